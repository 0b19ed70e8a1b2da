"""Classes derived from torch.Tensor that do not dispatch: in a trace their tensors are plain ones, with the methods that the class has.

Which of them a program makes is known here, and what it reads and sets of them; of functions of torch's `function_overrides` asks the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.bindable import executor
from thunder_norm.tracing.guarding.classes import MISSING, in_classes
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory import aliases
from thunder_norm.tracing.torch_functions import known_classes
from thunder_norm.wrapper_classes import is_of_users
from thunder.core import prims
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    wrap_const,
)
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_OF_TENSORS = frozenset(torch.Tensor.__mro__) | _PLAIN


def class_of(obj: WrappedValue) -> type:
    """The class of a tensor in eager mode."""
    of_wrapper = known_classes.class_of_wrapper(obj.value)
    if of_wrapper is not None:
        return of_wrapper
    cls = type(obj.original_value)
    if not issubclass(cls, torch.Tensor):
        cls = known_classes.class_of(obj.value) if known_classes.are_met() else torch.Tensor
    return cls


def of_class(obj: WrappedValue) -> bool:
    """Whether it is a plain tensor that is of such a class in eager mode."""
    return type(obj.value) is TensorProxy and known_classes.are_met() and known_classes.class_of(obj.value) is not torch.Tensor


def may_have_operators(obj: WrappedValue) -> bool:
    """Whether it is a tensor of a class that may say itself what Python's operators do."""
    return of_class(obj) or known_classes.class_of_wrapper(obj.value) is not None


def own_operator(obj: WrappedValue, name: str) -> Callable | None:
    """The method that the class of a tensor has of its own for an operator; None if that is torch's."""
    cls = known_classes.class_of_wrapper(obj.value)
    if cls is None and of_class(obj):
        cls = known_classes.class_of(obj.value)
    found = MISSING if cls is None else operator_of(cls, name)
    if found is MISSING:
        return None
    note_asked(obj, name)
    return found


def operator_of(cls: type, name: str) -> Any:
    """What a class of tensors has of its own under the name of an operator; MISSING if that is torch's."""
    return in_classes(_own(cls), name)


def class_in_eager(x: WrappedValue) -> type:
    """The class that an operand has in eager mode."""
    return class_of(x) if isinstance(x.value, TensorProxy) else type(x.value)


def is_asked_first(right: WrappedValue, left: WrappedValue, reflected: str) -> bool:
    """Whether a tensor is asked for an operator before what stands left of it: its class derives from that one's, and says it anew."""
    kinds = [class_in_eager(x) for x in (left, right)]
    if kinds[0] is kinds[1] or not issubclass(kinds[1], kinds[0]):
        return False
    return in_classes(kinds[1].__mro__, reflected) is not in_classes(kinds[0].__mro__, reflected)


def check_classes_of_plain_tensors(*tensors: torch.Tensor) -> None:
    """Guard: inputs traced as tensors of torch's own classes are of such."""
    if not _PLAIN.issuperset(map(type, tensors)):
        other = next((type(t) for t in tensors if is_of_users(type(t))), None)
        if other is not None:
            raise GuardError(f"expected a plain tensor, got {other.__name__}")


_check = executor.register_operator(
    "check_classes_of_plain_tensors",
    meta=lambda *tensors: None,
    fn=check_classes_of_plain_tensors,
    tags=(prims.OpTags.DONT_DCE,),
)


def guard(prologue: TraceCtx) -> None:
    """Have a prologue tell plain tensors from those of a user's class: Thunder's own check accepts any."""
    checks = [b for b in prologue.bound_symbols if b.sym.id == prims.PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA]
    tensors = [p for b in checks if type(p := b.args[0]) is TensorProxy and not is_of_users(type(aliases.given_as(p)))]
    if tensors:
        prologue.bound_symbols.insert(len(prologue.bound_symbols) - 1, _check.bind(*tensors, output=None))


