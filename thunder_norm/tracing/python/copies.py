"""``copy.copy`` and ``copy.deepcopy`` of tensors: what lies in one memory, and which tensor is which, is as in eager mode, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import EscapeError, UnsupportedSubclassError, with_details
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.classes import MISSING, in_classes
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of, look_up
from thunder_norm.tracing.shared_memory.aliases import given_as, memory_of, storage_address
from thunder_norm.tracing.torch_functions.known_classes import class_of
from thunder_norm.tracing.torch_functions.tensor_classes import of_class, own_classes
from thunder_norm.wrapper_classes import flattened, is_wrapper, overrides_torch_function
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, make_opaque, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it copies a tensor; None for all others."""
    if look_up(_COPYING, fn) is not None and args and of_class(args[0]):
        return lambda *given, **named: thunders._interpret_call(_COPYING[fn], *given, **named)
    if fn is copy.deepcopy and args and isinstance(args[0].value, TensorProxy):
        found = wrap_const(_place(args[0]))
        return lambda *given, **named: thunders._interpret_call(_deep_copied, found, *given, **named)
    if fn is copy.copy and args and isinstance(args[0].value, TensorProxy):
        return lambda *given: thunders._interpret_call(_copied, *given)
    return None


# -- tensors of classes that do not dispatch --------------------------------------------------------------------------------------


def _copied_of_class(x: Any) -> Any:
    """What its class says; or another tensor in the same memory, of the class, with what it has for attributes."""
    cls = type(x)
    if hasattr(cls, "__copy__"):
        return x.__copy__()
    _check_pickled_by_torch(x)
    with torch._C.DisableTorchFunctionSubclass():
        copied = _copied(x).as_subclass(cls)
    for name, value in x.__dict__.items():
        setattr(copied, name, value)
    return copied


@make_opaque
def _check_pickled_by_torch(x: TensorProxy) -> None:
    """Refuse a class that says how its tensors are pickled, by which torch copies them."""
    cls = class_of(x)
    said = [name for name in _PICKLING if in_classes(own_classes(cls), name) is not MISSING]
    if said or overrides_torch_function(cls):
        raise UnsupportedSubclassError(
            with_details(
                f"copy.copy of a {cls.__qualname__}, a tensor whose class does not dispatch",
                at=location_of_user(),
                why=f"torch makes it of what {said[0] if said else '__torch_function__'} of the class says of Tensor.__reduce_ex__",
                instead="x.clone(), or a __copy__ of the class",
            )
        )


_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")


def _deep_copied_of_class(x: Any, memo: dict[Any, Any] | None = None, _nil: Any = None) -> Any:
    """What its class says, or torch, which asks its ``__torch_function__``."""
    memo = {} if memo is None else memo
    if id(x) not in memo:
        is_own = type(x).__deepcopy__ is not torch.Tensor.__deepcopy__
        memo[id(x)] = x.__deepcopy__(memo) if is_own else torch.Tensor.__deepcopy__(x, memo)
    return memo[id(x)]


def _deep_copied_by_torch(x: Any, memo: dict[Any, Any]) -> Any:
    """``torch.Tensor.__deepcopy__``, which needs a class that makes its own tensors."""
    if not x.is_leaf:
        raise RuntimeError(_NO_LEAF)
    _check_makes_no_own(x)
    raise RuntimeError(
        "The default implementation of __deepcopy__() for non-wrapper subclasses only works for subclass types that implement "
        "new_empty() and for which that function returns another instance of the same subclass."
    )


@make_opaque
def _check_makes_no_own(x: TensorProxy) -> None:
    cls = class_of(x)
    if in_classes(own_classes(cls), "new_empty") is not MISSING or issubclass(cls, torch.nn.Parameter):
        raise UnsupportedSubclassError(
            with_details(
                f"copy.deepcopy of a {cls.__qualname__}, a tensor whose class does not dispatch",
                at=location_of_user(),
                why="torch makes it by the class, and puts it where the copied memory is",
                instead="x.clone(), or a __deepcopy__ of the class",
            )
        )


_NO_LEAF = (
    "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.  "
    "If you were attempting to deepcopy a module, this may be because of a torch.nn.utils.weight_norm usage"
)
_COPYING = {
    copy.copy: _copied_of_class,
    copy.deepcopy: _deep_copied_of_class,
    torch.Tensor.__deepcopy__: _deep_copied_by_torch,
}


