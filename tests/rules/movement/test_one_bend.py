"""The multipliers of one bend: against the theorem's own formula, another optimiser, ECLipsE-Fast and an adversary."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import crossed, seeded
from thunder_norm import L2Tensor, LipschitzMargin, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.core.ellipsoids import Dense, Ellipsoid
from thunder_norm.core.joint import _alone, _terms, smallest
from thunder_norm.core.kept import Bend, Sum
from thunder_norm.core.slopes import Slopes
from thunder_norm.errors import NormMismatchError

F64 = torch.float64
SLOPES = {"relu": (0.0, 1.0), "abs": (-1.0, 1.0), "leaky": (0.2, 1.0), "nearly linear": (0.9, 1.0), "falling": (-0.7, -0.1)}

KINDS = ("between matrices", "after a matrix", "residual")


def setting(seed: int, slopes: str, kind: str, size: int = 5, bent: int = 7, out: int = 4):
    """P, C, the matrix after the bend, the one beside it (or None) and the slopes of each entry."""
    torch.manual_seed(seeded(seed))
    a = torch.randn(size, size, dtype=F64)
    bent = size if kind == "between matrices" else bent
    c, b = torch.randn(bent, size, dtype=F64), torch.randn(out, bent, dtype=F64)
    c = torch.eye(size, dtype=F64) if kind == "between matrices" else c
    beside = torch.randn(out, size, dtype=F64) if kind == "residual" else None
    low, high = (torch.full((bent,), s, dtype=F64) for s in SLOPES[slopes])
    if seed % 2:  # of some entries the slopes are known better
        known = torch.rand(bent, dtype=F64) < 0.5
        low = torch.where(known, high, low)
    return a @ a.T, c, b, beside, low, high


def steps_of(c, b, beside, low, high):
    if beside is None and torch.equal(c, torch.eye(len(c), dtype=F64)):
        return [Bend(0, Slopes(low, high)), Sum(((1, Dense(b)),))]
    last = ((2, Dense(b)),) if beside is None else ((2, Dense(b)), (0, Dense(beside)))
    return [Sum(((0, Dense(c)),)), Bend(1, Slopes(low, high)), Sum(last)]


def by_the_theorem(p, c, b, beside, low, high, t) -> torch.Tensor:
    """``K blkdiag((P^-1 - C^T T C)^-1, T^-1) K^T`` with plain inverses."""
    m, h = (low + high) / 2, (high - low) / 2
    x = torch.linalg.inv(torch.linalg.inv(p) - c.T @ torch.diag(t) @ c)
    f, g = b @ (m[:, None] * c) + (0 if beside is None else beside), b * h
    return f @ x @ f.T + g @ torch.diag(1 / t) @ g.T


@pytest.mark.parametrize(("kind", "slopes", "seed"), crossed(KINDS, SLOPES, [0, 1]))
def test_what_is_computed_is_above_what_the_theorem_says(slopes: str, kind: str, seed: int):
    p, *rest = setting(seed, slopes, kind)
    base, steps = Ellipsoid.of(p), steps_of(*rest)
    alone = _alone(base, steps)
    assert alone is not None
    of, last = alone
    for count in (0, 2, 5):
        best = of.best(count)
        assert best is not None
        cov = of.covariance(best, _terms(base, steps, best.multipliers))
        assert cov is not None
        # in units of the ellipsoid and of the vectors' scales
        t = best.multipliers / (Dense(rest[0]).scale ** 2 * base.scale**2)
        exact = by_the_theorem(p, *rest, t)
        found = cov * (base.scale * last.scale) ** 2
        size = torch.linalg.eigvalsh(exact)[-1].item()
        least = torch.linalg.eigvalsh((found - exact) / size)[0].item()
        assert -1e-11 < least and (found - exact).abs().max().item() < 1e-4 * size


@pytest.mark.parametrize(("kind", "slopes", "seed"), crossed(KINDS, SLOPES, [0, 1]))
def test_nothing_leaves_the_ellipsoid(slopes: str, kind: str, seed: int):
    """An adversary chooses the vector and each entry's slope, so that y is as far outside as may be: ``y^T Q^-1 y <= 1``."""
    p, c, b, beside, low, high = setting(seed, slopes, kind)
    root = torch.linalg.cholesky(p)
    for count in (0, 2):
        with norm_sensitivity("composed", search_steps=count):
            e = smallest(Ellipsoid.of(p), steps_of(c, b, beside, low, high))
        inverse = torch.linalg.inv(e.cov * e.scale**2)
        u = torch.randn(64, len(p), dtype=F64, requires_grad=True)
        d = torch.randn(64, len(c), dtype=F64, requires_grad=True)
        optimizer = torch.optim.Adam([u, d], lr=0.05)
        largest = 0.0
        for _ in range(200):
            z = F.normalize(u, dim=-1) @ root.T
            y = ((low + (high - low) * d.sigmoid()) * (z @ c.T)) @ b.T + (0 if beside is None else z @ beside.T)
            outside = ((y @ inverse) * y).sum(-1)
            largest = max(largest, outside.max().item())
            optimizer.zero_grad()
            (-outside.sum()).backward()
            optimizer.step()
        assert 0.05 < largest <= 1


