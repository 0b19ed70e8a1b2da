"""Wrappers that require grad themselves: gradients are PyTorch's, in value and in class.

Every case is compared with eager: results, and the gradients of every argument, on two calls of which the second must be served
from the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.compiled_classes import Tagged
from tests.seeds import seeded
from tests.subclasses import OneTensor, ScaleTensor, assert_same, leaves, two
from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.subclass import register_implementation
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder
import thunder.torch as ltorch
from thunder.core import prims
from thunder.extend import OperatorExecutor


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> TwoTensor:
    return two(*shape, dtype=dtype).requires_grad_()


def wrapped(*shape: int) -> WrapperSubclass:
    return WrapperSubclass(torch.randn(shape)).requires_grad_()


def nested(*shape: int) -> TwoTensor:
    return TwoTensor(two(*shape), two(*shape)).requires_grad_()


def plain(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def quantized(*shape: int) -> ScaleTensor:
    return ScaleTensor.quantize(torch.randn(shape)).requires_grad_()


class TimesSeven(torch.autograd.Function):
    """A backward that no derivative of the forward would give."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y * 7, g * x


class Build(torch.autograd.Function):
    """A wrapper from a plain tensor."""

    @staticmethod
    def forward(ctx, x):
        return TwoTensor(x * 2, x * 3)

    @staticmethod
    def backward(ctx, g):
        return g.a * 2 + g.b * 3


class Open(torch.autograd.Function):
    """A plain tensor from a wrapper."""

    @staticmethod
    def forward(ctx, x):
        return x.a + x.b

    @staticmethod
    def backward(ctx, g):
        return TwoTensor(g, g * 5)


