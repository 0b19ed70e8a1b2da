"""From an operation on normed tensors to its norm rule: the registry and multiple dispatch.

A rule is an ordinary function.  The annotations of its tensor arguments are its dispatch key; the first registered rule whose
every argument fits runs.  A torch function, the tensor method and the aten overload of one operation share one entry,
found by the operation's name: ``F.relu``, ``torch.relu``, ``Tensor.relu`` and ``aten.relu.default`` are all "relu".
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_any, tree_flatten, tree_map

from thunder_norm import conversions
from thunder_norm.errors import MissingNormRuleError, NormMapKeyError, NormMismatchError, UnsupportedOpError, with_details
from thunder_norm.tensors import LinfTensor, NormedTensor, RMSTensor, describe

Mode = Literal["bound", "typical", "modula"]
MODES: tuple[Mode, ...] = typing.get_args(Mode)

_mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("thunder_norm_mode", default="bound")


@contextlib.contextmanager
def norm_mode(mode: Mode) -> Iterator[None]:
    """Use the rules of `mode` inside the block: "bound" (sound), "typical" (expected sizes) or "modula" (its conventions).

    Raises:
        NormMismatchError: there is no such mode.
    """
    token = _mode.set(check_mode(mode))
    try:
        yield
    finally:
        _mode.reset(token)


def check_mode(mode: str) -> Mode:
    """`mode` itself, or an error that names the modes there are."""
    if mode not in MODES:
        raise NormMismatchError(f"mode must be one of {MODES}, got {mode!r}")
    return mode


def current_mode() -> Mode:
    """The mode of the enclosing `norm_mode` block."""
    return _mode.get()


class Environment:
    """What surrounds a rule while it runs; tracing replaces it to record ops and to lift parameters its own way."""

    def run_real(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operation on plain tensors."""
        return func(*args, **kwargs)

    def lift(self, t: torch.Tensor, kind: type[NormedTensor], elem_dims: tuple[int, ...] | None) -> NormedTensor:
        """The normed tensor that stands for the plain tensor `t`: with its exact norm."""
        return kind.of(t, elem_dims)

    def note(self, func: Callable, out: NormedTensor) -> None:
        """Called with each normed result of an operation."""

    def user_location(self) -> str | None:
        """File, line and text of the user's call, where the traceback alone does not show it."""
        return None


_environment: contextvars.ContextVar[Environment] = contextvars.ContextVar("thunder_norm_environment", default=Environment())


@contextlib.contextmanager
def environment(env: Environment) -> Iterator[None]:
    """Run rules in `env` inside the block."""
    token = _environment.set(env)
    try:
        yield
    finally:
        _environment.reset(token)


