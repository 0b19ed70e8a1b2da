"""Which tensor is which object: what operations hand back, keys of dicts, sets, `id`; the oracle is eager mode."""

from __future__ import annotations

import collections
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder

x = torch.tensor([1.0, -2.0, 3.0])
y = torch.tensor([0.5, 4.0, -1.0])

HAND_BACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": lambda z: z.add_(1),
    "in place, by an operator": lambda z: z.__imul__(2),
    "relu in place": lambda z: F.relu(z, inplace=True),
    "float of a float": lambda z: z.float(),
    "to the dtype": lambda z: z.to(torch.float32),
    "to the device": lambda z: z.cpu(),
    "type": lambda z: z.type(torch.float32),
    "contiguous": lambda z: z.contiguous(),
    "dropout in eval mode": lambda z: nn.Dropout().eval()(z),
    "alpha_dropout": lambda z: F.alpha_dropout(z, 0.5, False),
    "flatten": lambda z: z.flatten(),
    "atleast_1d": lambda z: torch.atleast_1d(z),
    "real": lambda z: z.real,
    "conj": lambda z: z.conj(),
    "positive": lambda z: +z,
    "another": lambda z: z.double(),
    "a copy": lambda z: z.to(torch.float32, copy=True),
    "a view": lambda z: z.view(3),
    "T": lambda z: z.T,
    "t": lambda z: z.t(),
    "detach": lambda z: z.detach(),
    "data": lambda z: z.data,
}


@pytest.mark.parametrize("name", HAND_BACK)
def test_what_is_handed_back_is_the_tensor(name: str):
    operation = HAND_BACK[name]

    def f(x: torch.Tensor) -> Any:
        made = x * 2
        of_made, of_given = operation(made), operation(x)
        facts = of_made is made, id(of_made) == id(made), of_given is x
        return facts, of_made.add_(1) if of_made.dtype is made.dtype else of_made, made * 1, x * 1

    given, other = x.clone(), x.clone()
    found, expected = thunder.jit(f, transforms=[SubclassTransform()])(given), f(other)
    assert found[0] == expected[0]
    torch.testing.assert_close((*found[1:], given), (*expected[1:], other))


@pytest.mark.parametrize("write", [lambda z: z.fill_(0.5), lambda z: z.mul_(2).add_(1), lambda z: F.relu(z, inplace=True)])
def test_what_is_written_into_beside_wrappers_is_found_as_a_key(write: Callable):
    def f(wrapper: TwoTensor, z: torch.Tensor) -> Any:
        made = z.clone()
        key = write(made)
        return {key: wrapper}[made] * 2, made in {key}, len({key, made, z}), key * 3

    found = []
    for g in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        z = x.clone().requires_grad_()
        wrapped, *facts, plain = g(TwoTensor(x.clone(), x.clone()), z)
        (wrapped.a.sum() + plain.sum()).backward()
        found.append((wrapped.a, facts, plain, z.grad))
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[1][::2], found[0][::2])
    torch.testing.assert_close(found[1][3], found[0][3])


@pytest.mark.parametrize("transpose", [torch.t, torch.Tensor.t, lambda t: t.t(), lambda t: t.T, lambda t: t.view(3)])
def test_a_view_that_a_program_returns_is_another_tensor_in_the_same_memory(transpose):
    given = x.clone()
    found = thunder.jit(lambda x: transpose(x), transforms=[SubclassTransform()])(given)
    assert found is not given and found.data_ptr() == given.data_ptr()


def test_what_lies_otherwise_is_not_handed_back():
    def f(x: torch.Tensor) -> Any:
        z = x.contiguous()
        return z is x, z * 2

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for given in (torch.ones(2, 3), torch.ones(3, 2).T, torch.ones(2, 3)):
        assert jf(given)[0] == f(given)[0]


def memoized(x, y):
    known: dict[torch.Tensor, torch.Tensor] = {}

    def square(t):
        if t not in known:
            known[t] = t * t
        return known[t]

    total = square(x) + square(y) + square(x)
    return total + sum(k * v for k, v in known.items()), len(known)


def changed_in_place(x, y):
    a = x * 2
    known = {a: y}
    b = a.mul_(2)
    return known[b] + a, a in known, known.get(y) is None


def sets(x, y):
    a, b = x * 2, y + 1
    seen = {a, b, a}
    seen.discard(b)
    return len(seen) * a, a in seen, b in seen, len(frozenset([x, y, x])), list(dict.fromkeys([a, b, a]))


def in_tuples(x, y):
    a = x * 2
    known = {(a, 1): y, (y, "b"): a}
    return known[(a, 1)] * known[(y, "b")], (a, 2) in known


