"""Logarithms of probabilities written out: ``log(sigmoid(x))``, ``log(1 - sigmoid(x))`` and ``log(softmax(x))``.

Op by op a logarithm of what may be 0 has no bound.  What made the probabilities is known, and so is their logarithm, as a function of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import SoftmaxOf, Source, fact, moves_with, unconditional, with_fact
from thunder_norm.rules._shared import like
from thunder_norm.rules.written_out._forms import ENTRY
from thunder_norm.rules.written_out.written_out_activations import Gate
from thunder_norm.rules.written_out.written_out_exponentials import Exponential
from thunder_norm.scalars import times


@normed_op(F.softmax).register_norm(when=lambda args: isinstance(args["input"], RMSTensor) and isinstance(args["dim"], int))
def softmax(input: RMSTensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> NormedTensor:
    """The softmax: as ever, and of what."""
    return with_fact(unconditional(F.softmax, input, dim), SoftmaxOf(Source.of(input), dim))


def logistic(args: Mapping[str, Any]) -> tuple[Source, float] | None:
    """x and c, where an argument is the logistic function of c x."""
    gate = fact(args["input"], Gate)
    if gate is None or gate.f is not torch.sigmoid or (gate.scale, gate.shift) not in ((1.0, 0.0), (-1.0, 1.0)):
        return None
    for form in gate.arguments:
        if {p for p, c in form.terms.items() if c != 0} == {ENTRY}:
            return form.x, form.terms[ENTRY] * gate.scale
    return None


@normed_op(torch.log).register_norm(when=lambda args: logistic(args) is not None)
def log_of_logistic(input: RMSTensor) -> NormedTensor:
    """log sigmoid(c x): the rule of `logsigmoid`, of c x."""
    found = logistic({"input": input})
    assert found is not None, "the rule's condition has been checked"
    x, c = found
    result = unconditional(F.logsigmoid, x.tensor(c))
    return moves_with(x, result, times((result._sensitivity or {})["input"], abs(c)), "input")


@normed_op(torch.log).register_norm(when=lambda args: fact(args["input"], Exponential) is not None)
def log_of_exponential(input: RMSTensor) -> NormedTensor:
    """log e^x = x: value n, attained, and sensitivity 1."""
    found = fact(input, Exponential)
    assert found is not None, "the rule's condition has been checked"
    x = found.argument
    return moves_with(x, like(x.tensor(), x.norm_size), 1.0, "input")  # type: ignore[type-var]


@normed_op(torch.log).register_norm(when=lambda args: fact(args["input"], SoftmaxOf) is not None)
def log_of_softmax(input: NormedTensor) -> NormedTensor:
    """log softmax(x): the rule of `log_softmax`."""
    found = fact(input, SoftmaxOf)
    assert found is not None, "the rule's condition has been checked"
    result = unconditional(F.log_softmax, found.x.tensor(), found.dim)
    return moves_with(found.x, result, (result._sensitivity or {})["input"], "input")
