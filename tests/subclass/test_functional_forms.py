"""Operations that write into several of their arguments, or into one that is not the first: results, what was written, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

aten = torch.ops.aten


def two(*shape: int) -> TwoTensor:
    x = torch.randn(shape)
    return TwoTensor(x, x.cos() * 2)


def positive(*shape: int) -> TwoTensor:
    x = torch.rand(shape) + 0.5
    return TwoTensor(x, x + 1)


def statistics() -> list[torch.Tensor]:
    return [two(4, 3, 2), two(3), two(3), two(3), positive(3)]


_PROGRAMS: dict[str, tuple[Callable, Callable[[], list[torch.Tensor]]]] = {
    "training": (lambda x, w, b, m, v: aten._native_batch_norm_legit(x, w, b, m, v, True, 0.1, 1e-5), statistics),
    "evaluation": (lambda x, w, b, m, v: aten._native_batch_norm_legit(x, w, b, m, v, False, 0.1, 1e-5), statistics),
    "update": (lambda x, w, b, m, v: aten._batch_norm_with_update(x, w, b, m, v, 0.1, 1e-5)[:3], statistics),
    "written, then read": (lambda x, w, b, m, v: (aten._batch_norm_with_update(x, w, b, m, v, 0.1, 1e-5)[0], m * 2), statistics),
    "of its own": (
        lambda x, w, b, m, v: (aten._native_batch_norm_legit(x, w, b, n := m.clone(), v * 1, True, 0.1, 1e-5)[0], n),
        statistics,
    ),
    "instance_norm": (lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b), statistics),
    "plain statistics": (
        lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b),
        lambda: [*statistics()[:3], torch.zeros(3), torch.ones(3)],
    ),
    "rrelu": (lambda x: F.rrelu(x, training=True) * F.rrelu(x), lambda: [two(4, 3)]),
    "rrelu, the noise": (lambda x, n: (aten.rrelu_with_noise(x, n, 0.1, 0.3, True), n * 2), lambda: [two(4, 3), two(4, 3)]),
    "rrelu, in place": (lambda x: F.rrelu(x.sin(), training=True, inplace=True), lambda: [two(4, 3)]),
    "circular": (lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"), lambda: [two(2, 3, 4, 5)]),
}


def run(name: str, call: Callable, requires_grad: bool, *, first: int = 0) -> Any:
    torch.manual_seed(seeded(0))
    args = _PROGRAMS[name][1]()
    for t in args[first:3] if requires_grad else ():
        t.requires_grad_()
    found = call(*args)
    results = found if isinstance(found, tuple) else (found,)
    leaves = [t for t in args if t.requires_grad]
    gradients = torch.autograd.grad(results[0].sin().sum(), leaves, allow_unused=True) if requires_grad else ()
    return [t.detach() for t in (*results, *args)], gradients, torch.rand(2)


@pytest.mark.parametrize("name", _PROGRAMS)
def test_results_and_what_is_written_are_eagers(name: str):
    function = _PROGRAMS[name][0]
    jitted = thunder.jit(function, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(run(name, jitted, False), run(name, function, False))
    assert thunder.cache_misses(jitted) == 1


_WITH_GRADIENTS = [
    *("training", "update", "written, then read", "of its own", "instance_norm", "plain statistics"),
    *("rrelu", "rrelu, in place", "circular"),
]


@pytest.mark.parametrize("name", _WITH_GRADIENTS)
def test_gradients_are_eagers(name: str):
    function = _PROGRAMS[name][0]
    jitted = thunder.jit(function, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(run(name, jitted, True), run(name, function, True))


def test_a_kernel_leaves_out_the_gradient_of_an_input_that_needs_none():
    function = _PROGRAMS["of its own"][0]
    jitted = thunder.jit(function, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(run("of its own", jitted, True, first=1), run("of its own", function, True, first=1))
