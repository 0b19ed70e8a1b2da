"""Fakes that are of a class that does not dispatch, for what torch runs on fakes: ``torch.autograd.Function``s."""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions
from torch.utils._pytree import tree_leaves

from thunder_norm.tracing.torch_functions import known_classes
from thunder_norm.wrapper_classes import DEFAULT_TORCH_FUNCTION


def leaves_to_torch(cls: type) -> bool:
    """Whether a class has its ``__torch_function__`` from torch, so that what it says of an operation is known."""
    return not known_classes.asks(cls) or getattr(cls.__torch_function__, "__func__", None) is DEFAULT_TORCH_FUNCTION


def looks_at_types(function: Callable) -> bool:
    """Whether a function asks for the very type of something, which fakes are derived from."""
    pending, names = [function.__code__] if hasattr(function, "__code__") else [], set[str]()
    while pending:
        code = pending.pop()
        names |= {i.argval for i in dis.get_instructions(code) if i.opname in _NAMING}
        pending += [c for c in code.co_consts if isinstance(c, CodeType)]
    return not names.isdisjoint(("type", "__class__"))


_NAMING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")


def class_of(fake: torch.Tensor) -> type:
    """The class that a fake stands for."""
    return getattr(type(fake), _STANDS_FOR, torch.Tensor)


_STANDS_FOR = "_thunder_norm_stands_for"


def be_of(fake: torch.Tensor, cls: type) -> None:
    """Have a fake be of a class, with its methods and for `isinstance`; it stays a fake."""
    if cls is not torch.Tensor:
        fake.__class__ = _standing_for(cls)  # pyright: ignore[reportAttributeAccessIssue] - derived from FakeTensor


@functools.lru_cache(maxsize=64)  # programs make classes
def _standing_for(cls: type) -> type:
    return type(cls.__name__, (FakeTensor, cls), {_STANDS_FOR: cls, "as_subclass": _as_subclass})


def _as_subclass(self: torch.Tensor, cls: type) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.ops.aten.alias.default(self)
    be_of(made, cls)
    return made


@contextlib.contextmanager
def followed(is_due: bool) -> Iterator[None]:
    """Meanwhile results of torch's functions are of the classes that torch gives them, by those of the arguments; if it `is_due`."""
    with _Following() if is_due else contextlib.nullcontext():
        yield


class _Following(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        is_asked = torch._C._is_torch_function_enabled()
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)] if is_asked else []
        classes = {cls for t in given if known_classes.asks(cls := class_of(t))}
        if not classes or func in get_default_nowrap_functions():
            return result
        says = next((cls for cls in classes if all(issubclass(cls, other) for other in classes)), None)
        if says is None:
            raise TypeError(f"Multiple dispatch failed for '{func}'; all __torch_function__ handlers returned NotImplemented")
        for t in tree_leaves(result):
            if isinstance(t, FakeTensor) and not issubclass(class_of(t), says):
                be_of(t, says)
        return result
