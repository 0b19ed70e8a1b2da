"""Products of two tensors, which remember of what they are: their sums are those of matrix products (`summed_products`).

    (k.unsqueeze(-2) * key.unsqueeze(-3) * decay).sum(-1)

A product of three whose third factor is bounded entry by entry is one of two, of which the second is so many times as large.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import L1Tensor, RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._facts import ProductOf, Source, fact, unconditional
from thunder_norm.rules._shared import refined
from thunder_norm.rules.written_out._derived import are_of_one, with_facts
from thunder_norm.scalars import times

_KINDS = RMSTensor, L1Tensor


def _are_apart(args: dict[str, Any]) -> bool:
    a, b = args["input"], args["other"]
    if not (isinstance(a, _KINDS) and isinstance(b, _KINDS)) or is_complex(a) or is_complex(b):
        return False
    return a is not b and a.backing is not b.backing and max(a.ndim, b.ndim) > 0 and not are_of_one(a, b)


def _of_three(product: NormedTensor, by: NormedTensor) -> ProductOf | None:
    """A product times a third factor, as one of the first and of the second times the third."""
    found = fact(product, ProductOf)
    if (
        found is None
        or not isinstance(by, RMSTensor)
        or is_local(product)
        or found.a.kind not in _KINDS
        or found.b.kind not in _KINDS
    ):
        return None
    c = refined(by, ())
    largest = times(by.norm_size, c)
    if current_mode() == "bound" and (most := known_range(by).largest_modulus) < math.inf:
        largest = largest.clamp(max=most)
    shape = torch.broadcast_shapes(product.shape, by.shape)
    moving = [times(moved, size) for moved, size in ((found.b.perturbation_size, largest),) if moved is not None]
    if by.perturbation_size is not None:
        moving.append(times(by.perturbation_size, c) * found.b.norm_size)
    moved = moving[0] + moving[1] if len(moving) > 1 else next(iter(moving), None)
    second = product.backing if product.shape == shape else by.backing.expand(shape)
    return ProductOf(found.a, Source(found.b.kind, second, found.b.norm_size * largest, moved, found.b.elem_dims))


@normed_op(torch.mul).register_norm(when=_are_apart)
def mul(input: RMSTensor | L1Tensor, other: RMSTensor | L1Tensor) -> NormedTensor:
    """a b: as ever, and of what."""
    result = unconditional(torch.mul, input, other)
    thirds = [f for f in (_of_three(input, other), _of_three(other, input)) if f is not None]
    return with_facts(result, [*thirds[:1], ProductOf(Source.of(input), Source.of(other))])
