"""Modules that a program makes: of tensors of the program, of modules that were there, and of one another."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import mutation_guard

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder


class Holds(nn.Module):
    """A tensor as a buffer (tltorch's factorized tensors are modules like it)."""

    def __init__(self, t):
        super().__init__()
        self.order = t.ndim  # before there is a buffer
        self.register_buffer("t", t)

    def forward(self, x):
        return self.t * x * self.order


class Early(nn.Module):
    """Attributes that are set before ``nn.Module.__init__`` has made the tables."""

    def __init__(self, t):
        self.times = 2
        super().__init__()
        self.t = t


class Several(nn.Module):
    """Tensors under names of its own, without ``__iter__``."""

    def __init__(self, tensors=()):
        super().__init__()
        self.names = []
        for t in tensors:
            self.append(t)

    def append(self, t):
        self.names.append(f"held_{len(self.names)}")
        self.register_buffer(self.names[-1], t)

    def __getitem__(self, i):
        return getattr(self, self.names[i])

    def __len__(self):
        return len(self.names)


def several_of_several(layer, weight, x):
    first, second = Several(), Several([layer(x), x])
    first.append(x * 2)
    third = Several(Several([*first, *second]))
    return sum(third) + third[0] * getattr(third, "held_" + "1")


def changed(layer, weight, x):
    held = Holds(weight)
    held.t = held.t * 2
    return held.t * x


def with_a_part(layer, weight, x):
    held = Holds(x)
    held.part = layer
    return held.part(x) + held.t


PROGRAMS = {
    "a buffer": lambda layer, weight, x: Holds(layer(x))(x),
    "an attribute": lambda layer, weight, x: Early(layer(x)).t * Early(x).times,
    "a buffer that is replaced": changed,
    "a part that was there": with_a_part,
    "a parameter": lambda layer, weight, x: nn.ParameterList([weight])[0] * x,
    "several of several": several_of_several,
    "a list": lambda layer, weight, x: nn.ModuleList([layer, nn.ReLU()])[1](layer(x)),
    "a dict": lambda layer, weight, x: nn.ModuleDict({"a": layer})["a"](x),
    "without parameters": lambda layer, weight, x: nn.LayerNorm(3, elementwise_affine=False)(layer(x)),
}


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer, self.weight, self.name = nn.Linear(3, 3), nn.Parameter(torch.randn(3)), name

    def forward(self, x):
        return PROGRAMS[self.name](self.layer, self.weight, x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_eager_pytorchs(name):
    torch.manual_seed(seeded(0))
    model = Model(name)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(2):
        x = torch.randn(2, 3)
        result, expected = jitted(x), model(x)
        torch.testing.assert_close(result, expected)
        cotangent = torch.randn_like(expected)  # of the sum a layer norm's gradient is noise
        gradients = [
            torch.autograd.grad((y * cotangent).sum(), list(model.parameters()), allow_unused=True) for y in (result, expected)
        ]
        torch.testing.assert_close(*gradients)
    assert thunder.cache_misses(jitted) == 1


def test_dynamo_does_not_count_them(monkeypatch):
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))
    monkeypatch.setattr(nn.Module, "___has_generation_tag_patch", None, raising=False)
    monkeypatch.delattr(nn.Module, "___has_generation_tag_patch")
    monkeypatch.setattr(mutation_guard.GenerationTracker, "generation_values", counted := {})
    mutation_guard.install_generation_tagging_init()
    model, x = Model("a buffer"), torch.ones(2, 3)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    counted.clear()
    result = jitted(x)
    assert not counted
    torch.testing.assert_close(result, model(x))
    assert counted


def test_parameters_that_a_program_makes_are_refused():
    jitted = thunder.jit(lambda x: nn.Linear(3, 3)(x), transforms=[NormTransform()])
    with pytest.raises(UnsupportedOpError, match="a parameter of a module that it makes"):
        jitted(torch.ones(2, 3))


def _sizes(x):
    made = nn.Linear(3, 3)
    return x * sum(p.numel() for p in made.parameters()) + torch.rand(3)


def test_parameters_that_are_drawn_and_not_used_leave_the_generator_as_in_eager_mode():
    jitted = thunder.jit(_sizes, transforms=[NormTransform()])
    x, found = torch.ones(2, 3), []
    for f in (_sizes, jitted):
        torch.manual_seed(seeded(0))
        found.append([(f(x), torch.get_rng_state()) for _ in range(3)])
    torch.testing.assert_close(*found)


def test_parameters_that_are_drawn_after_other_numbers_are_refused():
    def program(x):
        y = torch.rand(3)
        return x + y * sum(p.numel() for p in nn.Linear(3, 3).parameters())

    with pytest.raises(UnsupportedOpError, match="draws its parameters after other random numbers"):
        thunder.jit(program, transforms=[NormTransform()])(torch.ones(2, 3))
