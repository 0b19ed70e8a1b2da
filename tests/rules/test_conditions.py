"""What is chosen by a comparison is on its side of the number: divisions, logarithms and roots that a program guards so are bounded."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.audit import Ball, search
from thunder_norm.audit.cases import Case
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 4, "steps": 12, "seed": seeded()}


def length(x):
    return x.norm(dim=-1, keepdim=True)


def at_length(call):
    return lambda x: call(x, length(x))


GUARDED = {
    "the length, or ones": at_length(lambda x, n: x / torch.where(n > 0.1, n, torch.ones_like(n))),
    "the length, or a number": at_length(lambda x, n: x / torch.where(n >= 0.1, n, 1.0)),
    "a number, or the length": at_length(lambda x, n: x / torch.where(n < 0.1, 1.0, n)),
    "compared the other way round": at_length(lambda x, n: x / torch.where(torch.full_like(n, 0.1) < n, n, 1.0)),
    "filled": at_length(lambda x, n: x / n.masked_fill(n < 0.1, 1.0)),
    "by what it is itself": lambda x: torch.log(torch.where(x > 0.1, x, 0.1)),
    "a root": lambda x: torch.sqrt(torch.where(x <= 0.1, 0.1, x)),
    "softplus": lambda x: torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x))).log1p(),
}
BALLS = (Ball("x", RMSTensor, (3, 4), 2.0, (-1,)),)
CASES = [Case(name, call, BALLS, 0.0, FEW) for name, call in GUARDED.items()]


@pytest.mark.parametrize("name", GUARDED)
def test_what_a_comparison_guards_is_bounded(name):
    x = RMSTensor(2.0, backing=torch.randn(3, 4, dtype=D))
    eager = GUARDED[name](x)
    traced = thunder.jit(GUARDED[name], transforms=[NormTransform()])(x)
    assert eager.norm_size < 60 and traced.norm_size.item() == pytest.approx(eager.norm_size.item())
    for scale in (
        1e-3,
        1.0,
    ):  # on either side; where the sides meet some of these jump, so that it is the values that are searched
        found = search(lambda x, c=scale: GUARDED[name](x * c), BALLS, **FEW, sensitivity=False)
        assert found.is_sound, found


def not_in_place(x):
    n = length(x)
    mask = n > 0.1
    mask.logical_not_()
    return x / torch.where(mask, n, 1.0)


def turned_before(x):
    n = length(x) - 1.0
    mask = n > 0.1
    n.neg_()
    return x / torch.where(mask, n, 1.0)


UNGUARDED = {
    "the other side": at_length(lambda x, n: x / torch.where(n > 0.1, 1.0, n)),
    "of another tensor": at_length(lambda x, n: x / torch.where(n > 0.1, n.flip(0), 1.0)),
    "a mask that is turned round": not_in_place,
    "a tensor that is turned round": turned_before,
    "filled where it is large": at_length(lambda x, n: x / n.masked_fill(n > 0.1, 1.0)),
}


@pytest.mark.parametrize("name", UNGUARDED)
def test_what_it_does_not_guard_is_refused(name):
    x = RMSTensor(2.0, backing=torch.randn(3, 4))
    for call in (UNGUARDED[name], thunder.jit(UNGUARDED[name], transforms=[NormTransform()])):
        with pytest.raises(NormMismatchError):
            call(x)
