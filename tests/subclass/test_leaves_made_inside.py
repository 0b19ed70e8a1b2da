"""Wrappers that a program makes and that require grad: those that are returned are leaves, and have the gradients that eager mode gives them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclass.other_numbers import Quantity
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

CLASSES = {
    "TwoTensor": lambda t: TwoTensor(t, t + 1),
    "nested": lambda t: TwoTensor(TwoTensor(t, t + 1), TwoTensor(t + 2, t + 3)),
    "Quantity": lambda t: Quantity(t, {"m": 1}),
}


def _as_parameter(w, x):
    p = nn.Parameter(w)
    return p, F.linear(x, p) if type(w) is TwoTensor else p * 2


def _in_place(w, x):
    p = nn.Parameter(w * 1)
    with torch.no_grad():
        p.mul_(2)
    return p, p.sin() if type(w) is TwoTensor else p * p


def _deep_copy(w, x):
    p = nn.Parameter(w)
    p.grad = p.detach() * 3
    copied = copy.deepcopy({"both": [p, p]})["both"]
    return copied[0], copied[0] * 2, copied[0].grad, copied[0] is copied[1]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("function", [_as_parameter, _in_place, _deep_copy])
def test_gradients_arrive_in_leaves_that_are_returned(cls, function):
    jitted, found = thunder.jit(function, transforms=[SubclassTransform()]), []
    for call in (function, jitted, jitted):
        torch.manual_seed(seeded(0))
        leaf, result, *others = call(CLASSES[cls](torch.randn(3, 3)), torch.randn(2, 3))
        assert leaf.is_leaf and isinstance(leaf, nn.Parameter)
        result.backward(torch.ones_like(result.detach()))
        found.append((leaf.detach(), result.detach(), leaf.grad, others))
    assert_same(found[1:], found[:1] * 2)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


def test_a_wrapper_of_tensors_that_require_grad_has_gradients_of_its_own():
    def f(x, w):
        y = TwoTensor(x.sin(), x)
        return y, w * y

    found = []
    for call in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        x, w = torch.randn(3, requires_grad=True), TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
        y, z = call(x, w)
        inner = torch.autograd.grad(y.a.sum(), x, retain_graph=True)
        found.append((inner, torch.autograd.grad(z, (w, y), torch.ones_like(z.detach()))))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("make", [torch.ones, lambda n: TwoTensor(torch.ones(n), torch.ones(n))], ids=["plain", "wrapper"])
@pytest.mark.parametrize("is_given", [False, True])
def test_under_no_grad_leaves_require_grad_alone(make, is_given):
    def f(x):
        y = make(3).requires_grad_()
        return y, y * 2, x * 2

    x = torch.ones(3, requires_grad=is_given)
    with torch.no_grad():
        flags = [
            [(t.requires_grad, t.is_leaf) for t in call(x)] for call in (f, thunder.jit(f, transforms=[SubclassTransform()]))
        ]
    assert flags[0] == flags[1]


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3), lambda: TwoTensor(torch.ones(3), torch.ones(3))], ids=["plain", "wrapper"]
)
def test_deep_copies_of_leaves_are_leaves(make):
    def f(x):
        copied = copy.deepcopy(x)
        return copied.requires_grad, copied.is_leaf, copied * 2, x * 3

    for x in (make(), make().requires_grad_()):
        found, want = ([(t.detach(), t.requires_grad) if i > 1 else t for i, t in enumerate(call(x))] for call in (_jit(f), f))
        assert_same(found, want)
    with pytest.raises(RuntimeError, match="graph leaves"):
        _jit(f)(make().requires_grad_() * 1)


def _jit(f):
    return thunder.jit(f, transforms=[SubclassTransform()])
