"""The adversary itself: its balls, that it catches rules known to be wrong, and that it finds rules by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm.audit import (
    QUICK,
    Ball,
    Case,
    Effort,
    Witness,
    audit,
    check,
    corners,
    evaluate,
    lmo,
    norm,
    project,
    search,
    start,
)
from thunder_norm.audit.__main__ import main
from thunder_norm.audit.ascent import Ascents
from thunder_norm.audit.balls import norms
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import LooseRuleError, NormMismatchError, UnsoundRuleError

SEEDED = replace(QUICK, seed=seeded())

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
    t = torch.randn(ball.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))
    assert ball.kind.of(t, ball.elem_dims).norm_size.item() == pytest.approx(ball.norm(t).item(), rel=1e-10)


@pytest.mark.parametrize("ball", BALLS, ids=lambda b: b.name)
def test_lmo_is_of_norm_one_and_beats_all_starts(ball):
    generator = torch.Generator().manual_seed(seeded(0))
    g = torch.randn(ball.shape, dtype=torch.float64, generator=generator)
    best = lmo(ball.kind, g, ball.dims)
    assert ball.norm(best).item() == pytest.approx(1.0)
    for which in range(8):
        candidate = start(ball, which, generator)
        assert ball.norm(candidate).item() == pytest.approx(1.0)
        assert (g * candidate).sum() <= (g * best).sum() + 1e-9


@pytest.mark.parametrize("ball", BALLS, ids=lambda b: b.name)
def test_projection_ends_in_the_ball_and_leaves_it_alone(ball):
    t = torch.randn(ball.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))
    inside = project(ball.kind, t, ball.dims, 0.3)
    assert norm(ball.kind, inside, ball.dims) <= 0.3 * (1 + 1e-9)
    assert torch.allclose(project(ball.kind, inside, ball.dims, 0.3), inside)


@pytest.mark.parametrize("ball", BALLS, ids=lambda b: b.name)
def test_stacked_tensors_are_treated_one_by_one(ball):
    """Each with a radius of its own: an ascent goes where it would go alone."""
    stack = torch.randn((3, *ball.shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(0)))
    radii = torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64).reshape(-1, *[1] * len(ball.shape))
    together = (
        norms(ball.kind, stack, ball.dims),
        lmo(ball.kind, stack, ball.dims, stacked=True),
        replace(ball, domain=torch.abs).point(stack, radii, stacked=True),
    )
    alone = [
        (ball.norm(t), lmo(ball.kind, t, ball.dims), project(ball.kind, t, ball.dims, r.item()).abs())
        for t, r in zip(stack, radii, strict=True)
    ]
    torch.testing.assert_close(together, tuple(torch.stack(several) for several in zip(*alone, strict=True)))


def test_ascents_together_find_what_each_finds_alone():
    """Of a concave function, whose largest value in the ball a projection gives; one that starts where it is not finite ends there."""
    target = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    ball = Ball("x", LinfTensor, (3,))

    def height(points, which):
        x = points[0]
        return torch.where(x[:, 0] > 5, math.nan, (1 + which) * (20 - (x - target).square().sum(1)))

    starts = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [-1.0, 1.0, 1.0], [0.5, -0.5, 0.0]], dtype=torch.float64)
    ascents = Ascents([ball], [torch.ones(4, dtype=torch.float64)], torch.tensor([False, False, True, False]))
    highest = 20 - (target.clamp(-1, 1) - target).square().sum().item()
    assert 0.99 * 4 * highest <= ascents.climb(height, [starts], 50) <= 4 * highest * (1 + 1e-9)
    alone = Ascents([ball], [torch.ones(1, dtype=torch.float64)], torch.tensor([False]))
    for start_at, least in ((starts[:1], 0.99 * highest), (starts[1:2], 0.0), (starts[2:3], 0.99 * highest)):
        assert least <= alone.climb(height, [start_at], 50) <= highest * (1 + 1e-9)
    assert alone.climb(height, [starts[1:2]], 50) == 0.0


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
    found = search(op, [Ball("input", kind, (3, 4), size)], seed=seeded())
    assert not found.is_sound
    assert found.sensitivity["input"] == pytest.approx(excess, rel=0.02)


# -- what shows that a bound is attained --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ball", BALLS, ids=lambda b: b.name)
def test_corners_have_norm_one_in_every_group_and_the_last_is_zero(ball):
    *several, zero = corners(ball)
    assert len(several) >= 2 and not zero.any()
    for t in several:
        assert t.shape == ball.shape and ball.norm(t).item() == pytest.approx(1.0)
        assert torch.allclose(project(ball.kind, t, ball.dims, 0.5), t / 2)  # all groups, or they would not shrink alike
    assert len({tuple(t.flatten().tolist()) for t in several}) >= len(several) - 2  # of other dimensions some are the same


def peak(at, width=1e-3):
    """An operation with the value 1 at one point, 0 further than `width` away from it; one of four entries has twice the RMS."""
    body = lambda x: F.relu(1 - (x - at).abs().amax() / width).expand(1)  # noqa: E731
    op = normed_op(lambda input: body(input))

    @op.register_norm
    def rule(input: RMSTensor) -> LinfTensor:
        return LinfTensor(torch.ones_like(input.norm_size), sensitivity={"input": 2 / width})

    return op


NEEDLE = torch.tensor([[0.31, -0.62, 0.87, 0.11]], dtype=torch.float64)
IN_UNIT = [Ball("input", RMSTensor, (1, 4))]


def test_a_witness_shows_what_no_search_finds():
    op = peak(NEEDLE)
    for seed in (0, 1):
        with pytest.raises(LooseRuleError, match="not attained"):
            check(op, IN_UNIT, restarts=1, steps=2, seed=seeded(seed))
    edge = NEEDLE + torch.tensor([[0.0, 0.0, 0.0, 5e-4]], dtype=torch.float64)
    entry = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    slope = evaluate(op, IN_UNIT, witnesses=[[NEEDLE], Witness([edge], [entry])]).sensitivity["input"]
    assert evaluate(op, IN_UNIT, witnesses=[[NEEDLE]]).value == 1.0
    assert slope == pytest.approx(1.0)
    check(op, IN_UNIT, witnesses=[[NEEDLE], Witness([edge], [entry])], restarts=1, steps=2, seed=seeded())


def test_a_witness_outside_of_its_ball_shows_nothing_above_a_right_claim():
    found = evaluate(F.relu, IN_UNIT, witnesses=[[torch.full((1, 4), 50.0)]])
    assert found.value == pytest.approx(1.0) and found.is_sound


def test_an_ascent_with_a_goal_goes_on_where_its_pace_leads_there():
    """To the same number; and ends soon where it does not, as no norm of the matrix is that large."""
    matrix, start = torch.diag(torch.tensor([1.0, 0.9], dtype=torch.float64)), torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    asked = []

    def f(points: list[torch.Tensor], which: torch.Tensor) -> torch.Tensor:
        asked.append(len(which))
        return (points[0] @ matrix).norm(dim=1)

    ascents = Ascents([Ball("x", L2Tensor, (2,))], [torch.ones(1, dtype=torch.float64)], torch.tensor([False]))
    found = {}
    for goal in (None, 0.99, 100.0):
        asked.clear()
        found[goal] = ascents.climb(f, [start], 60, goal), len(asked)
    assert found[None][0] == pytest.approx(1.0, abs=1e-3) and found[0.99][0] >= 0.99
    assert found[100.0][1] < found[None][1] / 4


def test_corners_show_bounds_without_a_search():
    """Equal entries, one entry, opposite ones, and one input against the other."""
    x, y = Ball("x", RMSTensor, (3, 4), 1.5), Ball("y", RMSTensor, (3, 4), 0.5)
    for call, balls in (
        (lambda a: a.sum(-1), [x]),
        (lambda a: a.amax(-1), [x]),
        (lambda a: a.amin(-1), [x]),
        (torch.sub, [x, y]),
        (F.mse_loss, [x, y]),
        (lambda a, b: (a * b).amax(-1), [x, y]),
        (torch.maximum, [x, y]),
    ):
        assert evaluate(call, balls).lowest == pytest.approx(1.0, abs=1e-6)
    assert evaluate(torch.cos, [x]).value == 1.0


@pytest.mark.parametrize("call", [lambda a: a * 0.99, lambda a: a.sin() + a * 1e-3], ids=["value", "both"])
def test_a_claim_above_what_is_attained_is_loose(call):
    op = normed_op(lambda input: call(input))

    @op.register_norm
    def rule(input: RMSTensor) -> RMSTensor:
        return RMSTensor(input.norm_size * 1.2, elem_dims=input.elem_dims, sensitivity={"input": 1.2})

    with pytest.raises(LooseRuleError):
        check(op, [Ball("input", RMSTensor, (2, 3))], tight=0.9, restarts=1, steps=2, seed=seeded())


def test_a_search_goes_on_until_a_claim_is_reached():
    """One combination in eight of the signs of three entries has a value, and nothing leads there."""
    wanted = torch.tensor([1.0, -1, -1], dtype=torch.float64)
    body = lambda x: (x.detach().sign() == wanted).all(-1).to(x.dtype) * x.abs().amin(-1)  # noqa: E731
    op = normed_op(lambda input: body(input))

    @op.register_norm
    def rule(input: RMSTensor) -> LinfTensor:
        return LinfTensor(input.norm_size, sensitivity={"input": 1.0})

    ball, options = Ball("input", RMSTensor, (1, 3)), {"sensitivity": False, "steps": 0}
    assert evaluate(op, [ball], sensitivity=False).value < 0.5
    assert min(search(op, [ball], seed=seeded(s), restarts=8, **options).value for s in range(40)) < 0.9
    check(op, [ball], seed=seeded(), restarts=96, **options)  # twelve times twelve draws of signs


# -- rules found by themselves ------------------------------------------------------------------------------------------------


@normed_op
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_norm
def _(x: RMSTensor) -> RMSTensor:
    return RMSTensor(x.norm_size / 2, elem_dims=x.elem_dims, sensitivity={"x": 0.5})


def test_a_right_rule_is_proven_without_being_told_its_arguments():
    (record,) = audit(halved, effort=SEEDED).records
    assert record.is_sound and record.cases >= 2
    assert record.value == pytest.approx(1.0) and record.sensitivity == {"0": pytest.approx(1.0)}


@normed_op
def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * gate.sigmoid()


@normed_op
def ramp(x: torch.Tensor, slope: float = 2.0) -> torch.Tensor:
    return torch.where(x > 1, slope * (x - 1), 0.0)


@normed_op
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


@gated.register_norm
def _(x: RMSTensor, gate: RMSTensor) -> RMSTensor:
    """The gate's own slope is forgotten."""
    return RMSTensor(x.norm_size, elem_dims=x.elem_dims, sensitivity={"x": 1.0, "gate": 0.0})