def returned(x, y):
    a = x * 2
    known = {a: y, y: a}
    return list(known), list(known.items()), known.pop(a), len(known)


def by_number(x, y):
    known = {id(x): 2.0, hash(y): 3.0}
    return x * known[id(x)] + y * known[hash(y)], id(y) in {id(x)}, hash(x) == hash(y)


@pytest.mark.parametrize("f", [memoized, changed_in_place, sets, in_tuples, returned, by_number], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["plain", "wrappers"])
def test_tensors_are_keys(f: Callable, kind: str):
    given = (x, y) if kind == "plain" else (TwoTensor(x, y), TwoTensor(y, x))
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        found, expected = jf(*given), f(*given)
        torch.testing.assert_close(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected))
    assert thunder.cache_misses(jf) == 1


_HELD = nn.Linear(2, 2)
_LIST, _DICT = list(_HELD.parameters()), dict(_HELD.named_parameters())
_SETS_OF_GIVEN = {
    "set": lambda x: set(_LIST),
    "frozenset": lambda x: frozenset(_DICT.values()),
    "written out": lambda x: {*_LIST},
    "update": lambda x: [s := {x}, s.update(_LIST), s][-1],
    "difference": lambda x: set(_LIST).difference([x]),
    "reversed": lambda x: set(reversed(_LIST)),
}


@pytest.mark.parametrize("name", _SETS_OF_GIVEN)
def test_sets_of_given_tensors(name: str):
    def f(x):
        return sum((p * x).sum() for p in _SETS_OF_GIVEN[name](x))

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for n in range(2):
        with torch.no_grad():
            _HELD.weight.add_(n)
        x = torch.ones(2, requires_grad=True)
        torch.testing.assert_close(jf(x), f(x))
        torch.testing.assert_close(torch.autograd.grad(jf(x), _LIST), torch.autograd.grad(f(x), _LIST))


_OF_TWO_SETS = {
    "|": lambda: len(set(_HELD.parameters()) | set(_LIST)) == 2,
    "&": lambda: len(set(_HELD.parameters()) & set(_LIST)) == 2,
    "-": lambda: not set(_HELD.parameters()).difference(_LIST),
    "==": lambda: set(_HELD.parameters()) == frozenset(_LIST),
    "<=": lambda: set(_HELD.parameters()).issubset(_LIST),
}


@pytest.mark.parametrize("name", _OF_TWO_SETS)
def test_sets_of_one_parameter_under_two_names_are_refused(name: str):
    assert _OF_TWO_SETS[name]()
    with pytest.raises(UnsupportedOpError, match="two names"):
        thunder.jit(lambda x: x * 2 if _OF_TWO_SETS[name]() else x, transforms=[SubclassTransform()])(torch.ones(2))


@pytest.mark.parametrize("asks", [lambda x, y: id(x) == id(y), lambda x, y: len({x, y}) == 1], ids=["id", "set"])
@pytest.mark.parametrize("kind", ["plain", "wrappers"])
def test_one_tensor_given_twice_is_told_from_two(asks: Callable, kind: str):
    """Plain tensors in sets are refused where they are one."""
    a, b = (x, y) if kind == "plain" else (TwoTensor(x, y), TwoTensor(y, x))
    jf = thunder.jit(lambda x, y: (x + y, asks(x, y)), transforms=[SubclassTransform()])
    for given in ((a, b), (a, a), (b, a), (b, b)):
        try:
            assert jf(*given)[1] == asks(*given)
        except UnsupportedOpError as e:
            assert "has two names" in str(e)
            assert given[0] is given[1]


