"""Parameters and modules that a program takes out of modules, and puts into them: in each call, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from tests.subclasses import assert_same, two
from thunder_norm import RMSTensor
from thunder_norm.transforms import CheckpointTransform, NormTransform, SplitBiasTransform, SubclassTransform
import thunder


class Scaled(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _taken_out_and_back(m, x):
    w = m.w
    del m.w
    m.w = w
    return x @ m.w


def _assigned_itself(m, x):
    m.w = m.w
    return x @ m.w


def _swapped(m, x):
    m.w, m.first.weight = m.first.weight, m.w
    return m.first(x) @ m.w


def _none_meanwhile(m, x):
    w, m.w = m.w, None
    y = x if m.w is None else x @ m.w
    m.w = w
    return y @ w


def _tied(m, x):
    before = m.first(x)
    m.first.weight = m.w
    return before, m.first(x), m.w is m.first.weight, len(list(m.parameters()))


def _in_dicts(m, x):
    m.more["b"] = m.w
    m._parameters["w"] = m.first.weight
    return x @ m.more["b"] @ m.w


def _tensor_meanwhile(m, x):
    w = m.first.weight
    del m.first.weight
    m.first.weight = w * 2
    y = m.first(x)
    del m.first.weight
    m.first.weight = w
    return y


def _modules_swapped(m, x):
    m.first, m.second = m.second, m.first
    return m.second(m.first(x).relu())


def _modules_in_lists(m, x):
    m.layers.insert(1, m.layers.pop(0))
    m.layers[2] = m.first
    return m.layers[1](m.layers[2](x).relu())


def _alias(m, x):
    m.alias = m.first
    m.alias.weight = m.w
    return m.first(x) + m.second(x)


PROGRAMS = [
    _taken_out_and_back,
    _assigned_itself,
    _swapped,
    _none_meanwhile,
    _tied,
    _in_dicts,
    _tensor_meanwhile,
    _modules_swapped,
    _modules_in_lists,
    _alias,
]


class Model(nn.Module):
    def __init__(self, program: Callable, make: Callable[[], torch.Tensor]):
        super().__init__()
        self.w, self.other, self.program = nn.Parameter(make()), nn.Parameter(make()), program
        self.first, self.second, self.more = Scaled(make()), Scaled(make()), nn.ParameterDict({"a": nn.Parameter(make())})
        self.layers = nn.ModuleList([Scaled(make()) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(self, x)


def _calls(program: Callable, make: Callable, jit: Callable, place: str) -> list[Any]:
    torch.manual_seed(seeded(0))
    model = Model(program, make)
    names, found = {id(p): name for name, p in model.named_parameters()}, []
    f = jit(model) if place == "jitted" else jit(program) if place == "given" else jit(lambda x: program(model, x))
    for _ in range(3):
        x = torch.randn(2, 3)
        result = f(model, x) if place == "given" else f(x)
        torch.stack([t.sum() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]).sum().backward()
        held = [
            (name, names[id(p)]) for name, p in model.named_parameters(remove_duplicate=False)
        ]  # the very parameters, in order
        grads = [(name, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()]
        found.append((tree_map_only(torch.Tensor, torch.Tensor.detach, result), held, grads))
    return found


MAKES = {"plain": lambda: torch.randn(3, 3), "wrapped": lambda: two(3, 3)}


@pytest.mark.parametrize(
    ("place", "make"), [("jitted", "plain"), ("jitted", "wrapped"), ("given", "wrapped"), ("closed over", "plain")]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_members_are_what_eager_mode_makes_them(program: Callable, place: str, make: str):
    def jitted(function: Callable) -> Callable:
        return thunder.jit(function, transforms=[SubclassTransform()])

    assert_same(_calls(program, MAKES[make], jitted, place), _calls(program, MAKES[make], lambda f: f, place))


@pytest.mark.parametrize("transform", [CheckpointTransform, NormTransform, SplitBiasTransform])
def test_with_other_transforms(transform):
    def jitted(function: Callable) -> Callable:
        return thunder.jit(function, transforms=[transform()])

    for program in (_swapped, _modules_swapped):
        found = _calls(program, MAKES["plain"], jitted, "jitted")
        assert_same(found, _calls(program, MAKES["plain"], lambda f: f, "jitted"))


def test_swapped_modules_need_one_trace():
    torch.manual_seed(seeded(0))
    model = Model(_modules_swapped, MAKES["plain"])
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    for _ in range(3):
        jitted(torch.randn(2, 3))
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 2)


def test_calls_with_norms_leave_the_parameters_themselves():
    torch.manual_seed(seeded(0))
    model = Model(_swapped, MAKES["plain"])
    w, weight = model.w, model.first.weight
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for n in range(3):
        jitted(RMSTensor.of(torch.randn(2, 3)))
        assert (model.w is weight) is (model.first.weight is w) is (n % 2 == 0)
