"""Products of sparse matrices: torch runs them, and their gradients, where Thunder would permute a matrix that has no strides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder.core.interpreter import WrappedValue, _interpret_call
from thunder.core.proxies import TensorProxy

_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, TensorProxy.__matmul__, torch.sparse.mm})
_KINDS = frozenset(map(type, _PRODUCTS))


def lookaside(fn: Any, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it is the product of a sparse matrix that is given and another matrix; None for all others."""
    if len(args) != 2 or type(fn) not in _KINDS or fn not in _PRODUCTS:
        return None
    if fn is torch.sparse.mm or (_is_sparse(args[0].original_value) and getattr(args[1].value, "ndim", 0) == 2):
        return functools.partial(_interpret_call, torch.mm)
    return None


def _is_sparse(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout is not torch.strided and t.ndim == 2
