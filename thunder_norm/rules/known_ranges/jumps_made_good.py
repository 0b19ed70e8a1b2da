"""Signs times what is 0 where they jump: soft thresholding, and other functions of the modulus that keep the sign.

    torch.sign(u) * relu(u.abs() - t)               # t not negative
    torch.sign(x) * torch.log1p(x.abs())        # and its inverse, ``sign(x) * (exp(|x|) - 1)``
    torch.copysign(torch.sqrt(x.abs() + 1) - 1, x)

On the way from one input to another ``sign(u) v`` has no jumps if v is 0 where u is; in between it moves as v does, or as -v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.kinds import L1Tensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact
from thunder_norm.rules._shared import argument, like
from thunder_norm.rules.known_ranges.where_zero import is_zero_where


@dataclass(frozen=True, eq=False)
class SignOf:
    """A fact: the entries' signs are those of x; they are 1, -1, or 0 where x is 0."""

    x: Source


def _sign(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    return Alternatives((*every_fact(out), SignOf(Source.of(argument(args, kwargs, 0, "input", "self")))))


for _op in (torch.sign, torch.sgn):
    normed_op(_op).register_fact(_sign)


def made_good(a: Any, b: Any) -> tuple[str, str] | None:
    """Which of two factors is a sign, and which one is 0 where it jumps; None where there are no such."""
    for sign, other, names in ((a, b, ("input", "other")), (b, a, ("other", "input"))):
        found = fact(sign, SignOf)
        if found is not None and isinstance(other, RMSTensor | L1Tensor) and other.shape == sign.shape:
            if is_zero_where(other, found.x):
                return names
    return None


def _is_made_good(args: dict[str, Any]) -> bool:
    return made_good(args["input"], args["other"]) is not None


@normed_op(torch.mul).register_norm(when=_is_made_good, takes_jumps=True)
def mul(input: RMSTensor | L1Tensor, other: RMSTensor | L1Tensor) -> NormedTensor:
    """``sign(u) v`` with v that is 0 where u is.

    Value:       |v|          (attained: u positive)
    Sensitivity: 1 to v, 0 to the sign
    Source:      along a path of inputs ``sign(u) v`` is continuous, and its derivative is that of v, or of -v
    Untried:     it is for two factors made of one tensor
    """
    names = made_good(input, other)
    assert names is not None, "the rule's condition has been checked"
    sign, other_factor = names
    v = input if other_factor == "input" else other
    return like(v, v.norm_size, sensitivity={other_factor: 1, sign: 0})


def _keeps_zero(args: dict[str, Any]) -> bool:
    input, other = args["input"], args["other"]
    if not isinstance(input, RMSTensor) or not isinstance(other, RMSTensor) or input.shape != other.shape:
        return False
    return is_zero_where(input, Source.of(other))


@normed_op(torch.copysign).register_norm(when=_keeps_zero)
def copysign(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """|v| with the sign of u, v that is 0 where u is.

    Value:       |v|          (attained)
    Sensitivity: 1 to v, 0 to u
    Source:      as of the product with a sign
    Untried:     it is for a v made of u
    """
    return like(input, input.norm_size, sensitivity={"input": 1, "other": 0})
