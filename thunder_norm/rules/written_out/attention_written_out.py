"""Attention written out: weights that are a softmax, times values, near the data at hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_environment
from thunder_norm.core.kinds import L1Tensor, RMSTensor
from thunder_norm.core.local import distances, is_local, is_within
from thunder_norm.core.perturbations import lesser
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import SoftmaxOf, Source, fact, is_plain, ruled, unconditional
from thunder_norm.rules._local import data
from thunder_norm.rules._shared import refined, root
from thunder_norm.rules.layers._attention_nearby import Moved, Nearby
from thunder_norm.rules.linear_algebra.einsum import equation_labels
from thunder_norm.scalars import times


def scores_of(weights: NormedTensor) -> Source | None:
    """Scores that these are the softmax of, along the last dimension and each of them."""
    found = fact(weights, SoftmaxOf)
    if found is None or weights.ndim < 2 or found.dim not in (-1, weights.ndim - 1):
        return None
    return found.x if found.x.backing.shape == weights.shape else None


def finite(z: NormedTensor) -> tuple[NormedTensor, torch.Tensor | None]:
    """Scores with 0 where they are minus infinity, and which are not, if some may be: by a mask, so that they stay so."""
    is_seen = z.backing.detach() > -math.inf
    if not isinstance(is_seen, FakeTensor) and bool(is_seen.all()):  # in a trace others may be infinite in another call
        return z, None
    found = type(z)._wrap(torch.where(is_seen, z.backing.detach(), 0.0), z.norm_size, z.perturbation_size, z.elem_dims)
    found._spread, found._away = z._spread, z._away
    return found, is_seen


def weights_and_values(equation: str, operands: Sequence[Any]) -> tuple[Any, Any] | None:
    """The two operands of an einsum, in the order in which it is their matrix product, if it is one."""
    if len(operands) != 2:
        return None
    terms, out = equation_labels(equation, *(t.ndim for t in operands))
    for first in (0, 1):
        a, b = terms[first], terms[1 - first]
        if min(len(a), len(b)) > 1 and a[-1] == b[-2] and out == [*a[:-1], b[-1]] and a[:-2] == b[:-2] and a[-1] not in out:
            return operands[first], operands[1 - first]
    return None


def _is_nearby(weights: Any, v: Any) -> bool:
    is_fixed = is_plain(v) and current_environment().is_constant(v)
    z = scores_of(weights) if (is_fixed or isinstance(v, RMSTensor)) and v.ndim > 1 else None
    if z is None or not issubclass(z.kind, RMSTensor) or z.perturbation_size is None or z.backing.is_meta:
        return False
    moving = (finite(z.moving())[0], *([] if is_fixed else [v]))
    return (is_local() or is_within()) and distances(*moving) is not None


def _weighted(op: Any, args: tuple, weights: Any, v: Any, names: tuple[str, str]) -> NormedTensor:
    made, z = ruled(op, args, {}), scores_of(weights)
    assert made is not None and z is not None, "the rule's condition has been checked"
    result, by_rule = made
    scores, is_seen = finite(z.moving())
    near = distances(scores, v)
    batch = tuple(d for d in ed.nontrivial(v.shape, v.elem_dims) if d < -2)
    kept = (*batch, *(d for d in ed.nontrivial(v.shape, v.elem_dims) if d == -1))
    if near is None or by_rule is None or set(result.elem_dims) != set(kept):
        return _moving(result, by_rule, names)
    constants = result._sensitivity or {}
    through = constants[names[0]] * (unconditional(F.softmax, z.tensor(), -1)._sensitivity or {})["input"]
    to_scores, to_values = _slopes(scores, is_seen, v, batch, kept, *near)
    terms = (
        (scores.perturbation_size, torch.minimum(to_scores, torch.as_tensor(through, dtype=to_scores.dtype))),
        (v.perturbation_size, torch.minimum(to_values, torch.as_tensor(constants[names[1]], dtype=to_values.dtype))),
    )
    moved = functools.reduce(torch.add, (times(n, c) for n, c in terms if n is not None))
    # by ellipsoids weights may move less
    return _moving(result, lesser(moved, by_rule) if is_within() else moved, names)


def _slopes(
    z: NormedTensor, is_seen: torch.Tensor | None, v: RMSTensor, batch: ed.Dims, kept: ed.Dims, by_score: float, by_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sensitivities to scores and to values, of scores and values that may be so far from the data."""
    scores, width, tokens = data(z), v.shape[-1], z.shape[-1]
    eye = torch.eye(tokens, dtype=scores.dtype, device=scores.device)
    each = by_score * refined(z, ())
    by = Moved(query=by_score * refined(z, (-1,)) * math.sqrt(tokens), value=by_value * refined(v, (-1,)) * math.sqrt(width))
    moves = torch.full((1, 1), min(each, by.query), dtype=scores.dtype, device=scores.device)
    here = Nearby.of(scores, eye, data(v), is_seen, False, 1.0, by, moves).slopes(batch)
    # from RMS over a query's scores to that over the features of values, or to the largest one where the output is
    by_feature = root(tokens) / (root(width) if -1 in kept else 1.0)
    return here.query * (by_feature * refined(z, (*batch, -1))), here.value * refined(v, kept)


def _moving(result: NormedTensor, moved: torch.Tensor | None, names: tuple[str, str]) -> NormedTensor:
    out = type(result)._wrap(None, result.norm_size, moved, result.elem_dims)  # type: ignore[arg-type]
    out._sensitivity = dict.fromkeys(names, 0)
    return out


@normed_op(torch.matmul).register_norm(when=lambda args: _is_nearby(args["input"], args["other"]))
def matmul(input: L1Tensor, other: RMSTensor) -> NormedTensor:
    """softmax(z) v at the data, or within a distance of it: attention of queries z to unit vectors as keys, ``z_ij = z_i . e_j``.

    Value:       as ever
    Sensitivity: to z the largest ``|Cov_p(v, e)|_2``, which has ``p_j (v_j - y)`` as columns; to v the weights (`Nearby.slopes`); or as ever, if that is less
    Untried:     a step of a program, near the data; the bound of the whole is tried
    """
    return _weighted(torch.matmul, (input, other), input, other, ("input", "other"))


@normed_op(torch.bmm).register_norm(when=lambda args: _is_nearby(args["input"], args["other"]))
def bmm(input: L1Tensor, other: RMSTensor) -> NormedTensor:
    """The same, as of `matmul`.

    Untried:     a step of a program, near the data; the bound of the whole is tried
    """
    return _weighted(torch.bmm, (input, other), input, other, ("input", "other"))


def _is_sum_nearby(args: dict[str, Any]) -> bool:
    found = weights_and_values(args["equation"], (args["left"], args["right"]))
    return found is not None and _is_nearby(*found)


@normed_op(torch.einsum).register_norm(when=_is_sum_nearby)
def einsum(equation: str, left: L1Tensor | RMSTensor, right: L1Tensor | RMSTensor) -> NormedTensor:
    """The same, spelled by labels.

    Untried:     a step of a program, near the data; the bound of the whole is tried
    """
    found = weights_and_values(equation, (left, right))
    assert found is not None, "the rule's condition has been checked"
    return _weighted(torch.einsum, (equation, left, right), *found, ("left", "right") if found[0] is left else ("right", "left"))
