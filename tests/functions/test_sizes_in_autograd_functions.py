"""torch.autograd.Function in which sizes are values: entries that a mask chooses, places that are looked for, values that differ."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, vmap
import thunder

Function = torch.autograd.Function
TRANSFORMS = (SubclassTransform, NormTransform)


class ByMask(Function):
    """What is positive, doubled; the backward chooses by the mask of the forward."""

    @staticmethod
    def forward(ctx, x):
        mask = x > 0
        ctx.save_for_backward(mask)
        result = torch.zeros_like(x)
        result[mask] = x[mask] * 2
        return result

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        result = torch.zeros_like(g)
        result[mask] = g[mask] * 3
        return result


class ByPlace(Function):
    """Rows that are long, doubled, as the exponential of a Lie algebra chooses its series."""

    @staticmethod
    def forward(ctx, x):
        rows = (x.norm(dim=-1) > 1).nonzero()[:, 0]
        result = x.clone()
        result[rows] = x[rows] * 2
        ctx.save_for_backward(rows, x)
        return result, rows.numel()

    @staticmethod
    def backward(ctx, g, _):
        rows, x = ctx.saved_tensors
        result = g * x
        result[rows] = g[rows].sin()
        return result


class Distinct(Function):
    """As many entries as there are values."""

    @staticmethod
    def forward(ctx, x):
        values, places, counts = torch.unique(x.round(), return_inverse=True, return_counts=True)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values * counts

    @staticmethod
    def backward(ctx, g):
        return g[ctx.saved_tensors[0]].reshape(ctx.shape)


_PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "mask": lambda x: ByMask.apply(x) + 1,
    "mask of what is computed": lambda x: ByMask.apply(x.sin() - 0.1).cos(),
    "places": lambda x: ByPlace.apply(x * 2)[0].sin(),
    "a number of places": lambda x: x * ByPlace.apply(x)[1],
    "values": lambda x: Distinct.apply(x * 3),
    "twice": lambda x: ByMask.apply(ByPlace.apply(x)[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_what_values_choose_is_eagers(name: str, requires_grad: bool, transform: type):
    program = _PROGRAMS[name]
    jitted = thunder.jit(lambda x: program(x), transforms=[transform()])
    for seed in (0, 1, 2, 0):
        torch.manual_seed(seeded(seed))
        x = torch.randn(4, 3, requires_grad=requires_grad)
        want, got = program(x), jitted(x)
        torch.testing.assert_close(got, want)
        if requires_grad:
            gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (want, got)]
            torch.testing.assert_close(gradients[1], gradients[0])
    assert thunder.cache_hits(jitted) >= 1


def test_a_backward_whose_sizes_hang_on_its_gradient_is_refused():
    class OfGradient(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            result = torch.zeros_like(g)
            result[g > 0] = g[g > 0] * 3
            return result

    x = torch.tensor([0.5, -2.0], requires_grad=True)
    y = thunder.jit(lambda x: OfGradient.apply(x) + 1, transforms=[SubclassTransform()])(x)
    assert y.tolist() == [2.0, -3.0]
    with pytest.raises(ThunderNormError):
        y.sum().backward()


@pytest.mark.parametrize("transformed", [grad(lambda x: ByMask.apply(x).sum()), vmap(ByMask.apply)], ids=["grad", "vmap"])
def test_functions_under_transforms_are_refused(transformed: Callable):
    with pytest.raises(ThunderNormError, match="ByMask|data-dependent"):
        transformed(torch.ones(2, 3))


def test_sizes_of_random_numbers_are_refused():
    def program(x):
        return ByMask.apply(x + torch.randn(3))

    with pytest.raises(ThunderNormError, match="random numbers"):
        thunder.jit(program, transforms=[SubclassTransform()])(torch.ones(3))


def test_wrappers_beside_plain_tensors():
    def program(w, x):
        return w * 2, ByMask.apply(x)

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        x = torch.tensor([1.0, -1.0, 2.0])
        w, y = jitted(TwoTensor(x, x + 1), x)
        assert torch.equal(w.b, (x + 1) * 2) and torch.equal(y, ByMask.apply(x))
    assert thunder.cache_hits(jitted) == 1
