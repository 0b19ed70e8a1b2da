"""Bounds that are no numbers: where norms overflow float64 on the way, a later formula may make NaN of infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.core.nonfinite import has_values
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
    if not any(has_values(y.backing) == has_data and not _is_nan(y.backing) for y in found):
        return result
    if not _are_numbers(given) or not all(map(_is_finite, _state(model))):
        return result
    raise NormMismatchError(
        with_details(
            "the bound of a result is not a number, though all that was given is one",
            why="a bound before it is infinite, larger than the largest float64 perhaps, and infinity times 0, or less infinity, is no number",
            instead="norm_report(...).first_infinite is the operation; norm_report's default, at the data, is the least that is known",
        )
    )


def _normed(tree: Any) -> Iterator[NormedTensor]:
    leaves = [tree] if isinstance(tree, NormedTensor) else tree_leaves(tree, is_leaf=lambda x: isinstance(x, NormedTensor))
    return (x for x in leaves if isinstance(x, NormedTensor))


def _are_numbers(tree: Any) -> bool:
    """Whether all data in a structure is finite, and no norm NaN: an infinite one is what a bound that overflowed is."""
    for x in tree_leaves(tree, is_leaf=lambda x: isinstance(x, NormedTensor)):
        if isinstance(x, NormedTensor):
            # a size given for a parameter has no backing
            if _is_nan(x.norm_size) or x.backing is not None and not _is_finite(x.backing):
                return False
        elif isinstance(x, torch.Tensor) and not _is_finite(x):
            return False
        elif isinstance(x, Mapping) and not _are_numbers(dict(x)):  # norms by name in one vector
            return False
    return True


def _state(model: Any) -> Iterator[torch.Tensor]:
    if isinstance(model, torch.nn.Module):
        yield from model.parameters()
        yield from model.buffers()


def _is_nan(t: torch.Tensor) -> bool:
    """Whether an entry is known to be NaN."""
    if not has_values(t):
        return False
    return (
        math.isnan(t.item()) if t.ndim == 0 and not t.is_complex() else bool(t.detach().isnan().any())
    )  # each call asks it of a norm


def _is_finite(t: torch.Tensor) -> bool:
    return not has_values(t) or bool(t.detach().isfinite().all())
