"""Gradients of jitted programs that are differentiated again, as eager mode has them, to any order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.kept_graphs import gradients_of_a_kept_graph
from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import MissingTransformRuleError, TransformError, UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SplitBiasTransform, SubclassTransform
import thunder

_TRANSFORMS = (SubclassTransform, NormTransform, SplitBiasTransform, CheckpointTransform)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def derivatives(function: Callable, leaves: Sequence[torch.Tensor], order: int = 3) -> list[tuple]:
    """The gradients of a function of the leaves, those of what these sum to, and so on; what does not depend on a leaf has zeros."""
    found, value = [], sum(t.sum() for t in tree_leaves(function(*leaves)) if isinstance(t, torch.Tensor) and t.requires_grad)
    for n in range(order):
        grads = torch.autograd.grad(value, leaves, create_graph=n < order - 1, allow_unused=True, materialize_grads=True)
        found.append(grads)
        value = sum((g * torch.linspace(0.5, 1.5, g.numel(), dtype=g.dtype).view(g.shape)).sum() for g in grads)
    return found


def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) @ k.sin()  # torch has no second derivative of its fused attention on a CPU


def several(x: torch.Tensor, w: torch.Tensor) -> tuple:
    y = x * w
    return y.exp(), y, y, y.argmax(), 3, {"inner": [y.view(-1).sin(), x]}


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y.mul_(w)
    y[0] += x[1].exp()
    return y


def partly_detached(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.exp()
    return (x.sin() * scale * w.detach()) ** 3 + w**3


def normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`layer_norm`, whose third derivatives are wrong in torch: the statistics that it saves count as constants then."""
    return ((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * w) ** 2


def normalized_by_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (4,), w) ** 2


_REFERENCES = {normalized_by_torch: normalized}
_PROGRAMS = {
    "elementwise": (lambda x, w: (x * w).sin().square(), (3, 4), (4,)),
    "a product": (lambda x, w: torch.tanh(x @ w).exp(), (3, 4), (4, 2)),
    "softmax": (lambda x, w: (F.log_softmax(x * w, -1) * w).softmax(0), (3, 4), (3, 4)),
    "layer_norm": (normalized_by_torch, (3, 4), (4,)),
    "attention": (attend, (1, 2, 3, 4), (1, 2, 5, 4)),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1).sin(), (1, 2, 4, 4), (3, 2, 3, 3)),
    "several results": (several, (2, 3), (3,)),
    "in-place": (in_place, (2, 3), (3,)),
    "no_grad inside": (partly_detached, (2, 3), (3,)),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_three_orders_are_eagers(name: str):
    function, *shapes = _PROGRAMS[name]
    leaves = [drawn(*shape) for shape in shapes]
    jitted = thunder.jit(function, transforms=[SubclassTransform()])
    expected = derivatives(_REFERENCES.get(function, function), leaves)
    for _ in range(3):  # acquired, found by Thunder, found by us
        torch.testing.assert_close(derivatives(jitted, leaves), expected)
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("transform", _TRANSFORMS)
def test_whatever_the_transform(transform: type):
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)).double()
    jitted = thunder.jit(model, transforms=[transform(["0"]) if transform is CheckpointTransform else transform()])
    x = drawn(2, 3)

    def penalized(call: Callable) -> list:
        y = call(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (y + (gradient.norm(dim=-1) - 1).square().mean()).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found[:3]  # the last bias

    expected = penalized(model)
    for _ in range(3):
        torch.testing.assert_close(penalized(jitted), expected)


def test_gradgradcheck():
    jitted = thunder.jit(lambda x, w: (x @ w).sigmoid() * x[:, :2], transforms=[SubclassTransform()])
    assert torch.autograd.gradgradcheck(jitted, (drawn(2, 3), drawn(3, 2)))


def test_backward_leaves_gradients_that_can_be_differentiated():
    x, y = drawn(3), drawn(3)
    jitted = thunder.jit(lambda x: x.exp() * x, transforms=[SubclassTransform()])
    for leaf, call in ((x, jitted), (y, lambda y: y.exp() * y)):
        leaf.data.fill_(0.5)
        call(leaf).sum().backward(create_graph=True)
        leaf.second = torch.autograd.grad(leaf.grad.square().sum(), leaf)[0]
    torch.testing.assert_close(x.second, y.second)
    x.grad = y.grad = None


def test_hooks_and_a_graph_that_is_kept():
    def run(call: Callable) -> list:
        x = torch.arange(1.0, 4.0, dtype=torch.float64).requires_grad_()
        x.register_hook(lambda g: g * g)

        def hooked(x: torch.Tensor) -> torch.Tensor:
            y = call(x)
            y.register_hook(lambda g: g * 3)
            return y

        return gradients_of_a_kept_graph(hooked, x, "backward through .* a second time")

    jitted = thunder.jit(lambda x: x.sin() * x, transforms=[SubclassTransform()])
    expected = run(lambda x: x.sin() * x)
    for _ in range(3):
        torch.testing.assert_close(run(jitted), expected)


def test_large_results():
    x = torch.full((2**22 + 1,), 2.0, requires_grad=True)  # more than 2**24 bytes: two nodes
    jitted = thunder.jit(lambda x: x * x * x, transforms=[SubclassTransform()])
    for _ in range(3):
        y = jitted(x)
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.full_like(x, 12.0))
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(gradient, torch.full_like(x, 12.0))
        assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], torch.full_like(x, 12.0))


