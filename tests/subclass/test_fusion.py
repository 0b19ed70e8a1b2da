"""Programs on wrappers are fused like the same program written by hand on plain tensors, and nothing of the wrappers is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import OpCounter
from thunder_norm.transforms import SubclassTransform
import thunder
from thunder.core import prims
from thunder.core.trace import TraceCtx

EXECUTOR = ["torchcompile"]
BOOKKEEPING = {"python_del", "python_return", "unpack_trivial", "unpack_sequence", "clear_mutable_collection"}


def regions(trace: TraceCtx) -> tuple[int, list[str]]:
    """How many fused regions an execution trace has, and what runs beside them."""
    names = [b.sym.name for b in trace.bound_symbols if b.sym.id != prims.PrimIDs.COMMENT]
    fused = [n for n in names if n.startswith("TorchCompile")]
    return len(fused), sorted(n for n in names if n not in BOOKKEEPING and n not in fused)


def fused(function: Callable, *args) -> tuple[Callable, tuple[int, list[str]]]:
    jitted = thunder.jit(function, transforms=[SubclassTransform()], executors=EXECUTOR)
    jitted(*args)
    return jitted, regions(thunder.last_traces(jitted)[-1])


def pointwise(x):
    return F.gelu(x * 2 + 1).tanh().sum(-1)


def with_a_view(x):
    return (x.t().reshape(3, 4) + 1).transpose(0, 1) * 3


def residual(x, w):
    return x + F.silu(F.linear(F.layer_norm(x, (4,)), w))


def attention(x, w):
    q = k = v = F.linear(x, w)
    return torch.softmax(q @ k.t() / 2, -1) @ v


PROGRAMS = (pointwise, with_a_view, residual, attention)


def _inputs(function: Callable) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seeded(0))
    return tuple(torch.randn(4, 4) if i else torch.randn(3, 4) for i in range(function.__code__.co_argcount))


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_one_inner_tensor_as_without_the_wrapper(function: Callable):
    args = _inputs(function)
    with torch.no_grad():
        jitted, found = fused(lambda *a: function(*a), *(WrapperSubclass(t) for t in args))
        _, expected = fused(lambda *a: function(*a), *args)
        torch.testing.assert_close(jitted(*(WrapperSubclass(t) for t in args)).a, function(*args))
    assert found[0] <= expected[0] and found[1] == expected[1]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_two_inner_tensors_as_two_programs_in_one(function: Callable):
    args = _inputs(function)
    wrapped = tuple(TwoTensor(t, t + 1) for t in args)
    by_hand = lambda *a: (function(*a[: len(args)]), function(*a[len(args) :]))  # noqa: E731
    with torch.no_grad():
        jitted, found = fused(lambda *a: function(*a), *wrapped)
        _, expected = fused(by_hand, *args, *(t.b for t in wrapped))
        y = jitted(*wrapped)
        torch.testing.assert_close((y.a, y.b), by_hand(*args, *(t.b for t in wrapped)))
    assert found[0] <= expected[0] and found[1] == expected[1]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_backward_into_inner_tensors_as_without_the_wrapper(function: Callable):
    args = [t.requires_grad_() for t in _inputs(function)]

    def traces(wrap: Callable) -> list[tuple[int, list[str]]]:
        jitted = thunder.jit(lambda *a: function(*a), transforms=[SubclassTransform()], executors=EXECUTOR)
        jitted(*map(wrap, args))
        return [regions(t[-1]) for t in (thunder.last_traces(jitted), thunder.last_backward_traces(jitted))]

    for found, expected in zip(traces(OpCounter), traces(lambda t: t), strict=True):
        assert found[0] <= expected[0] and found[1] == expected[1]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_backward_of_a_wrapper_that_requires_grad_is_fused_too(function: Callable):
    args = _inputs(function)
    jitted = thunder.jit(lambda *a: function(*a), transforms=[SubclassTransform()], executors=EXECUTOR)
    wrapped = [TwoTensor(t.clone(), t + 1).requires_grad_() for t in args]
    y = jitted(*wrapped)
    torch.autograd.backward(y, TwoTensor(torch.ones_like(y.a), torch.ones_like(y.b)))
    plain = [t.detach().requires_grad_() for t in args]
    expected = torch.autograd.grad(function(*plain).sum(), plain)
    torch.testing.assert_close(tuple(w.grad.a for w in wrapped), expected)
    for trace in (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]):
        count, beside = regions(trace)
        assert count >= 1 and not [n for n in beside if "TwoTensor" in n or "flatten" in n], (count, beside)


def test_wrapping_and_unwrapping_inside_disappears():
    def f(a, b):
        x = TwoTensor(a, b) * 2
        y = TwoTensor(x.b, x.a) + 1
        return y.a, y.b

    a, b = torch.randn(3), torch.randn(3)
    with torch.no_grad():
        jitted, found = fused(f, a, b)
        _, expected = fused(lambda a, b: (b * 2 + 1, a * 2 + 1), a, b)
    torch.testing.assert_close(jitted(a, b), f(a, b))
    assert found == expected