class ById(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factors = {id(p): 2.0 + i for i, p in enumerate(self.parameters())}

    def forward(self, x):
        return self.inner(x) * self.factors.get(id(self.inner.weight), 0.0)


def test_parameters_are_known_by_id():
    model = ById()
    jm = thunder.jit(model, transforms=[SubclassTransform()])
    given = torch.ones(2, 3)
    torch.testing.assert_close(jm(given), model(given))
    model.inner.weight = nn.Parameter(torch.ones(3, 3))
    torch.testing.assert_close(jm(given), model(given))


def test_tensors_of_the_call_are_no_keys_of_before_it():
    known = {x: 2.0}

    def f(t):
        return t * known[x]

    with pytest.raises(UnsupportedOpError, match="before the call"):
        thunder.jit(f, transforms=[SubclassTransform()])(y)

    def g(t):
        known[t] = 3.0
        return t

    with pytest.raises(UnsupportedOpError, match="before the call"):
        thunder.jit(g, transforms=[SubclassTransform()])(y)


class Momentum(nn.Module):
    """An optimizer's step written out: what it keeps has parameters as keys, as torch's optimizers have it."""

    def __init__(self, of_layers: Callable[[], nn.Parameter]):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.weight = of_layers()
        self.state = collections.defaultdict(dict)
        self.averages = {p: p.detach() * 1 for p in self.parameters()}
        self.decayed = {self.weight}
        self.latest: OrderedDict[Any, Any] = OrderedDict()

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            for p in self.parameters():
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = torch.zeros(()), torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(x.sum() * p)
                p.sub_(state["m"] / state["step"], alpha=0.1 if p in self.decayed else 0.01)
            for p, average in self.averages.items():
                average.mul_(0.5).add_(p, alpha=0.5)
        found = self.latest.pop(self.weight, x)
        self.latest[self.weight] = x * 2
        self.latest.setdefault(self.layers[0].bias, x)
        return (
            self.layers(x) * self.weight + found,
            (len(self.latest), self.weight in self.latest),
            self.averages.get(self.weight),
        )


WEIGHTS = {"plain": lambda: x.clone(), "wrapped": lambda: TwoTensor(x.clone(), y.clone())}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_parameters_are_keys_of_what_a_model_keeps(kind: str):
    """They are put in, taken out and iterated over, and another parameter has no entry; the oracle is a model of its own in eager mode."""
    models = []
    for _ in range(2):
        torch.manual_seed(seeded(0))
        models.append(Momentum(lambda: nn.Parameter(WEIGHTS[kind]())))
    jm = thunder.jit(models[1], transforms=[SubclassTransform()])
    for n in range(4):
        if n == 2:  # the state of the one before stays, under it
            for model in models:
                model.weight = nn.Parameter(WEIGHTS[kind]())
                model.averages = {p: p.detach() * 1 for p in model.parameters()}
        given = torch.randn(2, 3)
        found, expected = jm(given), models[0](given)
        assert_same(found[1], expected[1])
        for got, want in zip(
            *(_tensors(found, model) for found, model in ((found, models[1]), (expected, models[0]))), strict=True
        ):
            assert_same(got.detach(), want.detach())


def _tensors(result: Any, model: Momentum) -> list[torch.Tensor]:
    kept = [model.state, model.averages, model.latest]
    return [t for t in tree_leaves([result, [[*d.values()] for d in kept], [*model.parameters()]]) if isinstance(t, torch.Tensor)]


def test_a_function_has_parameters_as_keys():
    """They are found in a closure."""
    layer, counts = nn.Linear(3, 2), {}

    def step(x: torch.Tensor) -> torch.Tensor:
        for p in layer.parameters():
            counts[p] = counts[p] + x.sum() if p in counts else x.sum() * 0
        return layer(x) + counts[layer.bias]

    jf = thunder.jit(step, transforms=[SubclassTransform()])
    given = torch.ones(1, 3)
    for n in range(3):
        torch.testing.assert_close(jf(given), layer(given) + 3.0 * n)
    assert all(a is b for a, b in zip(counts, layer.parameters(), strict=True))


def test_tensors_beside_wrappers_with_gradients_are_what_they_were():
    """Torch's autograd follows the program, and what is written in place has another name in the trace."""

    def f(w, p):
        v = p * 1
        known = {v: 2.0}
        facts = v.add_(1) is v, v.contiguous() is v, v.detach() is v, id(v.mul_(2)) == id(v)
        return w * v * known[v], facts

    w, p = TwoTensor(x, y), y.clone().requires_grad_()
    found, expected = thunder.jit(f, transforms=[SubclassTransform()])(w, p), f(w, p)
    assert found[1] == expected[1]
    torch.testing.assert_close(found[0].detach(), expected[0].detach())


@pytest.mark.parametrize("options", [{}, {"memory_format": torch.contiguous_format}])
def test_what_is_handed_back_under_no_grad_keeps_its_gradient(options):
    """Whether it is depends on how the tensor lies, and so does the trace."""

    def f(x):
        v = x * 1
        with torch.no_grad():
            w = v.contiguous(**options)
        return (w * v).sin(), w.requires_grad, w is v

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    lies = torch.stack([x, -x])
    for n, given in enumerate([lies, lies.t(), lies]):
        given = given.detach().requires_grad_()
        found, expected = jf(given), f(given)
        assert found[1:] == expected[1:] and thunder.cache_misses(jf) == min(n, 1) + 1
        torch.testing.assert_close(found[0], expected[0])
        gradients = [torch.autograd.grad(r[0].sum(), given)[0] for r in (found, expected)]
        torch.testing.assert_close(*gradients)
