"""Linear maps of a vector of several parts, by columns: a block for each part, which is often zero or diagonal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The columns that belong to one part: a matrix, its diagonal if it has no other entries, or None for zeros.
Columns = torch.Tensor | None


def total(a: Columns, b: Columns) -> Columns:
    """The sum of two maps of one part."""
    if a is None or b is None:
        return b if a is None else a
    if a.ndim == b.ndim:
        return a + b
    return (torch.diag(a) + b) if a.ndim == 1 else (a + torch.diag(b))


def scaled(t: torch.Tensor, factor: float) -> torch.Tensor:
    """That many times t: itself, where it is one of a sum of one."""
    return t if factor == 1 else t * factor


def dense(columns: Sequence[Columns], sizes: Sequence[int]) -> torch.Tensor:
    """The columns as one matrix, of those parts that there are columns for."""
    n = next(len(k) for k in columns if k is not None)
    parts = zip(columns, sizes, strict=False)
    return torch.cat(
        [torch.zeros(n, m, dtype=torch.float64) if k is None else torch.diag(k) if k.ndim == 1 else k for k, m in parts], 1
    )


def _diagonal(columns: Sequence[Columns]) -> torch.Tensor | None:
    """The diagonal of a map that has no other entries, which needs no product of matrices; None of others."""
    only = columns[0] if len(columns) == 1 else None
    return only if only is not None and only.ndim == 1 else None


def times(columns: Sequence[Columns], t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``K t``, t with at least as many rows as K has columns."""
    if (d := _diagonal(columns)) is not None:
        return d[:, None] * t[: len(d)]
    k = dense(columns, sizes)
    return k @ t[: k.shape[1]]


def conjugated(columns: Sequence[Columns], t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``K t K^T``."""
    n = sum(sizes[: len(columns)])
    if (d := _diagonal(columns)) is not None:
        return d[:, None] * t[:n, :n] * d
    k = dense(columns, sizes)
    return k @ t[:n, :n] @ k.T


def weights(columns: Sequence[Columns], t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``K^T t K`` for all parts, zeros where there are no columns."""
    if (d := _diagonal(columns)) is not None:
        found = d[:, None] * t * d
    else:
        k = dense(columns, sizes)
        found = k.T @ t @ k
    left = sum(sizes) - len(found)
    return torch.nn.functional.pad(found, (0, left, 0, left))