def making(fn: Any, args: Sequence[WrappedValue], new: Callable) -> Callable | None:
    """What to call instead of `fn`, if it makes a tensor of such a class; None otherwise.

    Args:
        fn: what is called.
        args: with which arguments.
        new: what to call for ``torch.Tensor.__new__(torch.Tensor, ...)``.
    """
    if fn is torch.Tensor.as_subclass and len(args) > 1 and type(args[0].value) is TensorProxy:
        return _viewed
    if fn is torch.Tensor._make_subclass and len(args) > 1 and type(args[1].value) is TensorProxy:
        return _detached if _is_plain_class(args[0].value) else refused
    if fn is torch.Tensor.__new__ and args and _is_of_users(args[0].value):
        return functools.partial(_new, new)
    if _is_of_users(fn) and type(fn).__call__ is type.__call__:
        init = in_classes(_own(fn), "__init__")
        init = wrap_const(init if isinstance(init, FunctionType) else None)
        return functools.partial(_interpret_call, _constructed, wrap_const(fn), init)
    return None


def _is_of_users(cls: Any) -> bool:
    """Whether it is a class of a user's, of which the program may make tensors: no parameters."""
    return (
        isinstance(cls, type(torch.Tensor))
        and is_of_users(cls)
        and _is_plain_class(cls)
        and not issubclass(cls, torch.nn.Parameter)
    )


def _constructed(cls: Any, init: Callable | None, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    made = cls.__new__(cls, *args, **kwargs)
    if init is not None and isinstance(made, cls):
        init(made, *args, **kwargs)
    return made


def _viewed(x: WrappedValue, cls: WrappedValue) -> Any:
    """Called for ``x.as_subclass(cls)``: another object with the memory and the history of x."""
    if not (isinstance(cls.value, type) and issubclass(cls.value, torch.Tensor)):
        return do_raise(TypeError(f"as_subclass(): argument 'cls' must be a class derived from torch.Tensor, not {cls.value!r}"))
    if not _is_plain_class(cls.value):
        return refused()
    with known_classes.saying_nothing():
        return _noted_as(cls.value, _interpret_call(torch.Tensor.view_as, x, x))


def _detached(cls: WrappedValue, data: WrappedValue, require_grad: WrappedValue | None = None, *_: WrappedValue) -> Any:
    """Called for ``torch.Tensor._make_subclass(cls, data, require_grad)``."""
    with known_classes.saying_nothing():
        return _noted_as(
            cls.value, _interpret_call(_without_history, data, wrap_const(False) if require_grad is None else require_grad)
        )


def _without_history(data: torch.Tensor, require_grad: bool) -> torch.Tensor:
    return data.detach().requires_grad_() if require_grad else data.detach()


def _new(new: Callable, cls: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``torch.Tensor.__new__(cls, ...)``."""
    with known_classes.saying_nothing():
        return _noted_as(cls.value, new(*args, **kwargs))


def _noted_as(cls: type, made: Any) -> Any:
    if made is not INTERPRETER_SIGNALS.EXCEPTION_RAISED and type(made.value) is TensorProxy:
        known_classes.note(made.value, cls)
    return made


def _is_plain_class(cls: type) -> bool:
    return issubclass(cls, torch.Tensor) and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def own_classes(cls: type) -> tuple[type, ...]:
    """The class of a plain tensor and those it derives from, without torch's own; none of one that dispatches."""
    return _own(cls) if cls not in _PLAIN and _is_plain_class(cls) else ()


def _own(cls: type) -> tuple[type, ...]:
    return tuple(base for base in cls.__mro__ if base not in _OF_TENSORS)


def refused(*_: WrappedValue, **__: WrappedValue) -> Any:
    """Called for what makes a wrapper of a tensor without its class."""
    return do_raise(
        UnsupportedSubclassError(
            with_details(
                "as_subclass of a plain tensor in a jitted function, with a class that has a __torch_dispatch__",
                at=location_of_user(),
                why="a trace has plain tensors and those that such classes hold",
                instead="what the class says to make one",
            )
        )
    )


def note_asked(obj: WrappedValue, name: str, *, may_be_own: bool = False) -> None:
    """The program asks the class of a tensor for what it has under a name, which the tensor may have `may_be_own`."""
    if isinstance(obj.original_value, torch.Tensor):
        guards.note(obj, "type", None, type(obj.original_value))
        if not may_be_own:
            guards.note(obj, "not own", name, None)