# -- plain tensors and wrappers ---------------------------------------------------------------------------------------------------


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Another tensor in the same memory, or what its class says."""
    if hasattr(type(x), "__copy__"):
        return x.__copy__()
    if x.requires_grad or isinstance(x, torch.nn.Parameter):
        raise EscapeError(
            "copy.copy of a parameter, or of a tensor that requires grad: the copy is a leaf of its own, of which a trace makes none; "
            "use x.detach(), or x.view_as(x)"
        )
    return another(x)


def another(x: torch.Tensor) -> torch.Tensor:
    """Another tensor in the same memory. Of a wrapper whoever interprets it makes another object, as torch does, with no operation."""
    return x.view_as(x)


_SEVERAL_IN_ONE_MEMORY = (
    "copy.deepcopy of an object that holds several tensors in one memory: their copies would have one memory as well, which in a "
    "trace they have not; copy the tensor that the others are views of, and make them of the copy"
)
_DEEP_COPIED = "_thunder_norm_deep_copied"  # of an acquisition: the inputs of which there are deep copies


def _place(x: WrappedValue) -> tuple[tuple, int | str]:
    """The memory that a tensor lies in, and which tensor it is, whatever the program calls it.

    Inputs that are copied may be one tensor in one call, and several in the next: a guard sees that it stays so.
    """
    tensor = given_as(x.value)
    if tensor is None:
        return memory_of(x.value), x.value.name
    ctx = get_jit_ctx()
    copied = vars(ctx).setdefault(_DEEP_COPIED, {})
    for other in copied.values():
        ctx.add_constraint((_guard_of_relation(tensor, given_as(other)), x.value, other))
    copied[x.value.name] = x.value
    return memory_of(x.value), id(tensor)


def _guard_of_relation(a: torch.Tensor, b: torch.Tensor | None) -> Callable:
    is_one, is_in_one_memory = a is b, b is not None and storage_address(a) == storage_address(b)

    def check(t: torch.Tensor, other: torch.Tensor) -> None:
        if (t is other) != is_one or (storage_address(t) == storage_address(other)) != is_in_one_memory:
            raise GuardError(
                "two tensors of which there are deep copies are one, or in one memory, as they were not, or no longer so"
            )

    bind = bindable("check_relation_of_copied", check)
    return lambda t, other: get_tracectx().bound_symbols.append(bind(t, other, output=None))


def _deep_copied(found: tuple, x: torch.Tensor, memo: dict[Any, Any] | None = None, _nil: Any = None) -> torch.Tensor:
    """Each tensor is copied once, also by ``dataclasses.asdict``; `found` is its memory, and which tensor in it it is."""
    if isinstance(x, torch.nn.Parameter) and type(x) in (torch.Tensor, torch.nn.Parameter):
        raise EscapeError("copy.deepcopy of a parameter: a trace makes none; use x.clone(), or x.detach().clone()")
    if not x.is_leaf:
        raise RuntimeError(_NO_LEAF)
    memo = {} if memo is None else memo
    if id(x) in memo:
        return memo[id(x)]
    if _is_wrapper(x):
        memo[id(x)] = _copied_wrapper(x, memo)
        return memo[id(x)]
    memory, tensor = found
    if memory not in memo:
        memo[memory] = tensor, _copied_leaf(x)
    if memo[memory][0] != tensor:
        raise EscapeError(_SEVERAL_IN_ONE_MEMORY)
    return memo[memory][1]


@make_opaque
def _is_wrapper(x: Any) -> bool:
    return isinstance(x, TensorProxy) and type(x) is not TensorProxy


def _copied_wrapper(x: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """What its class says, or torch, which has the copy hold copies of what the object holds, whatever a clone of it would."""
    if type(x).__deepcopy__ is not torch.Tensor.__deepcopy__:
        return x.__deepcopy__(memo)
    copied = x.__deepcopy__({})
    if _is_copied_by_torch(x, type(x)):
        if x.grad is not None:
            copied.grad = copy.deepcopy(x.grad, memo)
        _note_copied_inside(x, copied, memo)
    return copied


@make_opaque
def _is_copied_by_torch(x: TensorProxy, cls: type) -> bool:
    """Whether the class leaves it to torch."""
    given = given_as(x)
    inner = [] if given is None or not is_wrapper(given) else [storage_address(t) for t in _plain_inside(given)]
    if len(set(inner)) != len(inner):
        raise EscapeError(_SEVERAL_IN_ONE_MEMORY)
    return not overrides_torch_function(cls)


def _plain_inside(x: torch.Tensor) -> list[torch.Tensor]:
    inner, _ = flattened(x)
    return [p for t in inner.values() for p in (_plain_inside(t) if is_wrapper(t) else [t])]


def _note_copied_inside(x: torch.Tensor, copied: torch.Tensor, memo: dict[Any, Any]) -> None:
    for name in x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else ():
        inner = getattr(x, name)
        if _is_wrapper(inner):
            _note_copied_inside(inner, getattr(copied, name), memo)
            continue
        memory, tensor = _place_of(inner)
        if memory in memo:
            raise EscapeError(_SEVERAL_IN_ONE_MEMORY)
        memo[memory] = tensor, getattr(copied, name)


def _place_of(x: torch.Tensor) -> tuple[tuple, int | str]:
    """`_place` for a function that is interpreted."""
    raise AssertionError("called while tracing only")


@instead_of(_place_of)
def _(x: WrappedValue) -> WrappedValue:
    return wrap_const(_place(x))


def _copied_leaf(x: torch.Tensor) -> torch.Tensor:
    copied = x.detach().clone()
    if isinstance(x, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, x.requires_grad)
    elif x.requires_grad:
        copied.requires_grad_()
    if x.requires_grad and x.grad is not None:
        copied.grad = x.grad.detach().clone()
    return copied
