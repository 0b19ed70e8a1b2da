"""Functions of torch whose arguments Thunder's operation of that name takes for others.

``F.nll_loss`` ignores the class -100 where none is named; Thunder's (`thunder/torch/__init__.py`, ``def nll_loss``) ignores -1, its
gradient fails without a number, and the places of its arguments are not torch's.  No other function that Thunder has differs in a
default (tests/test_torch_signatures.py compares them all).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.interpreter import _interpret_call


def lookaside(fn: Callable) -> Callable | None:
    """What to interpret instead of `fn`: a function with torch's arguments that calls Thunder's operation; None for most."""
    try:
        own = _WITH_TORCHS_ARGUMENTS.get(fn)
    except TypeError:  # not hashable
        return None
    return None if own is None else functools.partial(_interpret_call, own)


def _nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)
    return ltorch.nll_loss(input, target, weight, ignore_index, reduction)


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Thunder's takes the last row, -1, for no row, and scales no gradient by frequencies where no row is padding."""
    if padding_idx is not None:
        if not -weight.shape[0] <= padding_idx < weight.shape[0]:
            raise AssertionError("Padding_idx must be within num_embeddings")
        padding_idx = padding_idx % weight.shape[0]
    elif scale_grad_by_freq:
        padding_idx = -1
    return ltorch.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def _norm_over_positive(operation: Callable) -> Callable:
    """A norm whose third argument is `dim`: without data torch's keeps a dimension of size 1 that is counted from the end.

    `torch/_refs/linalg/__init__.py`, ``[s for d, s in enumerate(x.shape) if d not in dim]``; Thunder asks it for the shape.
    """

    def norm(*args: Any, **kwargs: Any) -> Any:
        if "dim" in kwargs:
            kwargs["dim"] = _positive(kwargs["dim"], args[0].ndim)
        elif len(args) > 2:
            args = (*args[:2], _positive(args[2], args[0].ndim), *args[3:])
        return operation(*args, **kwargs)

    return norm


def _positive(dim: Any, ndim: int) -> Any:
    if isinstance(dim, int):
        return dim + ndim if -ndim <= dim < 0 else dim
    return dim if dim is None else [d + ndim if -ndim <= d < 0 else d for d in dim]


_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)
_WITH_TORCHS_ARGUMENTS: dict[Callable, Callable] = {
    F.nll_loss: _nll_loss,
    F.embedding: _embedding,
    **{
        f: _norm_over_positive(ltorch._torch_to_thunder_function_map[f])
        for f in _NORMS
        if f in ltorch._torch_to_thunder_function_map
    },
}
