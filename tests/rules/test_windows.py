"""What is 0 outside an interval of x: B-splines have bounds where their arguments have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.audit import Ball, Case
from thunder_norm.modular import ModularNorm
from thunder_norm.rules.known_ranges import windows
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
KNOTS = {"even": torch.linspace(-2.2, 2.2, 12, dtype=D), "uneven": torch.tensor([-3, -2.5, -1, -0.9, 0, 0.3, 1, 2, 4], dtype=D)}


class Splines(nn.Module):
    """The B-splines of an order at each entry, by the recursion of Cox and de Boor."""

    def __init__(self, knots: torch.Tensor, order: int, is_right_open: bool = True):
        super().__init__()
        self.register_buffer("grid", knots.expand(3, -1).contiguous())
        self.order, self.is_right_open = order, is_right_open

    def forward(self, x):
        x, grid = x.unsqueeze(-1), self.grid
        if self.is_right_open:
            bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        else:
            bases = torch.logical_and(grid[:, :-1] < x, grid[:, 1:] >= x).double()
        for k in range(1, self.order + 1):
            rising = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            falling = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k])
            bases = rising * bases[:, :, :-1] + falling * bases[:, :, 1:]
        return bases


def largest_and_steepest(splines: Splines) -> tuple[float, float]:
    """Of the entries and their slopes at many points, by autograd."""
    x = torch.linspace(-5, 5, 4001, dtype=D)[:, None].expand(-1, 3).contiguous()
    y, slopes = torch.func.jvp(splines, (x,), (torch.ones_like(x),))
    return y.abs().max().item(), slopes.abs().max().item()


def normed_input(n: float) -> RMSTensor:
    t = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(seeded(0)))
    return RMSTensor(n, backing=t * (n / 5), perturbation_size=1.0, elem_dims=(-1,))


@pytest.mark.parametrize("is_right_open", [True, False])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("knots", KNOTS)
def test_splines_are_as_large_wherever_they_are_asked_for(knots, order, is_right_open):
    splines = Splines(KNOTS[knots], order, is_right_open)
    largest, steepest = largest_and_steepest(splines)
    jitted = thunder.jit(splines, transforms=[NormTransform()])
    for n in (1.0, 1e4):
        y = jitted(normed_input(n))
        torch.testing.assert_close(y.backing, splines(normed_input(n).backing))
        assert largest <= y.norm_size.item() <= 2**order
        assert steepest <= y.perturbation_size.item() * (1 + 1e-9)
        assert y.perturbation_size.item() <= 8**order * steepest


def told(func, *args):
    """An operation on indicators, of which an eager call of no module tells nobody."""
    result = func(*args)
    windows.follow(func, args, {}, result)
    return result


def hats(x):
    x, knots = x.unsqueeze(-1), torch.tensor([-1.0, -0.5, 1.0, 1.25], dtype=D)
    inside = told(torch.logical_and, x >= knots[:-1], x < knots[1:])
    bases = told(torch.Tensor.to, inside, D)
    rising, falling = (x - knots[:-2]) / (knots[1:-1] - knots[:-2]), (knots[2:] - x) / (knots[2:] - knots[1:-1])
    first, second = (told(torch.Tensor.__getitem__, bases, (..., part)) for part in (slice(None, -1), slice(1, None)))
    return rising * first + falling * second


CASES = [
    Case(f"hats within {n}", hats, (Ball("x", RMSTensor, (2, 3), n),), 0.0, {"steps": 12, "restarts": 4}) for n in (0.7, 30.0)
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_of_hats_holds(case):
    case.check(seeded())
    assert hats(normed_input(30.0)).norm_size == 2


class Layer(nn.Module):
    """A layer of a Kolmogorov-Arnold network: a linear function of the splines."""

    def __init__(self, knots: torch.Tensor):
        super().__init__()
        self.splines, self.weight = Splines(knots, 3), nn.Parameter(torch.randn(3, 3 * (len(knots) - 4), dtype=D) / 5)

    def forward(self, x):
        return self.splines(x).flatten(1) @ self.weight.mT


def test_targets_of_layers_of_splines_do_not_vanish_one_after_the_other():
    torch.manual_seed(seeded())
    model = nn.Sequential(*(Layer(KNOTS["even"]) for _ in range(3)))
    norm = ModularNorm(model, torch.randn(4, 3, dtype=D), mode="typical")
    assert min(norm.targets.values()) > 1e-7


def test_what_is_added_to_splines_and_other_functions_of_x_is_not_taken_for_one():
    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("grid", torch.tensor([[-1.0, 0.0, 1.0]], dtype=D))
            self.shift = nn.Parameter(torch.zeros(2, dtype=D))

        def forward(self, x, z):
            x, z, grid = x.unsqueeze(-1), z.unsqueeze(-1), self.grid
            bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
            half_open = (x >= grid[:, :-1]).to(x.dtype)
            moved = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype).flip(1)
            return z * bases, (x - grid[:, 1:]) * half_open, x * moved, (x - self.shift) * bases

    model, n = Others(), 50.0
    x = torch.full((2, 3), 0.5, dtype=D)
    x[:, 0] = n
    z = torch.full((2, 3), n, dtype=D)
    balls = [RMSTensor(n, backing=t, elem_dims=(-1,)) for t in (x, z)]
    found = thunder.jit(model, transforms=[NormTransform()])(*balls)
    for y in found:
        assert y.backing.square().mean(1).sqrt().max() <= y.norm_size * (1 + 1e-9)
    assert found[0].norm_size >= n


def test_an_indicator_that_is_written_into_is_none_any_more():
    class Written(nn.Module):
        def forward(self, x):
            low, high = torch.tensor([-1.0], dtype=D), torch.tensor([1.0], dtype=D)
            inside = ((x >= low) & (x < high)).to(x.dtype)
            inside.fill_(1.0)
            return x * inside

    y = thunder.jit(Written(), transforms=[NormTransform()])(normed_input(100.0))
    assert y.norm_size >= 100
    norm = ModularNorm(nn.Sequential(nn.Linear(3, 3, dtype=D), Written()), torch.randn(2, 3, dtype=D))
    assert min(norm.targets.values()) > 0


@pytest.mark.parametrize("changed", ["an end", "a constant of the affine function"])
def test_constants_that_change_say_nothing_of_what_they_were(changed):
    class Changed(nn.Module):
        def forward(self, x):
            low, high, shift = (torch.tensor([c], dtype=D) for c in (-90.0, 90.0, 0.0))
            inside = told(torch.Tensor.to, told(torch.logical_and, x >= low, x < high), D)
            moved = x + shift
            if changed == "an end":
                low.fill_(-1.0), high.fill_(1.0)
            else:
                shift.fill_(-89.0), low.fill_(88.0)
            return moved * inside

    x = torch.full((2, 3), 80.0, dtype=D)
    for call in (Changed(), thunder.jit(Changed(), transforms=[NormTransform()])):
        assert call(RMSTensor(80.0, backing=x, elem_dims=(-1,))).norm_size >= 80