class InsideOnly(torch.autograd.Function):
    """Plain in, plain out, a wrapper in between."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        t = x.detach()
        return (TwoTensor(t, t + 1) @ w).a

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t() * 2, x.t() @ g


def under_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w)


def half_without_grad(x):
    with torch.no_grad():
        y = x * 2
    return x * y


def checkpointed(x, w):
    return torch.utils.checkpoint.checkpoint(lambda t: F.linear(t, w).relu(), x, use_reentrant=False)


CASES: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "mul": (lambda x, y: x * y, lambda: (leaf(3, 4), leaf(3, 4))),
    "fan out": (lambda x: x * x + x.relu(), lambda: (leaf(3, 4),)),
    "the same tensor twice": (lambda x: x * x, lambda: (leaf(3),)),
    "linear, plain parameters": (F.linear, lambda: (leaf(3, 4), plain(5, 4), plain(5))),
    "linear, wrapped weight": (F.linear, lambda: (plain(3, 4), leaf(5, 4), plain(5))),
    "linear, int8 weight": (lambda x, w: F.linear(x, w) * 2, lambda: (plain(3, 4), quantized(5, 4))),
    "one inner tensor": (lambda x, w: F.linear(x, w).relu(), lambda: (wrapped(3, 4), plain(5, 4))),
    "nested": (lambda x: (x * x).sin(), lambda: (nested(3),)),
    "softmax, gelu": (lambda x, w: torch.softmax(F.gelu(F.linear(x, w)), -1) * 2, lambda: (leaf(3, 4), plain(5, 4))),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), lambda: (leaf(3, 4),)),
    "0-dim": (lambda x: x / x.sum() + x * x.mean(), lambda: (leaf(3, 4),)),
    "0-dim plain factor": (lambda x, s: x * s, lambda: (leaf(3, 4), plain())),
    "double": (lambda x: x.exp().sqrt(), lambda: (leaf(3, dtype=torch.float64),)),
    "plain before": (lambda p, x: (p.sin() * 2) * x, lambda: (plain(3, 4), leaf(3, 4))),
    "plain after": (lambda x, p: Open.apply(x * 2).sin() * p, lambda: (leaf(3, 4), plain(3, 4))),
    "views": (lambda x: x.view(4, 3).t()[0], lambda: (leaf(3, 4),)),
    "index, cat": (lambda x, y: torch.cat([x[1:], y]).relu(), lambda: (leaf(3, 4), leaf(2, 4))),
    "in-place on an intermediate": (lambda x: (x * 2).add_(1).mul_(3), lambda: (leaf(3),)),
    "conv2d": (F.conv2d, lambda: (leaf(1, 2, 4, 4), plain(3, 2, 2, 2))),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])), lambda: (leaf(3, 4),)),
    "an argument returned": (lambda x: x, lambda: (leaf(3),)),
    "detached factor": (lambda x: x * x.detach(), lambda: (leaf(3),)),
    "no_grad region": (half_without_grad, lambda: (leaf(3),)),
    "autocast region": (under_autocast, lambda: (leaf(3, 4), plain(5, 4))),
    "requires_grad is seen": (lambda x: x * 2 if x.requires_grad else x * 3, lambda: (leaf(3),)),
    "checkpoint": (checkpointed, lambda: (leaf(3, 4), plain(5, 4))),
    "autograd function": (TimesSeven.apply, lambda: (leaf(3), leaf(3))),
    "autograd function and an operation": (lambda x, y: TimesSeven.apply(x, y) + x, lambda: (leaf(3), leaf(3))),
    "autograd function of plain tensors": (lambda x, p, q: TimesSeven.apply(p, q) * x, lambda: (leaf(3), plain(3), plain(3))),
    "autograd function builds": (lambda x: Build.apply(x * 2).relu(), lambda: (plain(3, 4),)),
    "autograd function builds, another opens": (lambda x: Open.apply(Build.apply(x).relu()).sin(), lambda: (plain(3, 4),)),
    "autograd function with a wrapper inside": (
        lambda x, w: InsideOnly.apply(x, w).relu() * 2,
        lambda: (plain(3, 4), plain(4, 5)),
    ),
    "an argument without gradient": (lambda x, y: x * y.detach(), lambda: (leaf(3), leaf(3))),
}  # fmt: skip


def clone(x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(x.detach()).requires_grad_(x.requires_grad)


def assert_same_tensors(got: torch.Tensor | None, want: torch.Tensor | None, tolerance: dict | None = None) -> None:
    assert type(got) is type(want)
    if want is not None:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), **(tolerance or {}))


def backward(y: torch.Tensor) -> None:
    torch.autograd.backward(y, torch.ones_like(y) if y.ndim else None)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_eager(name: str):
    torch.manual_seed(seeded(0))
    function, make = CASES[name]
    args = make()
    expected_args = [clone(a) for a in args]
    expected = function(*expected_args)
    jitted = thunder.jit(lambda *args: function(*args), transforms=[SubclassTransform()])
    backward(expected)
    for _ in range(2):
        own = [clone(a) for a in args]
        result = jitted(*own)
        assert result.requires_grad
        assert_same_tensors(result, expected)
        backward(result)
        for a, b in zip(own, expected_args, strict=True):
            assert_same_tensors(a.grad, b.grad)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)
    # an argument that is returned is the very object, of which there is no backward
    for trace in (*thunder.last_traces(jitted)[-1:], *thunder.last_backward_traces(jitted)[-1:]):
        proxies = [p for b in trace.bound_symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)]
        assert all(type(p).__name__ != "SubclassProxy" for p in proxies)


def test_results_of_which_one_is_used():
    def f(x):
        return x * 2, (x * x).sum(), [x.detach(), x.a]

    torch.manual_seed(seeded(0))
    x = leaf(3)
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for i in range(2):
        own, want = clone(x), clone(x)
        backward(jf(own)[i])
        backward(f(want)[i])
        assert_same_tensors(own.grad, want.grad)
    assert not jf(x)[2][0].requires_grad


class Quantized(nn.Module):
    """A weight that requires grad, an int8 one, plain ones, and a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(two(4, 4))
        self.b = nn.Parameter(ScaleTensor.quantize(torch.randn(4, 4)))
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", two(4))

    def forward(self, x):
        return F.linear(self.linear(F.linear(x, self.b)).relu(), self.a) + self.shift


