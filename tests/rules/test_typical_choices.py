"""Typically a choice between tensors that move moves as they do on average: loops that choose in each step (bisections) stay as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.test_matrices import assert_reported
from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_mode
from thunder_norm.modular import ModularNorm

D = torch.float64


@pytest.mark.parametrize("choose", [torch.maximum, torch.minimum, lambda x, y: torch.where(x > y, x, y)])
@pytest.mark.parametrize("together", [True, False])
def test_a_choice_moves_as_what_it_chooses_from(choose, together):
    generator = torch.Generator().manual_seed(seeded(0))
    x, y, dx, dy = (torch.randn(4000, 4, dtype=D, generator=generator) for _ in range(4))
    dy = dx if together else dy
    moved = (choose(x + 1e-6 * dx, y + 1e-6 * dy) - choose(x, y)).square().mean().sqrt().item() / 1e-6
    with norm_mode("typical"):
        both = [RMSTensor(1.0, backing=t[:2], perturbation_size=1.0) for t in (x, y)]
        one = [both[0], RMSTensor(1.0, backing=y[:2])]
        claims = choose(*both).perturbation_size, choose(*one).perturbation_size
    assert claims[0].item() == pytest.approx(moved, rel=0.05)
    alone = (choose(x + 1e-6 * dx, y) - choose(x, y)).square().mean().sqrt().item() / 1e-6
    assert claims[1].item() == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("add", [torch.logaddexp, torch.logaddexp2])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_a_sum_of_exponentials_moves_as_its_logarithms_do_on_average(add, size):
    generator = torch.Generator().manual_seed(seeded(0))
    x, y, dx = (torch.randn(4000, 4, dtype=D, generator=generator) * n for n in (size, size, 1.0))
    with norm_mode("typical"):
        moving = [RMSTensor(size, backing=t[:2], perturbation_size=1.0) for t in (x, y)]
        together, alone = add(*moving), add(moving[0], RMSTensor(size, backing=y[:2]))
    slopes = torch.func.jvp(lambda x: add(x, y), (x,), (torch.ones_like(x),))[1]
    both = torch.func.jvp(add, (x, y), (dx, dx))[1].square().mean().sqrt().item()
    assert together.perturbation_size.item() == pytest.approx(both, rel=0.05)
    assert 0.7 * alone.perturbation_size < slopes.square().mean().sqrt() < 1.01 * alone.perturbation_size


class Transducer(nn.Module):
    """The loss of an RNN transducer: a sum over paths, step by step."""

    def __init__(self):
        super().__init__()
        self.inputs, self.labels, self.out = nn.Linear(8, 12), nn.Embedding(6, 12), nn.Linear(12, 6)

    def forward(self, x, labels):
        joint = torch.tanh(self.inputs(x)[:, :, None] + self.labels(F.pad(labels, (1, 0)))[:, None])
        logs = self.out(joint).log_softmax(-1)
        blank = logs[..., 0]
        label = logs[:, :, :-1].gather(-1, labels[:, None, :, None].expand(-1, x.shape[1], -1, -1)).squeeze(-1)
        alpha = F.pad(label[:, 0].cumsum(-1), (1, 0))
        for t in range(1, x.shape[1]):
            new = [alpha[:, 0] + blank[:, t - 1, 0]]
            for u in range(1, alpha.shape[1]):
                new.append(torch.logaddexp(alpha[:, u] + blank[:, t - 1, u], new[-1] + label[:, t, u - 1]))
            alpha = torch.stack(new, 1)
        return logs, -(alpha[:, -1] + blank[:, -1, -1]).mean()


def test_steps_along_paths_do_not_vanish():
    torch.manual_seed(seeded(0))
    norm = ModularNorm(Transducer(), torch.randn(2, 6, 8), torch.randint(1, 6, (2, 3)), mode="typical")
    assert min(norm.targets.values()) > 1e-6


class Entmax(nn.Module):
    """Peters et al.'s attention: the threshold by twenty bisections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = (q @ k.mT) / 8**0.5 * 0.5
        largest = x.amax(-1, keepdim=True)
        low, step = largest - 1, 1 - x.shape[-1] ** -0.5
        at_low = (x - low).clamp(min=0).square().sum(-1, keepdim=True) - 1
        for _ in range(20):
            step = step / 2
            p = (x - low - step).clamp(min=0).square()
            low = torch.where((p.sum(-1, keepdim=True) - 1) * at_low >= 0, low + step, low)
        return self.out(p / p.sum(-1, keepdim=True) @ v)


def test_steps_before_a_bisection_do_not_vanish():
    torch.manual_seed(seeded(0))
    norm = ModularNorm(Entmax(), torch.randn(2, 6, 8), mode="typical")
    assert min(norm.targets.values()) > 1e-3


class Smoothed(nn.Module):
    """Powers of a parameter by another, as per-channel energy normalization has them."""

    def __init__(self):
        super().__init__()
        self.offset, self.root = nn.Parameter(torch.full((8,), 2.0)), nn.Parameter(torch.full((8,), 2.0))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x).square()
        return (x + self.offset) ** (1 / self.root) - self.offset ** (1 / self.root)


def test_a_parameter_to_the_power_of_another_is_typical():
    torch.manual_seed(seeded(0))
    model, x = Smoothed(), torch.randn(3, 8)
    assert_reported(model, x)
    assert min(ModularNorm(model, x, mode="typical").targets.values()) > 1e-3


class Spline(nn.Module):
    """The knots of a spline flow (Durkan et al.): running sums of a softmax, which end where the interval does."""

    def __init__(self):
        super().__init__()
        self.widths = nn.Linear(8, 40)

    def forward(self, x):
        widths = 1e-3 + (1 - 8e-3) * self.widths(x).view(-1, 5, 8).softmax(-1)
        return 6 * widths.cumsum(-1) - 3


def test_running_sums_of_shares_are_no_larger_than_one():
    torch.manual_seed(seeded(0))
    model, x = Spline(), torch.randn(4, 8)
    for mode in ("bound", "typical"):
        norm = ModularNorm(model, x, mode=mode)
        assert norm.outputs.norm_size.item() <= 3 * (1 + 1e-9) and min(norm.targets.values()) > 1e-3
    with pytest.raises(AssertionError):  # of numbers of both signs they may be
        assert RMSTensor.of(torch.ones(4)).cumsum(-1).norm_size.item() <= 1
