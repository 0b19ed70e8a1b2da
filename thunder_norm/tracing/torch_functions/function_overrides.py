"""What a ``__torch_function__`` says: torch's functions ask the classes of their arguments, and a program is traced through their answers.

Such classes are derived from torch.Tensor and do not dispatch, or are no tensors at all.  Where the program calls a function of torch's, their
``__torch_function__`` is interpreted as the program is.  Torch's own, which gives results the class of the arguments, is not: what it does is
done here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._tensor import _convert
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves

from thunder_norm.tracing.lookasides import instead_of, look_up
from thunder_norm.tracing.shared_memory import second_names
from thunder_norm.tracing.torch_functions import function_modes, known_classes
from thunder_norm.wrapper_classes import DEFAULT_TORCH_FUNCTION
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call, do_raise, unwrap, wrap_const
from thunder.core.proxies import Proxy, TensorProxy

_DISABLED = torch._C._disabled_torch_function_impl


def lookaside(fn: Callable, args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> Callable | None:
    """What to call instead of `fn`, if it is a function of torch's, and the class of an argument has something to say of it; None otherwise."""
    if fn is getattr and type(args[0].value) is not TensorProxy:
        return None
    if not known_classes.are_met() and not _may_answer(fn, args, kwargs):
        return None
    asked = _asked([*args, *kwargs.values()])
    if not asked or known_classes.say_nothing():
        return None
    if look_up(_ASKING_NOBODY, fn) is not None:
        return functools.partial(_asking_nobody, fn)
    if isinstance(fn, BuiltinFunctionType) and (method := look_up(_BY_METHODS, fn)) is not None:
        return lambda x, *rest: _interpret_call(
            lambda bound, *given: bound(*given), _interpret_call(getattr, x, wrap_const(method)), *rest
        )
    if function_modes.is_iteration(fn, args):
        return lambda x: _interpret_call(function_modes.iterated, x)
    told = _told(fn, args)
    if told is None:
        return None
    types = list(asked)
    if not all(getattr(getattr(cls, "__torch_function__", None), "__func__", None) is DEFAULT_TORCH_FUNCTION for cls in types):
        of_program = wrap_const(told), wrap_const(tuple(types)), wrap_const(len(types)), *asked.values()
        given = args[:1] if fn is getattr else args
        return lambda *_, **named: _interpret_call(_ask, *of_program, *given, **named)
    says = next((cls for cls in types if all(issubclass(cls, other) for other in types)), None)
    if says is None:
        return lambda *_, **__: do_raise(TypeError(_nobody_answers(told, types)))
    return functools.partial(_as_torch_does, says, told, fn)


# Python's functions that ask what stands for a tensor, natively.
_BY_METHODS = {
    **{abs: "__abs__", operator.abs: "__abs__"},
    **{operator.neg: "__neg__", operator.pos: "__pos__", operator.inv: "__invert__", operator.invert: "__invert__"},
}


# What makes tensors of values, which are torch's own whatever holds the values.
_ASKING_NOBODY = dict.fromkeys(
    (
        *(torch.tensor, torch.scalar_tensor, torch.full, torch.arange, torch.range, torch.asarray, torch.as_tensor, torch.Tensor),
        *(kind for kind in vars(torch).values() if isinstance(kind, type(torch.FloatTensor))),
    ),
    True,
)


def _asking_nobody(fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    with known_classes.saying_nothing():
        return _interpret_call(fn, *args, **kwargs)


def _told(fn: Callable, args: Sequence[WrappedValue]) -> Callable | None:
    """Which function of torch's a class is asked of."""
    if fn is getattr:
        return function_modes.getter_told(*args[:2]) if len(args) > 1 else None
    return function_modes.function_told(fn, args)


def _may_answer(fn: Callable, args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> bool:
    """Whether an object that is no tensor is among arguments that may say what a function does; of nearly all calls none is."""
    several = False
    for v in (*args, *kwargs.values()) if kwargs else args:
        kind = type(v.value)
        if _answers_by_itself(kind):
            return True
        several = several or kind is list or kind is tuple
    if not several or function_modes.function_told(fn, args) is None:
        return False
    values = [v.value for v in (*args, *kwargs.values()) if type(v.value) in (list, tuple)]
    return any(_answers_by_itself(type(x.value if isinstance(x, WrappedValue) else x)) for value in values for x in value)


def _asked(values: Sequence[Any]) -> dict[type, WrappedValue]:
    """By type what is asked, in torch's order: as the arguments come, those of derived classes first; nothing beside wrappers, which dispatch."""
    found: dict[type, WrappedValue] = {}
    has_classes = known_classes.are_met()
    for v in _one_by_one(values):
        value = v.value if isinstance(v, WrappedValue) else v
        kind = type(value)
        if kind in _PLAIN or (kind is TensorProxy and not has_classes):
            continue
        if kind is TensorProxy:
            cls = known_classes.class_of(value)
            asked = wrap_const(cls) if known_classes.asks(cls) else None
        elif isinstance(value, Proxy):
            if isinstance(value, TensorProxy):
                return {}
            continue
        else:
            cls, asked = kind, (v if isinstance(v, WrappedValue) else wrap_const(v)) if _answers_by_itself(kind) else None
        if asked is not None and cls not in found:
            place = next((i for i, other in enumerate(found) if issubclass(cls, other)), len(found))
            items = list(found.items())
            found = dict([*items[:place], (cls, asked), *items[place:]])
    return found


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type, slice, dict})


def _one_by_one(values: Sequence[Any]) -> Iterator[Any]:
    """Arguments, and what is in lists and tuples of them, as torch looks for tensors."""
    for v in values:
        value = v.value if isinstance(v, WrappedValue) else v
        if type(value) is list or type(value) is tuple:
            yield from value
        else:
            yield v


