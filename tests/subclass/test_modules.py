"""Wrapper subclasses in modules, changed in place, beside random operations, and options of `thunder.jit`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclass.wrapper_programs import OPERATIONS, check, jit, one
from tests.subclasses import assert_same, leaves, nested, two
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

# -- in-place --------------------------------------------------------------------------------------------------------------


def every_inplace_operator(x: torch.Tensor) -> torch.Tensor:
    z = x + 1
    z += x
    z -= 1
    z *= 2
    z /= 3
    z **= 2
    return z.sin_().relu_().clamp_(max=0.5)


def fill_a_copy(x: torch.Tensor) -> torch.Tensor:
    z = torch.empty_like(x)
    z.copy_(x)
    w = x.clone()
    w.fill_(2.0)
    return z + w.zero_()


def through_a_list(x: torch.Tensor) -> torch.Tensor:
    z = x * 2
    held = [z]
    z.add_(1)
    return held[0]


def shared_after_mutation(n: TwoTensor) -> Any:
    z = n * 2
    inner = z.a
    z.add_(1)
    return inner, inner * 2, z


def inner_wrapper_mutated(n: TwoTensor) -> Any:
    z = n * 2
    inner = z.a
    inner.add_(1)
    return z, z * 2


def inner_tensor_mutated(x: TwoTensor) -> Any:
    z = x * 2
    view = z.view(-1)
    z.a.add_(1)
    z.a[0] = 5.0
    return z, z + 1, view, view + 1


def input_inner_tensor_mutated(x: TwoTensor) -> Any:
    before = x * 2
    x.a.add_(1)
    return before, x * 2


def plain_mutated_under_a_wrapper(p: torch.Tensor, q: torch.Tensor) -> Any:
    z = p + 0
    t = TwoTensor(z, q)
    before = t * 3
    z.add_(1)
    p.mul_(2)
    return t, t * 2, before


IN_PLACE: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "operators and methods": (every_inplace_operator, one),
    "functional inplace=True": (lambda x: F.relu(x + 0, inplace=True), one),
    "copy_, fill_, zero_": (fill_a_copy, one),
    "seen through a list": (through_a_list, one),
    "seen through an inner wrapper": (shared_after_mutation, lambda: (nested(2, 2),)),
    "of an inner wrapper": (inner_wrapper_mutated, lambda: (nested(2, 2),)),
    "of an inner tensor": (inner_tensor_mutated, one),
    "of an inner tensor of an input": (input_inner_tensor_mutated, one),
    "of a plain tensor under a wrapper": (plain_mutated_under_a_wrapper, lambda: (torch.randn(3), torch.randn(3))),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_are_seen_wherever_eager_sees_them(name: str):
    check(*IN_PLACE[name])


# -- random operations -----------------------------------------------------------------------------------------------------


def test_random_operations_draw_anew():
    jf = jit(lambda x: (torch.rand_like(x), torch.rand_like(x), torch.bernoulli(x.sigmoid())))
    x = two(20, 20)
    drawn = [leaves(jf(x)) for _ in range(2)]
    uniform = [t for leaf in drawn for t in leaf[:4]]
    assert all(0 <= t.min() and t.max() < 1 and abs(t.mean() - 0.5) < 0.1 for t in uniform)
    assert len({float(t.sum()) for t in uniform}) == 8  # neither merged within a call nor kept between calls
    assert all(set(t.unique().tolist()) <= {0.0, 1.0} and 0.2 < t.mean() < 0.8 for leaf in drawn for t in leaf[4:])


def test_random_plain_tensor_beside_a_wrapper():
    jf = jit(lambda x: x * 0 + torch.randn(3, 4))
    first, second = jf(two(3, 4)), jf(two(3, 4))
    assert_same(first.a, first.b)
    assert not torch.equal(first.a, second.a)


# -- modules ---------------------------------------------------------------------------------------------------------------


class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)
        self.linear.weight = torch.nn.Parameter(two(5, 4), requires_grad=False)
        self.register_buffer("shift", two(5))

    def forward(self, x: torch.Tensor) -> Any:
        kinds = [isinstance(self.linear.weight, torch.nn.Parameter), type(self.linear.weight) is TwoTensor]
        return self.linear(x) + self.shift, kinds


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_module_with_frozen_wrapper_parameter_and_buffer(transform: type[SubclassTransform]):
    torch.manual_seed(seeded(0))
    module = Shifted()
    jm = jit(module, transform)
    for x in (torch.randn(3, 4), two(3, 4)):
        assert_same(jm(x), module(x))
    jm(torch.randn(3, 4))
    assert (thunder.cache_misses(jm), thunder.cache_hits(jm)) == (2, 1)


def test_state_dict_round_trip():
    module, other = Shifted(), Shifted()
    jm, x = jit(module), torch.randn(3, 4)
    jm(x)
    state = jm.state_dict()
    assert type(state["linear.weight"]) is TwoTensor and type(state["shift"]) is TwoTensor
    jm.load_state_dict(other.state_dict())
    assert_same(jm(x), other(x))
    assert thunder.cache_misses(jm) == 1


WEIGHT = two(5, 4)


def test_wrapper_from_a_global_or_closure_is_an_input():
    closed_over = two(3, 4)
    jf = jit(lambda p: F.linear(closed_over + p, WEIGHT))
    for _ in range(2):
        p = torch.randn(3, 4)
        assert_same(jf(p), F.linear(closed_over + p, WEIGHT))
    closed_over.a.add_(1)  # read anew in each call
    assert_same(jf(p), F.linear(closed_over + p, WEIGHT))
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 2)


# -- options ---------------------------------------------------------------------------------------------------------------


def test_no_caching():
    jf = jit(lambda x, n: x * n, cache="no caching")
    x = two(3)
    assert_same(jf(x, 2), x * 2)
    assert_same(jf(x, 3), x * 3)
    assert thunder.cache_hits(jf) == 0


@pytest.mark.parametrize("name", ["linear", "nested", "views"])
def test_norm_transform_interprets_other_wrappers_too(name: str):
    check(*OPERATIONS[name], NormTransform)


def test_both_transforms_together():
    x = two(3, 4)
    jf = thunder.jit(lambda x: x.relu() + 1, transforms=[SubclassTransform(), NormTransform()])
    assert_same(jf(x), x.relu() + 1)


def test_hooks_with_keywords_on_the_jitted_module_itself():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    model.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)
    jm = thunder.jit(model, transforms=[SubclassTransform()])
    x = torch.randn(2, 3)
    for _ in range(2):
        torch.testing.assert_close(jm(x), model(x))
    assert (thunder.cache_misses(jm), thunder.cache_hits(jm)) == (1, 1)


def test_shapes_of_wrappers_given_to_factories():
    jf = thunder.jit(lambda x: torch.ones(x.shape, dtype=torch.int64), transforms=[SubclassTransform()])
    assert torch.equal(jf(two(3, 4)), torch.ones(3, 4, dtype=torch.int64))


def _forward(m, x):
    handle = m.register_forward_hook(lambda module, args, kwargs, result: result * 2, with_kwargs=True)
    y = m(x)
    handle.remove()
    return y, m(x)


def _pre_forward(m, x):
    with m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)):
        return m(x)


def _captured(m, x):
    seen = []
    first = m.register_forward_hook(lambda module, args, result: seen.append(args[0] * result))
    second = m.register_forward_hook(lambda module, args, result: result + 1, prepend=True)
    seen.append(m(x))
    first.remove()
    second.remove()
    return seen


def _full_backward(m, x):
    handle = m.register_full_backward_hook(lambda module, grads, of_results: tuple(g if g is None else g * 2 for g in grads))
    y = m(x)
    handle.remove()
    return y


def _kept_or_removed(m, x):
    """Each second call has one hook more on the way."""
    if getattr(m, "handle", None) is None:
        m.handle = m.register_forward_hook(lambda module, args, result: result * 2)
    else:
        m.handle.remove()
        m.handle = None
    return m(x)


@pytest.mark.parametrize(
    ("program", "make"),
    [(f, m) for f in (_forward, _pre_forward, _captured, _full_backward, _kept_or_removed) for m in (two, torch.randn)
     if (f, m) != (_full_backward, torch.randn)],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_hooks_that_a_program_gives_to_modules_are_called(program, make):
    models, jitted = [nn.Linear(4, 4)], thunder.jit(program, transforms=[SubclassTransform()])
    models.append(copy.deepcopy(models[0]))
    for _ in range(3):
        found = []
        x = make(3, 4)
        for model, function in zip(models, (program, jitted), strict=True):
            given = x.detach().clone().requires_grad_()
            results = function(model, given)
            results = [results] if isinstance(results, torch.Tensor) else list(results)
            (gradient,) = torch.autograd.grad([r.sin() for r in results], given, [torch.ones_like(r.detach()) for r in results])
            found.append(([r.detach() for r in results], gradient, len(model._forward_hooks)))
        assert_same(found[1], found[0])
    # a module knows from its first full backward hook on of which kind it has them
    assert thunder.cache_misses(jitted) == {_kept_or_removed: 3, _full_backward: 2}.get(program, 1)