@pytest.mark.parametrize(("kind", "slopes"), crossed(KINDS, SLOPES))
def test_the_search_comes_near_the_best_multipliers_that_another_finds(slopes: str, kind: str):
    p, *rest = setting(0, slopes, kind)
    base, steps = Ellipsoid.of(p), steps_of(*rest)

    def value(q: torch.Tensor) -> torch.Tensor:
        return (q @ q).square().sum().log() / 8

    def found(count: int) -> float:
        with norm_sensitivity("composed", search_steps=count):
            e = smallest(base, steps)
        return value(e.cov * e.scale**2).item()

    c = rest[0]
    logs = torch.full((len(c),), -math.log(4 * torch.linalg.eigvalsh(c @ p @ c.T)[-1].item()), dtype=F64, requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=0.02)
    best = math.inf
    for _ in range(1500):
        t = logs.exp()
        if torch.linalg.eigvalsh(t.sqrt()[:, None] * (c @ p @ c.T) * t.sqrt())[-1].item() >= 1:
            logs.data -= 0.05
            continue
        now = value(by_the_theorem(p, *rest, t))
        best = min(best, now.item())
        optimizer.zero_grad()
        now.backward()
        optimizer.step()
    values = [found(count) for count in (0, 2, 30)]
    assert values[2] <= values[1] + 1e-6 and values[1] <= values[0] + 1e-6
    assert values[2] < best + 0.01
    assert values[0] - values[1] > 0.1 * (values[0] - best) - 0.01


def _fast(weights) -> float:
    q = weights[0] @ weights[0].T
    for w in weights[1:]:
        factor = 2 / torch.linalg.eigvalsh(q)[-1]
        q = w @ torch.linalg.inv(factor * torch.eye(len(q), dtype=F64) - factor**2 / 4 * q) @ w.T
    return torch.linalg.eigvalsh(q)[-1].sqrt().item()


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@pytest.mark.parametrize("shape", [(4, 20, 1), (6, 3, 6), (5, 12, 9), (3, 8, 8, 8, 2), (4, *[16] * 8, 4)])
def test_no_number_of_steps_is_looser_than_eclipse_fast(steps: int, shape: tuple[int, ...]):
    """Of two layers that is a theorem, as the shorter of both ellipsoids is taken; deeper it is what random nets show."""
    for seed in range(6):
        torch.manual_seed(seeded(seed))
        weights = [torch.randn(b, a, dtype=F64) / a**0.5 for a, b in zip(shape, shape[1:], strict=False)]
        x = with_perturbation(L2Tensor.of(torch.randn(2, shape[0], dtype=F64)))
        with norm_sensitivity("composed", search_steps=steps):
            y = x
            for w in weights[:-1]:
                y = F.relu(F.linear(y, w))
            y = F.linear(y, weights[-1])
        found = sensitivities(y, x).item() * (1.0 if isinstance(y, L2Tensor) else math.sqrt(shape[-1]))
        assert found <= _fast(weights) * (1 + 1e-4)


@pytest.mark.parametrize("steps", [-1, 1.5, True, "many"])
def test_a_number_of_steps_is_a_number(steps):
    with pytest.raises(NormMismatchError, match="search_steps must be"):
        with norm_sensitivity("composed", search_steps=steps):
            pass


def test_a_loss_and_a_report_take_the_number_of_steps_around_them():
    torch.manual_seed(seeded(0))
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3)
    )
    margin = LipschitzMargin(net, torch.randn(4, 6), 0.1)
    found = []
    for steps in (None, 0, 2, 8):
        with norm_sensitivity("global", search_steps=steps):
            found.append(margin.constants().sum().item())
    assert found[0] == found[2] and found[3] < found[2] < found[1]


def test_what_is_beyond_squares_of_numbers_is_that_many_times_as_long():
    torch.manual_seed(seeded(0))
    low, high, w = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    steps = [Bend(0, Slopes(low, high)), Sum(((1, Dense(w)),))]
    one, many = (smallest(Ellipsoid.ball(3, radius), steps).length.item() for radius in (1.0, 1e200))
    assert many / 1e200 == pytest.approx(one)
