"""Inner products and weighted sums written out: a product of two tensors, and its sum.

    (query * key).sum(-1)
    (weights.unsqueeze(-1) * values).sum(1)

Op by op the product of two RMS norms may be one spike, and its sum many of them.  It is the matrix product that it is instead: at most
``K |a| |b|`` by Cauchy-Schwarz, and ``|p|_1 max |v|`` for weights p of an L1 norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._facts import ProductOf, Source, fact, unconditional
from thunder_norm.rules._shared import dims_tuple
from thunder_norm.rules.linear_algebra.contraction import Bound, contract
from thunder_norm.rules.linear_algebra.logits import scores
from thunder_norm.scalars import times


def _without_small(x: Source) -> tuple[NormedTensor, list[str]]:
    """A tensor of the same norm without dimensions of size 1, and the dimensions of the product that its own are."""
    size = x.backing.shape
    left = [d for d in ed.every(len(size)) if size[d] != 1]
    with _disable_current_modes():
        backing = torch.empty([size[d] for d in left], dtype=x.backing.dtype, device="meta")
    dims = tuple(i - len(left) for i, d in enumerate(left) if d in x.elem_dims)
    return x.kind._wrap(backing, x.norm_size, None, dims), [str(d) for d in left]


def _bound(x: NormedTensor, dims: ed.Dims, keepdim: bool) -> tuple[Bound, ProductOf] | None:
    """The product of matrices that the sum over `dims` is, if both tensors vary along all of them."""
    found = fact(x, ProductOf)
    if found is None or not all(x.shape[d] > 1 for d in dims):
        return None
    (a, of_a), (b, of_b) = (_without_small(s) for s in (found.a, found.b))
    summed = {str(d) for d in dims}
    if not summed <= set(of_a) & set(of_b):
        return None
    out = [f"one {d}" if d in dims else str(d) for d in ed.every(x.ndim) if keepdim or d not in dims]
    try:
        return contract(a, b, of_a, of_b, out), found
    except NormMismatchError:
        return None


def _is_inner(args: dict[str, Any]) -> bool:
    x = args["input"]
    return isinstance(x, NormedTensor) and _bound(x, dims_tuple(args["dim"], x.ndim), args["keepdim"]) is not None


@normed_op(torch.sum).register_norm(when=_is_inner)
def sum(
    input: NormedTensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> NormedTensor:
    """``sum_k a_k b_k``: the rule of the matrix product, and no more than that of the sum where both are in one norm.

    Value:       K |a| |b|, or |p|_1 |v| where one is an L1Tensor over what is summed      (see `contraction`)
    Sensitivity: the derivatives of that, to a and to b
    Typical:     sqrt(K) |a| |b|
    """
    found = _bound(input, dims_tuple(dim, input.ndim), keepdim)
    assert found is not None, "the rule's condition has been checked"
    bound, product = found
    a, b = product.a, product.b
    size = times(a.norm_size * b.norm_size, bound.factor)
    whole = unconditional(torch.sum, input, dim, keepdim)
    if type(whole) is bound.kind and whole.elem_dims == bound.elem_dims:
        size = torch.minimum(size, whole.norm_size)
    terms = [
        x.perturbation_size * times(y.norm_size, bound.factor) for x, y in ((a, b), (b, a)) if x.perturbation_size is not None
    ]
    moved = terms[0] + terms[1] if len(terms) > 1 else next(iter(terms), None)
    result = bound.kind._wrap(None, size, moved, bound.elem_dims)  # type: ignore[arg-type]
    result._sensitivity = {"input": 0}
    return scores(result) if a.kind is RMSTensor and b.kind is RMSTensor else result