def test_module_learns_as_in_eager():
    torch.manual_seed(seeded(0))
    model = Quantized()
    other = copy.deepcopy(model)
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    parameters = ("a", "linear.weight", "linear.bias")
    for _ in range(3):
        x = torch.randn(2, 4)
        for m, f in ((model, jitted), (other, other)):
            m.zero_grad()
            y = f(x)
            backward((y * y).sum())
            with torch.no_grad():
                for name in parameters:
                    p = m.get_parameter(name)
                    grad = p.grad.a + p.grad.b if type(p.grad) is TwoTensor and type(p) is not TwoTensor else p.grad
                    p.sub_(0.1 * grad)
        for name, p in other.named_parameters():
            assert_same_tensors(model.get_parameter(name).grad, p.grad)
            assert_same_tensors(model.get_parameter(name), p)
    assert thunder.cache_misses(jitted) == 1


def test_without_grad_mode_nothing_is_differentiated():
    x = leaf(3)
    jf = thunder.jit(lambda x: x * 2, transforms=[SubclassTransform()])
    with torch.no_grad():
        assert torch.equal(jf(x).a, x.a * 2) and not jf(x).requires_grad
    assert jf(x).requires_grad and thunder.cache_misses(jf) == 2


def test_the_trace_shows_the_program_and_the_backward_nodes():
    def program(x, w):
        return F.linear(x, w).relu()

    jf = thunder.jit(program, transforms=[SubclassTransform()])
    jf(leaf(3, 4), plain(5, 4))
    first = str(thunder.last_traces(jf)[0])
    assert "TwoTensor.linear(" in first and "test_autograd.py" in first and "return F.linear(x, w).relu()" in first
    joint = next(t for t in thunder.last_traces(jf) if "Grad transform" in str(t.get_provenance()))
    names = [b.sym.name for b in joint.bound_symbols]
    assert "backward.Relu" in names and "backward.Addmm" in names or "backward.Mm" in names


def test_a_gradient_of_another_class_gives_what_eager_mode_gives():
    found = []
    for f in (lambda x: x * 2, thunder.jit(lambda x: x * 2, transforms=[SubclassTransform()])):
        x = leaf(3)
        f(x).backward(torch.ones(3))
        found.append(x.grad)
    assert type(found[0]) is type(found[1])
    torch.testing.assert_close(found[1], found[0])


def test_gradients_of_norms_and_of_other_wrappers_do_not_mix():
    x = RMSTensor(1.0, backing=torch.randn(3), norm_size_requires_grad=True)
    jf = thunder.jit(lambda x, y: (x * 2, y * 2), transforms=[NormTransform()])
    with pytest.raises(UnsupportedOpError, match="inner tensors do"):
        jf(x, leaf(3))
    assert jf(x, two(3))[0].norm_size.requires_grad


def times_two_with_gradient_ten(calls: list) -> OperatorExecutor:
    executor = OperatorExecutor("own_rule")

    def run(a: Any) -> tuple:
        return (ltorch.mul(a, 2.0),)

    def rule(a: Any) -> tuple:
        calls.append(a)
        (out,) = run(a)
        prims.put_grad(a, ltorch.mul(prims.get_grad(out), 10.0))
        return (out,)

    operation = register_implementation(executor, WrapperSubclass, torch.mul, execution_transform=run, grad_transform=rule)
    assert str(operation) == "WrapperSubclass.mul"
    return executor


