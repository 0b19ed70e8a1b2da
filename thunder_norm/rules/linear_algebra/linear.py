"""Matrix products: linear, matmul and its relatives, addmm and its relatives, outer, bilinear; `einsum` has those of any layout.

All of them are one statement, `contraction.contract`, with the dimensions named.  What differs is which argument a plain
tensor is taken for: next to an activation it is a weight, an operator from RMS to RMS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import VectorKind, align, broadcast, negative, rms, spread
from thunder_norm.rules.linear_algebra.contraction import contract, conversion_factor, number, plus, rms_factor, scaled
from thunder_norm.rules.linear_algebra.logits import scores

NAMES = ("input", "other")


def _everywhere(t: torch.Tensor, args: dict[str, Any]) -> tuple[int, ...]:
    """Lift over no dimension: the largest entry, for an addend whose elem_dims are not known beforehand."""
    return ()


def _transposed(t: torch.Tensor, args: dict[str, Any]) -> tuple[int, int]:
    """Lift W in ``x @ W`` as the operator it is, from dimension -2 to dimension -1."""
    return (-1, -2)


def _beside(other: str):
    """Lift a plain factor beside `other`: rows by their RMS, or by their largest entry if `other` takes weighted sums of them."""
    return lambda t, args: () if isinstance(args[other], L1Tensor) else None


@normed_op(F.linear).register_norm
def linear(input: RMSTensor | L2Tensor, weight: RMSToRMSTensor, bias: RMSTensor | None = None) -> NormedTensor:
    """y = x W^T + b.

    input:  [..., in],  RMS over the last dimension (and possibly others), maximum over the rest
    weight: [out, in],  operator norm RMS -> RMS, i.e. sigma_max(W) sqrt(in / out)
    bias:   [out],      RMS
    Value:        |y| <= |x| |W| + |b|      (attained: rank-one W, b along W x)
    Sensitivity:  |W|, |x|, 1
    Source:       Large et al. 2024, "Scalable Optimization in the Modular Norm", section 3
    Raises NormMismatchError when the weight is not an operator on the last dimension.
    """
    return _linear(input, weight, bias)


@normed_op(F.linear).register_norm(lift_dims={"bias": _everywhere})
def linear_rows(input: VectorKind, weight: VectorKind, bias: VectorKind | None = None) -> NormedTensor:
    """y = x W^T + b for a weight of which rows are known, as when an embedding table is the un-embedding.

    input:  [..., in];  weight: [out, in], both in RMS over the last dimension;  output: largest entry
    Value:        |y| <= in |x| |W| + |b|   (attained: x along a row; Cauchy-Schwarz)
    Sensitivity:  in |W|, in |x|, 1
    With weight rows in L1 and x in Linf the factor `in` is 1; other elem_dims: see `contraction.contract`.
    """
    return _linear(input, weight, bias)


def _linear(input: NormedTensor, weight: NormedTensor, bias: NormedTensor | None) -> NormedTensor:
    batch = batch_labels(input.ndim - 1)
    out = (*batch, "n") if weight.ndim == 2 else batch
    result = scaled(contract(input, weight, (*batch, "k"), out[len(batch) :] + ("k",), out), input, weight, ("input", "weight"))
    shape = (*input.shape[:-1], *weight.shape[:-1])
    return result if bias is None else plus(result, bias, "bias", shape)


def batch_labels(count: int) -> tuple[str, ...]:
    """Names for that many leading dimensions, counted from the end so that they match when broadcast."""
    return tuple(f"b{i}" for i in range(count, 0, -1))


def _matmul_labels(a: NormedTensor, b: NormedTensor) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    batches = batch_labels(max(a.ndim, b.ndim) - 2)
    rows = ("m",) if a.ndim > 1 else ()
    columns = ("n",) if b.ndim > 1 else ()
    left = (*batches[len(batches) - max(a.ndim - 2, 0) :], *rows, "k")
    right = (*batches[len(batches) - max(b.ndim - 2, 0) :], "k", *columns)
    return left, right, (*batches, *rows, *columns)


def _matmul(a: NormedTensor, b: NormedTensor, names: tuple[str, str] = NAMES, scale: float = 1.0) -> NormedTensor:
    result = scaled(contract(a, b, *_matmul_labels(a, b)), a, b, names, scale)
    return scores(result) if isinstance(a, RMSTensor) and isinstance(b, RMSTensor) else result


def matmul_weight(input: RMSTensor | L2Tensor | RMSToRMSTensor, other: RMSToRMSTensor) -> NormedTensor:
    """y = x W (or the composition of two operators).

    input: [..., in], RMS over the last dimension;  other: [in, out], operator norm over (-1, -2), i.e. (out, in)
    Value:        |y| <= |x| |W|      (attained: rank-one W)
    Sensitivity:  |W|, |x|
    """
    return _matmul(input, other)


def weight_matmul(input: RMSToRMSTensor, other: RMSTensor | L2Tensor) -> NormedTensor:
    """y = W x.

    input: [out, in], operator norm;  other: [..., in, tokens], RMS over dimension -2
    Value:        |y| <= |W| |x|      (attained: rank-one W)
    Sensitivity:  |x|, |W|
    """
    return _matmul(input, other)


def matmul(input: VectorKind, other: VectorKind) -> NormedTensor:
    """y = A B for two activations, K the contracted size.

    A rows RMS, B columns RMS -> largest entry (scores):   |y| <= K |A| |B|   (Cauchy-Schwarz; attained by constants)
    A rows RMS, B rows RMS    -> rows RMS:                 |y| <= K |A| |B|   (attained by constants)
    A rows L1,  B rows RMS    -> rows RMS (attention):     |y| <= |A| |B|     (triangle inequality; attained by one-hot rows)
    both RMS over both dims   -> Frobenius:                |y| <= K |A| |B|   (attained by constants)
    Sensitivity:  the value is bilinear.  Other elem_dims are converted, see `contraction.contract`.
    """
    return _matmul(input, other)


for _op in (torch.matmul, torch.mm, torch.bmm, torch.mv):
    if _op is not torch.mv:
        normed_op(_op).register_norm(matmul_weight, lift_dims={"other": _transposed}, when=lambda args: args["other"].ndim > 1)
    normed_op(_op).register_norm(weight_matmul, when=lambda args: args["input"].ndim > 1)
for _op in (torch.matmul, torch.mm, torch.bmm, torch.mv, torch.dot, torch.vdot):
    normed_op(_op).register_norm(matmul, lift_dims={"input": _beside("other"), "other": _beside("input")})


@normed_op(torch.Tensor.__rmatmul__).register_norm
def rmatmul(input: RMSTensor | L2Tensor, other: RMSToRMSTensor) -> NormedTensor:
    """other @ input, for a plain weight on the left: as `weight_matmul`."""
    return _matmul(other, input, ("other", "input"))


@normed_op(torch.inner).register_norm
def inner(input: VectorKind, other: VectorKind) -> NormedTensor:
    """y = A B^T over the last dimensions of both: as `matmul`."""
    rows, columns = (tuple(f"{name}{i}" for i in range(x.ndim - 1)) for name, x in (("m", input), ("n", other)))
    return scaled(contract(input, other, (*rows, "k"), (*columns, "k"), rows + columns), input, other, NAMES)


@normed_op(torch.outer).register_norm
def outer(input: VectorKind, vec2: VectorKind) -> NormedTensor:
    """y_ij = a_i b_j.

    Value:        |y| <= |a| |b|, RMS over both dimensions   (an equality)
    Sensitivity:  |b|, |a|
    """
    return scaled(contract(input, vec2, "i", "j", "ij"), input, vec2, ("input", "vec2"))


# -- with an addend -------------------------------------------------------------------------------------------------------


def _sum_of_products(labels: tuple[str, str, str]) -> Callable[..., NormedTensor]:
    """The rule of ``beta input + alpha (a @ b)`` for an operation with these dimensions."""
    left, right, out = labels

    def combine(
        input: NormedTensor, a: NormedTensor, b: NormedTensor, names: tuple[str, str], beta: Any, alpha: Any
    ) -> NormedTensor:
        sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
        product = scaled(contract(a, b, left, right, out), a, b, names, number(alpha))
        return plus(product, input, "input", [sizes[name] for name in out], number(beta))

    return combine


_addmm = _sum_of_products(("mk", "kn", "mn"))
_addmv = _sum_of_products(("mk", "k", "m"))
_baddbmm = _sum_of_products(("bmk", "bkn", "bmn"))
_addbmm = _sum_of_products(("bmk", "bkn", "mn"))
_addr = _sum_of_products(("m", "n", "mn"))


@normed_op(torch.addmm).register_norm(lift_dims={"mat2": _transposed})
def addmm(input: RMSTensor, mat1: RMSTensor | L2Tensor, mat2: RMSToRMSTensor, *, beta: Any = 1, alpha: Any = 1) -> NormedTensor:
    """y = beta b + alpha x W, the layout of GPT-2's Conv1D.

    mat1: [tokens, in], RMS over the last dimension;  mat2: [in, out], operator norm over (-1, -2);  input: RMS
    Value:        |y| <= |beta| |b| + |alpha| |x| |W|    (attained: rank-one W, b along x W)
    Sensitivity:  |beta|, |alpha| |W|, |alpha| |x|
    """
    return _addmm(input, mat1, mat2, ("mat1", "mat2"), beta, alpha)


@normed_op(torch.addmm).register_norm(lift_dims={"input": lambda t, args: (-2,) if t.ndim == 2 else ()})
def addmm_weight_first(
    input: RMSTensor, mat1: RMSToRMSTensor, mat2: RMSTensor | L2Tensor, *, beta: Any = 1, alpha: Any = 1
) -> NormedTensor:
    """y = beta b + alpha W x, features in dimension -2: as `addmm`."""
    return _addmm(input, mat1, mat2, ("mat1", "mat2"), beta, alpha)


@normed_op(torch.addmm).register_norm(lift_dims={"input": _everywhere})
def addmm_activations(input: VectorKind, mat1: VectorKind, mat2: VectorKind, *, beta: Any = 1, alpha: Any = 1) -> NormedTensor:
    """y = beta b + alpha A B for two activations: `matmul` and the triangle inequality."""
    return _addmm(input, mat1, mat2, ("mat1", "mat2"), beta, alpha)


@normed_op(torch.addmv).register_norm
def addmv(input: RMSTensor, mat: RMSToRMSTensor, vec: RMSTensor | L2Tensor, *, beta: Any = 1, alpha: Any = 1) -> NormedTensor:
    """y = beta b + alpha W x: as `addmm`."""
    return _addmv(input, mat, vec, ("mat", "vec"), beta, alpha)


@normed_op(torch.baddbmm).register_norm(lift_dims={"batch2": _transposed})
def baddbmm(
    input: RMSTensor, batch1: RMSTensor | L2Tensor, batch2: RMSToRMSTensor, *, beta: Any = 1, alpha: Any = 1
) -> NormedTensor:
    """y = beta b + alpha x W, one weight for each batch entry: as `addmm`."""
    return _baddbmm(input, batch1, batch2, ("batch1", "batch2"), beta, alpha)


@normed_op(torch.baddbmm).register_norm(lift_dims={"input": _everywhere})
def baddbmm_activations(
    input: VectorKind, batch1: VectorKind, batch2: VectorKind, *, beta: Any = 1, alpha: Any = 1
) -> NormedTensor:
    """y = beta b + alpha A B for two activations: `matmul` and the triangle inequality."""
    return _baddbmm(input, batch1, batch2, ("batch1", "batch2"), beta, alpha)


@normed_op(torch.addbmm).register_norm(lift_dims={"input": _everywhere, "batch2": lambda t, args: (-2,)})
def addbmm(input: VectorKind, batch1: VectorKind, batch2: VectorKind, *, beta: Any = 1, alpha: Any = 1) -> NormedTensor:
    """y = beta b + alpha sum_b A_b B_b: `matmul` over batches as well, and the triangle inequality."""
    return _addbmm(input, batch1, batch2, ("batch1", "batch2"), beta, alpha)


@normed_op(torch.addr).register_norm(lift_dims={"input": _everywhere})
def addr(input: VectorKind, vec1: VectorKind, vec2: VectorKind, *, beta: Any = 1, alpha: Any = 1) -> NormedTensor:
    """y_ij = beta x_ij + alpha a_i b_j: `outer` and the triangle inequality."""
    return _addr(input, vec1, vec2, ("vec1", "vec2"), beta, alpha)


@normed_op(torch.linalg.cross).register_norm(lift_dims={"input": _beside("other"), "other": _beside("input")})
def linalg_cross(input: RMSTensor, other: RMSTensor, *, dim: int = -1) -> RMSTensor:
    """a x b of vectors of 3 entries along `dim`.

    Value:        sqrt(3 M) |a| |b|, RMS over the vector and M entries besides;  2 sqrt(M) |a| |b| where the norm runs over M
                  others only         (attained: orthogonal vectors, signs; for M > 1 all in the same place)
    Sensitivity:  the value is bilinear
    Source:       |a x b| <= |a| |b|;  |a_i b_j - a_j b_i| <= 2 |a| |b| in the largest entries
    """
    shape = broadcast(input.shape, other.shape)
    dims, factors = align(shape, input, other)
    is_over = negative(dim, len(shape)) in dims
    beside = ed.numel(shape, dims) / (3 if is_over else 1)
    c = math.prod(factors) * spread(math.sqrt(beside)) * (math.sqrt(3) if is_over else 2)
    return rms(input.norm_size * other.norm_size * c, dims, multilinear=True)


@normed_op(torch.cross).register_norm(lift_dims={"input": _beside("other"), "other": _beside("input")})
def cross(input: RMSTensor, other: RMSTensor, dim: int | None = None) -> RMSTensor:
    """`linalg_cross`, along the first dimension of 3 if none is given."""
    shape = broadcast(input.shape, other.shape)
    return linalg_cross(input, other, dim=shape.index(3) if dim is None else dim)


# -- bilinear --------------------------------------------------------------------------------------------------------------


@normed_op(F.bilinear).register_norm(lift_dims={"bias": _everywhere})
def bilinear(input1: RMSTensor, input2: RMSTensor, weight: RMSToRMSTensor, bias: RMSTensor | None = None) -> LinfTensor:
    """y_k = x1^T A_k x2 + b_k.

    input1: [..., d1], input2: [..., d2], RMS over the last dimension;  weight: [out, d1, d2], largest operator norm of an A_k
    Value:        |y|_inf <= d1 |x1| |x2| |A| + |b|    (attained: rank-one A_k; Cauchy-Schwarz)
    Sensitivity:  the products of the other sizes
    """
    d1 = input1.shape[-1]
    c_weight = conversion_factor(weight, RMSToRMSTensor, (-2, -1))
    c = d1 * c_weight * rms_factor(input1, (-1,)) * rms_factor(input2, (-1,))
    n1, n2, n_weight = input1.norm_size, input2.norm_size, weight.norm_size
    value = n1 * n2 * n_weight * c
    sensitivity: dict[str, Any] = {"input1": n2 * n_weight * c, "input2": n1 * n_weight * c, "weight": n1 * n2 * c}
    if bias is not None:
        sensitivity["bias"] = rms_factor(bias, ())
        value = value + bias.norm_size * sensitivity["bias"]
    return LinfTensor(value, sensitivity=sensitivity)
