"""Functions with a cache that return tensors, in traced programs: masks, grids, tables of rotary embeddings."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, build_norm_map, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


@functools.lru_cache
def causal(n, device):
    return torch.tril(torch.ones(n, n, device=device))


@functools.cache
def rotary(n, width, base=10000.0):
    angles = torch.arange(n)[:, None] * base ** (-torch.arange(0, width, 2) / width)
    return angles.cos(), angles.sin()


@functools.cache
def doubled(t):
    return t * 2


@functools.lru_cache
def noise(n):
    return torch.randn(n)


@functools.lru_cache
def count(n):
    return n + 1


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    @functools.lru_cache(maxsize=4)  # noqa: B019 - as models have it
    def mask(self, n):
        return torch.triu(torch.full((n, n), -1e9), 1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 2 + self.mask(x.shape[-2])).softmax(-1) @ v


PROGRAMS = {
    "a mask": lambda x: x @ causal(4, x.device),
    "two tables": lambda x: x[..., :2] * rotary(3, 4)[0] + rotary(3, 4, base=10.0)[1],
    "of a tensor": lambda x: doubled(x) + 1,
    "of a number": lambda x: x * count(3),
    "a method": Attention(),
}


@pytest.mark.parametrize("transform", [NormTransform, CheckpointTransform, SubclassTransform])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_eagers(name, transform):
    torch.manual_seed(seeded(0))
    jitted = thunder.jit(PROGRAMS[name], transforms=[transform()])
    for factor in (1, 2):
        x = (torch.randn(3, 4) * factor).requires_grad_()
        found, expected = jitted(x), PROGRAMS[name](x)
        torch.testing.assert_close(found, expected)
        (g,) = torch.autograd.grad(found.square().sum(), x)
        torch.testing.assert_close(g, torch.autograd.grad(PROGRAMS[name](x * 1).square().sum(), x)[0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_norms_bound_what_comes_out(name):
    torch.manual_seed(seeded(0))
    found = normed(thunder.jit(PROGRAMS[name], transforms=[NormTransform()]))(RMSTensor.of(torch.randn(3, 4)))
    assert actual_norm(found) <= found.norm_size * (1 + 1e-6)
    assert build_norm_map(PROGRAMS[name], torch.empty(3, 4))(RMSTensor(1.0)).norm_size > 0


def test_one_that_draws_numbers_is_refused():
    with pytest.raises(UnsupportedOpError, match="draws random numbers"):
        thunder.jit(lambda x: x + noise(4), transforms=[NormTransform()])(torch.ones(4))


@pytest.mark.parametrize("call", [lambda f: f(2), lambda f: f(n=2), lambda f: f(2, by=3), lambda f: f(n=2, by="unread")])
def test_what_it_returns_is_looked_at_in_each_call(call):
    """It is called as the program calls it, and with nothing else."""
    table = {1: 5.0, 3: 7.0, "unread": 9.0}

    @functools.lru_cache
    def cached(n, by=1):
        return table[by] * n

    jitted = thunder.jit(lambda x: x * call(cached), transforms=[SubclassTransform()])
    x = torch.ones(2)
    for change in ({}, {}, dict.fromkeys(table, 11.0), {"other": 1.0}):
        table |= change
        cached.cache_clear()
        found, filled = jitted(x), cached.cache_info().currsize
        cached.cache_clear()
        assert torch.equal(found, x * call(cached))
        assert filled == cached.cache_info().currsize
    assert thunder.cache_misses(jitted) == 2


@functools.lru_cache
def _ramp(n):
    made = torch.zeros(n)
    made[1:] = 2.0
    return {"ramp": made.add_(1), "others": [torch.ones(n)]}


def _filled(x):
    with torch.no_grad():
        _ramp(4)["ramp"].fill_(3.0)
    return x * 2


def _added(x):
    ramp = _ramp(4)["ramp"]
    ramp += 1
    return x * ramp


def _set(x):
    _ramp(4)["others"][0][1:] = 5.0
    return x * 2


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("f", [_added, _set, _filled, lambda x: _ramp(4)["ramp"].view(2, 2)[0].mul_(x.detach()[:2]).sum() * x])
def test_writes_into_what_a_cache_keeps_are_refused(f, requires_grad):
    """In eager mode each call finds there what those before have written."""
    with pytest.raises(UnsupportedOpError, match=r"writes into what a function with a cache(.|\n)*test_cached_calls.py"):
        thunder.jit(f, transforms=[SubclassTransform()])(torch.ones(4, requires_grad=requires_grad))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_writes_into_copies_of_what_a_cache_keeps_are_not(requires_grad):
    def f(x):
        ramp = _ramp(4)["ramp"].clone()
        ramp += x
        made = x * 2
        made[1:] = _ramp(4)["ramp"][1:]
        return ramp * _ramp(4)["ramp"], made.add_(_ramp(4)["others"][0])

    x = torch.tensor([1.0, -2.0, 3.0, 0.5], requires_grad=requires_grad)
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        torch.testing.assert_close(jitted(x), f(x))
