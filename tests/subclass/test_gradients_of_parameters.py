"""``.grad`` of a module's parameters and of what is given, set, read and written into, and parameters made inside; the oracle is eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from tests.subclasses import OneTensor, OpCounter, Overriding, assert_same, two
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder


def set_all(m: Any, x: torch.Tensor) -> Any:
    m.w.grad = x * 2
    for p in m.layer.parameters():
        p.grad = (x * 1).sum() * p.detach()
    return x + 1


def accumulated(m: Any, x: torch.Tensor) -> Any:
    for p in m.parameters():
        added = p.detach() * 3
        p.grad = added if p.grad is None else p.grad + added
    return m.w.grad * 2


def added_in_place(m: Any, x: torch.Tensor) -> Any:
    if m.w.grad is not None:
        m.w.grad.add_(x)
        m.w.grad.mul_(2)
    else:
        m.w.grad = x.clone()
    return m.w.grad + 1


def zeroed(m: Any, x: torch.Tensor) -> Any:
    for p in m.parameters():
        if p.grad is not None:
            p.grad.zero_()
    return x * m.w.detach()


def stepped(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        for p in m.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
            p.grad = None
    return x * m.w.detach(), m.w.grad is None


def norm_clipped(m: Any, x: torch.Tensor) -> Any:
    return nn.utils.clip_grad_norm_(m.layer.parameters(), 0.5), [p.grad for p in m.layer.parameters() if p.grad is not None]


PROGRAMS = [set_all, accumulated, added_in_place, zeroed, stepped, norm_clipped]


class Model(nn.Module):
    def __init__(self, program: Callable, weight: torch.Tensor):
        super().__init__()
        self.w, self.layer, self.program = nn.Parameter(weight), nn.Linear(4, 2), program

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(self, x)


MAKES = {"plain": lambda: torch.randn(3, 4), "wrapped": lambda: two(3, 4)}


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_gradients_of_parameters_are_eagers(program: Callable, kind: str):
    """In four calls, between which the caller sets them, and takes them away."""

    def called(jit: Callable) -> list[Any]:
        torch.manual_seed(seeded(0))
        model, found = Model(program, MAKES[kind]()), []
        f = jit(model)
        for n in range(4):
            for p in model.parameters() if n else ():
                p.grad = None if n == 2 else torch.full_like(p.detach(), 1.5 + n)
            result = f(MAKES[kind]())
            found.append([result, [(p.detach() * 1, None if p.grad is None else p.grad * 1) for p in model.parameters()]])
        return found

    assert_same(_detached(called(lambda m: thunder.jit(m, transforms=[SubclassTransform()]))), _detached(called(lambda m: m)))


def _detached(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), tree)


def test_gradients_of_what_is_given_are_asked_for_in_loops():
    """What a generator hands out has them as well as what an argument is."""

    def f(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [p * 2 if p.grad is None else p * p.grad for p, _ in zip([a, b], (1, 2), strict=True)]

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for n in range(3):
        given = [torch.ones(2), torch.ones(2)]
        for p in given if n % 2 else ():
            p.grad = torch.full((2,), 3.0)
        assert_same(jf(*given), f(*given))


@pytest.mark.parametrize("is_reduced", [False, True])
def test_gradients_of_sums_are_added_up(is_reduced: bool):
    """The gradient of a sum is expanded, inside of a wrapper too: what torch adds to has an entry for each element."""
    found = []
    for jit in (lambda f: f, lambda f: thunder.jit(f, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        w, f = two(3, 4).requires_grad_(), jit(lambda w, x: (x + w).sum() if is_reduced else x + w)
        for _ in range(3):
            f(w, torch.ones(3, 4)).sum().backward()
        found.append([w.grad, w.grad.stride(), w.grad.a.stride()])
    assert_same(found[1], found[0])


def test_gradients_are_asked_of_the_class_as_often_as_in_eager_mode():
    """For a cotangent that has another context than the trace was made for, too."""
    found = []
    for jit in (lambda f: f, lambda f: thunder.jit(f, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        x, w = (OpCounter(torch.randn(4, 4)).requires_grad_() for _ in range(2))
        y = jit(lambda x, w: (x * 2).sin() @ w)(x, w)
        cotangent = OpCounter(torch.randn(4, 4))
        found.append([y.detach(), *torch.autograd.grad(y, (x, w), cotangent)])
    assert_same(found[1], found[0])


class Lying(OneTensor):
    """Says in its context how it lies, as a DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __tensor_flatten__(self):
        return ["inner"], self.inner.stride()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Lying, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Lying, func(*args, **kwargs))


def test_gradients_of_results_may_lie_otherwise():
    """Where the program cannot run again for it, too."""

    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w

    found = []
    for jit in (lambda f: f, lambda f: thunder.jit(f, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        x, w = (Lying(torch.randn(3, 3)).requires_grad_() for _ in range(2))
        y = jit(f)(x, w)
        found.append(
            [torch.autograd.grad(loss, (x, w), retain_graph=True) for loss in (y.sum(), (y.t() * torch.randn(3, 3)).sum())]
        )
    assert_same(found[1], found[0])


class Answering(Overriding):
    """Says of each gradient that it is five."""

    @staticmethod
    def __tensor_unflatten__(inner, ctx, outer_size, outer_stride):
        return Answering(inner["value"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.grad.__get__:
            return 5
        return super().__torch_function__(func, types, args, kwargs)


def test_classes_with_a_torch_function_have_gradients_that_they_leave_to_torch():
    def f(x: Any, y: Any) -> Any:
        before = x.grad
        x.grad = y * 2 if before is None else None
        return x.grad is None, y * 3 if before is None else before + y

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for n in range(4):
        (x, y), (given, other) = [[Overriding(torch.full((2,), 1.0 + i)) for i in range(2)] for _ in range(2)]
        if n % 2:
            x.grad, given.grad = y.detach(), other.detach()
        found, expected = jf(x, y), f(given, other)
        assert_same([found, x.grad], [expected, given.grad])
    with pytest.raises(UnsupportedOpError, match="grad of a Answering"):
        jf(*(Answering(torch.ones(2)) for _ in range(2)))


def test_a_wrapper_is_made_a_parameter_inside():
    """Its class is the wrapper's: what `nn.Parameter` makes of it is not initialized again."""

    def f(x: Any) -> Any:
        made = nn.Parameter(x.detach() * 2, requires_grad=False)
        return made * 3, isinstance(made, nn.Parameter), isinstance(x, nn.Parameter), made

    given = two(3, 4)
    found, expected = thunder.jit(f, transforms=[SubclassTransform()])(given), f(given)
    assert_same(found, expected)
    assert isinstance(found[-1], nn.Parameter)
