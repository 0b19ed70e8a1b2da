"""Tensors of several rows as one, inside ``norm_sensitivity("within")``: what mixes rows is known of all of them together.

A tensor whose norm is the largest of its rows', each of which moves by d at most in RMS, moves by d in the RMS of all its entries: small
ones are followed as that too, operation by operation, beside what is known row by row.  How far a row moves is found by what all
entries move in, or by the rows, whichever is less.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from thunder_norm.core import conversions
from thunder_norm.core.composed import moves, reasons_of, spread_of, within_norm
from thunder_norm.core.kinds import L2Tensor, LinfTensor, RMSTensor
from thunder_norm.core.lengths import length
from thunder_norm.core.local import is_within
from thunder_norm.core.perturbations import lesser
from thunder_norm.core.tensors import NormedTensor, is_complex

# Entries of a tensor that this begins with, and of those that are made of it: the price is their cube.
LARGEST_AT_FIRST, LARGEST = 128, 512


def whole(x: NormedTensor) -> NormedTensor:
    """x as one row; x itself where it is one, has more entries than that pays for, or does not move."""
    if x._whole is not None:
        return x._whole
    dims = tuple(range(-x.ndim, 0))
    is_one = not isinstance(x, RMSTensor | L2Tensor) or isinstance(x, LinfTensor) or set(x.elem_dims) == set(dims)
    if is_one or not moves(x) or is_complex(x) or x.backing.is_meta or not 0 < x.numel() <= LARGEST_AT_FIRST:
        return x
    if x._spread is not None and x._spread.parts[0].size == x.numel() or x.numel() == max(x.shape):
        return x
    x._whole = _as_one(x, dims)
    return x._whole


def _as_one(x: NormedTensor, dims: tuple[int, ...]) -> NormedTensor:
    out = conversions.convert(x, RMSTensor, dims)
    out._facts, out._sums, out._spread = None, (), within_norm(out, reasons_of([x]))
    if x._away is not None:
        out._away = _as_one(x._away, dims)
    return out


def is_followed(y: NormedTensor) -> bool:
    """Whether a result is to be known as one row, given that an argument is."""
    return is_within() and moves(y) and not is_complex(y) and 0 < y.numel() <= LARGEST


def moves_as_one(y: NormedTensor, other: NormedTensor) -> None:
    """Let y, known row by row, be known as `other` too, the same tensor as one row: it moves no further than either says."""
    found = _moved(y, other)
    if found is None or y.perturbation_size is None or other.perturbation_size is None:
        return
    y._whole = other
    least = lesser(found, y.perturbation_size)
    if least is not y.perturbation_size:
        y.perturbation_size = least
        if y._spread is not None:
            y._spread = replace(y._spread, is_limited=True)


def _moved(y: NormedTensor, other: NormedTensor) -> torch.Tensor | None:
    """How far y moves in its own norm by what is known of `other`."""
    c = conversions.factor(other, type(y), y.elem_dims)
    assert other.perturbation_size is not None
    found = [] if c is None else [other.perturbation_size * c]
    spread = spread_of(other)
    if spread is not None:
        moved = (length(v.ellipsoid, spread.ndim, y).to(v.root.size.device) * v.root.size for v in spread.parts)
        found.append(functools.reduce(torch.add, moved))
    return functools.reduce(lesser, found) if found else None
