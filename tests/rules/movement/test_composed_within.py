"""Composed bounds within a radius of the data: slopes over intervals, Jacobians nearby, reports."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import (
    RMSTensor,
    build_norm_map,
    load_norm_report,
    norm_report,
    norm_sensitivity,
    sensitivities,
    with_perturbation,
)
from thunder_norm.core.ellipsoids import Dense, Ellipsoid
from thunder_norm.core.slopes import Slopes
from thunder_norm.core.vertices import Root, Vertex
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules.entrywise import slopes_within
from thunder_norm.rules.movement import slopes
from thunder_norm.transforms import NormTransform
import thunder

OPTIONS = {
    F.gelu: [{}, {"approximate": "tanh"}],
    F.elu: [{}, {"alpha": 0.3}, {"alpha": 2.0}, {"alpha": -0.5}],
    F.celu: [{}, {"alpha": 0.3}],
    F.leaky_relu: [{}, {"negative_slope": 0.3}, {"negative_slope": -1.5}],
    F.softplus: [{}, {"beta": 3.0}, {"threshold": 25.0}],
    F.softshrink: [{}, {"lambd": 1.5}],
    F.hardtanh: [{}, {"min_val": -0.3, "max_val": 2.0}],
    torch.clamp: [{"min": -0.5}, {"max": 0.5}, {"min": -1.0, "max": 2.0}],
}


@pytest.mark.parametrize("op", slopes_within.functions(), ids=lambda op: op.__name__)
def test_slopes_over_intervals_are_those_that_functions_have_there(op):
    generator = torch.Generator().manual_seed(seeded(2))
    scale = torch.tensor([0.01, 0.3, 3.0, 30.0], dtype=torch.float64)[torch.randint(4, (200,), generator=generator)]
    low = torch.randn(200, generator=generator, dtype=torch.float64) * scale
    high = low + torch.rand(200, generator=generator, dtype=torch.float64) * scale
    for given in OPTIONS.get(op, [{}]):
        least, largest = slopes_within.of(op, given, low, high)
        everywhere = slopes.of(op, given)
        x = (low + (high - low) * torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]).requires_grad_()
        y = op(x, **given)
        (derivative,) = torch.autograd.grad(y.sum(), x)
        quotients = (y.diff(dim=0) / x.diff(dim=0)).detach()
        assert (derivative[1:-1] >= least - 1e-7).all()
        assert (derivative[1:-1] <= largest + 1e-7).all()
        rounding = 1e-6 + 4e-9 / x.diff(dim=0).detach()  # above its threshold softplus jumps by 2e-9
        assert (quotients >= least - rounding).all()
        assert (quotients <= largest + rounding).all()
        width = torch.maximum(quotients.abs().amax(0), torch.tensor(1e-3))
        # but for kinks so near to an end of an interval that no two of the points are on both sides
        assert ((quotients.amin(0) - least) <= 2e-2 * width + 2e-3).double().mean() > 0.95
        assert ((largest - quotients.amax(0)) <= 2e-2 * width + 2e-3).double().mean() > 0.95
        if everywhere is not None:
            whole = slopes_within.of(op, given, torch.tensor(-math.inf).double(), torch.tensor(math.inf).double())
            assert everywhere[0] - 1e-9 <= whole[0]
            assert whole[1] <= everywhere[1] + 1e-9


POWERS = [{"exponent": p} for p in (2, 3, 1, 0.5, -1, -2.5, 1.7)]


@pytest.mark.parametrize("op", slopes_within.steep_functions(), ids=lambda op: op.__name__)
def test_slopes_of_functions_without_a_steepest_one(op):
    generator = torch.Generator().manual_seed(seeded(4))
    low = torch.randn(300, generator=generator, dtype=torch.float64) * 2
    high = low + 3 * torch.rand(300, generator=generator, dtype=torch.float64) ** 3
    for given in POWERS if op is torch.pow else [{}]:
        least, largest = slopes_within.of(op, given, low, high)
        x = (low + (high - low) * torch.linspace(0, 1, 501, dtype=torch.float64)[:, None]).requires_grad_()
        y = op(x, *given.values())
        (derivative,) = torch.autograd.grad(y.sum(), x)
        is_known = least.isfinite() & largest.isfinite()
        # the reciprocal and odd powers jump at 0: there its value is finite on both sides
        has_pole = op is torch.reciprocal or given.get("exponent", 1) < 0
        is_defined = y.isfinite().all(0) & ~((low <= 0) & (high >= 0) & has_pole)
        assert (is_defined | ~is_known).all()
        # negative bases of powers are left out, and ends where the slope is infinite
        assert is_known[is_defined & (low > 0)].all()
        slack = 1e-9 * (1 + derivative.abs())
        assert ((derivative >= least - slack) & (derivative <= largest + slack))[:, is_known].all()
        steps = (y.diff(dim=0) / x.diff(dim=0)).detach()
        rounding = 1e-6 * (1 + steps.abs()) + 1e-13 * (1 + y.detach()[1:].abs()) / x.diff(dim=0).detach()
        assert ((steps >= least - rounding) & (steps <= largest + rounding))[:, is_known].all()


class Block(nn.Module):
    def __init__(self, width, activation):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


def networks():
    torch.manual_seed(seeded(3))
    return {
        "perceptron": nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)),
        "residual": nn.Sequential(nn.Linear(6, 5), Block(5, F.gelu), Block(5, F.silu), Block(5, F.leaky_relu)),
        "norms": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5), nn.Softmax(-1)),
    }


def within(model, x, radius):
    """The bound on how far rows of the result move, Euclidean, when a row of x does."""
    with norm_sensitivity("within"):
        given = with_perturbation(
            RMSTensor._wrap(x, RMSTensor.of(x).norm_size + radius / math.sqrt(6), None, (-1,)), radius / math.sqrt(6)
        )
        y = model(given)
        return sensitivities(y, given).item() * math.sqrt(5 / 6)


@pytest.mark.parametrize("name", list(networks()))
@pytest.mark.parametrize("radius", [1e-3, 0.1, 1.0])
def test_no_two_inputs_nearby_move_the_result_further_apart(name, radius):
    model = networks()[name].double()
    x = torch.randn(2, 6, dtype=torch.float64)
    bound = within(model, x, radius)
    near = torch.randn(400, 6, dtype=torch.float64)
    near = (
        x[torch.arange(400) % 2] + radius * near / near.norm(dim=1, keepdim=True) * torch.rand(400, 1, dtype=torch.float64) ** 0.2
    )
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(near)
    assert torch.linalg.matrix_norm(jacobians, 2).max() <= bound * (1 + 1e-9)
    moved = model(near) - model(x)[torch.arange(400) % 2]
    assert (moved.norm(dim=1) <= bound * (near - x[torch.arange(400) % 2]).norm(dim=1) * (1 + 1e-9)).all()


def test_at_radius_0_it_is_the_norm_of_the_jacobian():
    for name in ("perceptron", "residual"):
        model = networks()[name].double()
        x = torch.randn(1, 6, dtype=torch.float64)
        jacobian = torch.func.jacrev(lambda v, model=model: model(v[None])[0])(x[0])
        assert within(model, x, 0.0) == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item(), rel=1e-6)


class Gated(nn.Module):
    """A GRU, or an LSTM, spelled in operations: an input of its own at each step, and products of gates."""

    def __init__(self, count: int):
        super().__init__()
        self.by_input, self.by_state, self.count = nn.Linear(2, count * 3), nn.Linear(3, count * 3), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(len(x), 3, dtype=x.dtype)
        for step in x.unbind(1):
            a, b = self.by_input(step).chunk(self.count, -1), self.by_state(h).chunk(self.count, -1)
            i, f, *rest = ((s + t).sigmoid() for s, t in zip(a, b, strict=True))
            n = torch.tanh(a[2] + (b[2] if rest[1:] else i * b[2]))
            c = f * c + (i * n if rest[1:] else (1 - f) * n)
            h = rest[1] * c.tanh() if rest[1:] else c
        return h


@pytest.mark.parametrize(("gates", "dtype"), [(3, torch.float32), (4, torch.float64)])
def test_at_radius_0_steps_by_hand_are_their_jacobian(gates: int, dtype: torch.dtype):
    torch.manual_seed(seeded(1))
    model, steps = Gated(gates).to(dtype).requires_grad_(False), 5
    x = torch.randn(1, steps, 2, dtype=dtype)
    leaf = with_perturbation(RMSTensor.of(x, (-2, -1)), 0.0)
    with norm_sensitivity("within"):
        found = sensitivities(model(leaf), leaf).item() * math.sqrt(3 / x.numel())
    model.double()
    jacobian = torch.func.jacrev(lambda v: model(v[None])[0])(x[0].double()).flatten(1)
    assert found == pytest.approx(torch.linalg.matrix_norm(jacobian, 2).item(), rel=1e-5)


@pytest.mark.parametrize(("gates", "steps"), [(3, 4), (4, 2)])
def test_within_a_radius_steps_by_hand_are_little_more_than_their_steepest_jacobian(gates: int, steps: int):
    torch.manual_seed(seeded(1))
    model, radius = Gated(gates).double().requires_grad_(False), 0.01
    x = torch.randn(1, steps, 2, dtype=torch.float64)
    leaf = with_perturbation(RMSTensor(RMSTensor.of(x, (-2, -1)).norm_size + radius, backing=x, elem_dims=(-2, -1)), radius)
    with norm_sensitivity("within"):
        claimed = sensitivities(model(leaf), leaf).item() * math.sqrt(3 / x.numel())
    moves = torch.randn(100, steps, 2, dtype=torch.float64)
    points = x + moves * radius * math.sqrt(x[0].numel()) / moves.flatten(1).norm(dim=1)[:, None, None]
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(points).flatten(2)
    steepest = torch.linalg.matrix_norm(jacobians, 2).amax().item()
    assert steepest <= claimed <= 1.2 * steepest


@pytest.mark.parametrize("width", [0.0, 1e-10, 1e-8, 0.05, 4.0])
def test_what_is_nearly_linear_is_one_matrix_and_no_slope_leaves_it(width: float):
    """``B (D A x + x) - D A x`` with diagonals D between two numbers that are so far apart: the worst of them, drawn, is in its ellipsoid."""
    torch.manual_seed(seeded(2))
    a, b = torch.randn(2, 4, 4, dtype=torch.float64)
    low = torch.rand(4, dtype=torch.float64)
    root, minus = Root(torch.ones(())), Dense(-torch.eye(4, dtype=torch.float64))
    x = Vertex(root, 4, given=Ellipsoid.ball(4, 2.0))
    before = Vertex(root, 4, terms=((x, Dense(a)),))
    bent = Vertex(root, 4, terms=((before, None),), slopes=Slopes(low, low + width))
    y = Vertex(root, 4, terms=((Vertex(root, 4, terms=((bent, None), (x, None))), Dense(b)), (bent, minus)))
    assert (y.first is x) == (width < 1)
    d = torch.diag_embed(low + width * torch.randint(2, (64, 4)))
    matrices = b @ (d @ a + torch.eye(4, dtype=torch.float64)) - d @ a
    worst = 2 * torch.linalg.matrix_norm(matrices, 2).amax().item()
    assert worst * (1 - 1e-14) <= y.ellipsoid.length.item() <= worst * (1 + 1e-6 + 10 * width)


def test_it_grows_with_the_radius_to_the_bound_for_all_inputs():
    model = networks()["perceptron"].double()
    x = torch.randn(1, 6, dtype=torch.float64)
    with norm_sensitivity("composed"):
        given = with_perturbation(RMSTensor.of(x))
        everywhere = sensitivities(model(given), given).item() * math.sqrt(5 / 6)
    near, further, far = (within(model, x, r) for r in (0.0, 0.3, 1e6))
    assert near <= further * 1.01
    assert far == pytest.approx(everywhere, rel=0.02)
    assert near < 0.9 * far


def test_reports(tmp_path):
    model = networks()["perceptron"].double()
    jm, x = thunder.jit(model, transforms=[NormTransform()]), torch.randn(1, 6, dtype=torch.float64)
    report = norm_report(jm, RMSTensor.of(x), radius=0.1)
    assert (report.scope, report.radius) == ("within", 0.1)
    assert "within 0.1 of the data" in report.table(width=120)
    assert report.rows[-1].sensitivity * math.sqrt(5 / 6) == pytest.approx(within(model, x, 0.1 * math.sqrt(6)), rel=1e-6)
    report.save(tmp_path / "report")
    assert load_norm_report(tmp_path / "report").radius == 0.1
    assert norm_report(jm, RMSTensor.of(x), sensitivity="within", radius=0.1).rows[-1].sensitivity == report.rows[-1].sensitivity


@pytest.mark.parametrize("seed", range(3))
def test_parameters_of_a_report_are_no_reason_to_move(seed):
    """They have rates, and stay where they are: a result moves no further than with the same numbers as constants."""
    model = networks()["perceptron"].double()
    torch.manual_seed(seeded(seed))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    jm, x = thunder.jit(model, transforms=[NormTransform()]), torch.randn(1, 6, dtype=torch.float64)
    found = norm_report(jm, RMSTensor.of(x), radius=0.1).rows[-1].sensitivity * math.sqrt(5 / 6)
    assert found == pytest.approx(within(model, x, 0.1 * math.sqrt(6)), rel=1e-6)


def test_mistakes_are_refused():
    model, x = networks()["perceptron"], torch.randn(1, 6)
    jm = thunder.jit(model, transforms=[NormTransform()])
    for options, words in (
        ({"radius": -1.0}, "distance"),
        ({"sensitivity": "within"}, "needs a radius"),
        ({"sensitivity": "local", "radius": 0.1}, "within"),
        ({"radius": 0.1, "precision": torch.bfloat16}, "precision"),
    ):
        with pytest.raises(NormMismatchError, match=words):
            norm_report(jm, RMSTensor.of(x), **options)
    with pytest.raises(NormMismatchError, match="radius"):
        with_perturbation(RMSTensor.of(x), -1.0)
    with pytest.raises(NormMismatchError, match="within"):
        NormTransform(sensitivity="within")
    with pytest.raises(NormMismatchError, match="norm map"):
        norm_report(build_norm_map(model, x), radius=0.1)
