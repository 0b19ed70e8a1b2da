"""Lists, dicts and generators of a program as in eager mode: what it changes after an operation took it, and calls with a generator."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BackboneOutput, BaseModelOutput

from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform, grad
import thunder


def replaced_afterwards(x, y):
    parts = [x, y]
    z = torch.cat(parts)
    parts[0] = y
    return z


def appended_afterwards(x, y):
    """DenseNet: every layer takes all results before."""
    features = [x, y]
    for _ in range(2):
        features.append(torch.cat(features, 1).relu())
    return torch.cat(features, 1)


def emptied_afterwards(x, y):
    parts = [[x, 2 * y], {"a": x}]
    z = torch.stack(parts[0]) + parts[1]["a"]
    parts[0].pop()
    del parts[1]["a"]
    return z


def of_results(x, y):
    parts = list(x.split(1))
    parts[0] = y[:1]
    return torch.cat(parts) + torch.cat(x.split(1))


def dims_afterwards(x, y):
    dims = [-1]
    z = x.sum(dims, keepdim=True)
    dims.append(0)
    return z + y.mean(dims)


def generator_for_arguments(x, y):
    return torch.add(*(t.cos() for t in (x, y))) * torch.maximum(*iter([x.sin(), y]))


class Instances(OrderedDict):
    """As transformers' table of activations, which makes one for each look-up."""

    def __getitem__(self, key):
        content = super().__getitem__(key)
        cls, options = content if isinstance(content, tuple) else (content, {})
        return cls(**options)


ACTIVATIONS = Instances(silu=nn.SiLU, leaky=(nn.LeakyReLU, {"negative_slope": 0.5}))


def own_items(x, y):
    return ACTIVATIONS["silu"](x) + ACTIVATIONS["leaky"](y) + ACTIVATIONS["silu"](y)


def missing_items(x, y):
    try:
        return ACTIVATIONS["gelu"](x)
    except KeyError as e:
        return x + y * len(e.args[0])


class Frozen(OrderedDict):
    """As transformers' outputs: nobody may delete from one, but it does itself."""

    def __delitem__(self, key):
        raise RuntimeError("not from outside")

    def without(self, key):
        super().__delitem__(key)
        return self


class FrozenDict(dict):
    def __delitem__(self, key):
        raise RuntimeError("not from outside")

    def without(self, key):
        super().__delitem__(key)
        return self


