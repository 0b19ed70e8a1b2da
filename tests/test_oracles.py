"""The adversary itself: its balls, and that it catches rules known to be wrong."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import Ball, lmo, norm, project, search, start

from thunder_norm.registry import normed_op
from thunder_norm.tensors import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
)

BALLS = [
    Ball("rms", RMSTensor, (3, 4)),
    Ball("rms over two", RMSTensor, (2, 3, 4), elem_dims=(-3, -1)),
    Ball("linf", LinfTensor, (3, 4)),
    Ball("l1", L1Tensor, (3, 4), elem_dims=(-2,)),
    Ball("l2", L2Tensor, (3, 4)),
    Ball("operator", RMSToRMSTensor, (2, 3, 4)),
    Ball("operator transposed", RMSToRMSTensor, (3, 4), elem_dims=(-1, -2)),
    Ball("kernel", RMSToRMSConvTensor, (4, 3, 2, 2)),
    Ball("kernel in groups", RMSToRMSConvTensor.grouped(2), (4, 3, 2)),
]


@pytest.mark.parametrize("ball", BALLS, ids=lambda b: b.name)
def test_own_norm_agrees_with_the_measured_one(ball):
    t = torch.randn(ball.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert ball.kind.of(t, ball.elem_dims).norm_size.item() == pytest.approx(ball.norm(t).item(), rel=1e-10)


@pytest.mark.parametrize("ball", BALLS, ids=lambda b: b.name)
def test_lmo_is_of_norm_one_and_beats_all_starts(ball):
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(ball.shape, dtype=torch.float64, generator=generator)
    best = lmo(ball.kind, g, ball.dims)
    assert ball.norm(best).item() == pytest.approx(1.0)
    for which in range(8):
        candidate = start(ball, which, generator)
        assert ball.norm(candidate).item() == pytest.approx(1.0)
        assert (g * candidate).sum() <= (g * best).sum() + 1e-9


@pytest.mark.parametrize("ball", BALLS, ids=lambda b: b.name)
def test_projection_ends_in_the_ball_and_leaves_it_alone(ball):
    t = torch.randn(ball.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inside = project(ball.kind, t, ball.dims, 0.3)
    assert norm(ball.kind, inside, ball.dims) <= 0.3 * (1 + 1e-9)
    assert torch.allclose(project(ball.kind, inside, ball.dims, 0.3), inside)


def wrong(name, body, value, lipschitz, kind=RMSTensor):
    """An operation of the test's own, with a rule that claims too little."""

    def operation(input):
        return body(input)

    operation.__qualname__ = name
    op = normed_op(operation)

    @op.register_norm
    def rule(input: RMSTensor) -> RMSTensor:
        return kind(value(input.norm_size), elem_dims=kind.default_elem_dims(2), sensitivity={"input": lipschitz})

    return op


WRONG = [
    ("relu with slope 1 / sqrt 2", F.relu, lambda n: n, math.sqrt(0.5), RMSTensor, 1.0, math.sqrt(2)),
    ("silu with slope 1", F.silu, lambda n: n, 1.0, LinfTensor, 4.0, 1.0998),
    ("rms divide with slope 1", lambda x: F.rms_norm(x, (4,), None, 0.25), lambda n: n * 0 + 1.0, 1.0, RMSTensor, 1.0, 2.0),
    ("softmax, largest entry, slope 1 / 4", lambda x: F.softmax(x, -1), lambda n: n * 0 + 1.0, 0.25, LinfTensor, 2.0, 2.0),
    ("log_softmax with slope 1", lambda x: F.log_softmax(x, -1), lambda n: 2 * n + 2, 1.0, LinfTensor, 2.0, 1.988),
]


@pytest.mark.parametrize("name, body, value, lipschitz, kind, size, excess", WRONG, ids=[w[0] for w in WRONG])
def test_wrong_rule_is_caught(name, body, value, lipschitz, kind, size, excess):
    op = wrong(name, body, value, lipschitz, kind)
    found = search(op, [Ball("input", kind, (3, 4), size)])
    assert not found.is_sound
    assert found.sensitivity["input"] == pytest.approx(excess, rel=0.02)
