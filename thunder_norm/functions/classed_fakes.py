"""Fakes that are of a class that does not dispatch, for what torch runs on fakes: ``torch.autograd.Function``s."""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import UnsupportedSubclassError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory.aliases import given_as
from thunder_norm.tracing.torch_functions import known_classes
from thunder_norm.tracing.torch_functions.tensor_attributes import those_set
from thunder_norm.wrapper_classes import DEFAULT_TORCH_FUNCTION
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy


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


def has_attributes(proxy: TensorProxy) -> bool:
    """Whether somebody has set attributes of a tensor, which its fake has not."""
    real = given_as(proxy)
    return (real is not None and bool(vars(real))) or proxy.name in those_set(get_jit_ctx())


def check_without_attributes(function: type, results: Iterable[torch.Tensor]) -> None:
    """Refuse results of a function of which a class has set attributes, as long as they were fakes.

    Raises:
        UnsupportedSubclassError: says of which class.
    """
    for t in results:
        names = [name for name in vars(t) if name not in _of_fakes()] if class_of(t) is not torch.Tensor else []
        if names:
            raise UnsupportedSubclassError(
                with_details(
                    f"{function.__name__}, a torch.autograd.Function, returns a {class_of(t).__name__} with attribute {names[0]!r}",
                    at=location_of_user(),
                    why="torch runs it on tensors without values, which are not those that the program gets",
                    instead=f"set the attribute of what {function.__name__}.apply returns",
                )
            )


@functools.cache
def _of_fakes() -> frozenset[str]:
    """The attributes that each fake has; asked late, as torch starts threads for one, which a process that is forked must not have."""
    with FakeTensorMode():
        return frozenset(vars(torch.empty(0)))


def class_of(fake: torch.Tensor) -> type:
    """The class that a fake stands for."""
    return getattr(type(fake), _STANDS_FOR, torch.Tensor)


_STANDS_FOR = "_thunder_norm_stands_for"


def be_of(fake: torch.Tensor, cls: type) -> None:
    """Have a fake be of a class, with its methods and for `isinstance`; it stays a fake, and can be made one of another class."""
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
        if is_asked and (asked := _with_own_answer(args, kwargs)):
            return self._answered(asked, func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if type(t) is FakeTensor:
                be_of(t, torch.Tensor)
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

    def _answered(self, asked: list[type], func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What classes say themselves, asked in torch's order; what they call of torch's asks again, unless they have it ask nobody."""
        for cls in asked:
            with self:
                result = cls.__torch_function__(func, tuple(asked), args, kwargs)
            if result is not NotImplemented:
                return result
        raise TypeError(f"Multiple dispatch failed for '{func}'; all __torch_function__ handlers returned NotImplemented")


def _with_own_answer(args: tuple, kwargs: dict[str, Any] | None) -> list[type]:
    """The classes of the tensors among arguments in the order in which torch asks them; none if all leave it to torch."""
    found: list[type] = []
    for t in tree_leaves((args, kwargs)):
        cls = class_of(t) if isinstance(t, torch.Tensor) else torch.Tensor
        if known_classes.asks(cls) and cls not in found:
            found.insert(next((i for i, other in enumerate(found) if issubclass(cls, other)), len(found)), cls)
    return [] if all(map(leaves_to_torch, found)) else found
