"""Where a function has no derivative, at a bound, ours is the one that the installed torch has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from thunder_norm.transforms import NormTransform, SubclassTransform, grad, jacrev, jvp, vjp, vmap
import thunder


def _compiled(function: Callable, transforms: list) -> Callable:
    jitted = thunder.jit(lambda x: function(x).sum(), transforms=transforms)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(jitted(y := x.clone().requires_grad_()), y)
        return found

    return gradient


CLAMPED = [
    lambda x: x.clamp(-1, 1),
    lambda x: torch.clamp(x, min=1.0),
    lambda x: torch.clamp(x, max=1),
    lambda x: x.clamp(torch.full_like(x, -1.0), torch.ones_like(x)),
    lambda x: x.clamp(1, -1),
    lambda x: x.clamp(1, 1),
    lambda x: (x * 1).clamp_(-1, 1),
    lambda x: torch.ops.aten.clamp.default(x, -1, 1),
    lambda x: x.clip(-1, 1),
    lambda x: x.clamp_min(1) + x.clamp_max(-1),
]
POWERS = [lambda x: x**0 + x**0.0 + torch.pow(x, 0) + x.sin() ** 1 + (x * 1).pow_(0)]
ACTIVATIONS = [
    lambda x: F.hardtanh(x) + F.relu6(6 * x) + F.hardswish(3 * x) + F.hardsigmoid(3 * x),
    lambda x: F.threshold(x, 1, 0) + F.relu(x - 1) + F.leaky_relu(x + 1) + F.softshrink(x, 1.0) + F.hardshrink(x, 1.0),
]


@pytest.mark.parametrize("clamped", [*CLAMPED, *POWERS, *ACTIVATIONS])
def test_derivatives_at_bounds_are_those_of_the_installed_torch(clamped: Callable):
    """Torch's own changed in 2.15; Thunder's have 0 at the bounds of clamp, 1 where there is no number, and NaN for ``0 ** 0``."""
    numbers = torch.tensor([-2.0, -1.0, 0.5, 1.0, 2.0, 0.0])
    x = numbers if clamped in ACTIVATIONS else torch.cat((numbers, torch.full((1,), torch.nan)))
    expected = torch.func.grad(lambda x: clamped(x).sum())(x)
    for gradient in (
        grad(lambda x: clamped(x).sum()),
        jacrev(lambda x: clamped(x).sum()),
        lambda x: vmap(grad(lambda x: clamped(x).sum()))(x[None])[0],
        lambda x: vjp(clamped, x)[1](torch.ones_like(x))[0],
        _compiled(clamped, [SubclassTransform()]),
        _compiled(clamped, [NormTransform()]),
    ):
        torch.testing.assert_close(gradient(x), expected, rtol=0, atol=0, equal_nan=True)
    moved = torch.func.jvp(clamped, (numbers,), (torch.ones(6),))[1]
    torch.testing.assert_close(jvp(clamped, (numbers,), (torch.ones(6),))[1], moved, rtol=0, atol=0)