@ramp.register_norm
def _(x: RMSTensor, slope: float = 2.0) -> RMSTensor:
    """Right for the value at small norms and the slope; an entry may be far larger than the norm."""
    return RMSTensor((slope * (x.norm_size - 1)).clamp(min=0.0), elem_dims=x.elem_dims, sensitivity={"x": slope})


@centred.register_norm
def _(x: NormedTensor) -> LinfTensor:
    """True of the RMS, not of the largest entry."""
    return LinfTensor(x.norm_size, sensitivity={"x": 1.0})


@pytest.mark.parametrize("op, claim", [(gated, "sensitivity to argument 1 inf"), (ramp, "value"), (centred, "value")])
def test_a_wrong_rule_is_caught_without_being_told_its_arguments(op, claim):
    with pytest.raises(UnsoundRuleError, match="UNSOUND in") as error:
        audit(op, effort=SEEDED)
    assert claim in str(error.value)
    assert not error.value.audit.is_sound


def test_operations_of_torch_are_tried_on_torchs_own_samples():
    found = audit(torch.cumsum, effort=Effort(cases=4, restarts=2, steps=3, seed=seeded()))
    assert all(r.cases for r in found.records)


def test_aten_operations_are_tried_on_the_calls_that_torch_makes():
    (record,) = audit(torch.ops.aten._softmax.default, effort=Effort(cases=2, restarts=2, steps=3, seed=seeded())).records
    assert record.cases == 2


