"""What a wrapper keeps beside its inner tensors: what one operation computed on the way and a later one uses."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.sizes import assert_same_size
from tests.subclasses import OneTensor
from thunder_norm import L1Tensor, L2Tensor, RMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

aten = torch.ops.aten


class Remembering(OneTensor):
    """A tensor that remembers the square of what it was multiplied with, which is no inner tensor of it, and adds it in `neg`."""

    def __init__(self, inner, kept=None):
        self.inner, self.kept = inner, kept

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        x, *others = args
        if func is aten.mul.Tensor:
            (other,) = others
            return cls(x.inner * other, (other * other).sin() + 1)
        if func is aten.neg.default:
            return cls(-x.inner if x.kept is None else x.kept - x.inner)
        if func is aten.add_.Tensor:
            x.inner.add_(others[0])
            return return_and_correct_aliasing(func, args, kwargs or {}, x)
        raise NotImplementedError(func)


def jit(f):
    return thunder.jit(f, transforms=[SubclassTransform()])


def test_it_is_what_it_was():
    x, y = torch.randn(3), torch.randn(3)

    def f(a, b):
        return -((a * b) * b), -(a * b.cos()), -(a * b)

    for _ in range(2):
        for got, want in zip(jit(f)(Remembering(x), y), f(Remembering(x), y), strict=True):
            assert type(got) is Remembering
            torch.testing.assert_close(got.inner, want.inner)


@pytest.mark.parametrize("change", [lambda b: b.add_(1), lambda b: b.copy_(b + 1), lambda b: b[:2].mul_(3)])
def test_it_is_what_it_was_where_its_argument_was_changed_in_place_since_then(change):
    def f(a, b):
        product = a * b
        change(b)
        return -product

    x, y = torch.randn(3), torch.randn(3)
    got, want = jit(f)(Remembering(x), y.clone()), f(Remembering(x), y.clone())
    torch.testing.assert_close(got.inner, want.inner)


@pytest.mark.parametrize("change", [lambda c: c.add_(1), lambda c: c[:2].mul_(3), lambda c: c.view(3, 1).copy_(c[:, None] + 1)])
def test_what_something_else_was_changed_since_then_is_what_it_was(change):
    x, y, z = (torch.randn(3) for _ in range(3))

    def f(a, b, c):
        states = c.clone()
        product = a * b
        change(states)
        return -product, states

    (got, states), (want, expected) = jit(f)(Remembering(x), y, z), f(Remembering(x), y, z)
    torch.testing.assert_close(got.inner, want.inner)
    torch.testing.assert_close(states, expected)


@pytest.mark.parametrize("kind", [RMSTensor, L1Tensor, L2Tensor], ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.sqrt(x.square().mean(-1, keepdim=True) + 0.1),
        lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1),
        lambda x: torch.chunk(torch.sqrt((x * x).mean(-1, keepdim=True) + 0.1), 2, -2)[0] * 3,
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1),
    ],
    ids=["root", "inverse root", "a piece", "normalized"],
)
def test_norms_of_converted_arguments_live_on_in_later_rules(kind, f):
    """A mean of squares remembers x as its rule took it: an L1Tensor as the RMSTensor it was converted to, in a rule's inside."""

    def run(call):
        n, d = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (2.0, 0.5))
        out = call(kind(n, backing=torch.ones(2, 4, 3, dtype=torch.float64), perturbation_size=d))
        return out, torch.autograd.grad(out.norm_size + out.perturbation_size, (n, d))

    (eager, expected), (traced, found) = run(f), run(thunder.jit(f, transforms=[NormTransform()]))
    assert type(eager) is type(traced) and eager.elem_dims == traced.elem_dims
    assert_same_size(traced.norm_size, eager.norm_size)
    assert_same_size(traced.perturbation_size, eager.perturbation_size)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