@functools.lru_cache(maxsize=512)  # programs make classes
def _answers_by_itself(kind: type) -> bool:
    """Whether objects that are no tensors say what torch's functions do with them."""
    return hasattr(kind, "__torch_function__") and not issubclass(kind, torch.Tensor | torch.overrides.TorchFunctionMode | Proxy)


def _ask(told: Callable, types: tuple[type, ...], count: int, /, *args: Any, **kwargs: Any) -> Any:
    """Interpreted: ask one after the other."""
    for asked in args[:count]:
        if kwargs:
            found = asked.__torch_function__(told, types, args[count:], kwargs)
        else:
            found = asked.__torch_function__(told, types, args[count:])
        if found is not NotImplemented:
            return found
    raise TypeError(_nobody_answers(told, types))


def _nobody_answers(told: Callable, types: Sequence[type]) -> str:
    listed = "".join(f"\n\n  - tensor subclass {cls}" for cls in types)
    return f"Multiple dispatch failed for '{told}'; all __torch_function__ handlers returned NotImplemented:{listed}"


# -- what torch's own says ------------------------------------------------------------------------------------------------------


@instead_of(DEFAULT_TORCH_FUNCTION)
def _torchs_own(
    cls: WrappedValue, func: WrappedValue, types: WrappedValue, args: Any = None, kwargs: Any = None, /, **named: WrappedValue
) -> Any:
    """Called for ``super().__torch_function__(func, types, args, kwargs)``."""
    args, kwargs = named.get("args", args), named.get("kwargs", kwargs)
    if not all(issubclass(cls.value, t) for t in unwrap(types)):
        return wrap_const(NotImplemented)
    found = _torchs_own_of_nothing(func, types, args, kwargs)
    return _given_class(found, cls.value, func.value, [] if args is None else list(args.value))


@instead_of(_DISABLED)
def _torchs_own_of_nothing(func: WrappedValue, types: WrappedValue, args: Any = None, kwargs: Any = None, /) -> Any:
    """Called for ``super().__torch_function__(func, types, args, kwargs)`` of a class derived from one that has nothing to say."""
    args = wrap_const(()) if args is None else args
    kwargs = wrap_const({}) if kwargs is None or kwargs.value is None else kwargs
    with known_classes.saying_nothing():
        return _interpret_call(_call, func, args, kwargs)


def _call(func: Callable, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _as_torch_does(cls: type, told: Callable, fn: Callable, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for a function of torch's of tensors whose classes leave it to torch."""
    with known_classes.saying_nothing():
        found = _interpret_call(fn, *args, **kwargs)
    into = kwargs.get("out")
    if found is not INTERPRETER_SIGNALS.EXCEPTION_RAISED and into is not None and type(into.value) is TensorProxy:
        return into if issubclass(known_classes.class_of(into.value), cls) else _interpret_call(_convert, found, wrap_const(cls))
    return _given_class(found, cls, told, args)


def _given_class(found: Any, cls: type, told: Callable, args: Sequence[Any]) -> Any:
    """Give results a class: what an operation in place returns, or one that hands back its argument, is what it was given."""
    if found is INTERPRETER_SIGNALS.EXCEPTION_RAISED or told in get_default_nowrap_functions():
        return found
    if type(found.value) is TensorProxy and args and _writes(told):
        into = args[0] if isinstance(args[0], WrappedValue) else found
        if type(into.value) is TensorProxy and issubclass(known_classes.class_of(into.value), cls):
            return into
    if type(found.value) is TensorProxy and second_names.is_noted(found.value):
        same = second_names.handed_back(found.value)
        back = next((a for a in args if isinstance(a, WrappedValue) and a.value is same), None)
        if back is not None and issubclass(known_classes.class_of(same), cls):
            return back
    made = [p for p in tree_leaves(found.value) if type(p) is TensorProxy and not issubclass(known_classes.class_of(p), cls)]
    given = {v.name for v in tree_leaves([a.value if isinstance(a, WrappedValue) else a for a in args]) if isinstance(v, Proxy)}
    if any(p.name in given or p.history is not None for p in made):
        return _interpret_call(_convert, found, wrap_const(cls))
    for p in made:
        known_classes.note(p, cls)
    return found


def _writes(told: Callable) -> bool:
    """Whether a method is one in place: ``add_``, ``__iadd__``."""
    name = getattr(told, "__name__", "")
    return hasattr(torch.Tensor, f"__{name[3:]}") if name.startswith("__i") else name.endswith("_") and not name.startswith("__")


# -- contexts -------------------------------------------------------------------------------------------------------------------


class _Disabling:
    """What a program enters in place of torch's contexts, which it has left before the trace runs."""

    def __init__(self, with_modes: bool):
        self.with_modes = with_modes

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@instead_of(torch._C.DisableTorchFunctionSubclass)
def _disabled() -> Any:
    return wrap_const(_Disabling(with_modes=False))


@instead_of(torch._C.DisableTorchFunction)
def _disabled_with_modes() -> Any:
    return wrap_const(_Disabling(with_modes=True))


@instead_of(_Disabling.__enter__)
def _enter(context: WrappedValue) -> WrappedValue:
    known_classes.enter()
    function_modes.turn(context.value.with_modes)
    return wrap_const(None)


@instead_of(_Disabling.__exit__)
def _leave(context: WrappedValue, *_: WrappedValue) -> WrappedValue:
    known_classes.leave()
    function_modes.turn(-context.value.with_modes)
    return wrap_const(None)
