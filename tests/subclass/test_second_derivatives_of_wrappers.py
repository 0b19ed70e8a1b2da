"""Gradients of wrappers that require grad, differentiated again: the classes' own, as eager mode has them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from tests.kept_graphs import gradients_of_a_kept_graph
from tests.seeds import crossed, seeded
from tests.subclasses import assert_same
from tests.zoo import ZOO, Case, built
from tests.zoo.case import second_gradients
from thunder_norm.errors import MissingTransformRuleError, TransformError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def two(*shape: int) -> TwoTensor:
    x = torch.randn(shape, dtype=torch.float64)
    return TwoTensor(x, 2 * x.cos()).requires_grad_()


def wrapped(*shape: int) -> WrapperSubclass:
    return WrapperSubclass(torch.randn(shape, dtype=torch.float64)).requires_grad_()


def plain(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def drawn(makers: tuple[tuple, ...]) -> list[torch.Tensor]:
    return [make(*shape) for make, *shape in makers]


def derivatives(function: Callable, leaves: list[torch.Tensor], order: int = 3) -> list[tuple]:
    """The gradients of the sums of results, those of the sums of these, and so on."""
    values, found = function(*leaves), []
    values = values if isinstance(values, tuple) else (values,)
    for n in range(order):
        ones = [torch.ones_like(v) for v in values]
        grads = torch.autograd.grad(values, leaves, ones, create_graph=n < order - 1, allow_unused=True)
        found.append(grads)
        values = tuple(g.sin() for g in grads if g is not None and g.requires_grad)
    return found


class Through(torch.autograd.Function):
    """Rounds, and hands gradients on times 3 x: no derivative of the forward is that."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0]


class Both(torch.autograd.Function):
    """A plain tensor from a wrapper."""

    @staticmethod
    def forward(ctx, x):
        return x.a + x.b * 2

    @staticmethod
    def backward(ctx, g):
        return TwoTensor(g, g * 2)


def partly_detached(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.exp()
    return (x.sin() * scale * w.detach()) ** 3 + w**3


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y.add_(x.sin())
    return y.square() * w


def computed_before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (w.sin() * w).exp() * x


def causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(3, 3, dtype=torch.float64).tril() == 0
    return ((x @ x.t()).masked_fill(mask, -2.0).softmax(-1) @ w).sin()


def beside_constants(x: torch.Tensor, w: torch.Tensor) -> tuple:
    table = torch.zeros(3, dtype=torch.float64)
    table[0] = 2.0
    with torch.no_grad():
        scale = w.exp().sum(0)
    y = (x * (torch.arange(3.0, dtype=torch.float64) + 1) * table).cos()
    return (y * (scale * 2)).exp(), torch.where(w > 0, x, scale * w.detach()).square(), w.sin()


_PROGRAMS: dict[str, tuple[Callable, tuple]] = {
    "two wrappers": (lambda x, y: (x @ y).sin() * 2, ((two, 2, 3), (two, 3, 2))),
    "a plain tensor": (lambda x, w: torch.tanh(x @ w).exp(), ((wrapped, 2, 3), (plain, 3, 2))),
    "one tensor twice": (lambda x: x.sin() * x * x, ((two, 3),)),
    "two results": (lambda x, y: (x.sin() * y, (x * y).exp()), ((two, 3), (two, 3))),
    "a function of its own": (lambda x, w: Through.apply(x * w) * x.sin(), ((two, 3), (plain, 3))),
    "no_grad inside": (partly_detached, ((two, 3), (two, 3))),
    "in-place": (in_place, ((two, 3), (plain, 3))),
    "views": (lambda x, w: x.view(3, 2).t()[0].exp() * w, ((wrapped, 2, 3), (plain, 3))),
    "plain results": (lambda x, w: (Both.apply(x.sin() * w).exp(), Both.apply(w * w), x.sin()), ((two, 3), (two, 3))),
    "a mask": (causal, ((two, 3, 2), (plain, 3, 2))),
    "constants": (beside_constants, ((two, 2, 3), (plain, 2, 3))),
    "constants and another class": (beside_constants, ((wrapped, 2, 3), (plain, 2, 3))),
    "computed before": (computed_before, ((two, 3), (plain, 3))),
}


@pytest.mark.parametrize(("name", "transform"), crossed(_PROGRAMS, [SubclassTransform, NormTransform]))
def test_three_orders_are_eagers(name: str, transform: type):
    function, makers = _PROGRAMS[name]
    leaves = drawn(makers)
    jitted = thunder.jit(function, transforms=[transform()])
    expected = derivatives(function, leaves)
    for _ in range(3):
        assert_same(derivatives(jitted, leaves), expected)
    assert thunder.cache_misses(jitted) == 1


def test_inputs_that_come_from_one_another():
    def run(call: Callable) -> Any:
        torch.manual_seed(seeded(0))
        x = two(3)
        (first,) = torch.autograd.grad(call(x, x.sin(), x).sum(), x, create_graph=True)
        return first, *torch.autograd.grad((first * first).sum(), x)

    def function(x, y, z):
        return x * y * z.exp()

    jitted = thunder.jit(function, transforms=[SubclassTransform()])
    expected = run(function)
    for _ in range(3):
        assert_same([t.detach() for t in run(jitted)], [t.detach() for t in expected])


def test_a_gradient_penalty_of_a_module():
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)).double()
    for m in (model[0], model[2]):
        m.weight = nn.Parameter(TwoTensor(m.weight.detach(), m.weight.detach() * 2))
    own, found = copy.deepcopy(model), []
    jitted = thunder.jit(own, transforms=[SubclassTransform()])
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for call, parameters in ((model, model.parameters()), (jitted, own.parameters())):
        parameters = list(parameters)
        for _ in range(3):
            grads = torch.autograd.grad(call(x).sum(), parameters, create_graph=True)
            gradients = torch.autograd.grad(grads[0].square().sum(), parameters, allow_unused=True)
        found.append(gradients)
    assert_same(found[1], found[0])


