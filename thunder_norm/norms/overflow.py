"""Bounds that are no numbers: where norms overflow float64 on the way, a later formula may make NaN of infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError, with_details


def refuse_overflowed(result: Any, given: Any, model: Any, has_data: bool) -> Any:
    """`result`, unless a norm in it is NaN and nothing that it was computed from is.

    NaN and infinity in data are told as such (docs/reports.md).  A norm of finite data is NaN where a bound on the way is larger than the
    largest number.

    Args:
        result: what a call returned.
        given: its arguments, and norms given for parameters.
        model: what was called, the tensors of which count as given.
        has_data: whether results have data: a norm map has none, and calls what it acquires without.

    Raises:
        NormMismatchError: a bound is NaN because another overflowed.
    """
    found = [y for y in _normed(result) if _is_nan(y.norm_size)]
    if not any(_has_values(y.backing) == has_data and not _is_nan(y.backing) for y in found):
        return result
    if not all(map(_is_finite, _tensors(given))) or not all(map(_is_finite, _state(model))):
        return result
    raise NormMismatchError(
        with_details(
            "the bound of a result is not a number, though all that was given is finite",
            why="a bound of an operation before it is larger than the largest float64, and infinity less infinity is no number",
            instead="norm_report(...).first_infinite is the operation; norm_report's default, at the data, is the least that is known",
        )
    )


def _normed(tree: Any) -> Iterator[NormedTensor]:
    leaves = [tree] if isinstance(tree, NormedTensor) else tree_leaves(tree, is_leaf=lambda x: isinstance(x, NormedTensor))
    return (x for x in leaves if isinstance(x, NormedTensor))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for x in tree_leaves(tree, is_leaf=lambda x: isinstance(x, NormedTensor)):
        if isinstance(x, NormedTensor):
            yield from (t for t in (x.backing, x.norm_size) if t is not None)  # a size given for a parameter has no backing
        elif isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, Mapping):  # norms by name in one vector
            yield from _tensors(dict(x))


def _state(model: Any) -> Iterator[torch.Tensor]:
    if isinstance(model, torch.nn.Module):
        yield from model.parameters()
        yield from model.buffers()


def _has_values(t: torch.Tensor) -> bool:
    return not (t.is_meta or isinstance(t, FakeTensor) or is_functorch_wrapped_tensor(t))


def _is_nan(t: torch.Tensor) -> bool:
    """Whether an entry is known to be NaN."""
    if not _has_values(t):
        return False
    return (
        math.isnan(t.item()) if t.ndim == 0 and not t.is_complex() else bool(t.detach().isnan().any())
    )  # each call asks it of a norm


def _is_finite(t: torch.Tensor) -> bool:
    return not _has_values(t) or bool(t.detach().isfinite().all())
