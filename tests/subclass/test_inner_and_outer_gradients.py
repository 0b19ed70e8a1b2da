"""Wrappers of which some require grad and others hold tensors that do: gradients arrive where eager PyTorch has them arrive."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.fuzz.wrapper_classes import Dual
from tests.seeds import part, seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

PROGRAMS: dict[str, Callable] = {
    "of both": lambda x, y: x * y,
    "what is inside": lambda x, y: x.primal * 2,
    "what is inside, and the whole": lambda x, y: (x.primal * 2, x * 3),
    "what is inside times the whole": lambda x, y: x * x.primal,
    "what is inside of the other": lambda x, y: ((y.primal if isinstance(y, Dual) else y).sin(), x * 3),
    "another around it": lambda x, y: Dual(x.primal, x.tangent) * y,
    "another class around it": lambda x, y: (TwoTensor(x.primal, x.primal) * 2, y.sin()),
    "a property": lambda x, y: (x.dense().cos(), x * y),
    "written into": lambda x, y: (x * 1).mul_(2) * y,
    "detached": lambda x, y: (x.detach() * y, x.primal.detach() * 2),
    "inner ones alone": lambda x, y: x.primal * x.tangent,
}
FLAGS = [*itertools.product((False, True), repeat=3)]  # of a wrapper, its first tensor and its second one
OTHERS: dict[str, bool | tuple[bool, bool, bool]] = {
    "a plain tensor": False,
    "a plain tensor that requires grad": True,
    "a wrapper": (False, False, False),
    "a wrapper that requires grad": (True, False, False),
    "a wrapper of what requires grad": (False, True, True),
    "a wrapper that requires grad of what does": (True, True, True),
}


def made(flags: bool | tuple[bool, bool, bool]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An argument, and all that may get gradients."""
    if isinstance(flags, bool):
        t = torch.randn(3, dtype=torch.float64).requires_grad_(flags)
        return t, [t]
    a, b = (torch.randn(3, dtype=torch.float64).requires_grad_(flag) for flag in flags[1:])
    x = Dual(a, b).requires_grad_(flags[0])
    return x, [x, a, b]


def outcome(f: Callable, flags: tuple[bool, bool, bool], other: bool | tuple[bool, bool, bool]) -> tuple[Any, ...]:
    """Results, which of them require grad, and all gradients."""
    torch.manual_seed(seeded(0))
    (x, of_x), (y, of_y) = made(flags), made(other)
    results = f(x, y)
    differentiable = [t for t in tree_leaves(results) if t.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])
    return results, [t.requires_grad for t in tree_leaves(results)], [t.grad for t in (*of_x, *of_y)]


# where no wrapper requires grad itself, what is inside is differentiated through
CASES = {
    f"{name}, {flags}, {other}": (name, flags, other)
    for name, flags, other in itertools.product(PROGRAMS, FLAGS, OTHERS)
    if flags[0] or "wrapper that" in other
}


@pytest.mark.parametrize("case", part(CASES))
def test_gradients_are_those_of_eager_mode(case: str):
    name, flags, other = CASES[case]
    jitted = thunder.jit(PROGRAMS[name], transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(outcome(jitted, flags, OTHERS[other]), outcome(PROGRAMS[name], flags, OTHERS[other]))
    assert thunder.cache_misses(jitted) == 1