def test_a_rule_that_cannot_be_tried_says_so_and_takes_cases():
    @normed_op
    def named(x: torch.Tensor, how: str) -> torch.Tensor:
        return getattr(torch, how)(x)

    @named.register_norm
    def rule(x: RMSTensor, how: str) -> RMSTensor:
        return RMSTensor(x.norm_size, elem_dims=x.elem_dims, sensitivity={"x": 1.0})

    assert "no arguments to try it with" in str(audit(named))
    (record,) = audit(
        named, cases=[Case("relu", lambda x: named(x, "relu"), (Ball("x", RMSTensor, (3, 4)),))], effort=SEEDED
    ).records
    assert record.cases == 1 and record.is_sound


def test_an_operation_without_rules_is_refused():
    with pytest.raises(NormMismatchError, match="no norm rules"):
        audit(lambda x: x)


MODULE = """
import torch
from thunder_norm import RMSTensor, normed_op
from thunder_norm.audit import QUICK, Ball, Case

@normed_op
def doubled(x):
    return x * 2

@doubled.register_norm
def _(x: RMSTensor) -> RMSTensor:
    return RMSTensor(x.norm_size * {factor}, elem_dims=x.elem_dims, sensitivity={{"x": 2.0}})

CASES = [Case("over both", doubled, (Ball("x", RMSTensor, (2, 3), 1.0, (-2, -1)),))]
"""


@pytest.mark.parametrize("factor, status", [(2.0, 0), (1.9, 1)])
def test_the_command_proves_what_a_module_registers(tmp_path, capsys, factor, status):
    path = tmp_path / f"rules_{status}.py"
    path.write_text(MODULE.format(factor=factor))
    assert main([str(path)]) == status
    out = capsys.readouterr().out
    assert "doubled, _:" in out and "1 rules, 3 cases" in out
    assert ("UNSOUND" in out) == bool(status)


def test_the_command_needs_rules(capsys):
    with pytest.raises(SystemExit):
        main(["math"])
    assert "no rules" in capsys.readouterr().err
