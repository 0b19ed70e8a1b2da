"""The registry of norm rules, and multiple dispatch on the kinds their annotations name.

A rule is an ordinary function.  The annotations of its tensor arguments are its dispatch key; the first registered rule whose
every argument fits is the one.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_norm.core import conversions
from thunder_norm.core.context import Mode, check_mode, current_mode, inside_operation_of_ones_own, lift
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import at_data
from thunder_norm.core.programs import program_of
from thunder_norm.core.ranges import Range
from thunder_norm.core.running import runner
from thunder_norm.core.slots import Slot
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.errors import NormMismatchError
from thunder_norm.op_names import METADATA, is_in_place, op_key
from thunder_norm.trees import flat_tensors

# Arguments that do not change a norm: a rule need not name them.  (One that is None, or False where torch's default is not
# True, need not be named either.)
_NORM_NEUTRAL = frozenset(
    {"inplace", "_stacklevel", "memory_format", "non_blocking", "pin_memory", "layout", "device", "cudnn_enable", "cudnn_enabled"}
)

# What torch's functions take by NumPy's names as well, and methods of tensors by theirs.
_OTHER_NAMES = {
    "self": "input",
    "axis": "dim",
    "axis0": "dim0",
    "axis1": "dim1",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "indices": "indices_or_sections",
    "sections": "indices_or_sections",
}

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
    takes_complex: bool = False  # what it says holds for complex numbers as well, whose norm is that of their moduli
    wants_own_kinds: bool = False  # what is wanted of its result says nothing about the kinds of its arguments
    is_refusal = False  # it only says why there is no rule

    def bind(self, args: tuple, kwargs: dict, on_by_default: frozenset[str] = frozenset()) -> inspect.BoundArguments | str:
        """The call's arguments by the rule's own names, or why they do not fit its signature.

        `on_by_default` are the names of the operation's arguments that are True if not given.
        """
        names = self.signature.parameters
        takes_any = self._takes_any
        kwargs = {(k if k in names else _OTHER_NAMES.get(k, k)): v for k, v in kwargs.items()}
        if not takes_any:
            kwargs = {
                k: v
                for k, v in kwargs.items()
                if k in names or not (k in _NORM_NEUTRAL or v is None or v is False and k not in on_by_default)
            }
        arguments = self._in_order(args, kwargs)
        if arguments is not None:
            return inspect.BoundArguments(self.signature, arguments)
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            return str(e)
        bound.apply_defaults()
        return bound

    @functools.cached_property
    def _takes_any(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values())

    @functools.cached_property
    def _positional(self) -> tuple[str, ...] | None:
        """The arguments that may be given in order; None if the signature has others than those and ones given by name alone."""
        parameters = self.signature.parameters.values()
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            return None
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    def _in_order(self, args: tuple, kwargs: dict) -> dict[str, Any] | None:
        """What `inspect.Signature.bind` and its defaults give, at a fifth of the price; None where it has more to say."""
        if self._positional is None or len(args) > len(self._positional):
            return None
        parameters = self.signature.parameters
        given = dict(zip(self._positional, args, strict=False))
        if any(name in given or name not in parameters for name in kwargs):
            return None
        given |= kwargs
        arguments = {name: given.get(name, p.default) for name, p in parameters.items()}
        return arguments if len(given) == len(parameters) or _ABSENT not in map(id, arguments.values()) else None

    def fits(self, bound: inspect.BoundArguments, *, converting: bool) -> bool:
        """Whether every argument fits its slot, and all of them the rule's condition."""
        if not all(self.slots[name].fits(value, converting=converting) for name, value in _named_values(bound)):
            return False
        return self.when is None or self.when(bound.arguments)

    def wanted(self, name: str, t: torch.Tensor, given: dict[str, Any]) -> tuple[type[NormedTensor], tuple[int, ...] | None]:
        """The kind and the elem_dims (None: the kind's default) this rule lifts the plain tensor `t` to."""
        dims = self.lift_dims[name](t, given) if name in self.lift_dims else None
        kind = self.lift_kinds[name](t, given) if name in self.lift_kinds else None
        kind = kind or self.slots[name].kinds[0]
        return RMSTensor if kind is NormedTensor else kind, dims

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
                exact = (self.lift_kinds[name](value, given),) if name in self.lift_kinds else ()
                kind = next(k for k in (*exact, *slot.kinds) if conversions.can_convert(value, k))
                converted = conversions.convert(value, kind)
                # another norm of the same entries may be far smaller than what is known from this one
                return converted if converted.norm_size is value.norm_size else at_data(converted)
            if isinstance(value, torch.Tensor) and slot.kinds and not slot.accepts_plain:
                return lift(value, *self.wanted(name, value, given))
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


