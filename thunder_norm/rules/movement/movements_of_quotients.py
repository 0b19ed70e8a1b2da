"""How products and quotients move that are normalizations, written out in any spelling: as the layers do (`movements_of_normalizations`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.core.composed import Call, moves
from thunder_norm.core.registry import normed_op
from thunder_norm.rules.movement import movements_of_products
from thunder_norm.rules.movement.movements_nearby import Found, groups_of
from thunder_norm.rules.movement.movements_of_normalizations import normalized
from thunder_norm.rules.written_out import written_out_groups
from thunder_norm.rules.written_out._derived import derivations
from thunder_norm.rules.written_out._forms import Normalized


@normed_op(torch.mul).register_movement
def mul(call: Call) -> Found:
    """x times the inverse of its length; any other product."""
    return _normalized(call, written_out_groups.mul) or movements_of_products.mul(call)


@normed_op(torch.div).register_movement
def div(call: Call) -> Found:
    """x over its length; any other quotient."""
    return _normalized(call, written_out_groups.div) or movements_of_products.div(call)


def _normalized(call: Call, derive: Callable[..., Any]) -> Found:
    """What both arguments were made from, normalized; None where they were not, or it is divided by something else than the root."""
    a, b = call.given.get("input"), call.given.get("other")
    if not (moves(a) and moves(b)) or call.given.get("rounding_mode") is not None:
        return None
    found = next((f for f in derivations(derive, a, b) if isinstance(f, Normalized)), None)
    if found is None or found.root.slack != 1 or found.root.divisor.shift or found.root.divisor.floor:
        return None
    root, x = found.root, found.root.x.moving()
    eps = root.divisor.eps

    def run(plain: Callable[[Any], Any]) -> torch.Tensor:
        z = plain(x)
        z = z - z.mean(root.dims, keepdim=True) if root.is_centred else z
        return found.factor * z / (z.square().mean(root.dims, keepdim=True) + eps).sqrt()

    of_x = Call((x,), {}, {"input": x}, call.results, call.body)
    gain = torch.tensor(abs(found.factor), dtype=torch.float64)
    made = normalized(of_x, x, lambda x: groups_of(x, root.dims), eps, gain, root.is_centred, run)
    return made and [replace(m, of=(a, b)) for m in made if m is not None]
