"""Spiking networks: a step with the gradient of something smooth, as a `torch.autograd.Function` and straight through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm.errors import VanishingTargetWarning
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.transforms import NormTransform
import thunder


class Spike(torch.autograd.Function):
    """1 where v is positive, with the derivative of an arc tangent."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).float()

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g / (1 + (math.pi * v) ** 2)


def straight_through(v):
    soft = torch.atan(math.pi * v) / math.pi
    return soft + ((v > 0).float() - soft).detach()


class Spiking(nn.Module):
    """Two layers of neurons that leak, fire and are reset; the mean of what is read from them."""

    def __init__(self, spike):
        super().__init__()
        self.spike, self.first, self.second, self.last = spike, nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        v, read = torch.zeros(x.shape[0], 16), []
        for _ in range(3):
            v = 0.9 * v + self.first(x)
            fired = self.spike(v - 1)
            v = v - fired
            read.append(self.last(self.spike(self.second(fired))))
        return torch.stack(read).mean(0)


def models():
    for spike in (Spike.apply, straight_through):
        torch.manual_seed(seeded())
        yield Spiking(spike)


def test_both_spellings_have_eagers_values_and_gradients():
    x = torch.randn(5, 8)
    gradients = []
    for model in models():
        jitted = thunder.jit(model, transforms=[NormTransform()])
        for call in (model, jitted):
            y = call(x)
            gradients.append((y.detach(), *torch.autograd.grad(y.square().mean(), list(model.parameters()))))
    for others in gradients[1:]:
        for found, expected in zip(others, gradients[0], strict=True):
            torch.testing.assert_close(found, expected)


def test_a_step_with_a_backward_of_its_own_leaves_what_is_before_it_unreached_and_the_warning_says_what_to_write():
    surrogate, through = models()
    x = torch.randn(5, 8)
    with pytest.warns(VanishingTargetWarning, match="soft") as said:
        norm = ModularNorm(surrogate, x, mode="typical")
    assert len(said) == 1 and norm.unreached == ("first.weight", "first.bias", "second.weight", "second.bias")
    norm = ModularNorm(through, x, mode="typical")
    assert not norm.unreached and min(norm.targets.values()) > 1e-4
    optimizer, before = ModularOptimizer(norm, lr=0.1), through.first.weight.detach().clone()
    target, losses = torch.randn(5, 4), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (through(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not torch.equal(before, through.first.weight)
