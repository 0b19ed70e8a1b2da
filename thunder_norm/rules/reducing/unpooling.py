"""Norm rules for pooling at random places and for putting pooled entries back: fractional_max_pool, max_unpool.

Which entries go where is data (or chance), of which only the number of positions is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import as_kind, per_dim, rms, root, scaled, spread
from thunder_norm.scalars import times


def _pooled(x: RMSTensor, count: int, entries: int, energy: float) -> RMSTensor:
    """Each channel picks its own of (at most) `entries` positions; over the `count` last dimensions, by energies."""
    positions = tuple(range(-count, 0))
    sized = set(ed.nontrivial(x.shape, positions))
    if sized and sized <= set(x.elem_dims):
        return scaled(x, spread(energy), tuple(sorted({*x.elem_dims, *positions})))
    inside = tuple(d for d in x.elem_dims if d not in positions)
    per_position, c = as_kind(x, RMSTensor, inside)
    own = spread(root(min(entries, ed.numel(x.shape, inside))))
    return rms(times(per_position.norm_size, own), inside, sensitivity={"input": c * own})


# -- unpooling ----------------------------------------------------------------------------------------------------------------


def _unpooled(x: RMSTensor, count: int, sizes: Sequence[Sequence[int]]) -> RMSTensor:
    """Put back into an output of one of several `sizes`, that which allows the most."""
    before = math.prod(x.shape[-count:])
    after = min(math.prod(s) for s in sizes)
    return _pooled(x, count, before, math.sqrt(before / max(after, 1)))


def _unpooled_size(x: RMSTensor, kernel: Any, stride: Any, padding: Any, count: int) -> tuple[int, ...]:
    kernels = per_dim(kernel, count)
    strides = kernels if not stride else per_dim(stride, count)
    parts = zip(x.shape[-count:], kernels, strides, per_dim(padding, count), strict=True)
    return tuple((n - 1) * s - 2 * p + k for n, k, s, p in parts)


def _register_unpooling(count: int) -> None:
    def max_unpool(
        input: RMSTensor,
        indices: torch.Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        output_size: Any = None,
    ) -> RMSTensor:
        """Entries of x, P_in positions, at the places that plain indices name among P_out, zeros elsewhere.

        Value:       n from the largest entry; sqrt(P_in / P_out) n from RMS over all positions; sqrt(min(P_in, C)) n from RMS over
                     C channels, each of which may put another of its entries into the same place (all attained)
        Sensitivity: the same factor
        """
        if output_size is not None:
            return _unpooled(input, count, [tuple(output_size)[-count:]])
        sizes = [_unpooled_size(input, kernel_size, stride, padding, count)]
        if count > 1 and not isinstance(kernel_size, int) and len(kernel_size) == count:
            sizes.append(tuple(kernel_size))  # ATen's function of this name has the output's size in this place
        return _unpooled(input, count, sizes)

    max_unpool.__name__ = f"max_unpool{count}d"
    normed_op(getattr(F, f"max_unpool{count}d")).register_norm(max_unpool, allow_plain_tensors="constant")


for _count in (1, 2, 3):
    _register_unpooling(_count)


# -- windows at random places -----------------------------------------------------------------------------------------------


def _fractional(x: RMSTensor, kernel_size: Any, output_size: Any, output_ratio: Any, count: int) -> RMSTensor:
    shape = x.shape[-count:]
    kernels = per_dim(kernel_size, count)
    if output_size is not None:
        sizes = per_dim(output_size, count)
    else:
        ratios = (output_ratio,) * count if isinstance(output_ratio, int | float) else tuple(output_ratio)
        sizes = tuple(int(n * r) for n, r in zip(shape, ratios, strict=True))
    covered = 1
    for n, k, out in zip(shape, kernels, sizes, strict=True):
        # neighbouring windows start at least floor((n - k) / (out - 1)) apart
        apart = (n - k) // (out - 1) if out > 1 else n
        covered *= min(out, -(-k // apart)) if apart else out
    return _pooled(x, count, math.prod(kernels), math.sqrt(covered * math.prod(shape) / max(math.prod(sizes), 1)))


def _register_fractional(count: int) -> None:
    def fractional_max_pool(
        input: RMSTensor,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = False,
        _random_samples: torch.Tensor | None = None,
    ) -> RMSTensor:
        """Maximum over windows of K positions at random places.

        Value:       n from the largest entry; sqrt(min(K, C)) n from RMS over C channels, each of which picks its own position
                     (attained); n sqrt(mu P_in / P_out) from RMS over positions too, an entry in at most mu windows
        Sensitivity: the same factor
        """
        return _fractional(input, kernel_size, output_size, output_ratio, count)

    def fractional_max_pool_with_indices(
        input: RMSTensor,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = True,
        _random_samples: torch.Tensor | None = None,
    ) -> tuple:
        """`fractional_max_pool` and the indices of the maxima, which have no norm."""
        return _fractional(input, kernel_size, output_size, output_ratio, count), None

    def fractional_max_pool_aten(input: RMSTensor, kernel_size: Any, output_size: Any, random_samples: torch.Tensor) -> tuple:
        """`fractional_max_pool_with_indices`, as ATen has it."""
        return _fractional(input, kernel_size, output_size, None, count), None

    for op, rules in (
        # in this order: F's function does not take a tensor for its output_ratio
        (f"fractional_max_pool{count}d", (fractional_max_pool_aten, fractional_max_pool)),
        (f"fractional_max_pool{count}d_with_indices", (fractional_max_pool_with_indices,)),
    ):
        for rule in rules:
            normed_op(getattr(F, op)).register_norm(rule, allow_plain_tensors="constant")


for _count in (2, 3):
    _register_fractional(_count)