class Both(OrderedDict):
    """Items that are attributes too, as transformers' outputs have them."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, key, value):
        if key in self and value is not None:
            super().__setitem__(key, value)
        super().__setattr__(key, value)


def attributes_of_dicts(x, y):
    both = Both(a=x)
    both.a = None
    nothing = both.a
    both["a"] = x * y
    both.b = y
    both["b"] = both.a + both["a"]
    return both.a + both.b * (2 if nothing is None else 3)


def first_fields(x, y):
    several = BackboneOutput(feature_maps=(x * 2, y))
    one = BaseModelOutput((x + y,))
    return several.feature_maps[0] + several["feature_maps"][1] + one.last_hidden_state[0] * len(one)


def own_deletions(x, y):
    total = 0
    for cls in (Frozen, FrozenDict, OrderedDict, dict):
        table = cls()
        table["a"], table["b"] = x, y
        if cls in (OrderedDict, dict):
            del table["a"]
        else:
            table = table.without("a")
        total = total + table["b"] * len(table) + (x if "a" in table else 0)
    try:
        del Frozen(a=1)["a"]
    except RuntimeError as e:
        total = total + x * len(e.args[0])
    return total


def missing_deletions(x, y):
    try:
        Frozen().without("a")
    except KeyError:
        return x + 2 * y


class State(NamedTuple):
    h: torch.Tensor
    z: torch.Tensor


class Features(list):
    """A list by another name."""


def errors_of_assignments(x, y):
    errors = []
    for put in (
        lambda: [].__setitem__(-1, x),
        lambda: [1].__setitem__("a", x),
        lambda: [1].__setitem__(slice(None, None, 2), [1, 2]),
        lambda: {}.__setitem__([1], x),
        lambda: {}.setdefault([1], x),
    ):
        try:
            put()
        except (IndexError, TypeError, ValueError) as error:
            errors.append(str(error))
    empty, fixed = [], (1,)
    try:
        empty[0] = x
    except IndexError:
        empty.append(x * 2)
    try:
        fixed[0] = x
    except TypeError as error:
        errors.append(str(error))
    return empty[0] * sum(map(len, errors))


def derived_sequences(x, y):
    """The state of a recurrence, as a whole."""
    state = State(x, y)
    for _ in range(2):
        state = State(torch.cat(state, -1)[:, 1:4], torch.stack(Features(state)).mean(0))
    return torch.cat([torch.cat(state), torch.einsum("ij,ij->i", State(x, y))[:, None].expand(2, 3)])


PROGRAMS = [
    derived_sequences,
    errors_of_assignments,
    own_deletions,
    attributes_of_dicts,
    first_fields,
    missing_deletions,
    replaced_afterwards,
    appended_afterwards,
    emptied_afterwards,
    of_results,
    dims_afterwards,
    generator_for_arguments,
    own_items,
    missing_items,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_containers_as_in_eager_mode(program):
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    for transform in (SubclassTransform(), NormTransform()):
        jf = thunder.jit(program, transforms=[transform])
        torch.testing.assert_close(jf(x, y), program(x, y))
        torch.testing.assert_close(jf(y, x), program(y, x))
    torch.testing.assert_close(
        grad(lambda x: program(x, y).square().sum())(x), torch.func.grad(lambda x: program(x, y).square().sum())(x)
    )


@pytest.mark.parametrize(
    "program",
    [replaced_afterwards, appended_afterwards, generator_for_arguments, derived_sequences],
    ids=lambda f: f.__name__,
)
def test_containers_in_normed_mode(program):
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    y_normed = thunder.jit(program, transforms=[NormTransform()])(RMSTensor.of(x), RMSTensor.of(y))
    eager = program(RMSTensor.of(x), RMSTensor.of(y))
    torch.testing.assert_close(y_normed.backing, program(x, y))
    torch.testing.assert_close(y_normed.norm_size, eager.norm_size)


class Backwards(nn.Module):
    """Layers from the last to the first, as decoders and the inverses of flows have them."""

    def __init__(self, container):
        super().__init__()
        self.layers = container([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])
        self.scales = nn.ParameterList([nn.Parameter(torch.full((3,), float(i))) for i in (1, 2)])

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        for i, scale in enumerate(reversed(self.scales)):
            x = x.sin() * scale + i
        return x


@pytest.mark.parametrize("container", [nn.ModuleList, lambda layers: nn.Sequential(*layers)], ids=["list", "sequential"])
def test_modules_in_the_other_order(container):
    module, x = Backwards(container), torch.randn(2, 3)
    for transform in (SubclassTransform(), NormTransform()):
        jm = thunder.jit(module, transforms=[transform])
        torch.testing.assert_close(jm(x), module(x))
        torch.testing.assert_close(jm(2 * x), module(2 * x))
        assert thunder.cache_misses(jm) == 1


def test_what_has_no_order_is_not_reversed():
    class Sized:
        def __len__(self):
            return 2

    with pytest.raises(TypeError, match="not reversible"):
        thunder.jit(lambda x: x + len(list(reversed(Sized()))), transforms=[SubclassTransform()])(torch.ones(2))


def test_other_items_are_noticed():
    table = Instances(it=(nn.LeakyReLU, {"negative_slope": 0.5}))
    x = torch.tensor([-1.0, 2.0])
    jf = thunder.jit(lambda x: table["it"](x), transforms=[NormTransform()])
    assert jf(x).tolist() == [-0.5, 2.0]
    dict.__getitem__(table, "it")[1]["negative_slope"] = 0.25
    assert jf(x).tolist() == [-0.25, 2.0]
    table["it"] = nn.ReLU
    assert jf(x).tolist() == jf(x).tolist() == [0.0, 2.0]
    assert thunder.cache_misses(jf) == 3


def test_an_error_in_a_generator_is_the_program_s():
    def f(x):
        return torch.add(*(t.reshape(7) for t in (x, x)))

    with pytest.raises(Exception) as found:
        thunder.jit(f, transforms=[NormTransform()])(torch.ones(2))
    assert "reshape" in str(found.value) or "shape" in str(found.value)
