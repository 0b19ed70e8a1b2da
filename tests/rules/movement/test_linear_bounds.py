"""Linear bounds of movements away from the data: lines beside functions, an adversary on whole networks, CROWN by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks import certified
from tests.rules.movement.test_composed_within import OPTIONS
from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, certified_radii, norm_sensitivity, with_perturbation
from thunder_norm.core import linear_bounds
from thunder_norm.core.composed import spread_of
from thunder_norm.core.local import from_data
from thunder_norm.core.slopes import Slopes
from thunder_norm.rules.entrywise import slopes_within

F64 = torch.float64
ACTIVATIONS = [F.relu, F.leaky_relu, F.gelu, torch.tanh, torch.abs, F.softplus, torch.sin, F.hardswish]


@pytest.mark.parametrize("op", slopes_within.functions(), ids=lambda op: op.__name__)
def test_functions_are_between_their_lines(op):
    generator = torch.Generator().manual_seed(seeded(11))
    n = 300
    scale = torch.tensor([0.01, 0.3, 3.0, 30.0], dtype=F64)[torch.randint(4, (n,), generator=generator)]
    middle = torch.randn(n, generator=generator, dtype=F64) * scale
    down, up = torch.rand(2, n, generator=generator, dtype=F64) * scale * (torch.rand(2, n, generator=generator) > 0.1)
    off = 1e-3 * torch.rand(n, generator=generator, dtype=F64) * (torch.rand(n, generator=generator) > 0.5)
    for given in OPTIONS.get(op, [{}]):
        away = slopes_within.chords(op, given, middle, off, down, up)
        assert away is not None
        low, low_at, high, high_at = linear_bounds._lines(Slopes(*away.slopes, away), torch.maximum(down, up))
        for share in (-1.0, 0.0, 1.0):  # points that the interval may be about
            c = middle + share * off
            d = -down + (down + up) * torch.linspace(0, 1, 300, dtype=F64)[:, None]
            moved, rounding = op(c + d, **given) - op(c, **given), 1e-10 * (1 + middle.abs() + down + up)
            assert (moved >= low * d + low_at - rounding).all() and (moved <= high * d + high_at + rounding).all()


def test_of_a_relu_they_are_those_of_crown():
    c, r = torch.tensor([0.5, -0.5, 2.0, -2.0, 0.1], dtype=F64), torch.ones(5, dtype=F64)
    away = slopes_within.chords(F.relu, {}, c, c * 0, r, r)
    assert away is not None
    low, low_at, high, high_at = linear_bounds._lines(Slopes(*away.slopes, away), r)
    # through (-0.5, 0) and (1.5, 1.5), the entry itself below; 0 below where more than half of the interval is negative
    assert high.tolist() == pytest.approx([0.75, 0.25, 1, 0, 0.55]) and low.tolist() == pytest.approx([1, 0, 1, 0, 1], abs=1e-9)
    assert (c.relu() + high_at).tolist() == pytest.approx([0.75, 0.25, 2, 0, 0.55], abs=1e-9)
    assert low_at.tolist() == pytest.approx([0] * 5, abs=1e-9)


def network(seed: int):
    """A few layers, with residuals, gates by fixed numbers and entries taken twice, of random activations and scales."""
    generator = torch.Generator().manual_seed(seeded(seed))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    def number(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    layers = []
    width = 6
    for _ in range(2 + number(3)):
        kind, out = number(3), 4 + number(8)
        size = 10.0 ** (number(3) - 1)
        w = normal(width if kind else out, width) / math.sqrt(width) * size
        layers.append((kind, w, normal(len(w)) * size, ACTIVATIONS[number(len(ACTIVATIONS))], normal(len(w))))
        width = len(w)

    def f(x: torch.Tensor) -> torch.Tensor:
        for kind, w, b, act, gate in layers:
            y = act(F.linear(x, w, b))
            x = y if kind == 0 else x + y * gate if kind == 1 else torch.flip(x, (-1,)) - 0.5 * y
        return x

    return f


@pytest.mark.parametrize(("seed", "radius"), crossed(range(16), [1e-3, 0.3, 5.0]))
def test_no_adversary_gets_further(seed: int, radius: float):
    f = network(seed)
    generator = torch.Generator().manual_seed(seeded(seed + 100))
    point = torch.randn(1, 6, generator=generator, dtype=F64)
    r = radius / math.sqrt(6)
    x = with_perturbation(RMSTensor._wrap(point, RMSTensor.of(point).norm_size + r, None, (-1,)), r)
    with norm_sensitivity("within"), from_data():
        y = f(x)
        spread = spread_of(y)
    assert spread is not None
    rows = torch.randn(5, y.shape[-1], generator=generator, dtype=F64)
    found = [linear_bounds.least(v, rows) for v in spread.parts]
    if any(t is None for t in found):  # nothing is bent there
        return
    claimed = sum(t for t in found if t is not None)
    d = torch.randn(5, 40, 6, generator=generator, dtype=F64).requires_grad_()
    optimizer, least = torch.optim.Adam([d], lr=0.1), torch.zeros(5, dtype=F64)
    for _ in range(30):
        at = point + d * (radius / d.norm(dim=-1, keepdim=True)).clamp(max=1.0)
        values = ((f(at) - f(point)) * rows[:, None]).sum(-1)
        least = torch.minimum(least, values.detach().amin(1))
        optimizer.zero_grad()
        values.sum().backward()
        optimizer.step()
    assert (least >= claimed - 1e-9 * (1 + claimed.abs())).all()


def test_certified_radii_of_deep_nets_are_at_least_those_of_crown():
    torch.manual_seed(seeded(2))
    layers = [torch.nn.Linear(8, 16), *[torch.nn.Linear(16, 16) for _ in range(3)], torch.nn.Linear(16, 3)]
    net = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())][:-1]).double()
    x = torch.randn(2, 8, dtype=F64)
    target = net(x).argmax(-1)
    weights = [(m.weight.detach(), m.bias.detach()) for m in layers]
    by_hand = certified._each(weights, x, target, certified.crown)
    assert (certified_radii(net, x, target) >= by_hand * 0.98).all()
