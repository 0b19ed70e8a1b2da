"""What is known of the entries of plain tensors in a trace: by what made them, whatever values the next call has, and until they are written into."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, NormedTensor, normed
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder


class Averages(nn.Module):
    """A quotient that has a bound because the weights, of plain x, are not negative."""

    def __init__(self, weights):
        super().__init__()
        self.linear, self.weights = nn.Linear(4, 4), weights

    def forward(self, x):
        y = self.linear(x)
        return y / (y.exp() * self.weights(x) + 0.1)


def in_steps(x):
    n = x.new_zeros(x.shape)
    for _ in range(3):
        n = torch.sigmoid(x) * n + x.square().mean(-1, keepdim=True)
    return n.sqrt()


WEIGHTS = {
    "a mask": lambda x: (x > 0).float(),
    "a mask of another dtype": lambda x: (x > 0).to(torch.float64),
    "a mask as it is": lambda x: x > 0,
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 4),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "softmax": lambda x: x.softmax(-1),
    "softplus, cut and joined": lambda x: torch.cat(F.softplus(x).chunk(2, -1)[::-1], -1),
    "where": lambda x: torch.where(x > 0, x.relu(), 0.0),
    "rand": lambda x: torch.rand(x.shape),
    "full": lambda x: torch.full(x.shape, 0.5).relu(),
    "intervals": lambda x: torch.linspace(2.0, 6.0, 5)[1:] - torch.linspace(2.0, 6.0, 5)[:-1],
    "steps": in_steps,
    "a view of a square": lambda x: x.square().view(-1)[: x.numel()].view(x.shape),
}


def jitted(weights):
    torch.manual_seed(seeded(0))
    model = Averages(weights)
    return model, normed(thunder.jit(model, transforms=[NormTransform()]))


@pytest.mark.parametrize("name", WEIGHTS)
def test_quotients_by_what_is_kept_away_from_zero_have_bounds_that_hold_in_later_calls(name):
    """Refused before, as nothing was known of the entries of a plain tensor that depends on an input."""
    model, jm = jitted(WEIGHTS[name])
    for scale in (1.0, 30.0, 0.0):
        x = scale * torch.randn(3, 4)
        torch.manual_seed(seeded(1))
        expected = model(x)
        torch.manual_seed(seeded(1))
        y = jm(x)
        assert isinstance(y, NormedTensor) and math.isfinite(y.norm_size)
        assert actual_norm(y) <= y.norm_size * (1 + 1e-5)
        torch.testing.assert_close(y.backing, expected, rtol=1e-4, atol=1e-5)


def lowered(x):
    n = x.new_zeros(x.shape)
    n.sub_(1.0)
    return n


def lowered_by_a_view(x):
    n = (x > 0).float()
    n[:, :2].sub_(2.0)
    return n


def of_one_lowered(x):
    n = x.square()
    n -= 3.0
    return 2 * n


def lowered_under_another_name(x):
    n = x.square()
    n.type_as(x).neg_()
    return n * 1


def too_large_for_the_dtype(x):
    n = (x > 0).to(torch.int8) * 100
    return n + n


@pytest.mark.parametrize(
    "weights",
    [
        lowered,
        lowered_by_a_view,
        of_one_lowered,
        lowered_under_another_name,
        too_large_for_the_dtype,
        lambda x: (x.abs() * 30).to(torch.int8),
        lambda x: (x.abs() * 30).long().to(torch.int16).square(),
        lambda x: x.sigmoid().double().view(torch.int32).view(3, 4, 2)[..., 0],
        lambda x: x,
        lambda x: x.sin(),
        lambda x: 1 - x.exp(),
    ],
)
def test_what_may_be_negative_or_was_written_into_keeps_nothing_away_from_zero(weights):
    _, jm = jitted(weights)
    with pytest.raises(NormMismatchError, match="gives no lower bound on entries"):
        jm(torch.randn(3, 4))


def masked_mean(x, mask):
    return (x * mask).sum() / (mask.sum() + 1e-5)


def mean_of_rows(x, mask):
    rows = mask[:, 0].float()
    return (x.abs() * rows[:, None]).sum() / (rows.sum() + 1e-6) / x.shape[1]


@pytest.mark.parametrize("program", [masked_mean, mean_of_rows])
def test_an_epsilon_beside_a_constant_is_not_what_keeps_it_away_from_zero(program):
    """The norm of the quotient is that of the numerator over the constant at hand, in each call."""
    torch.manual_seed(seeded(0))
    x = torch.randn(4, 4)
    jitted = thunder.jit(program, transforms=[NormTransform()])
    for mask in (torch.ones(4, 4, dtype=torch.bool), torch.tensor([True, False, True, False])[:, None].expand(4, 4)):
        found = jitted(LinfTensor.of(x, elem_dims=()), mask)
        torch.testing.assert_close(found.backing, program(x, mask))
        assert actual_norm(found) <= found.norm_size <= 4 * x.abs().max()