_ABSENT = id(inspect.Parameter.empty)


def _named_values(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, v) for v in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((name, v) for v in value.values())
        else:
            yield name, value


# From a call's arguments, and what gives the range of one of them, to the range of the result, or of each result.
RangeRule = Callable[[tuple, Mapping[str, Any], Callable[[Any], Range | None]], "Range | None"]


# From a call's arguments and its result to what is known about that as a sum.
SumsRule = Callable[[tuple, Mapping[str, Any], NormedTensor], tuple]


class NormedOp:
    """An operation together with its norm rules; calling it runs the rule if an argument is normed, the body otherwise."""

    dispatches_on_wrappers = True  # so that a trace has it as one operation

    def __init__(self, key: Any, body: Callable):
        self.key = key
        self.body = body
        self.rules: list[NormRule] = []
        self.range_rule: RangeRule | None = None
        self.sums_rule: SumsRule | None = None
        self.movement_rule: Callable | None = None
        self.is_factory = False  # it makes a tensor whose norm no other's decides: it has rules, and none takes a NormedTensor
        self.__name__ = getattr(body, "__name__", str(key))
        self.__qualname__ = getattr(body, "__qualname__", self.__name__)
        self.__module__ = getattr(body, "__module__", __name__)
        self.__doc__ = body.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_normed = any(isinstance(v, NormedTensor) for v in flat_tensors((args, kwargs)))
        if is_normed or (self.is_factory and runner().runs_model()):
            with inside_operation_of_ones_own():
                return runner().torch_function(self, args, kwargs)
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
        takes_complex: bool = False,
        wants_own_kinds: bool = False,
    ) -> Callable:
        """Register a norm rule; usable as ``@op.register_norm`` and ``@op.register_norm(...)``.

        Args:
            rule: the function.  Annotate every tensor argument with the kind it needs, name arguments as the operation does.
            mode: only for this mode; for all modes without a rule of their own if None.
            allow_plain_tensors: arguments annotated ``torch.Tensor`` take plain tensors as they are.
            lift_dims: for a plain tensor in a normed slot, argument name -> function giving its elem_dims.
            lift_kinds: the same for its kind, where the annotated one is not exact enough.
            when: a condition on the arguments by name, as given; a rule with one goes before the others.
            takes_complex: it holds for complex tensors too; other rules do not meet them.
            wants_own_kinds: parameters that it makes another of are taken as annotated, not in the kind that is wanted of that.

        Raises:
            NormMismatchError: ``torch.Tensor`` in the annotations without `allow_plain_tensors`, no tensor annotation at
                all in a rule that takes arguments of unknown kind, or an unknown mode.
        """
        if rule is None:
            return lambda fn: self.register_norm(
                fn,
                mode=mode,
                allow_plain_tensors=allow_plain_tensors,
                lift_dims=lift_dims,
                lift_kinds=lift_kinds,
                when=when,
                takes_complex=takes_complex,
                wants_own_kinds=wants_own_kinds,
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
        self.rules.append(
            NormRule(rule, signature, slots, mode, lift_dims or {}, lift_kinds or {}, when, takes_complex, wants_own_kinds)
        )
        self.is_factory = not any(s.kinds for r in self.rules for s in r.slots.values())
        return rule

    def extend_to_complex(self, *names: str) -> None:
        """Say of rules registered before that they hold for complex tensors: of those named, or of all that have no condition."""
        self.rules = [
            replace(r, takes_complex=True) if (r.fn.__name__ in names if names else r.when is None and not r.is_refusal) else r
            for r in self.rules
        ]

    def register_range(self, rule: RangeRule, *, takes_complex: bool = False) -> RangeRule:
        """Register which entries a result has, given those of the arguments, real ones unless it `takes_complex`; usable as a decorator."""

        def of_real(args: tuple, kwargs: Mapping[str, Any], of: Callable[[Any], Range | None]) -> Range | None:
            return None if _any_complex(args, kwargs) else rule(args, kwargs, of)

        self.range_rule = rule if takes_complex else of_real
        return rule

    def register_sums(self, rule: SumsRule) -> SumsRule:
        """Register of which weights a result is a sum (`thunder_norm.rules.weighted_sums`); usable as a decorator."""
        self.sums_rule = rule
        return rule

    def register_movement(self, rule: Callable) -> Callable:
        """Register how a result moves with the arguments, as a linear map or by slopes; usable as a decorator.

        It is `thunder_norm.core.composed.MovementRule`: from the `Call` to what each result's movement is made of.
        """
        self.movement_rule = rule
        return rule

    def find(self, args: tuple, kwargs: dict, *, with_conditions: bool = True) -> tuple[NormRule, inspect.BoundArguments] | None:
        """The rule for these arguments.

        Exact kinds go before converted ones, then rules with a condition before the others, then those of the current mode.
        Complex tensors meet rules that say they hold for them.
        """
        mode = current_mode()
        ordered = [r for r in self.rules if r.mode in (mode, None) and (with_conditions or r.when is None)]
        if _any_complex(args, kwargs):
            ordered = [r for r in ordered if r.takes_complex or r.is_refusal]
        ordered.sort(key=lambda r: (r.when is None, r.mode is None))
        on_by_default = _on_by_default(self.key)
        bindable = []
        for rule in ordered:
            bound = rule.bind(args, kwargs, on_by_default)
            if isinstance(bound, str):
                continue
            if rule.fits(bound, converting=False):
                return rule, bound
            bindable.append((rule, bound))
        return next(((rule, bound) for rule, bound in bindable if rule.fits(bound, converting=True)), None)


def _any_complex(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor among the arguments has complex entries."""
    return any(is_complex(t) for t in flat_tensors((args, kwargs)))


@functools.cache
def _on_by_default(key: Any) -> frozenset[str]:
    """The arguments of an operation that are True if they are not given: by aten's schemas and Python's signatures."""
    if not isinstance(key, str):
        return frozenset()
    packet = getattr(torch.ops.aten, key, None)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()] if packet else []
    names = {a.name for schema in schemas for a in schema.arguments if a.has_default_value() and a.default_value is True}
    function = getattr(torch.nn.functional, key, None)
    if isinstance(function, types.FunctionType):
        names |= {p.name for p in inspect.signature(function).parameters.values() if p.default is True}
    return frozenset(names)


_registry: dict[Any, NormedOp] = {}


def normed_op(func: Callable) -> NormedOp:
    """The `NormedOp` of an operation of torch, or a new one for a function of the user's own (as a decorator).

    For a function of one's own the body is its implementation on plain tensors.
    """
    key = key_of(func)
    if key is None:
        raise NormMismatchError(f"{func!r} cannot be a normed operation: it is not hashable")
    if key not in _registry:
        _registry[key] = NormedOp(key, func)
    return _registry[key]


def registered_ops() -> dict[Any, NormedOp]:
    """All operations that have norm rules, by key."""
    return dict(_registry)


def has_rule(func: Callable) -> bool:
    """Whether any norm rule is registered for the operation, or a program of such operations."""
    key = key_of(func)
    op = _registry.get(key)
    return op is not None and bool(op.rules) or program_of(key) is not None


def key_of(func: Callable) -> Any:
    """The registry key of an operation, None for what cannot be one."""
    key = func.key if isinstance(func, NormedOp) else op_key(func)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def find_op(key: Any) -> NormedOp | None:
    """The operation registered under a key."""
    return _registry.get(key)


def is_metadata(func: Callable) -> bool:
    """Whether an operation asks for a property of a tensor that has nothing to do with its values."""
    return key_of(func) in METADATA


def is_mutation(func: Callable, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument."""
    key = key_of(func)
    return kwargs.get("inplace") is True or isinstance(key, str) and is_in_place(key)
