"""``torch.autograd.grad`` in programs with wrappers: values, whether they require grad, gradients and mistakes are eager PyTorch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.fuzz import wrappers
from tests.seeds import crossed, seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

PROGRAMS: dict[str, Callable] = {}


def program(fn: Callable) -> Callable:
    PROGRAMS[fn.__name__] = fn
    return fn


@program
def penalty(x, w):
    h = torch.tanh(x @ w) @ w.t()
    (g,) = grad(h.sum(), x, create_graph=True)
    return h.sum() + (g.pow(2).sum() + 1e-3).sqrt()


@program
def steps(x, w):
    for _ in range(2):
        (g,) = grad(((x @ w).relu() ** 2).sum(), w, create_graph=True)
        w = w - 0.1 * g
    return (x @ w).sum()


@program
def steps_in_place(x, w):
    w = w.detach().clone().requires_grad_()
    for _ in range(3):
        (g,) = grad(((x @ w) ** 2).sum(), w)
        with torch.no_grad():
            w.sub_(0.1 * g)
    return x @ w


@program
def third_derivative(x, w):
    (d,) = grad((x.sin() * x).sum(), x, create_graph=True)
    (e,) = grad(d.sum(), x, create_graph=True)
    return grad(e.sum(), x, create_graph=True)[0] @ w


@program
def kept_graph(x, w):
    y = (x @ w).sin().sum()
    (g,) = grad(y, w, retain_graph=True)
    return y, g


@program
def freed_graph(x, w):
    y = (x.sin() * x).sum()
    (g,) = grad(y, x)
    return y, g


@program
def what_operations_keep(x, w):
    y = F.dropout(F.layer_norm(x @ w, (4,)), 0.5)  # means and a mask that no operation returns
    return grad((y.softmax(-1) ** 2 * y).sum(), x, create_graph=True)[0]


@program
def what_is_written_into(x, w):
    y = x * 2
    y.mul_(x).add_(w)
    y[0] = y[1] * 2
    z = y.cos()
    z.add_(x)
    return grad((z * y).sum(), [x, w], create_graph=True)


@program
def by_what_was_computed(x, w):
    h = x.sin()
    y = (h * h @ w).sum()
    return (*grad(y, [h, w], retain_graph=True), y)


@program
def plain_on_the_way(x, w):
    h = w.sin()
    return grad((x * h).sum(), [x, w])


@program
def of_plain_alone(x, w):
    z = x * 2
    (d,) = grad((w * w).sum(), w, create_graph=True)
    return (z * d).sum()


@program
def a_cotangent(x, w):
    return grad(w.sin(), w, x, create_graph=True)[0]


@program
def not_used(x, w):
    none = grad(x.sin().sum(), [x, w], allow_unused=True)
    assert none[1] is None
    return none[0], *(g.detach() for g in grad(x.sin().sum(), [x, w], materialize_grads=True))


@program
def not_used_and_not_allowed(x, w):
    return grad(x.sin().sum(), [x, w])


@program
def a_mistake_that_is_caught(x, w):
    try:
        return grad(x.sin(), x)
    except RuntimeError:
        return x * 3


@program
def within_regions(x, w):
    with torch.no_grad():
        y = x.sin()
        with torch.enable_grad():
            (d,) = grad((x * w).sum(), x)
    return grad((y * d * x).sum(), x)[0]


@program
def of_a_hook(x, w):
    y = x * 2
    y.register_hook(lambda g: g * 5)
    return grad((y * x).sum(), x)[0]


@program
def kept_as_grad(x, w):
    x.grad = grad((x * x).sum(), x)[0]
    return x * x.grad


def pair(*shape: int) -> TwoTensor:
    return TwoTensor(torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64))


def wrapped(*shape: int) -> WrapperSubclass:
    return WrapperSubclass(torch.randn(shape, dtype=torch.float64))


def plain(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


MAKERS = {
    "pairs": (pair, pair),
    "wrappers": (wrapped, wrapped),
    "a pair and a plain one": (pair, plain),
    "a plain one and a wrapper": (plain, wrapped),
}


def drawn(kind: str, requires_grad: tuple[bool, bool] = (True, True)) -> list[torch.Tensor]:
    torch.manual_seed(seeded(3))
    return [make(4, 4).requires_grad_(flag) for make, flag in zip(MAKERS[kind], requires_grad, strict=True)]


def outcome(f: Callable, given: list[torch.Tensor]) -> list[Any]:
    """Results, which require grad, `.grad` of the inputs, and the gradients of all results together; what is raised, by its message."""
    torch.manual_seed(seeded(4))
    try:
        results = f(*given)
    except RuntimeError as e:
        return [str(e)[:60]]
    tensors = tree_leaves(results)
    found = [results, [t.requires_grad for t in tensors], [t.grad for t in given]]
    differentiable = [t for t in tensors if t.requires_grad]
    leaves = [t for t in given if t.requires_grad]
    if differentiable and leaves:
        try:
            cotangents = [torch.ones_like(t) for t in differentiable]
            found.append(grad(differentiable, leaves, cotangents, allow_unused=True))
        except RuntimeError as e:
            found.append(str(e)[:60])
    return found


def check(f: Callable, given: Callable[[], list[torch.Tensor]]) -> None:
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(outcome(jitted, given()), outcome(f, given()))


@pytest.mark.parametrize(("name", "kind"), crossed(PROGRAMS, MAKERS))
def test_programs_are_those_of_eager_mode(name: str, kind: str):
    check(PROGRAMS[name], lambda: drawn(kind))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_requires_no_grad(name: str):
    check(PROGRAMS[name], lambda: drawn("a pair and a plain one", (False, True)))


def test_of_a_wrapper_that_is_made_inside():
    def f(a, b):
        x = TwoTensor(a, b).requires_grad_()
        return grad((x.sin() * x).sum(), x)[0]

    check(f, lambda: [plain(3), plain(3)] if torch.manual_seed(seeded(5)) else [])


def test_in_a_call_without_gradients():
    def f(x, w):
        z = x * 2
        with torch.enable_grad():
            y = x.sin()
            y.mul_(w)
            (d,) = grad((y * x).sum(), x, create_graph=True)
            (e,) = grad(d.sum(), w)
        return d * 2 + z, e

    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for mode in (torch.no_grad, torch.no_grad, torch.enable_grad):
        with mode():
            assert_same(jitted(*drawn("a pair and a plain one")), f(*drawn("a pair and a plain one")))


def asks(drawn: wrappers.WrapperProgram) -> bool:
    return "autograd.grad" in drawn.code()


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int):
    """Those of `python -m tests.fuzz wrappers` that ask for derivatives."""
    source = random.Random(f"autograd.grad {seeded(seed)}")
    found = [p for p in (wrappers.draw(source) for _ in range(25)) if asks(p)][:3]
    outcomes = {p.source(): p.run() for p in found}
    assert {o.kind for o in outcomes.values()} <= {"right", "refused", "no oracle"}, outcomes