def test_hooks_and_a_graph_that_is_kept():
    def run(call: Callable) -> list:
        torch.manual_seed(seeded(0))
        x = two(3)
        x.register_hook(lambda g: g * 2)
        return gradients_of_a_kept_graph(call, x, "backward through the graph a second time")

    jitted = thunder.jit(lambda x: x.sin() * x, transforms=[SubclassTransform()])
    expected = run(lambda x: x.sin() * x)
    for _ in range(3):
        assert_same(run(jitted), expected)


def test_what_changes_after_the_call_is_noticed():
    x, w = two(3), plain(3)
    y = thunder.jit(lambda x, w: x * w * w, transforms=[SubclassTransform()])(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(x * w, 0.5)


def in_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ w


def times_random_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(3, 3) * w


@pytest.mark.parametrize("function", (dropped, in_autocast, times_random_numbers))
def test_what_cannot_be_run_again_is_refused(function: Callable):
    x, w = TwoTensor(torch.randn(3, 3), torch.randn(3, 3)).requires_grad_(), torch.randn(3, 3, requires_grad=True)
    y = thunder.jit(function, transforms=[SubclassTransform()])(x, w)
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    with pytest.raises(TransformError, match="create_graph=True through a jitted program"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)


def test_nothing_is_kept_for_it():
    x = two(3)
    jitted = thunder.jit(lambda x: (x * 2).sin(), transforms=[SubclassTransform()])
    for create_graph in (False, True, False):
        y = jitted(x * 1)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        gone = [weakref.ref(t) for t in (y, gradient)]
        del y, gradient
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


# -- the zoo --------------------------------------------------------------------------------------------------------------------

# opaque objects, and programs with more than operations on wrappers in them
_REFUSED = {
    *(name for name, entry in ZOO.items() if "opaque" in entry.roles),
    "NestedTensor, views",
    "as_nested_tensor of the parts of another",
    "NF4, F.linear, gradient of the input",
    "ComplexTensor constructed",
}
# custom operators whose registered gradient torch does not differentiate under a transform
_WITHOUT_RULE = {"AsyncCollectiveTensor, differentiated"}


@pytest.fixture
def process_group_of_one() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("entry", [pytest.param(c, id=c.name) for c in ZOO.values() if c.available and c.works[1]])
def test_second_derivatives_of_the_zoo(entry: Case, process_group_of_one: None):
    function, args = built(entry)
    try:
        expected = second_gradients(function, args, function)
    except (RuntimeError, NotImplementedError, AssertionError, TypeError) as e:
        pytest.skip(f"eager mode has none: {e}")
    function, args = built(entry)
    jitted = thunder.jit(function, transforms=[SubclassTransform(**entry.options)])
    if entry.name in _REFUSED | _WITHOUT_RULE:
        error = TransformError if entry.name in _REFUSED else MissingTransformRuleError
        message = "create_graph=True through a jitted program" if entry.name in _REFUSED else "torch has no derivative"
        with pytest.raises(error, match=message):
            second_gradients(function, args, jitted)
        return
    for _ in range(2):
        assert_same(second_gradients(function, args, jitted), expected)
