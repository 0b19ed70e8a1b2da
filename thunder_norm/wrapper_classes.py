"""Which classes are wrapper subclasses, and how their instances are taken apart: the one place that asks.

A class says it itself (``__tensor_flatten__`` and ``__tensor_unflatten__``), or somebody says it for the class with `register_flatten`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder_norm.errors import TransformError, UnsupportedSubclassError, with_details

Flatten = Callable[[Any], tuple[dict[str, torch.Tensor], Any]]
Unflatten = Callable[[dict[str, torch.Tensor], Any, torch.Size, tuple[int, ...]], torch.Tensor]

PROTOCOL = ("__tensor_flatten__", "__tensor_unflatten__")


class _Registered(NamedTuple):
    """How somebody said that instances of a class are taken apart and put together."""

    flatten: Flatten
    unflatten: Unflatten


_registered: dict[type, _Registered] = {}


def undifferentiated(cls: type) -> str | None:
    """The inner tensor whose derivatives a wrapper of the class cannot hold: it says something of that tensor alone."""
    return getattr(cls, "_undifferentiated", None)


def keeps_to_itself(cls: type) -> bool:
    """Whether what wrappers of the class have besides what they are put together with is for its own operations alone."""
    return getattr(cls, "_keeps_to_itself", False)


def register_flatten(cls: type, flatten: Flatten, unflatten: Unflatten, *, override: bool = False) -> None:
    """Say how instances of a wrapper subclass without ``__tensor_flatten__`` are taken apart, so that `SubclassTransform` interprets it.

    Holds for `cls` alone, not for classes derived from it.

    Args:
        cls: made with ``torch.Tensor._make_wrapper_subclass``, with a ``__torch_dispatch__``.
        flatten: ``flatten(x)`` returns ``({name: tensor}, context)``: all tensors that `x` holds, themselves and not copies or views,
            always under the same names, and everything else that its operations read, comparable with ``==``.
        unflatten: ``unflatten(inner, context, shape, stride)`` returns the instance of `cls` that holds the tensors ``inner``,
            themselves.
        override: replace what was registered before.

    Raises:
        UnsupportedSubclassError: `cls` is no wrapper subclass, or says itself how it is taken apart.
        TransformError: it is registered already, and `override` is not given.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.Tensor)) or not dispatches(cls):
        raise UnsupportedSubclassError(
            with_details(
                f"{getattr(cls, '__qualname__', repr(cls))} is no wrapper subclass",
                needed="a subclass of torch.Tensor, made with torch.Tensor._make_wrapper_subclass, with a __torch_dispatch__",
            )
        )
    if _has_protocol(cls):
        raise UnsupportedSubclassError(
            with_details(f"{cls.__qualname__} says itself how it is taken apart", by=" and ".join(PROTOCOL))
        )
    if cls in _registered and not override:
        raise TransformError(
            with_details(f"{cls.__qualname__} is registered already", to_replace_it="register_flatten(..., override=True)")
        )
    _registered[cls] = _Registered(flatten, unflatten)


def dispatches(cls: type) -> bool:
    """Whether a class of tensors dispatches operations in Python."""
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _has_protocol(cls: type) -> bool:
    return all(hasattr(cls, name) for name in PROTOCOL)


def is_wrapper_class(cls: Any) -> bool:
    """Whether instances of `cls` can be taken apart."""
    return (
        isinstance(cls, type) and issubclass(cls, torch.Tensor) and dispatches(cls) and (_has_protocol(cls) or cls in _registered)
    )


def is_wrapper(x: Any) -> bool:
    """Whether `x` is a tensor that can be taken apart."""
    if not isinstance(x, torch.Tensor) or type(x) in _PLAIN:
        return False
    return _has_protocol(type(x)) or type(x) in _registered


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def flattened(x: torch.Tensor) -> tuple[dict[str, Any], Any]:
    """What a wrapper holds, by name, and its context.

    Raises:
        UnsupportedSubclassError: what was registered for its class is not what `register_flatten` asks for.
    """
    found = _registered.get(type(x))
    if found is None:
        names, ctx = x.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue] - `is_wrapper` has asked
        return {name: getattr(x, name, None) for name in names}, ctx
    result = found.flatten(x)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], dict)):
        raise UnsupportedSubclassError(
            with_details(
                f"flatten registered for {type(x).__qualname__} returned {type(result).__name__}",
                needed="({name: tensor}, context)",
            )
        )
    return result


def check_stable(x: torch.Tensor) -> None:
    """Refuse a wrapper that gives other tensors each time it is taken apart: what is written into them would be lost.

    Raises:
        UnsupportedSubclassError: it does.
    """
    if type(x) not in _registered:
        return
    once, again = flattened(x)[0], flattened(x)[0]
    if list(once) != list(again) or any(once[name] is not again[name] for name in once):
        raise UnsupportedSubclassError(
            with_details(
                f"flatten registered for {type(x).__qualname__} gives other tensors each time",
                needed="the tensors that the object holds, themselves and not copies or views",
            )
        )


def inner_tensors(x: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
    """The tensors that a wrapper holds, in the order of `names`."""
    if type(x) not in _registered:
        return [getattr(x, name) for name in names]
    inner, _ = flattened(x)
    return [inner[name] for name in names]


def unflattened(cls: type, inner: dict[str, torch.Tensor], ctx: Any, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """The wrapper of a class that holds `inner`; the inverse of `flattened`."""
    found = _registered.get(cls)
    unflatten = cls.__tensor_unflatten__ if found is None else found.unflatten  # pyright: ignore[reportAttributeAccessIssue]
    return unflatten(inner, ctx, shape, stride)


def is_of_users(cls: type) -> bool:
    """Whether it is a class of tensors, and none of torch's own."""
    return cls.__module__.partition(".")[0] != "torch" and issubclass(cls, torch.Tensor)


def gives_its_class(cls: type) -> bool:
    """Whether it is a class of a user's that does not dispatch, which results of torch's functions may be of: a tensor of it times two is one."""
    if not is_of_users(cls) or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return cls.__torch_function__ is not torch._C._disabled_torch_function_impl


def overrides_torch_function(cls: type) -> bool:
    """Whether a class says itself what torch's functions do with it."""
    own = cls.__torch_function__
    return own is not torch._C._disabled_torch_function_impl and getattr(own, "__func__", None) is not DEFAULT_TORCH_FUNCTION


DEFAULT_TORCH_FUNCTION = torch.Tensor.__torch_function__.__func__
