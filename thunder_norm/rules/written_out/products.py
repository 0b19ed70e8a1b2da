"""Products of two tensors, which remember of what they are: their sums are those of matrix products (`summed_products`)."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.kinds import L1Tensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.rules._facts import ProductOf, Source, unconditional
from thunder_norm.rules.written_out._derived import are_of_one, with_facts

_KINDS = RMSTensor, L1Tensor


def _are_apart(args: dict[str, Any]) -> bool:
    a, b = args["input"], args["other"]
    if not (isinstance(a, _KINDS) and isinstance(b, _KINDS)) or is_complex(a) or is_complex(b):
        return False
    return a is not b and a.backing is not b.backing and max(a.ndim, b.ndim) > 0 and not are_of_one(a, b)


@normed_op(torch.mul).register_norm(when=_are_apart)
def mul(input: RMSTensor | L1Tensor, other: RMSTensor | L1Tensor) -> NormedTensor:
    """a b: as ever, and of what."""
    result = unconditional(torch.mul, input, other)
    return with_facts(result, [ProductOf(Source.of(input), Source.of(other))])
