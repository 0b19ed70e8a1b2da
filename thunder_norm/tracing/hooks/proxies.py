"""``TensorProxy`` while a user's rule runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from thunder_norm.errors import TransformError
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy


@contextmanager
def torch_functions_on_proxies() -> Iterator[None]:
    """Let torch's functions, called on proxies meanwhile, record Thunder's operations."""
    if "__torch_function__" in vars(TensorProxy):  # a rule inside a rule
        yield
        return
    setattr(TensorProxy, "__torch_function__", classmethod(_record))  # noqa: B010 - pyright knows no such attribute
    try:
        yield
    finally:
        delattr(TensorProxy, "__torch_function__")


def _record(cls: type, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    operation = ltorch._torch_to_thunder_function_map.get(function)
    if operation is None:
        raise TransformError(f"{getattr(function, '__qualname__', function)} is not an operation that Thunder records")
    return operation(*args, **(kwargs or {}))
