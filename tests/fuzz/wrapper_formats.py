"""Wrapper subclasses that store a matrix in another form: of low rank, or quantised in blocks."""

from __future__ import annotations

import torch

from .wrapper_classes import Wrapper, aten

# -- low rank ---------------------------------------------------------------------------------------------------------


class LowRank(Wrapper):
    """The matrix ``left @ right^T``: its inner tensors have other shapes than it."""

    INNER = ("left", "right")

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, (left.shape[0], right.shape[0]), dtype=left.dtype, device=left.device)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def dense(self):
        return self.left @ self.right.t()


def _low_rank_scaled(func, x, by):
    if not isinstance(x, LowRank) or not isinstance(by, int | float):
        return func(*(t.dense() if isinstance(t, LowRank) else t for t in (x, by)))
    return LowRank(func(x.left, by), x.right)


def _low_rank_add(func, a, b, alpha=1):
    if not (isinstance(a, LowRank) and isinstance(b, LowRank)) or a.shape != b.shape:
        return func(*(t.dense() if isinstance(t, LowRank) else t for t in (a, b)), alpha=alpha)
    factor = -alpha if func is aten.sub.Tensor else alpha
    return LowRank(torch.cat([a.left, b.left * factor], 1), torch.cat([a.right, b.right], 1))


def _low_rank_mm(func, a, b):
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return LowRank(a.left @ (a.right.t() @ b.left), b.right)
    if isinstance(a, LowRank):
        return LowRank(a.left, (a.right.t() @ b).t())
    return LowRank(a @ b.left, b.right)


def _low_rank_copy(func, x, **kwargs):
    kwargs.pop("memory_format", None)
    return LowRank(func(x.left, **kwargs), func(x.right, **kwargs))


LowRank.RULES = (
    dict.fromkeys((aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar), _low_rank_scaled)
    | dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _low_rank_add)
    | dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default), _low_rank_copy)
    | {
        aten.mm.default: _low_rank_mm,
        aten.t.default: lambda func, x: LowRank(x.right, x.left),
        aten.neg.default: lambda func, x: LowRank(-x.left, x.right),
        aten.sum.default: lambda func, x: x.left.sum(0) @ x.right.sum(0),
    }
)


# -- quantised in blocks ----------------------------------------------------------------------------------------------

BLOCK = 4


class BlockQuantised(Wrapper):
    """Rows of int8 codes, of which every four have a scale of their own; the dtype it shows is context."""

    INNER = ("codes", "scales")

    @staticmethod
    def __new__(cls, codes, scales, dtype=torch.float64):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scales, dtype=torch.float64):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return list(self.INNER), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scales"], context)

    @staticmethod
    def of(x: torch.Tensor) -> BlockQuantised:
        """A matrix whose rows have a multiple of four entries, quantised."""
        blocks = x.reshape(x.shape[0], -1, BLOCK)
        scales = blocks.abs().amax(-1) / 127 + 1e-6
        return BlockQuantised((blocks / scales.unsqueeze(-1)).round().to(torch.int8).reshape(x.shape), scales, x.dtype)

    def dense(self):
        blocks = self.codes.reshape(self.codes.shape[0], -1, BLOCK).to(self.scales.dtype)
        return (blocks * self.scales.unsqueeze(-1)).reshape(self.codes.shape).to(self.dtype)


def _quantised_scaled(func, x, by):
    if not isinstance(x, BlockQuantised) or not isinstance(by, int | float):
        return func(*(t.dense() if isinstance(t, BlockQuantised) else t for t in (x, by)))
    return BlockQuantised(x.codes, func(x.scales, by), x.dtype)


def _quantised_sum(func, a, b, alpha=1):
    result = func(*(t.dense() if isinstance(t, BlockQuantised) else t for t in (a, b)), alpha=alpha)
    both = isinstance(a, BlockQuantised) and isinstance(b, BlockQuantised)
    return BlockQuantised.of(result) if both and result.shape == a.shape == b.shape else result


def _quantised_rows(func, x, *args, **kwargs):
    kwargs.pop("memory_format", None)
    return BlockQuantised(func(x.codes, *args, **kwargs), func(x.scales, *args, **kwargs), x.dtype)


def _quantised_slice(func, x, dim=0, *args):
    return _quantised_rows(func, x, dim, *args) if dim == 0 else func(x.dense(), dim, *args)


def _quantised_to(func, x, *, dtype=None, **kwargs):
    if dtype is None or not dtype.is_floating_point:
        return func(x.dense(), dtype=dtype, **kwargs)
    return BlockQuantised(x.codes.clone(), x.scales.clone(), dtype)


BlockQuantised.RULES = (
    dict.fromkeys((aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar), _quantised_scaled)
    | dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _quantised_sum)
    | dict.fromkeys((aten.detach.default, aten.clone.default, aten.alias.default), _quantised_rows)
    | {
        aten.slice.Tensor: _quantised_slice,
        aten._to_copy.default: _quantised_to,
        aten.neg.default: lambda func, x: BlockQuantised(x.codes, -x.scales, x.dtype),
    }
)
