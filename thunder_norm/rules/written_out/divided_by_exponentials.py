"""Quotients by ``e^x``, which are products with ``e^(-x)``: of deviations that a program gives by their logarithm.

    ((y - mean) / log_std.exp()) ** 2
    (x - shift) / torch.exp(scale)

Nothing keeps an exponential away from 0, but the norm of x bounds its inverse as it bounds itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Source, fact, moves_with, unconditional
from thunder_norm.rules._shared import SAME_DIMS, rms
from thunder_norm.rules.entrywise.binary import product_dims
from thunder_norm.rules.written_out.written_out_exponentials import Exponential
from thunder_norm.scalars import times


def _is_known(name: str) -> Callable[[dict[str, Any]], bool]:
    """Whether an argument is an exponential, and a bound for all inputs is asked for; at the data more is known."""
    return lambda args: current_mode() == "bound" and fact(args[name], Exponential) is not None and not is_local(args[name])


def _is_by_exponential(args: dict[str, Any]) -> bool:
    return args["rounding_mode"] is None and _is_known("other")(args)


def _inverse(x: NormedTensor) -> tuple[Source, RMSTensor, Any]:
    """The argument of an exponential, one over that, and how far it moves with the argument."""
    found = fact(x, Exponential)
    assert found is not None, "the rule's condition has been checked"
    inverse = unconditional(torch.exp, found.argument.tensor(-1.0))
    backed = type(inverse)._wrap(x.backing, inverse.norm_size, None, inverse.elem_dims)
    return found.argument, backed, (inverse._sensitivity or {})["input"]


@normed_op(torch.div).register_norm(when=_is_by_exponential, lift_dims=SAME_DIMS)
def div(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """a / e^x = a e^(-x): the value of `mul`, and its sensitivity to a; ``k |a| s`` to x, s the slope of e^(-x) and k the factor of `mul`.

    Gap:         from RMS one entry of x is as large as its norm allows, and not all of them
    """
    x, inverse, slope = _inverse(other)
    dims, k = product_dims(input, inverse)
    terms = []
    if input.perturbation_size is not None:
        terms.append(input.perturbation_size * times(inverse.norm_size, k))
    if x.perturbation_size is not None:
        terms.append(x.perturbation_size * times(input.norm_size, k) * slope)
    out = rms(times(input.norm_size * inverse.norm_size, k), dims)
    result = type(out)._wrap(None, out.norm_size, sum(terms[1:], terms[0]) if terms else None, out.elem_dims)  # type: ignore[arg-type]
    result._sensitivity = {"input": 0, "other": 0}
    return result


@normed_op(torch.reciprocal).register_norm(when=_is_known("input"))
def reciprocal(input: RMSTensor) -> NormedTensor:
    """1 / e^x = e^(-x): value and sensitivity of that."""
    x, inverse, slope = _inverse(input)
    return moves_with(x, inverse, slope, "input")