def run_real(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run `func` on plain tensors as one operation (a trace records it as such)."""
    return _environment.get().run_real(func, args, kwargs)


def lift(t: torch.Tensor, kind: type[NormedTensor], elem_dims: Sequence[int] | None = None) -> NormedTensor:
    """A plain tensor as a normed one: constants by their exact norm, parameters as the transform in use says."""
    return _environment.get().lift(t, kind, None if elem_dims is None else tuple(elem_dims))


# -- names ------------------------------------------------------------------------------------------------------------

_ALIASES = {
    "absolute": "abs", "concat": "cat", "concatenate": "cat", "multiply": "mul", "subtract": "sub", "divide": "div",
    "true_divide": "div", "negative": "neg", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "special_expit": "sigmoid", "special_erf": "erf", "special_softmax": "softmax", "clip": "clamp", "greater": "gt",
    "less": "lt", "_unsafe_view": "view", "_reshape_alias": "reshape", "fix": "trunc", "arctan": "atan",
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__isub__": "sub_", "__rsub__": "rsub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "__truediv__": "div", "__div__": "div", "__itruediv__": "div_",
    "__idiv__": "div_", "__rtruediv__": "rdiv", "__rdiv__": "rdiv", "__matmul__": "matmul", "__rmatmul__": "rmatmul",
    "__neg__": "neg", "__pow__": "pow", "__rpow__": "rpow", "__ipow__": "pow_", "__abs__": "abs", "__getitem__": "getitem",
    "__setitem__": "setitem_", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__eq__": "eq", "__ne__": "ne",
}  # fmt: skip

# Functions that share their name with another operation.
_RENAMED = {torch.nn.functional.unfold: "im2col", torch.nn.functional.fold: "col2im"}

_METADATA = frozenset(
    "size shape ndim dim numel nelement dtype device layout requires_grad is_cuda is_cpu is_meta is_floating_point "
    "is_complex is_contiguous stride storage_offset is_leaf grad_fn grad __len__ __hash__ __repr__ __str__ element_size "
    "itemsize nbytes is_nested is_sparse is_quantized get_device _backward_hooks names data_ptr is_inference __format__ "
    "is_same_size is_mkldnn is_conj is_neg is_signed is_shared retains_grad output_nr _is_view is_distributed".split()
)


def op_key(func: Callable) -> Any:
    """The registry key of an operation: its canonical name for torch's own, the function itself for others.

    >>> op_key(torch.nn.functional.relu), op_key(torch.ops.aten.relu.default), op_key(torch.Tensor.__add__)
    ('relu', 'relu', 'add')
    """
    if isinstance(func, NormedOp):
        return func.key
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        namespace, name = packet._qualified_op_name.split("::")
        return _ALIASES.get(name, name) if namespace in ("aten", "prims") else packet._qualified_op_name
    if isinstance(func, types.FunctionType) and func in _RENAMED:
        return _RENAMED[func]
    name = getattr(func, "__name__", None)
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):  # a property of torch.Tensor: x.T
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else f"{func.__self__.__name__}_"
    module = getattr(func, "__module__", None) or getattr(getattr(func, "__objclass__", None), "__module__", None) or ""
    if name is None or not (module.startswith("torch") or isinstance(func, _BUILTIN_TYPES)):
        return func
    return _ALIASES.get(name, name)


_BUILTIN_TYPES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MethodWrapperType,
)


def op_name(func: Callable) -> str:
    """Readable name of an operation for messages and traces."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{func}"
    key = op_key(func)
    if not isinstance(key, str):
        return getattr(func, "__qualname__", repr(func))
    own = (func.__self__ if func.__name__ in ("__get__", "__set__") else func).__name__
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch.nn.functional") or module == "torch._C._nn":
        public = next((name for name in (key, own) if hasattr(torch.nn.functional, name)), None)
        return f"torch.nn.functional.{public}" if public else f"{module}.{own}"
    family, _, rest = key.partition("_")  # torch.linalg.svd calls itself linalg_svd
    if family in ("linalg", "special", "fft") and hasattr(getattr(torch, family), rest):
        return f"torch.{family}.{rest}"
    return f"torch.Tensor.{own}" if not hasattr(torch, key) and hasattr(torch.Tensor, own) else f"torch.{key}"


# -- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """What one argument of a rule accepts, read from its annotation."""

    kinds: tuple[type[NormedTensor], ...] = ()
    is_list: bool = False
    is_optional: bool = False
    accepts_plain: bool = False  # annotated torch.Tensor: taken as it is
    accepts_number: bool = False
    is_unconstrained: bool = False  # no annotation of ours: any non-tensor

    @staticmethod
    def of(annotation: Any) -> Slot:
        """Parse an annotation."""
        if annotation is inspect.Parameter.empty or annotation is Any:
            return Slot(is_unconstrained=True)
        members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
        kinds, found = [], {"is_list": False, "is_optional": False, "accepts_plain": False, "accepts_number": False}
        is_ours = has_other = False
        for member in members:
            origin = typing.get_origin(member)
            if member is type(None):
                found["is_optional"] = True
            elif isinstance(member, type) and issubclass(member, NormedTensor):
                kinds.append(member)
                is_ours = True
            elif member is torch.Tensor:
                found["accepts_plain"] = is_ours = True
            elif member in (int, float, bool):
                found["accepts_number"] = is_ours = True
            elif isinstance(origin, type) and issubclass(origin, Sequence) and typing.get_args(member):
                inner = Slot.of(typing.get_args(member)[0])
                if inner.kinds or inner.accepts_plain:
                    kinds.extend(inner.kinds)
                    found["is_list"] = is_ours = True
                    found["accepts_plain"] |= inner.accepts_plain
                else:
                    has_other = True
            else:
                has_other = True
        return Slot(tuple(kinds), is_unconstrained=has_other or not is_ours, **found)

    def fits(self, value: Any, *, converting: bool) -> bool:
        """Whether `value` may be passed, as it is or (if `converting`) after a sound conversion or a lift."""
        if value is None:
            return self.is_optional or self.is_unconstrained
        if isinstance(value, list | tuple) and tree_any(lambda v: isinstance(v, torch.Tensor), value):
            # a list that may hold plain tensors holds indices: numbers, slices and None go along
            element = Slot(
                self.kinds,
                accepts_plain=self.accepts_plain,
                accepts_number=self.accepts_number,
                is_unconstrained=self.accepts_plain,
            )
            return self.is_list and all(element.fits(v, converting=converting) for v in value)
        if isinstance(value, NormedTensor):
            if isinstance(value, self.kinds):
                return True
            return converting and any(conversions.can_convert(value, kind) for kind in self.kinds)
        if isinstance(value, torch.Tensor):
            return self.accepts_plain or (bool(self.kinds) and value.is_floating_point())
        if isinstance(value, bool | int | float):
            return self.accepts_number or self.is_unconstrained
        return self.is_unconstrained


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union


# Arguments that do not change a norm: a rule need not name them.  (One that is None or False need not be named either.)
_NORM_NEUTRAL = frozenset({"inplace", "_stacklevel", "memory_format", "non_blocking", "pin_memory", "layout", "device"})

# From the plain argument and all bound arguments to the elem_dims it should be lifted over (None: the kind's default).
LiftDims = Callable[[torch.Tensor, dict[str, Any]], "tuple[int, ...] | None"]
# The same for the kind it should be lifted to, a subclass of the slot's (None: the slot's own).
LiftKind = Callable[[torch.Tensor, dict[str, Any]], "type[NormedTensor] | None"]


@dataclass(frozen=True)
class NormRule:
    """One registered norm rule of an operation."""

    fn: Callable
    signature: inspect.Signature
    slots: dict[str, Slot]
    mode: Mode | None
    lift_dims: Mapping[str, LiftDims] = field(default_factory=dict)
    lift_kinds: dict[str, LiftKind] = field(default_factory=dict)
    when: Callable[[dict[str, Any]], bool] | None = None

    def bind(self, args: tuple, kwargs: dict) -> inspect.BoundArguments | str:
        """The call's arguments by the rule's own names, or why they do not fit its signature."""
        names = self.signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
        kwargs = {("input" if k == "self" and k not in names else k): v for k, v in kwargs.items()}
        if not takes_any:
            kwargs = {k: v for k, v in kwargs.items() if k in names or not (k in _NORM_NEUTRAL or v is None or v is False)}
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            return str(e)
        bound.apply_defaults()
        return bound

    def fits(self, bound: inspect.BoundArguments, *, converting: bool) -> bool:
        """Whether every argument fits its slot, and all of them the rule's condition."""
        if not all(self.slots[name].fits(value, converting=converting) for name, value in _named_values(bound)):
            return False
        return self.when is None or self.when(bound.arguments)

    def prepare(self, bound: inspect.BoundArguments) -> inspect.BoundArguments:
        """Lift plain tensors and convert kinds so that each argument is what the rule's annotation says."""
        given = dict(bound.arguments)

        def prepare(name: str, value: Any) -> Any:
            slot = self.slots[name]
            if isinstance(value, list | tuple) and slot.is_list:
                return type(value)(prepare(name, v) for v in value)
            if isinstance(value, NormedTensor):
                if isinstance(value, slot.kinds):
                    return value
                kind = next(k for k in slot.kinds if conversions.can_convert(value, k))
                return conversions.convert(value, kind)
            if isinstance(value, torch.Tensor) and slot.kinds and not slot.accepts_plain:
                dims = self.lift_dims[name](value, given) if name in self.lift_dims else None
                kind = self.lift_kinds[name](value, given) if name in self.lift_kinds else None
                kind = kind or slot.kinds[0]
                return lift(value, RMSTensor if kind is NormedTensor else kind, dims)
            return value

        for name, value in list(bound.arguments.items()):
            parameter = self.signature.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(prepare(name, v) for v in value)
            elif parameter.kind is parameter.VAR_KEYWORD:
                bound.arguments[name] = {k: prepare(name, v) for k, v in value.items()}
            else:
                bound.arguments[name] = prepare(name, value)
        return bound


def _named_values(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, v) for v in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((name, v) for v in value.values())
        else:
            yield name, value


class NormedOp:
    """An operation together with its norm rules; calling it runs the rule if an argument is normed, the body otherwise."""

    def __init__(self, key: Any, body: Callable):
        self.key = key
        self.body = body
        self.rules: list[NormRule] = []
        self.__name__ = getattr(body, "__name__", str(key))
        self.__qualname__ = getattr(body, "__qualname__", self.__name__)
        self.__module__ = getattr(body, "__module__", __name__)
        self.__doc__ = body.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tree_any(lambda v: isinstance(v, NormedTensor), (args, kwargs)):
            return torch_function(self, args, kwargs)
        return self.body(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<NormedOp {self.__qualname__} with {len(self.rules)} rules>"

    def register_norm(
        self,
        rule: Callable | None = None,
        *,
        mode: Mode | None = None,
        allow_plain_tensors: bool = False,
        lift_dims: Mapping[str, LiftDims] | None = None,
        lift_kinds: dict[str, LiftKind] | None = None,
        when: Callable[[dict[str, Any]], bool] | None = None,
    ) -> Callable:
        """Register a norm rule; usable as ``@op.register_norm`` and ``@op.register_norm(...)``.

        Args:
            rule: the function.  Annotate every tensor argument with the kind it needs, name arguments as the operation does.
            mode: only for this mode; for all modes without a rule of their own if None.
            allow_plain_tensors: arguments annotated ``torch.Tensor`` take plain tensors as they are.
            lift_dims: for a plain tensor in a normed slot, argument name -> function giving its elem_dims.
            lift_kinds: the same for its kind, where the annotated one is not exact enough.
            when: a condition on the arguments by name, as given; a rule with one goes before the others.

        Raises:
            NormMismatchError: ``torch.Tensor`` in the annotations without `allow_plain_tensors`, no tensor annotation at
                all in a rule that takes arguments of unknown kind, or an unknown mode.
        """
        if rule is None:
            return lambda fn: self.register_norm(
                fn, mode=mode, allow_plain_tensors=allow_plain_tensors, lift_dims=lift_dims, lift_kinds=lift_kinds, when=when
            )
        if mode is not None:
            check_mode(mode)
        signature = inspect.signature(rule)
        hints = typing.get_type_hints(rule)
        slots = {name: Slot.of(hints.get(name, inspect.Parameter.empty)) for name in signature.parameters}
        plain = [name for name, slot in slots.items() if slot.accepts_plain]
        if plain and not allow_plain_tensors:
            raise NormMismatchError(
                f"norm rule for {self.__qualname__}: {plain} annotated torch.Tensor; "
                "annotate a kind, or register with allow_plain_tensors=True"
            )
        unknown = {*(lift_dims or ()), *(lift_kinds or ())} - set(slots)
        if unknown:
            raise NormMismatchError(f"norm rule for {self.__qualname__}: lifts for no argument of it: {sorted(unknown)}")
        self.rules.append(NormRule(rule, signature, slots, mode, lift_dims or {}, lift_kinds or {}, when))
        return rule

    def find(self, args: tuple, kwargs: dict, *, with_conditions: bool = True) -> tuple[NormRule, inspect.BoundArguments] | None:
        """The rule for these arguments.

        Exact kinds go before converted ones, then rules with a condition before the others, then those of the current mode.
        """
        mode = current_mode()
        ordered = [r for r in self.rules if r.mode in (mode, None) and (with_conditions or r.when is None)]
        ordered.sort(key=lambda r: (r.when is None, r.mode is None))
        for converting in (False, True):
            for rule in ordered:
                bound = rule.bind(args, kwargs)
                if not isinstance(bound, str) and rule.fits(bound, converting=converting):
                    return rule, bound
        return None


_registry: dict[Any, NormedOp] = {}


def normed_op(func: Callable) -> NormedOp:
    """The `NormedOp` of an operation of torch, or a new one for a function of the user's own (as a decorator).

    For a function of one's own the body is its implementation on plain tensors.
    """
    key = op_key(func)
    if key not in _registry:
        _registry[key] = NormedOp(key, func)
    return _registry[key]


def registered_ops() -> dict[Any, NormedOp]:
    """All operations that have norm rules, by key."""
    return dict(_registry)


def has_rule(func: Callable) -> bool:
    """Whether any norm rule is registered for the operation."""
    op = _registry.get(_hashable_key(func))
    return op is not None and bool(op.rules)


def is_metadata(func: Callable) -> bool:
    """Whether an operation asks for a property of a tensor that has nothing to do with its values."""
    return _hashable_key(func) in _METADATA


def _hashable_key(func: Callable) -> Any:
    key = op_key(func)
    try:
        hash(key)
    except TypeError:
        return None
    return key


# -- running ----------------------------------------------------------------------------------------------------------


def torch_function(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A torch function called with a NormedTensor: its rule, or else its decomposition into aten ops."""
    key = _hashable_key(func)
    if key in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if isinstance(key, str) and is_in_place(key) and kwargs.get("inplace") is not True:
        return _run_in_place(func, key, args, kwargs)
    if kwargs.get("inplace") is True:
        return _run_in_place(func, key + "_", args, {k: v for k, v in kwargs.items() if k != "inplace"})
    op = _registry.get(key)
    if op is not None and op.rules:
        return run_rule(op, func, args, kwargs)
    if isinstance(func, NormedOp) or not isinstance(key, str):
        raise missing_rule(func, args, kwargs)
    body = _python_body(func)
    if body is not None:
        return body(*args, **kwargs)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    except MissingNormRuleError as e:
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise
        raise missing_rule(func, args, kwargs, decomposition=str(e).partition("\n")[0]) from e


@functools.cache
def _python_body(func: Callable) -> Callable | None:
    """What a torch function written in Python does after it has asked for ``__torch_function__``; None for others.

    The torch functions it calls ask again and find their rules, which ATen's decomposition of them would not: `F.linear` has a
    tighter one than the in-place operations it may become.
    """
    if not isinstance(func, types.FunctionType):
        return None
    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    if not any(name in func.__code__.co_names for name in asks):
        return None
    names = {**func.__globals__, **dict.fromkeys(asks, lambda *args: False)}
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def run_registered(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run the norm rule of `func` although no argument is normed yet: plain tensors are lifted.

    Raises:
        MissingNormRuleError: no rule fits.
    """
    op = _registry.get(_hashable_key(func))
    if op is None or not op.rules:
        raise missing_rule(func, args, kwargs)
    return run_rule(op, func, args, kwargs)


def is_factory(func: Callable) -> bool:
    """Whether an operation makes a tensor from no tensor: none of its rules takes one."""
    op = _registry.get(_hashable_key(func))
    return op is not None and bool(op.rules) and not any(s.kinds or s.accepts_plain for r in op.rules for s in r.slots.values())


def torch_dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """An aten overload called with a NormedTensor, below autograd: its rule, run with autograd for norm sizes."""
    key = op_key(func)
    if func._schema.is_mutable:
        with _autograd_again():
            return _run_in_place(func, key, args, kwargs)
    op = _registry.get(key)
    if op is None or not op.rules:
        raise missing_rule(func, args, kwargs)
    with _autograd_again():
        return run_rule(op, func, args, kwargs)


@contextlib.contextmanager
def _autograd_again() -> Iterator[None]:
    """Let operations on norm sizes be recorded by autograd inside ``__torch_dispatch__``, which runs below it."""
    key = torch._C.DispatchKey.AutogradFunctionality
    was_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, was_excluded)


def is_in_place(key: str) -> bool:
    """Whether a canonical name is that of an in-place operation, by torch's naming rule."""
    return key.endswith("_") and not key.endswith("__")


def is_mutation(func: Callable, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument."""
    key = _hashable_key(func)
    return kwargs.get("inplace") is True or isinstance(key, str) and is_in_place(key)


def _run_in_place(func: Callable, key: str, args: tuple, kwargs: dict) -> Any:
    target, op = args[0] if args else None, _registry.get(key.rstrip("_"))
    if not isinstance(target, NormedTensor) or op is None or not op.rules or key == "setitem_":
        raise UnsupportedOpError(
            with_details(
                f"in-place {op_name(func)} with a NormedTensor",
                called_with=_describe_call(args, kwargs),
                at=_environment.get().user_location(),
                instead="use the out-of-place operation and assign its result",
            )
        )
    functional = getattr(torch, op.key, None) or getattr(torch.nn.functional, op.key, None) or getattr(torch.Tensor, op.key)
    return target._assign(run_rule(op, functional, args, kwargs))


def run_rule(op: NormedOp, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Find the rule, run the operation on the backings and the rule on the norms, and put them together."""
    if kwargs.get("out") is not None:
        raise UnsupportedOpError(f"{op_name(func)}: out= is not possible with a NormedTensor")
    _check_finalized(func, args, kwargs)
    found = op.find(args, kwargs)
    if found is None:
        raise missing_rule(func, args, kwargs)
    rule, bound = found
    try:
        prepared = rule.prepare(bound)
        result = rule.fn(*prepared.args, **prepared.kwargs)
    except NormMapKeyError:  # a parameter's name is not the operation's affair
        raise
    except NormMismatchError as e:
        raise NormMismatchError(
            with_details(f"{op_name(func)}: {e}", called_with=_describe_call(args, kwargs), at=_environment.get().user_location())
        ) from e
    body = func.body if isinstance(func, NormedOp) else func
    # a custom op's body is a program, not one operation: it is run as it is
    call = body if isinstance(func, NormedOp) else lambda *a, **k: run_real(body, a, k)
    real = call(*unwrap(args), **unwrap(kwargs))
    return _attach(op, rule, prepared, result, real, args, kwargs)


def unwrap(tree: Any) -> Any:
    """The same structure with every NormedTensor replaced by its backing."""
    return tree_map(lambda v: v.backing if isinstance(v, NormedTensor) else v, tree)


def _attach(
    op: NormedOp, rule: NormRule, bound: inspect.BoundArguments, result: Any, real: Any, args: tuple, kwargs: dict
) -> Any:
    """Give each NormedTensor of a rule's result its backing and its perturbation_size."""
    if isinstance(result, list | tuple):
        if not isinstance(real, list | tuple) or len(real) != len(result):
            raise NormMismatchError(f"norm rule for {op.__qualname__} returned {len(result)} results, the operation did not")
        attached = [_attach(op, rule, bound, n, r, args, kwargs) for n, r in zip(result, real, strict=True)]
        # lists, tuples, and torch.return_types with their fields
        return type(real)(attached)
    if not isinstance(result, NormedTensor):
        return real if result is None else result
    if not isinstance(real, torch.Tensor):
        raise NormMismatchError(f"norm rule for {op.__qualname__} returned a norm for {describe(real)}")
    size = result.norm_size
    # a rule that knows where all of its arguments come from may state the result's movement itself
    perturbation = _perturbation(op, rule, bound, result) if result.perturbation_size is None else result.perturbation_size
    if current_mode() == "modula":
        size = torch.ones_like(size)
    kind = type(result)
    if kind is RMSTensor and result.elem_dims == ():
        kind = LinfTensor
    out = kind._wrap(real, size, perturbation, result.elem_dims)
    out._facts = result._facts
    _track_aliases(out, real, args, kwargs)
    _environment.get().note(op.body, out)
    return out


def _track_aliases(out: NormedTensor, real: torch.Tensor, args: tuple, kwargs: dict) -> None:
    storage = _storage_id(real)
    for other in tree_flatten((args, kwargs))[0]:
        if isinstance(other, NormedTensor) and _storage_id(other.backing) == storage:
            out._is_aliased = other._is_aliased = True


def _storage_id(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _perturbation(op: NormedOp, rule: NormRule, bound: inspect.BoundArguments, result: NormedTensor) -> torch.Tensor | None:
    """``sum_i L_i(n) d_i`` over the arguments that carry a perturbation; None if none does (then nothing is computed)."""
    moving = list(_moving(bound))
    if not moving:
        return None
    if result._is_multilinear:
        sensitivity = _partial_derivatives(rule, bound, result, [where for where, _ in moving])
    elif result._sensitivity is None:
        raise NormMismatchError(
            f"the norm rule {rule.fn.__qualname__} for {op.__qualname__} states no sensitivity, but {moving[0][0][0]!r} carries "
            "a perturbation_size; return Kind(value, sensitivity={...}) or Kind(value, multilinear=True)"
        )
    else:
        sensitivity = result._sensitivity
    total = None
    for (name, index), perturbation in moving:
        constant = sensitivity.get(name) if index is None else sensitivity[name][index]
        if constant is None:
            raise NormMismatchError(
                f"the norm rule {rule.fn.__qualname__} for {op.__qualname__} states no sensitivity to {name!r}"
            )
        if not isinstance(constant, torch.Tensor) and constant == 0:
            continue
        is_one = not isinstance(constant, torch.Tensor) and constant == 1
        term = perturbation if is_one else perturbation * constant
        total = term if total is None else total + term
    return torch.zeros_like(result.norm_size) if total is None else total


def _moving(bound: inspect.BoundArguments) -> Iterator[tuple[tuple[str, int | None], torch.Tensor]]:
    """The perturbations that arguments carry: (name, index in a list or None), perturbation_size."""
    for name, value in bound.arguments.items():
        if isinstance(value, NormedTensor) and value.perturbation_size is not None:
            yield (name, None), value.perturbation_size
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                if isinstance(v, NormedTensor) and v.perturbation_size is not None:
                    yield (name, i), v.perturbation_size


def _partial_derivatives(rule: NormRule, bound: inspect.BoundArguments, result: NormedTensor, slots: list) -> dict[str, Any]:
    """Partial derivatives of a value affine in each norm size: ``V(.., 1, ..) - V(.., 0, ..)``, exact and differentiable."""
    if any(index is not None for _, index in slots):
        raise NormMismatchError("multilinear=True is for tensor arguments; state the sensitivities of a list of tensors")

    def value(name: str, size: float) -> torch.Tensor:
        x = bound.arguments[name]
        at = type(x)._wrap(x.backing, torch.full_like(x.norm_size, size), None, x.elem_dims)
        changed = inspect.BoundArguments(bound.signature, {**bound.arguments, name: at})
        return rule.fn(*changed.args, **changed.kwargs).norm_size

    return {name: value(name, 1.0) - value(name, 0.0) for name, _ in slots}


# -- errors -----------------------------------------------------------------------------------------------------------


def _check_finalized(func: Callable, args: tuple, kwargs: dict) -> None:
    for x in tree_flatten((args, kwargs))[0]:
        if isinstance(x, NormedTensor) and not x.finalized:
            raise NormMismatchError(
                f"{op_name(func)} on an unfinalized {type(x).__name__}: give it a backing (finalize) or pass it to a norm map"
            )


def _describe_call(args: tuple, kwargs: dict) -> str:
    shown = [describe(a) if _has_tensor(a) else repr(a) for a in args]
    shown += [f"{k}={describe(v) if _has_tensor(v) else repr(v)}" for k, v in kwargs.items()]
    return f"({', '.join(shown)})"


def _has_tensor(value: Any) -> bool:
    return tree_any(lambda v: isinstance(v, torch.Tensor), value)


def missing_rule(func: Callable, args: tuple, kwargs: dict, decomposition: str | None = None) -> MissingNormRuleError:
    """The error for an operation no registered rule fits, and why that of its ATen decomposition does not help."""
    op = _registry.get(_hashable_key(func))
    signatures = [f"{r.fn.__name__}{r.signature}" + (f"  [mode {r.mode}]" if r.mode else "") for r in op.rules] if op else []
    return MissingNormRuleError(
        with_details(
            f"no norm rule for {op_name(func)}",
            called_with=_describe_call(args, kwargs),
            at=_environment.get().user_location(),
            decomposition=decomposition,
            registered="\n".join(signatures) or "(none)",
            to_add_one=f'@thunder_norm.normed_op({op_name(func)}).register_norm   -- see CONTRIBUTING.md, "Adding a rule"',
        )
    )
