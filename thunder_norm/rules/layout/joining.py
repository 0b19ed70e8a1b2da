"""Norm rules for putting tensors together: cat, stack, pad."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import (
    align,
    annotated,
    like,
    maximum,
    negative,
    over_dims_of,
    own_dims,
    rms,
    root_sum_squares,
    scalar,
    scaled,
    spread,
)
from thunder_norm.scalars import times

_SAME_DIMS = {"tensors": over_dims_of("tensors")}


@normed_op(torch.cat).register_norm(lift_dims=_SAME_DIMS)
def cat(tensors: list[RMSTensor], dim: int = 0) -> RMSTensor:
    """Tensors one after the other along `dim`, K_i positions each.

    Value:       sqrt(sum_i K_i n_i^2 / sum_i K_i) if the norm runs over `dim`, else max_i n_i     (both attained)
    Sensitivity: sqrt(K_i / sum_i K_i), else 1 (a bound of the maximum by the sum)
    Source:      energies add
    """
    # torch lets vectors of no element pass beside tensors of any shape
    present = [i for i, t in enumerate(tensors) if not (t.ndim == 1 and t.numel() == 0)]
    if not present:
        return like(tensors[0], tensors[0].norm_size, sensitivity={"tensors": [1] * len(tensors)})
    operands = [tensors[i] for i in present]
    along = negative(dim, operands[0].ndim)
    lengths = [t.shape[along] for t in operands]
    shape = list(operands[0].shape)
    shape[along] = sum(lengths)
    dims, factors = align(shape, *operands)
    if along in dims:
        factors = [c * math.sqrt(k / max(sum(lengths), 1)) for c, k in zip(factors, lengths, strict=True)]
    sizes = [times(t.norm_size, c) for t, c in zip(operands, factors, strict=True)]
    value = root_sum_squares(*sizes) if along in dims else maximum(sizes)
    constants = dict(zip(present, factors, strict=True))
    return rms(value, dims, sensitivity={"tensors": [constants.get(i, 0) for i in range(len(tensors))]})


def _cat_same_kind(tensors: list, dim: int = 0) -> NormedTensor:
    """Tensors of one kind one after the other along `dim`: sums (L1) and energies (L2, operators) add.

    Operators: stacked rows have ``n^2 = sum_i (d_i / d) n_i^2`` for d = sum d_i, columns ``n^2 = sum_i (d / d_i) n_i^2``.
    """
    first = tensors[0]
    along, dims = negative(dim, first.ndim), first.elem_dims
    if any(t.elem_dims != dims or type(t) is not type(first) for t in tensors):
        raise NormMismatchError(f"cat of {type(first).__name__}s needs the same elem_dims in all of them")
    if isinstance(first, RMSToRMSConvTensor):
        raise NormMismatchError("convolution kernels cannot be concatenated: measure the result")
    lengths = [max(t.shape[along], 1) for t in tensors]
    factors = [1.0] * len(tensors)
    if isinstance(first, RMSToRMSTensor) and along in dims:
        ratios = [k / sum(lengths) for k in lengths]
        factors = [math.sqrt(r) if along == dims[0] else math.sqrt(1 / r) for r in ratios]
    sizes = [times(t.norm_size, c) for t, c in zip(tensors, factors, strict=True)]
    if along not in dims:
        value = maximum(sizes)
    else:
        value = torch.stack(sizes).sum() if isinstance(first, L1Tensor) else root_sum_squares(*sizes)
    return like(first, value, sensitivity={"tensors": factors})


for _kind in (L1Tensor, L2Tensor, RMSToRMSTensor):
    normed_op(torch.cat).register_norm(annotated(_cat_same_kind, tensors=list[_kind]), lift_dims=_SAME_DIMS)


@normed_op(torch.stack).register_norm(lift_dims=_SAME_DIMS)
def stack(tensors: list[RMSTensor], dim: int = 0) -> RMSTensor:
    """Tensors of one shape along a new dimension, which is in no norm.

    Value:       max_i n_i      (attained)
    Sensitivity: 1              (a bound of the maximum by the sum)
    """
    ndim = tensors[0].ndim
    dims, factors = align(tensors[0].shape, *tensors)
    value = maximum([times(t.norm_size, c) for t, c in zip(tensors, factors, strict=True)])
    return rms(value, ed.place(dims, ed.with_new(ndim, dim)), sensitivity={"tensors": factors})


def _stack_same_kind(tensors: list, dim: int = 0) -> NormedTensor:
    """Tensors of one kind along a new dimension: value max_i n_i, sensitivity 1."""
    first = tensors[0]
    if any(t.elem_dims != first.elem_dims or type(t) is not type(first) for t in tensors) or isinstance(
        first, RMSToRMSConvTensor
    ):
        raise NormMismatchError(f"stack of {type(first).__name__}s needs the same elem_dims in all of them")
    dims = ed.place(first.elem_dims, ed.with_new(first.ndim, dim))
    return like(first, maximum([t.norm_size for t in tensors]), dims, sensitivity={"tensors": [1] * len(tensors)})


for _kind in (L1Tensor, L2Tensor, RMSToRMSTensor):
    normed_op(torch.stack).register_norm(annotated(_stack_same_kind, tensors=list[_kind]), lift_dims=_SAME_DIMS)


@normed_op(torch.ops.aten._chunk_cat.default).register_norm(lift_dims=_SAME_DIMS)
def chunk_cat(tensors: list[RMSTensor], dim: int, num_chunks: int) -> RMSTensor:
    """Each tensor padded with zeros and cut into chunks along `dim`; the i-th chunks of all, flattened, make row i.

    Value:       max_i n_i from the largest entries; else sqrt(sum_i N_i n_i^2 / N), N_i the entries of tensor i and N those of the
                 output behind the leading dimensions, over which the norm then runs too (attained)
    Sensitivity: 1, sqrt(N_i / N)
    """
    lead = dim % max(t.ndim for t in tensors)
    if all(not own_dims(t) for t in tensors):
        return LinfTensor(maximum([t.norm_size for t in tensors]), elem_dims=(), sensitivity={"tensors": [1] * len(tensors)})
    counts = [math.prod(t.shape[lead:]) for t in tensors]
    padded = [math.prod(t.shape[lead + 1 :]) * num_chunks * -(-t.shape[lead] // num_chunks) for t in tensors]
    # leading dimensions that one norm runs over are averaged over in all of them
    leading = sorted({d + t.ndim for t in tensors for d in own_dims(t) if d + t.ndim < lead})
    factors = [math.sqrt(k / max(sum(padded), 1)) for k in counts]
    value = root_sum_squares(*(times(t.norm_size, c) for t, c in zip(tensors, factors, strict=True)))
    dims = (*(d - lead - 2 for d in leading), -2, -1)
    return rms(value, dims, sensitivity={"tensors": factors})


# -- padding ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Padding:
    """Positions added before and after the `size` positions of a dimension; negative: taken away."""

    size: int
    left: int
    right: int

    @property
    def kept(self) -> int:
        return self.size + min(self.left, 0) + min(self.right, 0)

    @property
    def total(self) -> int:
        return self.size + self.left + self.right

    def most_often(self, mode: str) -> int:
        """How often an entry occurs at most, if the positions added are taken from x."""
        size, left, right = self.size, self.left, self.right
        if mode == "circular":  # torch crops first, and repeats what is left
            size, left, right = self.kept, max(left, 0), max(right, 0)
        source: Callable[[int], int] = {
            "reflect": lambda i: (size - 1) - abs((size - 1) - i % (2 * size - 2)) if size > 1 else 0,
            "replicate": lambda i: min(max(i, 0), size - 1),
            "circular": lambda i: i % size,
        }[mode]
        counts = [0] * size
        for i in range(-left, size + right):
            counts[source(i)] += 1
        return max(counts, default=0)


def _paddings(x: NormedTensor, pad: Sequence[Any]) -> dict[int, _Padding]:
    """By dimension (negative), those that `pad` changes; programs compute some of them as tensors."""
    counts = [int(n) for n in pad]
    pairs = enumerate(zip(counts[::2], counts[1::2], strict=True))
    return {-1 - i: _Padding(x.shape[-1 - i], left, right) for i, (left, right) in pairs if left or right}


def _padded(x: RMSTensor, pad: Sequence[Any], mode: str, v: float) -> RMSTensor:
    paddings = _paddings(x, pad)
    inside = [p for d, p in paddings.items() if d in x.elem_dims]
    ratio = math.prod(p.size / max(p.total, 1) for p in inside)
    if mode != "constant":
        return scaled(x, spread(math.sqrt(ratio * math.prod(p.most_often(mode) for p in inside))))
    filled = 1 - math.prod(p.kept / max(p.total, 1) for p in inside)
    c = spread(math.sqrt(ratio / (1 - filled))) * math.sqrt(1 - filled) if filled < 1 else 1.0
    value = times(x.norm_size, c)
    if v and filled:
        value = root_sum_squares(value, scalar(v * math.sqrt(filled), value))
    if v and len(paddings) > len(inside):  # blocks of nothing but v
        value = value.clamp(min=v)
    return rms(value, x.elem_dims, sensitivity={"input": c})


@normed_op(F.pad).register_norm(allow_plain_tensors="constant")
def pad(
    input: RMSTensor, pad: list[torch.Tensor] | Sequence[int], mode: str = "constant", value: float | None = None
) -> RMSTensor:
    """Positions added around x: of value v, or taken from x (reflect, replicate, circular).

    Value:       with N entries of elem_dims becoming N', sqrt((N n^2 + (N' - N) v^2) / N'), and at least |v| if there are
                 positions outside of elem_dims; taken from x, n sqrt(mu N / N') where an entry occurs at most mu times
    Sensitivity: sqrt(N / N'), sqrt(mu N / N')
    Source:      energies add
    """
    return _padded(input, pad, mode, math.fabs(value or 0.0))


def _adds_zeros(args: dict[str, Any]) -> bool:
    if args.get("mode", "constant") != "constant" or args.get("value"):
        return False
    return not isinstance(args["input"], RMSToRMSTensor) or all(int(n) >= 0 for n in args["pad"])


@normed_op(F.pad).register_norm(when=_adds_zeros, allow_plain_tensors="constant")
def pad_zeros(
    input: L1Tensor | L2Tensor | RMSToRMSTensor,
    pad: list[torch.Tensor] | Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> NormedTensor:
    """Zeros around x in other kinds: a sum stays; a matrix with out' rows and in' columns has sqrt(out in' / (out' in)) n.

    With other values around them, and a matrix of which rows or columns are left out, they are read through their entries.
    """
    paddings = _paddings(input, pad)
    c = 1.0
    if isinstance(input, RMSToRMSTensor):
        growth = {d: p.total / p.size for d, p in paddings.items()}
        if getattr(input, "groups", 1) > 1 and set(growth) & set(input.elem_dims):
            raise NormMismatchError("the kernel of a grouped convolution cannot be padded along its channels")
        rows, columns = (growth.pop(d, 1.0) for d in input.elem_dims)
        c = math.sqrt(columns / rows) * (math.prod(growth.values()) if isinstance(input, RMSToRMSConvTensor) else 1)
    return scaled(input, c)


@normed_op(torch.constant_pad_nd).register_norm
def constant_pad_nd(input: RMSTensor, pad: Sequence[int], value: float = 0) -> RMSTensor:
    """`pad` with a constant, as ATen names it."""
    return _padded(input, pad, "constant", math.fabs(value))


def _register_aten_padding(mode: str, name: str) -> None:
    def padded(input: RMSTensor, padding: Any) -> RMSTensor:
        return _padded(input, padding, mode, 0.0)

    padded.__doc__ = f"`pad` in mode {mode}, as ATen names it."
    for rank in (1, 2, 3):
        normed_op(getattr(torch.ops.aten, f"{name}{rank}d").default).register_norm(padded)


_register_aten_padding("reflect", "reflection_pad")
_register_aten_padding("replicate", "replication_pad")
