"""A mistake of torch's: without data, its vector_norm keeps a dimension of size 1 that is counted from the end.

`torch/_refs/linalg/__init__.py`, ``[s for d, s in enumerate(x.shape) if d not in dim]``; norms, distances and similarities are
computed with it, and Thunder asks it for their shapes.  So dimensions are counted from the start before it is asked.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PositiveDims(TorchDispatchMode):
    """Operations of torch inside the block have the shapes without data that they have with data."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.linalg_vector_norm.default and len(args) > 2 and args[2]:
            args = (*args[:2], _positive(args[2], args[0].ndim), *args[3:])
        return func(*args, **(kwargs or {}))


def over_positive(operation: Callable) -> Callable:
    """An operation of Thunder's that is a norm, whose third argument is `dim`, with torch's shape."""

    def norm(*args: Any, **kwargs: Any) -> Any:
        if "dim" in kwargs:
            kwargs["dim"] = _positive(kwargs["dim"], args[0].ndim)
        elif len(args) > 2:
            args = (*args[:2], _positive(args[2], args[0].ndim), *args[3:])
        return operation(*args, **kwargs)

    return norm


def _positive(dim: Any, ndim: int) -> Any:
    """The same dimensions, counted from the start; of a tensor without dimensions there is one, 0."""
    if dim is None:
        return None
    if isinstance(dim, int):
        return dim + max(ndim, 1) if -max(ndim, 1) <= dim < 0 else dim
    return [_positive(d, ndim) for d in dim]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's report of a call that fails without data: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
