"""Modules that a model has in lists, tuples, dicts and objects of its own, registered besides or not: what eager PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, RMSToRMSTensor, build_norm_map, normed
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform
import thunder


class Model(nn.Module):
    """One that has `layers` as they are, and by names of its own if it registers them (MaskFormer's stem)."""

    def __init__(self, layers: Any, call: Callable, registers: bool):
        super().__init__()
        self.layers, self.call = layers, call
        if registers:
            for i, layer in enumerate(tree_leaves(layers)):
                self.add_module(f"m{i}", layer)

    def forward(self, x):
        return self.call(self, x)


def one_after_the_other(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def in_dict(model, x):
    for name, layer in model.layers.items():
        x = layer(x) if name != "skip" else x + layer(x)
    return x


def nested(model, x):
    return sum(layer(x) for layers in reversed(model.layers) for layer in layers[-1:]) + model.layers[0][0](x)


def weights_alone(model, x):
    return x @ model.layers[-1].weight.T + model.layers[0].bias


def linear() -> nn.Module:
    return nn.Linear(4, 4)


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable]] = {
    "list": (lambda: [linear(), nn.GELU(), linear()], one_after_the_other),
    "tuple": (lambda: (linear(), nn.Sequential(linear(), nn.Tanh())), one_after_the_other),
    "dict": (lambda: {"in": linear(), "skip": linear()}, in_dict),
    "nested": (lambda: [[linear(), linear()], (linear(),)], nested),
    "weights": (lambda: [linear(), linear()], weights_alone),
    "statistics": (lambda: [linear(), nn.BatchNorm1d(4)], one_after_the_other),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(seeded(0))


@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize(("name", "transform"), crossed(PROGRAMS, [NormTransform, SubclassTransform, SplitBiasTransform]))
def test_results_gradients_and_buffers_are_eagers(name, registers, transform):
    layers, call = PROGRAMS[name]
    model = Model(layers(), call, registers)
    eager = copy.deepcopy(model)
    jm = thunder.jit(model, transforms=[transform()])
    for _ in range(2):
        x = torch.randn(3, 4)
        y, expected = jm(x), eager(x)
        torch.testing.assert_close(y, expected)
        for result in (y, expected):
            result.square().sum().backward()
    assert thunder.cache_misses(jm) == 1
    for ours, theirs in zip(tree_leaves(model.layers), tree_leaves(eager.layers), strict=True):
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
        torch.testing.assert_close([*ours.buffers()], [*theirs.buffers()])


def test_other_modules_in_the_list_are_used():
    model = Model([linear(), linear()], one_after_the_other, registers=True)
    jm = thunder.jit(model, transforms=[NormTransform()])
    x = torch.randn(3, 4)
    for change in (
        lambda layers: layers.__setitem__(0, linear()),
        lambda layers: layers.__setitem__(1, nn.Tanh()),
        lambda layers: layers.append(linear()),
        lambda layers: layers.reverse(),
        lambda layers: layers.pop(),
    ):
        torch.testing.assert_close(jm(x), model(x))
        change(model.layers)
        torch.testing.assert_close(jm(x), model(x))


@pytest.mark.parametrize("registers", [True, False])
def test_norms_are_those_of_a_module_list(registers):
    """Registered parameters have the names that the model gives them; others have none, and are constants as in eager runs."""
    layers = [linear(), nn.GELU(), linear()]
    model = Model(layers, one_after_the_other, registers)
    given = {"m0.weight": RMSToRMSTensor(30.0)} if registers else {}
    as_list = {f"layers.{name[1:]}": norm for name, norm in given.items()}
    x = RMSTensor.of(torch.randn(3, 4))
    found, expected = (
        normed(thunder.jit(m, transforms=[NormTransform(parameters=norms or "measured")]))(x)
        for m, norms in ((model, given), (Model(nn.ModuleList(layers), one_after_the_other, False), as_list))
    )
    torch.testing.assert_close(found.norm_size, expected.norm_size)
    torch.testing.assert_close(found.backing, model(x.backing))


def test_a_parameter_outside_the_model_does_not_take_the_name_of_one_in_it():
    class Holder:
        pass

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))
            self.other = Holder()
            self.other.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.other.layer(x @ self.weight.T)

    model, x = Two(), RMSTensor(1.0, backing=torch.ones(3, 4))
    norms = NormTransform(parameters={"weight": RMSToRMSTensor(5.0)})
    found = thunder.jit(model, transforms=[norms])(x)
    largest = torch.linalg.matrix_norm(model.other.layer.weight, 2)
    torch.testing.assert_close(found.norm_size, 5 * largest, check_dtype=False)


def test_a_norm_map_has_modules_in_lists():
    model = Model([linear(), nn.ReLU(), linear()], one_after_the_other, registers=True)
    sizes = {"m0.weight": 2.0, "m0.bias": 0.5, "m2.weight": 3.0, "m2.bias": 0.25}
    kinds = {name: (RMSToRMSTensor if name.endswith("weight") else RMSTensor)(size) for name, size in sizes.items()}
    compute = build_norm_map(model.to("meta"), torch.empty(3, 4, device="meta"))
    found = compute(RMSTensor(1.0), normed_state_dict=kinds)
    assert found.norm_size.item() == pytest.approx((1 * 2 + 0.5) * 3 + 0.25)
