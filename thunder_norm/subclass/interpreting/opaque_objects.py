"""Objects of classes that dispatch in Python and cannot be taken apart: the trace calls torch with the objects themselves.

Each operation is one call, in the order of the program (`effects`), which checks that it returns what it returned while the trace was
acquired: tensors of the same classes, shapes and dtypes, and equal numbers.  What that is, is found by running the operation on
copies of the objects, with plain tensors beside them that have the values of inputs, or made up ones.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.errors import DataDependentError, UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import is_in_place
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.fallback import fallback_executor
from thunder_norm.subclass.classes.protocol import is_equal
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording.trace import name_of_operation as name_of
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent_on_wrapper
from thunder_norm.wrapper_classes import dispatches, is_wrapper
from thunder.core import devices, dtypes, prims
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad


def is_opaque(x: Any) -> bool:
    """Whether `x` is a tensor that dispatches in Python and cannot be taken apart."""
    return isinstance(x, torch.Tensor) and is_opaque_class(type(x)) and not is_wrapper(x)


def is_opaque_class(cls: type) -> bool:
    """Whether instances of a class of tensors are such."""
    return dispatches(cls) and cls not in (torch.nn.Parameter, torch.nn.Buffer, torch._subclasses.FakeTensor)


class OpaqueProxy(TensorProxy):
    """Stands for an object in a trace; `example` is one like it.  ``OpaqueProxy(like=p)`` is another of the kind of `p`."""

    def __init__(
        self, example: torch.Tensor | None = None, *, acquisition: Acquisition | None = None, like: Any = None, **options: Any
    ) -> None:
        self.example = like.example if example is None else example
        self.strides = stride_of(self.example) if like is None else like.strides
        self._acquisition = (lambda: None) if acquisition is None else weakref.ref(acquisition)
        if like is None:
            _, shape, dtype, device, _ = _metadata(self.example)
            options = {"requires_grad": False, "device": devices.to_device(device), "dtype": dtypes.to_dtype(dtype), **options}
            super().__init__(options.pop("name", None), shape=shape, **options)
        else:
            super().__init__(like=like, **options)

    def replace(self, **changes: Any) -> OpaqueProxy:
        """A copy under another name (the interpreter renames proxies after the user's variables)."""
        kept = {name: changes.get(name, getattr(self, name)) for name in ("name", "history", "tags", "requires_grad")}
        copy = OpaqueProxy(self.example, acquisition=self.acquisition, **kept)
        copy.strides = self.strides
        return copy

    @property
    def class_of_wrapper(self) -> type:
        """The class that the object has in eager mode."""
        return type(self.example)

    @property
    def acquisition(self) -> Acquisition | None:
        """The acquisition it belongs to, as long as there is one."""
        return self._acquisition()

    def type_string(self) -> str:
        """Shown in traces: the class, then what a tensor shows."""
        return f"{type(self.example).__name__} {super().type_string()}"

    def refuse_value(self) -> NoReturn:
        """Called where Python asks for the value.

        Raises:
            DataDependentError: always.
        """
        error = data_dependent_on_wrapper(f"the value of a {type(self.example).__name__} was asked for")
        raise error if self.acquisition is None else self.acquisition.refuse(error)

    __bool__ = __int__ = __float__ = __complex__ = __index__ = refuse_value  # called by C code


def proxy_for_input(acquisition: Acquisition, x: torch.Tensor, name: str | None, history: Any) -> OpaqueProxy:
    """The proxy of an object that the jitted function was given.

    Raises:
        UnsupportedSubclassError: it cannot be copied.
    """
    acquisition.opaque.is_met = acquisition.watches = True
    proxy = OpaqueProxy(_copy(x), acquisition=acquisition, name=name, history=history, requires_grad=x.requires_grad)
    proxy.strides = stride_of(x)  # a copy may lie otherwise
    return proxy


def _copy(x: torch.Tensor) -> torch.Tensor:
    try:
        with torch.no_grad():
            copy = x.clone()
    except Exception as e:
        raise UnsupportedSubclassError(
            with_details(f"a {type(x).__qualname__} cannot be run", why=f"clone() fails: {type(e).__name__}: {e}")
        ) from e
    if type(copy) is not type(x):
        raise UnsupportedSubclassError(f"a {type(x).__qualname__} cannot be run: clone() returns a {type(copy).__qualname__}")
    return copy


# -- calls --------------------------------------------------------------------------------------------------------------


def call(acquisition: Acquisition, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """Write one call into the trace; returns proxies for the tensors of its result.

    Raises:
        UnsupportedOpError: it has no place in a trace.
        whatever the call raises.
    """
    leaves, spec = tree_flatten((args, kwargs))
    proxies = list({id(p): p for p in leaves if isinstance(p, TensorProxy)}.values())
    _check(acquisition, fn, proxies, kwargs)
    places = [next((i for i, p in enumerate(proxies) if p is v), None) for v in leaves]
    constants = [None if isinstance(v, TensorProxy) else acquisition.to_fake(v) for v in leaves]

    def run(*tensors: torch.Tensor) -> Any:
        own = [c if i is None else tensors[i] for c, i in zip(constants, places, strict=True)]
        own_args, own_kwargs = tree_unflatten(own, spec)
        return fn(*own_args, **own_kwargs)

    examples = [_example(acquisition, p) for p in proxies]
    result, changes, is_random = _tried(fn, run, examples)
    if changes and any(not isinstance(p, OpaqueProxy) for p in proxies[:1]):
        raise UnsupportedOpError(
            with_details(f"{name_of(fn)} writes a {_classes(proxies)} into a plain tensor", at=location_of_user())
        )
    if changes or is_random:
        acquisition.opaque.once.append(f"{name_of(fn)} on a {_classes(proxies)}")
    if changes:
        acquisition.opaque.has_changed = True
    beside = [p for p in acquisition.opaque.plain if changes and all(p is not q for q in proxies)]
    owner = _classes(proxies) if any(isinstance(p, OpaqueProxy) for p in proxies) else "plain"
    step = Call(f"{owner}_{name_of(fn)}", run, result, examples, len(beside))
    return _write(acquisition, step, proxies, beside, result)


def _tried(fn: Callable, run: Callable, examples: Sequence[torch.Tensor]) -> tuple[Any, bool, bool]:
    """What a call returns, whether it changes what it is given, and whether it draws numbers."""
    before = [_state(e) for e in examples]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        generator = torch.get_rng_state()
        result = run(*examples)
        is_random = not torch.equal(generator, torch.get_rng_state())
    return result, is_in_place(fn) or [_state(e) for e in examples] != before, is_random


def _check(acquisition: Acquisition, fn: Callable, proxies: Sequence[TensorProxy], kwargs: dict) -> None:
    why = None
    if any(isinstance(p, SubclassProxy) for p in proxies):
        why = "it meets a wrapper that is interpreted"
    elif acquisition.num_levels:
        why = "it is in a function that is transformed"
    elif kwargs.get("out") is not None:
        why = "it writes into a tensor by out="
    elif _in_autocast():
        why = "it is in a region of autocast"
    if why is not None:
        raise UnsupportedOpError(with_details(f"{name_of(fn)} on a {_classes(proxies)}: {why}", at=location_of_user()))


class Call:
    """What one call does when the program runs."""

    def __init__(self, name: str, run: Callable, result: Any, given: Sequence[torch.Tensor], num_beside: int) -> None:
        leaves, self.spec = tree_flatten(result)
        self.name, self.run, self.num_given, self.num_beside = name, run, len(given), num_beside
        self.records_gradients, self.at = is_grad_enabled(), location_of_user()
        positions = {id(t): i for i, t in enumerate(given)}
        self.made = list({id(v): v for v in leaves if isinstance(v, torch.Tensor) and id(v) not in positions}.values())
        new = {id(t): i for i, t in enumerate(self.made)}
        self.leaves = [(positions.get(id(v)), new.get(id(v)), None if isinstance(v, torch.Tensor) else v) for v in leaves]
        self.metadata = [_metadata(t) for t in self.made]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run it; returns a turn and the tensors that are made.

        Raises:
            DataDependentError: it returns something else than while the trace was acquired.
            UnsupportedOpError: it would change a plain tensor of the program.
        """
        given, beside = tensors[: self.num_given], tensors[self.num_given : self.num_given + self.num_beside]
        if beside:
            check_apart(self.name, [t for t in given if is_opaque(t)], beside)
        with contextlib.nullcontext() if self.records_gradients else torch.no_grad():
            result = self.run(*given)
        return torch.empty(0, dtype=torch.bool), *self._checked(result, given)

    def _checked(self, result: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves, spec = tree_flatten(result)
        made: dict[int, torch.Tensor] = {}
        is_same = spec == self.spec
        for leaf, (position, new, constant) in zip(leaves, self.leaves, strict=False):
            if position is not None:
                is_same &= leaf is given[position]
            elif new is None:
                is_same &= is_equal(leaf, constant)
            else:
                is_same &= isinstance(leaf, torch.Tensor) and made.setdefault(new, leaf) is leaf
                is_same = is_same and _metadata(leaf) == self.metadata[new]
        if not is_same:
            raise DataDependentError(
                with_details(
                    f"{self.name} returned something else than while the trace was acquired",
                    at=self.at,
                    returned=", ".join(map(_described, leaves)) or type(result).__name__,
                    expected=", ".join(_described(self.made[n] if n is not None else c) for _, n, c in self.leaves),
                    why="what follows was compiled for that",
                )
            )
        return [made[i] for i in range(len(self.made))]


def _write(
    acquisition: Acquisition, step: Call, proxies: Sequence[TensorProxy], beside: Sequence[TensorProxy], result: Any
) -> Any:
    known = weakref.ref(acquisition)  # the trace lives longer

    def meta(*_: TensorProxy) -> tuple[TensorProxy, ...]:
        return TensorProxy(shape=(0,), device=devices.cpu, dtype=dtypes.bool8), *(_proxy(known(), t) for t in step.made)

    def named(bsym: Any) -> None:
        bsym._call_ctx = {name: step}

    name = f"{step.name}_{next(_counter)}"
    symbol = Symbol(
        name=name,
        id=f"{ID}{name}",
        meta=meta,
        is_prim=True,
        executor=fallback_executor,
        tags=(prims.OpTags.DONT_DCE, prims.OpTags.DONT_RECOMPUTE_IN_BACKWARD),
        _bind_postprocess=named,
    )
    register_grad(symbol.id, _gradient(step, symbol))
    before = () if acquisition.turn is None else (acquisition.fakes.proxy_of(acquisition.turn),)
    turn, *made = symbol(*proxies, *beside, *before)
    with acquisition.fakes.mode:
        acquisition.turn = torch.empty(0, dtype=torch.bool)
    acquisition.fakes.bind(acquisition.turn, turn)
    for p, t in zip(made, step.made, strict=True):
        acquisition.opaque.examples[p.name] = t
    acquisition.opaque.plain += [p for p in (*proxies, *made) if not isinstance(p, OpaqueProxy)]
    found = [proxies[i] if i is not None else made[n] if n is not None else c for i, n, c in step.leaves]
    return tree_unflatten(found, step.spec)


_counter = itertools.count()
ID = "thunder_norm.opaque."


def _proxy(acquisition: Acquisition | None, t: torch.Tensor) -> TensorProxy:
    if is_opaque(t):
        return OpaqueProxy(t, acquisition=acquisition)
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedOpError(f"an operation on an object that cannot be taken apart returned a {type(t).__qualname__}")
    return TensorProxy(
        shape=tuple(t.shape), device=devices.to_device(t.device), dtype=dtypes.to_dtype(t.dtype), requires_grad=False
    )


def _gradient(step: Call, symbol: Symbol) -> Callable:
    """What Thunder calls in place of `symbol` where it is differentiated: torch's autograd runs the call again."""

    def vjp(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, cotangents = list(tensors[: step.num_given]), tensors[step.num_given :]
        inputs = [i for i, t in enumerate(given) if t.is_floating_point() or t.is_complex()]
        for i in inputs:
            given[i] = given[i].detach().requires_grad_()
        with torch.enable_grad():
            made = step._checked(step.run(*given), given)
        pairs = [(t, g) for t, g in zip(filter(_is_inexact, made), cotangents, strict=True) if t.requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(given[i]) for i in inputs)
        found = torch.autograd.grad([t for t, _ in pairs], [given[i] for i in inputs], [g for _, g in pairs], allow_unused=True)
        return tuple(torch.zeros_like(given[i]) if g is None else g for i, g in zip(inputs, found, strict=True))

    def vjp_meta(*proxies: TensorProxy) -> tuple[TensorProxy, ...]:
        given = proxies[: step.num_given]
        return tuple(TensorProxy(like=p, requires_grad=False) for p in given if dtypes.is_inexact_dtype(p.dtype))

    def grad(*args: TensorProxy) -> tuple[TensorProxy, ...]:
        results = symbol(*args)
        outputs = [p for p in results if dtypes.is_inexact_dtype(p.dtype)]
        inputs = [p for p in args[: step.num_given] if dtypes.is_inexact_dtype(p.dtype)]
        if outputs and inputs and step.records_gradients:
            backward = fallback_executor.register_operator(f"{symbol.name}_vjp", meta=vjp_meta, fn=vjp)
            found = backward(*args[: step.num_given], *(prims.get_grad(p) for p in outputs))
            for p, g in zip(inputs, found, strict=True):
                prims.put_grad(p, g)
        return results

    return grad


# -- what tensors are ---------------------------------------------------------------------------------------------------


def _example(acquisition: Acquisition, p: TensorProxy) -> torch.Tensor:
    if isinstance(p, OpaqueProxy):
        return p.example
    if p.name not in acquisition.opaque.examples:
        real = acquisition.fakes.real_input(p) if p.history is not None else None
        acquisition.opaque.examples[p.name] = _made_up(p) if real is None else real.detach().clone()
    return acquisition.opaque.examples[p.name]


def _made_up(p: TensorProxy) -> torch.Tensor:
    dtype, device = dtypes.to_torch_dtype(p.dtype), devices.to_torch_device(p.device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(tuple(p.shape), dtype=dtype, device=device)
    return torch.linspace(0.5, 1.5, max(p.numel, 1), dtype=torch.float64)[: p.numel].reshape(p.shape).to(device, dtype)


def held(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, itself included, in attributes, lists and dicts."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        if is_opaque(value) or is_wrapper(value):
            slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
            inside = [*vars(value).values(), *(getattr(value, name, None) for name in slots)]
            yield from itertools.chain.from_iterable(held(v, seen) for v in inside)
    elif isinstance(value, list | tuple | set):
        yield from itertools.chain.from_iterable(held(v, seen) for v in value)
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(held(v, seen) for v in value.values())


def check_apart(what: str, objects: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    """Objects that are written into share no memory with plain tensors, which the trace takes for unchanged.

    Raises:
        UnsupportedOpError: they do.
    """
    inside = {_memory(t) for x in objects for t in held(x) if type(t) in (torch.Tensor, torch.nn.Parameter)}
    if inside & {_memory(t) for t in plain if not is_opaque(t)} - {0}:
        raise UnsupportedOpError(
            with_details(
                f"{what} writes into an object that shares memory with a plain tensor of the program",
                instead="make the object from a clone, or use the out-of-place operation",
            )
        )


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else 0


def _state(x: torch.Tensor) -> list[tuple[int, int]]:
    return [(id(t), t._version) for t in held(x)]


def _metadata(t: torch.Tensor) -> tuple:
    with torch._C.DisableTorchFunctionSubclass():
        return type(t), tuple(t.shape), t.dtype, t.device, t.layout


def _described(v: Any) -> str:
    return f"{type(v).__name__} {list(v.shape)} of {v.dtype}" if isinstance(v, torch.Tensor) else repr(v)


def _is_inexact(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _classes(proxies: Sequence[TensorProxy]) -> str:
    return next((type(p.example).__name__ for p in proxies if isinstance(p, OpaqueProxy)), "object that cannot be taken apart")


def _in_autocast() -> bool:
    cd = get_compile_data()
    return (cd is not None and bool(cd.autocast_stack.stack)) or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def stride_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that has some."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(x.stride()) if x.layout is torch.strided else None
