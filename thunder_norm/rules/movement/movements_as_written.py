"""How operations move that are several in one, for `norm_sensitivity("composed")`: as these do, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.composed import Call, Made, is_fixed, moves, spread_of
from thunder_norm.core.context import Environment, environment
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import MissingNormRuleError, NormMismatchError
from thunder_norm.rules.movement import movements, movements_nearby
from thunder_norm.rules.movement.movements_nearby import Found


def as_written(call: Call, program: Callable[..., Any]) -> Found:
    """The result moves as that of `program` does, given the arguments by name; by the norm rule where its operations have none for them.

    Its operations are none of the user's program, which a report has rows of, and parameters are as they are: of those the rule says the rest.
    """
    (y,) = call.results
    try:
        with environment(Environment()):
            same = program(**call.given)
    except (MissingNormRuleError, NormMismatchError):
        return None
    if not moves(same) or same.shape != y.shape or (spread := spread_of(same)) is None:
        return None
    return [Made(spread.ndim, (), parts=spread.parts, of=tuple(call.moving))]


def _gated(input: Any, dim: int = -1) -> Any:
    gated, gate = input.chunk(2, dim)
    return gated * torch.sigmoid(gate)


@normed_op(F.glu).register_movement
def glu(call: Call) -> Found:
    """``a sigmoid(b)``: near the data by its Jacobian there, if that is known."""
    return movements_nearby.glu(call) or as_written(call, _gated)


def _added_product(input: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return input + tensor1 * tensor2 * value


def _added_quotient(input: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return input + tensor1 / tensor2 * value


def _between(input: Any, end: Any, weight: Any) -> Any:
    return input * (1 - weight) + end * weight


def _added_matrix_product(input: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    product = (mat1 @ mat2) * alpha
    return product + input * beta if beta else product  # of what counts 0 times nothing is looked at


def _added_products(input: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added_matrix_product(input, batch1, batch2, beta, alpha)


@normed_op(torch.addmm).register_movement
def addmm(call: Call) -> Found:
    """c + x W, W as it is; where c moves, what both move by together."""
    return as_written(call, _added_matrix_product) if moves(call.given.get("input")) else movements.addmm(call)


def _inner(input: Any, other: Any) -> Any:
    if not input.ndim or not other.ndim:
        return input * other
    if other.ndim == 1:
        return input @ other
    return (input @ other.flatten(0, -2).mT).unflatten(-1, other.shape[:-1])


def _outer(input: Any, vec2: Any) -> Any:
    return input.unsqueeze(-1) * vec2


@normed_op(torch.cosine_similarity).register_movement
def cosine_similarity(call: Call) -> Found:
    """``<x / max(|x|, eps), y / max(|y|, eps)>``: normalizations near the data, which a norm does not keep away from 0.

    Where a vector is stretched along the dimension first, by the norm rule.
    """
    x, y, dim = call.given["x1"], call.given["x2"], call.given.get("dim", 1)
    ndim = max(x.ndim, y.ndim)
    along = dim - ndim if dim >= 0 else dim
    if min(x.ndim, y.ndim) < -along or x.shape[along] != y.shape[along]:
        return None

    def written(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
        return (F.normalize(x1, dim=along, eps=eps) * F.normalize(x2, dim=along, eps=eps)).sum(along)

    return as_written(call, written)


for _op, _program in (
    (torch.inner, _inner),
    (torch.outer, _outer),
    (torch.addcmul, _added_product),
    (torch.addcdiv, _added_quotient),
    (torch.lerp, _between),
    (torch.baddbmm, _added_products),
):
    normed_op(_op).register_movement(lambda call, program=_program: as_written(call, program))


@normed_op(torch.where).register_movement
def where(call: Call) -> Found:
    """``b + D (a - b)``, each entry of D from 0 to 1: one of both lines, or a chord across both where they meet (leaky relus, written out).

    A condition may turn out another way for other inputs; what is known of the result is of those for which it does not jump there.
    """
    a, b, (y,) = call.given.get("input"), call.given.get("other"), call.results
    if not all(moves(t) or is_fixed(t) for t in (a, b)):
        return None
    return movements.chosen(a, b, y, call.given["condition"])


@normed_op(torch.masked_fill).register_movement
def masked_fill(call: Call) -> Found:
    """``torch.where(mask, value, x)``."""
    x, value, (y,) = call.given["input"], call.given["value"], call.results
    return movements.chosen(value, x, y, call.given["mask"]) if moves(x) and is_fixed(value) else None
