"""Inputs that are views of one storage, in programs that write something in place: as eager torch, or refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder


def _jit(function):
    return thunder.jit(function, transforms=[NormTransform()])


def _halves():
    a = torch.arange(8.0)
    return a[:4], a[4:]


def _interleaved():
    a = torch.arange(8.0).view(4, 2)
    return a[:, 0], a[:, 1]


def _twice():
    a = torch.arange(4.0)
    return a, a


def _views():
    a = torch.arange(4.0)
    return a[:], a[:]


def _reshaped():
    a = torch.arange(4.0)
    return a, a.view(2, 2)


def _overlapping():
    a = torch.arange(6.0)
    return a[:4], a[2:]


def _transposed():
    a = torch.arange(4.0).view(2, 2)
    return a, a.T


def _elsewhere(k, v):
    return k + torch.zeros(1).add_(1.0), v * 2


def _first(k, v):
    k.add_(1.0)
    return k * 2, v * 2


def _first_through_view(k, v):
    k.view(-1)[1:].mul_(3.0)
    return k * 2, v * 2


def _check(function, make):
    mine, theirs = make(), make()
    expected, found = function(*theirs), _jit(function)(*mine)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("make", [_halves, _interleaved, _twice, _views, _reshaped, _overlapping, _transposed])
def test_something_else_is_written(make):
    _check(_elsewhere, make)


@pytest.mark.parametrize("make", [_halves, _interleaved, _twice, _views, _reshaped])
def test_one_of_them_is_written(make):
    _check(_first, make)


@pytest.mark.parametrize("make", [_halves, _twice, _views])
def test_one_of_them_is_written_through_a_view(make):
    _check(_first_through_view, make)


@pytest.mark.parametrize("make", [_overlapping, _transposed])
def test_some_elements_of_another_are_written(make):
    with pytest.raises(UnsupportedOpError, match="shares memory with another input"):
        _jit(_first)(*make())


def test_inputs_of_other_kinds_stand_before_them():
    _check(lambda n, u, k, w, v: (_first(k, v), u + w * n), lambda: (3, torch.ones(4), *_views(), torch.ones(4)))


def test_another_sharing_is_another_program():
    jitted = _jit(_first)
    for make in (_halves, _views, _halves, _twice):
        mine, theirs = make(), make()
        torch.testing.assert_close(jitted(*mine), _first(*theirs), rtol=0, atol=0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    with pytest.raises(UnsupportedOpError, match="shares memory with another input"):
        jitted(*_overlapping())


def test_in_attributes_of_an_object():
    def first(cache):
        return _first(cache.k, cache.v)

    jitted = _jit(first)
    for make in (_halves, _views, _interleaved):
        mine, theirs = (SimpleNamespace(**dict(zip("kv", make(), strict=True))) for _ in range(2))
        torch.testing.assert_close(jitted(mine), first(theirs), rtol=0, atol=0)
        torch.testing.assert_close((mine.k, mine.v), (theirs.k, theirs.v), rtol=0, atol=0)
    with pytest.raises(UnsupportedOpError, match="shares memory with another input"):
        jitted(SimpleNamespace(**dict(zip("kv", _overlapping(), strict=True))))


def test_with_a_parameter_of_the_module():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x):
            self.count.add_(1.0)
            return x * 2 + self.count

    model = Model()
    jitted = _jit(model)
    with pytest.raises(UnsupportedOpError, match="shares memory with another input"):
        jitted(model.get_buffer("count")[1:2])
    assert torch.equal(jitted(torch.ones(4)), torch.full((4,), 3.0))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_writes_into_inputs_that_met_in_an_operation_are_all_in_the_forward(requires_grad):
    def f(x, w, r):
        met = r * w
        w[1:].copy_(r.sum() * -2.0)
        r.fill_(-2.0)
        w.view(-1)[:1].add_(1)
        return x * 2, met

    def run(g):
        torch.manual_seed(seeded(0))
        x, w, r = torch.randn(3, requires_grad=requires_grad), torch.randn(3), torch.randn(3)
        return g(x, w, r), w, r

    torch.testing.assert_close(run(thunder.jit(f, transforms=[NormTransform()])), run(f))
    torch.testing.assert_close(run(thunder.jit(lambda *a: f(*a)[0], transforms=[NormTransform()])), run(lambda *a: f(*a)[0]))
