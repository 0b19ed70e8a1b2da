"""Programs of torch.jit that traced programs call are what they are in eager mode, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import check_bounds
from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, ProfileTransform, SubclassTransform
import thunder


@torch.jit.script
def scaled(x: torch.Tensor, by: float = 2.0):
    return x * by + 1


@torch.jit.script
def squashed(x: torch.Tensor):
    if x.dim() > 1:
        return scaled(x).tanh()
    return scaled(x, 0.5)


@torch.jit.script
def total(xs: list[torch.Tensor]):
    out = xs[0]
    for x in xs[1:]:
        out = out + x
    return out


traced = torch.jit.trace(lambda x: x.sin() * 2, torch.zeros(3, 4))

PROGRAMS: dict[str, Callable] = {
    "a function": lambda x: squashed(x) * x,
    "a row": lambda x: squashed(x[0]),
    "by name": lambda x: scaled(x, by=3.0),
    "a list": lambda x: total([x, x * 2, squashed(x)]),
    "traced": lambda x: traced(x) + x,
    "of no input": lambda x: x + squashed(torch.ones(3, 4)),
}


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, ProfileTransform])
@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_of_torch_jit_are_the_functions_that_they_were_made_of(name, transform):
    torch.manual_seed(seeded(0))
    f, x = PROGRAMS[name], torch.randn(3, 4, requires_grad=True)
    jf = thunder.jit(f, transforms=[transform()])
    found, expected = jf(x), f(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_norms(name):
    torch.manual_seed(seeded(1))
    f, x = PROGRAMS[name], torch.randn(3, 4)
    found = thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x))
    torch.testing.assert_close(found.backing, f(x))
    check_bounds([found])


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x):
        return self.part(x)


@pytest.mark.parametrize("given", [torch.ones(2, 4), RMSTensor.of(torch.ones(2, 4))], ids=["plain", "norm"])
def test_modules_of_torch_jit_are_refused_with_the_line(given):
    with pytest.raises(UnsupportedOpError, match="compiled program of torch.jit") as error:
        thunder.jit(Holds(), transforms=[NormTransform()])(given)
    assert "test_scripted.py:" in str(error.value)