def test_the_gradient_rule_of_an_executor_goes_before_derivatives_of_what_the_class_does():
    calls: list = []
    executor = times_two_with_gradient_ten(calls)
    t = torch.randn(3, requires_grad=True)
    x = WrapperSubclass(t)
    x.requires_grad_(False)
    jf = thunder.jit(lambda x: (x * 2).sin().a, transforms=[SubclassTransform()], executors=[executor])
    jf(x).sum().backward()
    assert calls
    torch.testing.assert_close(t.grad, 10 * (2 * t.detach()).cos())


def test_the_gradient_rule_of_an_executor_goes_before_the_formula_of_torch():
    calls: list = []
    executor = times_two_with_gradient_ten(calls)
    x = wrapped(3)
    p = plain(3)
    jf = thunder.jit(lambda x, p: (x * 2).sin() + p, transforms=[SubclassTransform()], executors=[executor])
    backward(jf(x, p))
    assert calls
    torch.testing.assert_close(x.grad.a, 10 * (2 * x.a.detach()).cos())
    assert torch.equal(p.grad.a, torch.ones(3))


@pytest.mark.parametrize("same", [lambda x: x * 1, torch.ops.aten.alias, lambda x: x.view(3), lambda x: x[:]])
def test_a_result_that_is_an_input_again_has_a_gradient(same):
    grads = []
    for f in (lambda x: (same(x), x * 2), thunder.jit(lambda x: (same(x), x * 2), transforms=[SubclassTransform()])):
        x = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
        outs = f(x)
        assert all(t.requires_grad for t in outs)
        torch.autograd.backward(outs, [torch.ones_like(t.detach()) for t in outs])
        grads.append(x.grad)
    assert_same_tensors(grads[1], grads[0])


@pytest.mark.parametrize("make", [TwoTensor, lambda t, _: Tagged(t, ("w",))], ids=["TwoTensor", "Tagged"])
@pytest.mark.parametrize("f", [lambda x: x.sum(), lambda x: x.sum(-1), lambda x: (x * 2).sum()], ids=["all", "rows", "multiple"])
def test_gradients_lie_as_in_eager_mode(make, f):
    """Those of sums are expanded; what torch adds to them in later backwards is not written into the expanded ones."""
    found = []
    for call in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        x = make(torch.ones(3, 4), torch.ones(3, 4)).requires_grad_()
        result = call(x) * 1
        (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result.detach()))
        for _ in range(2):
            call(x).backward(torch.ones_like(result.detach()))
        found.append([(t.stride(), [getattr(t, n).stride() for n in t.__tensor_flatten__()[0]], t) for t in (gradient, x.grad)])
    assert_same(found[1], found[0])


class _Unmoved(OneTensor):
    """Does to a tensor of its own what is to be done to it in place: what autograd records is all that there is."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.detach.default) and not isinstance(args[-1], torch.Tensor | None):
            return cls(func(args[0].inner, *args[1:]))
        if func is torch.ops.aten.detach.default:
            return cls(func(args[0].inner))
        plain, named = tree_map_only(cls, lambda x: x.inner * 1, (args, kwargs or {}))
        return func(*plain, **named)


@pytest.mark.parametrize(
    "write",
    [
        lambda y, p: y.add_(p),
        lambda y, p: y.mul_(p),
        lambda y, p: y.copy_(p),
        lambda y, p: y.mul_(2).add_(p, alpha=3),
        lambda y, p: y.addcmul_(p, p),
    ],
)
@pytest.mark.parametrize("after", [lambda y: y, lambda y: y * 2, lambda y: y.sum(), lambda y: y.cos()])
def test_what_is_done_to_something_else_in_place_has_its_gradients(write, after):
    def program(w, p):
        y = w * 1
        write(y, p)
        return after(y)

    def run(f):
        torch.manual_seed(seeded(0))
        w, p = (torch.randn(3, dtype=torch.float64) for _ in range(2))
        w, p = _Unmoved(w).requires_grad_(), p.requires_grad_()
        y = f(w, p)
        y.backward(torch.ones_like(y.detach()))
        return y, w.grad, p.grad

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(run(jitted), run(program))
