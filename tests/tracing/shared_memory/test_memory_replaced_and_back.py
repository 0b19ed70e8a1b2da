"""Weights whose ``.data`` is another while a program uses them, as compressed-tensors does in training: gradients are eager mode's, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class _Replaced(nn.Module):
    """A layer whose weight is rounded while it is used."""

    def __init__(self, use: Callable, back: Callable = lambda old: old):
        super().__init__()
        torch.manual_seed(seeded(0))
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
        self.use, self.back = use, back

    def forward(self, x):
        old = self.weight.data
        self.weight.data = (old * 8).round() / 8 + 0.25
        y = self.use(self, x)
        self.weight.data = self.back(old)
        return y


def _twice(m, x):
    return F.linear(F.linear(x, m.weight).sin(), m.weight.t())


_RIGHT = {
    "linear": lambda m, x: F.linear(x, m.weight),
    "linear with a bias": lambda m, x: F.linear(x, m.weight, m.bias).relu(),
    "a product with a view": lambda m, x: x @ m.weight.t(),
    "matmul": lambda m, x: torch.matmul(x, m.weight.mT),
    "a row": lambda m, x: F.layer_norm(x, (3,), m.weight[0]),
    "twice": _twice,
}
# In eager mode autograd keeps the parameter itself, and finds in it what is there when the backward runs.
_REFUSED = {
    "a factor": lambda m, x: x.unsqueeze(-2) * m.weight,
    "a product": lambda m, x: F.linear(x, m.weight) @ m.weight,
    "a power": lambda m, x: F.linear(x, m.weight**2),
}


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize("back", [lambda old: old, lambda old: old.clone(), lambda old: old * 0.9], ids=["old", "clone", "other"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("name", _RIGHT)
def test_a_backward_computes_with_what_was_used(name: str, shape: tuple[int, ...], back: Callable, transform: type):
    module = _Replaced(_RIGHT[name], back)
    jitted = thunder.jit(copy.deepcopy(module), transforms=[transform()])
    for seed in range(2):
        torch.manual_seed(seeded(seed))
        given = [x.clone().requires_grad_() for x in torch.randn(1, *shape).expand(2, *shape)]
        results = [call(x) for call, x in zip((jitted, module), given, strict=True)]
        torch.testing.assert_close(*results)
        for y in results:
            y.square().sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad)
    for (_, p), (_, q) in zip(jitted.named_parameters(), module.named_parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach())
        torch.testing.assert_close(p.grad, q.grad)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


@pytest.mark.parametrize("name", _REFUSED)
def test_what_autograd_keeps_as_the_parameter_is_refused(name: str):
    module = _Replaced(_REFUSED[name])
    before = module.weight.detach().clone()
    with pytest.raises(UnsupportedOpError, match=".data is set of a tensor that a backward needs"):
        thunder.jit(module, transforms=[SubclassTransform()])(torch.ones(2, 3, requires_grad=True))
    torch.testing.assert_close(module.weight.detach(), before)


def test_memory_that_was_given_and_is_another_since_is_refused():
    def program(m, x):
        old = m.weight.data
        m.weight.data = old * 2
        y = F.linear(x, m.weight)
        m.weight.data = old
        z = F.linear(x, m.weight)
        m.weight.data = old * 3
        return y * z

    module = _Replaced(_twice)
    with pytest.raises(UnsupportedOpError, match=".data is set of a tensor that a backward needs"):
        thunder.jit(program, transforms=[SubclassTransform()])(module, torch.ones(2, 3, requires_grad=True))
