"""The operation that a warning of vanishing targets names: the one that loses most, wherever it stands in the program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thunder_norm.errors import NormMismatchError, VanishingTargetWarning
from thunder_norm.modular import ModularNorm

X = torch.randn(3, 4)


class Sided(nn.Module):
    """What is lost is lost in `normalize`; a branch that hardly counts starts, or ends, right beside it in time."""

    def __init__(self, order: str):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.order = order

    def normalized(self, x):
        return nn.functional.normalize(x, dim=-1, eps=1e-9)

    def forward(self, x):
        x = self.a(x)
        if self.order == "branch first":
            side = torch.tanh(self.c(x)) * 1e-12
            return self.b(self.normalized(x)) + side
        y = self.normalized(x)
        side = torch.tanh(self.c(x)) * 1e-12
        return self.b(y) + side


@pytest.mark.parametrize("order", ["branch first", "branch last"])
def test_a_branch_that_hardly_counts_is_not_what_is_lost_in(order):
    with pytest.warns(VanishingTargetWarning) as said:
        ModularNorm(Sided(order), X)
    text = str(said[0].message)
    assert "torch.nn.functional.normalize, which moves" in text and "torch.tanh" not in text
    assert "nn.functional.normalize(x, dim=-1, eps=1e-9)" in text


class Skipping(nn.Module):
    """A residual branch: the sum hands on what the branch loses, and loses nothing."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        return x + torch.relu(x * 3e7)


class Padding(Skipping):
    """Rows of zeros in front, which nothing moves: no operation is behind them (DeepSeek-V4's empty blocks)."""

    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y.new_zeros(2, 4), y])


@pytest.mark.parametrize("mode", ["bound", "typical", "modula"])
def test_what_comes_from_nothing_loses_nothing(mode):
    with pytest.warns(VanishingTargetWarning, match=r"torch\.mul, which moves 3e\+07 times as far"):
        ModularNorm(Padding(), X, mode=mode)


@pytest.mark.parametrize("mode", ["bound", "typical", "modula"])
def test_a_sum_is_not_what_its_terms_lose(mode):
    with pytest.warns(VanishingTargetWarning, match=r"torch\.mul, which moves 3e\+07 times as far"):
        ModularNorm(Skipping(), X, mode=mode)


class Growing(nn.Module):
    """Values that grow until they are no numbers: what they multiply moves without a bound."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x) * 2
        for _ in range(12):
            y = y.square()
        return torch.relu(y)


@pytest.mark.parametrize("mode", ["bound", "typical"])
def test_what_has_no_bound_is_said_with_its_operation(mode):
    with pytest.raises(NormMismatchError) as said:
        ModularNorm(Growing(), X, mode=mode)
    text = str(said.value)
    assert "'a.weight'" in text and "torch.square, which moves without a bound" in text and "y = y.square()" in text
    assert ("mode='typical'" in text) == (mode == "bound")
