"""What functions that run uninterpreted read of globals, closures and attributes is looked at before a trace is used again."""

from __future__ import annotations

import types

import pytest
import torch
from torch import func
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm.transforms import SubclassTransform
import thunder

SCALE = 2.0
SETTINGS = types.SimpleNamespace(k=3.0)


def _scaled(v):
    return v * SCALE


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _scaled(x) * SETTINGS.k

    @staticmethod
    def backward(ctx, g):
        return _scaled(g) * SETTINGS.k


class Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, x):
        ctx.f = f
        return f(x)

    @staticmethod
    def backward(ctx, g):
        return None, ctx.f(g)


class Shared:
    """Numbers that the programs read in closures, and that the test changes."""

    def __init__(self):
        items, number = [1.5], 1.0

        def change(to):
            nonlocal number
            items[0] = number = to

        def hooked(x):
            y = x * 1
            y.register_hook(lambda g: g * SCALE * number)
            return y * 2

        self.change = change
        self.programs = {
            "a function of autograd's": lambda x: Scaling.apply(x),
            "a function that it is given": lambda x: Given.apply(lambda v: v * number * items[0], x),
            "a hook": hooked,
            "a global": lambda x: func.grad(lambda v: (v * v * SCALE).sum())(x),
            "a helper": lambda x: func.grad(lambda v: (_scaled(v) * v).sum())(x),
            "an attribute": lambda x: func.vmap(lambda v: v * SETTINGS.k)(x),
            "an item": lambda x: func.vmap(lambda v: v * items[0])(x),
            "a variable": lambda x: func.vmap(lambda v: v * number)(x),
        }


@pytest.mark.parametrize("of", ["plain", "wrapper"])
@pytest.mark.parametrize("name", Shared().programs)
def test_what_is_read_natively_is_guarded(name, of, monkeypatch):
    shared = Shared()
    program = shared.programs[name]
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for i, number in enumerate((1.0, 1.0, 2.0, 1.0)):
        monkeypatch.setattr("tests.tracing.guarding.test_read_natively.SCALE", 1.0 + number)
        SETTINGS.k = 3 * number
        shared.change(number)
        found = []
        for f in (jitted, program):
            x = torch.arange(3.0)
            x = (TwoTensor(x, x * 2) if of == "wrapper" else x).requires_grad_()
            y = f(x)
            y.sum().backward()
            found.append([(t.a.tolist(), t.b.tolist()) if of == "wrapper" else t.tolist() for t in (y.detach(), x.grad)])
        assert found[0] == found[1]
        assert thunder.cache_misses(jitted) == (1 if i < 2 else 2)


FACTOR = 2.0


class Scaled(torch.Tensor):
    power = 1

    @staticmethod
    def __new__(cls, a):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a):
        self.a = a * FACTOR

    def __tensor_flatten__(self):
        return ["a"], None

    @classmethod
    def _around(cls, a):
        made = cls.__new__(cls, a)
        made.a = a
        return made

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Scaled._around(inner["a"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [a.a if isinstance(a, cls) else a for a in args]
        return cls._around(func(*args, **(kwargs or {})) * FACTOR**cls.power)


@pytest.mark.parametrize("made", ["given", "inside"])
def test_what_a_class_reads_is_guarded(made, monkeypatch):
    def program(x):
        return (x if made == "given" else Scaled(x)).sin()

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for i, (factor, power) in enumerate([(2.0, 1), (2.0, 1), (3.0, 1), (3.0, 2)]):
        monkeypatch.setattr("tests.tracing.guarding.test_read_natively.FACTOR", factor)
        monkeypatch.setattr(Scaled, "power", power)
        x = torch.arange(3.0)
        given = Scaled(x) if made == "given" else x
        assert torch.equal(jitted(given).a, program(given).a)
        assert thunder.cache_misses(jitted) == max(i, 1)