def test_running_statistics_and_random_numbers():
    def trained(make: Callable) -> list:
        torch.manual_seed(seeded(3))
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Softplus(), nn.Dropout(0.2)).double()
        call, x, found = make(model), drawn(6, 3), []
        for _ in range(3):
            (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
            found += [gradient.detach(), torch.rand(2)]  # as many numbers were drawn
        return [*found, *(p.grad for p in model.parameters()), *model.buffers()]

    expected = trained(lambda model: model)
    found = trained(lambda model: thunder.jit(model, transforms=[SubclassTransform()]))
    torch.testing.assert_close(found, expected)


def test_norms_and_data_of_normed_programs():
    model, weight = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), drawn(2, 3).detach()
    leaves = list(model.parameters())[::2]

    def run(call: Callable) -> list:
        y = call(RMSTensor(1.5, backing=weight))
        first = torch.autograd.grad(y.norm_size + y.backing.square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    jitted = thunder.jit(model, transforms=[NormTransform()])
    expected = run(model)
    for _ in range(3):
        torch.testing.assert_close(run(jitted), expected)


def test_autocast():
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)

    def run(call: Callable, inside: bool) -> tuple:
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x, w)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return gradient.detach(), *torch.autograd.grad(gradient.square().sum(), (x, w))

    jitted = thunder.jit(lambda x, w: torch.tanh(x @ w), transforms=[SubclassTransform()])
    for inside in (False, True):
        expected = run(lambda x, w: torch.tanh(x @ w), inside)
        for _ in range(2):
            for g, e in zip(run(jitted, inside), expected, strict=True):
                torch.testing.assert_close(
                    g, e, atol=0.1 * e.abs().max().item(), rtol=0
                )  # bfloat16 has 8 bits, here summed over 3


def test_what_changes_after_the_call_is_noticed():
    x, w = drawn(3), drawn(3)
    jitted = thunder.jit(lambda x, w: x * w * w, transforms=[SubclassTransform()])
    for _ in range(3):
        y = jitted(x, w)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_the_program_changes_is_noticed():
    def count(x, seen):
        y = (x * seen).exp()
        seen.add_(1)
        return y

    jitted = thunder.jit(count, transforms=[SubclassTransform()])
    for _ in range(3):
        y = jitted(x := drawn(3), torch.ones(3, dtype=torch.float64))
        with pytest.raises((RuntimeError, TransformError), match="modified by an inplace operation|has written"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    "function",
    (
        lambda x: torch.autograd.backward(x.sin().sum()),
        lambda x: x.sin().sum().backward(),
    ),
)
def test_a_backward_pass_inside_is_refused(function: Callable):
    with pytest.raises(UnsupportedOpError, match="inside a traced program"):
        thunder.jit(function, transforms=[SubclassTransform()])(drawn(3))


@torch.library.custom_op("second_derivatives::show", mutates_args=())
def show(x: torch.Tensor) -> None:
    pass


show.register_fake(lambda x: None)


def test_effects_are_not_repeated():
    def shown(x):
        t = TwoTensor(x, x)
        show(t)
        return t.a.sin()

    x = drawn(3)
    y = thunder.jit(shown, transforms=[SubclassTransform()])(x)
    with pytest.raises((TransformError, UnsupportedOpError), match="does more than return tensors"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_nothing_is_kept_for_it():
    x = drawn(3)
    jitted = thunder.jit(lambda x: (x * 2).sin().view(-1), transforms=[SubclassTransform()])
    for create_graph in (False, True, False):
        y = jitted(x * 1)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        gone = [weakref.ref(t) for t in (y, gradient)]
        del y, gradient
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


def _weighted(t: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.2, 1.0, max(t.numel(), 1), dtype=torch.float64)[: t.numel()].view(t.shape)
    return (t.abs() if t.is_complex() else t).mul(weights).sum()


def _second(function: Callable, given: tuple, leaves: list[torch.Tensor]) -> tuple[Any, ...]:
    results = [t for t in tree_leaves(function(*given)) if isinstance(t, torch.Tensor) and t.requires_grad]
    value = sum(_weighted(t).square() for t in results)
    first = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True, allow_unused=True)
    return torch.autograd.grad(sum(_weighted(g).square() for g in first), leaves, allow_unused=True, materialize_grads=True)


_OPERATORS = (
    "atan2 prod cumsum logsumexp matmul index_add scatter var clamp where cdist gather diff renorm nn.functional.gelu".split()
)


@pytest.mark.parametrize("name", _OPERATORS)
def test_operators_of_torchs_database(name: str):
    operator = next(o for o in op_db if o.name == name)

    def run(x, args, kwargs):
        return operator.op(x, *args, **kwargs)

    for sample in list(operator.sample_inputs("cpu", torch.float64, requires_grad=True))[:3]:
        given = (sample.input, sample.args, sample.kwargs)
        leaves = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
        jitted = thunder.jit(run, transforms=[SubclassTransform()])
        try:
            expected = _second(run, given, leaves)
        except NotImplementedError:  # torch 2.11 has no second derivative of cdist
            with pytest.raises(MissingTransformRuleError, match="torch has no derivative"):
                _second(jitted, given, leaves)
        else:
            torch.testing.assert_close(_second(jitted, given, leaves), expected)
