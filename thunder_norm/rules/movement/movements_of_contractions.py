"""How contractions that are spelled by labels move: einsum of what moves with what is fixed, or of two tensors that move."""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.composed import Call, Made, Term, is_fixed, moves, spread_of, values
from thunder_norm.core.ellipsoids import Dense
from thunder_norm.core.local import is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.core.vertices import LARGEST
from thunder_norm.rules.linear_algebra.einsum import equation_labels
from thunder_norm.rules.movement import movements_nearby, movements_of_attention
from thunder_norm.rules.movement.movements_nearby import Found
from thunder_norm.rules.written_out.attention_written_out import weights_and_values


@normed_op(torch.einsum).register_movement
def einsum(call: Call) -> Found:
    """One operand moves and the other, if there is one, is fixed; or both move, near the data.

    What one operand alone is summed over, or the other is broadcast along, K elements, is at most sqrt(K) times as long.
    """
    equation, *operands = call.args
    if not 0 < len(operands) <= 2 or not all(moves(t) or is_fixed(t) for t in operands):
        return None
    terms, out = equation_labels(equation, *(t.ndim for t in operands))
    if is_within() and (found := weights_and_values(equation, operands)) is not None and moves(found[0]):
        by_scores = movements_of_attention.by_weights(call, *found)
        if by_scores is not None:
            return by_scores
    if len(operands) == 2 and all(map(moves, operands)):
        first, second = (dict(zip(term, t.shape, strict=True)) for term, t in zip(terms, operands, strict=True))
        pairs = ((first.get(name, 1), second.get(name, 1)) for name in {*first, *second} - {*out})
        longer = math.sqrt(math.prod(max(pair) for pair in pairs if pair[0] != pair[1]))
        return movements_nearby.bilinear(call, operands[0], operands[1], lambda a, b: torch.einsum(equation, a, b), longer)
    place = next(i for i, t in enumerate(operands) if moves(t))
    return _of_samples(call, equation, operands, place, terms, out)


def _of_samples(call: Call, equation: str, operands: list[Any], place: int, terms: list[list[str]], out: list[str]) -> Found:
    """The matrix of one sample, if samples have leading labels that nothing else has but once."""
    x, (y,) = operands[place], call.results
    assert isinstance(x, NormedTensor)
    if (spread := spread_of(x)) is None or not spread.ndim:
        return None
    batch, size = x.ndim - spread.ndim, spread.parts[0].size
    samples, features = terms[place][:batch], terms[place][batch:]
    others = {
        name: n for t, term in zip(operands, terms, strict=True) if t is not x for name, n in zip(term, t.shape, strict=True)
    }
    if out[:batch] != samples or set(samples) & set(features) or any(others.get(name, 1) != 1 for name in samples):
        return None
    given = [values(t) if t is not x else t for t in operands]

    def of_sample(u: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *(u if t is x else t for t in given))

    units = torch.eye(size, dtype=torch.float64).reshape(size, *[1] * batch, *x.shape[batch:])
    found = torch.vmap(of_sample)(units)
    matrix = found.reshape(size, -1).T
    if not 0 < len(matrix) <= LARGEST or found.shape[1 + batch :] != y.shape[batch:] or not bool(matrix.isfinite().all()):
        return None
    return [Made(y.ndim - batch, (Term(x, Dense(matrix)),))]
