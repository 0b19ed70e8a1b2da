"""Operators of others in regions of autocast: what their Python calls is cast as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.seeds import seeded
from tests.subclasses import assert_same, two
from thunder_norm.transforms import SubclassTransform
import thunder


@torch.library.custom_op("autocast_of_operators::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@product.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def _backward(ctx, grad):
    a, b = ctx.saved_tensors
    return grad.float() @ b.mT, a.mT @ grad.float()


product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("autocast_of_operators::square_into", mutates_args={"out"})
def square_into(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    found = a @ a
    out.copy_(found.float())
    return found * 2


@square_into.register_fake
def _(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return a @ a


def in_a_region(a, b):
    with torch.autocast("cpu", torch.bfloat16):
        found = product(a, b)
        with torch.autocast("cpu", enabled=False):
            return found, product(a, b)


def written(a, b):
    out = torch.zeros(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        return square_into(a, out), out + b


@pytest.mark.parametrize(
    ("program", "make"),
    [(in_a_region, lambda: torch.randn(3, 3)), (in_a_region, lambda: two(3, 3)), (written, lambda: torch.randn(3, 3))],
)
def test_what_an_operator_calls_is_cast(program: Callable, make: Callable):
    torch.manual_seed(seeded(0))
    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        a, b = make(), make()
        assert_same(jf(a, b), program(a, b))


def test_gradients_of_an_operator_in_a_region_and_calls_in_one():
    jf, found = thunder.jit(lambda a, b: product(a, b), transforms=[SubclassTransform()]), []
    for function in (product, jf):
        torch.manual_seed(seeded(0))
        a, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(a, b)
        found.append((y, *torch.autograd.grad(y.sum(), (a, b)), function(a, b)))
    assert_same(found[1], found[0])
