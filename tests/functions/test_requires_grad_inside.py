"""``x.requires_grad`` in transformed functions, of whichever transform the tensor is: torch.func's answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_norm.transforms as ours
from tests.subclasses import assert_same
from thunder_norm.transforms import NormTransform
import thunder

x, rows = torch.tensor([0.5, -1.0, 2.0]), torch.arange(6.0).view(2, 3)


def twice(t: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return (t * 2 if of.requires_grad else t * 5).sin()


def _without_grad(t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = t * 3
    return (twice(t, y) + twice(t, t)).sum()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda of: of.grad(lambda t: twice(t, t).sum())(x),
    "value and gradient of what is computed": lambda of: of.grad_and_value(lambda t: twice(t, t + 1).sum())(x),
    "vjp": lambda of: of.vjp(lambda t: twice(t, t), x)[0],
    "jvp": lambda of: of.jvp(lambda t: twice(t, t), (x,), (x,)),
    "jacrev": lambda of: of.jacrev(lambda t: twice(t, t))(x),
    "jacfwd": lambda of: of.jacfwd(lambda t: twice(t, t))(x),
    "hessian": lambda of: of.hessian(lambda t: twice(t, t).sum())(x),
    "vmap": lambda of: of.vmap(lambda t: twice(t, t))(rows),
    "grad in vmap": lambda of: of.vmap(of.grad(lambda t: twice(t, t).sum()))(rows),
    "vmap in grad": lambda of: of.grad(lambda t: of.vmap(lambda r: twice(r, r))(t).sum())(rows),
    "jvp in grad": lambda of: of.grad(lambda t: of.jvp(lambda u: twice(u, u), (t,), (t,))[0].sum())(x),
    "grad in jvp": lambda of: of.jvp(of.grad(lambda t: twice(t, t).sum()), (x,), (x,)),
    "of another argument": lambda of: of.grad(lambda t, u: (twice(t, u) * u).sum())(x, x),
    "by keyword": lambda of: of.grad(lambda t, u: (twice(t, u) * u).sum())(x, u=x),
    "of an argument in grad": lambda of: of.grad(lambda t: of.grad(lambda a, b: (twice(a, b) * b).sum())(t, t).sum())(x),
    "of what is around": lambda of: of.grad(lambda t: of.grad(lambda a: (twice(a, t) * t).sum())(t).sum())(x),
    "of both": lambda of: of.grad(lambda t: of.grad(lambda a: (twice(a, a * t) * t).sum())(t).sum())(x),
    "of what is around a batch": lambda of: of.grad(lambda t: of.vmap(lambda r: twice(r, t) * t)(rows).sum())(x),
    "of what meets a batch": lambda of: of.grad(lambda t: of.vmap(lambda r: twice(r, r + t) * t)(rows).sum())(x),
    "without a batch": lambda of: of.grad(lambda t: of.vmap(twice, in_dims=(0, None))(rows, t).sum() + t.sum())(x),
    "detached": lambda of: of.grad(lambda t: twice(t, t.detach()).sum())(x),
    "of integers": lambda of: of.grad(lambda t: twice(t, t > 0).sum())(x),
    "of indices": lambda of: of.grad(lambda t: twice(t, t.sort().indices).sum())(x),
    "of a constant": lambda of: of.grad(lambda t: twice(t, rows).sum())(x),
    "without gradients": lambda of: of.grad(_without_grad)(x),
}


class Ours:
    """Those of `thunder_norm.transforms` under the names and with the arguments of torch.func."""

    grad, jacrev, jacfwd, hessian, vmap, vjp, jvp = (
        ours.grad, ours.jacrev, ours.jacfwd, ours.hessian, ours.vmap, ours.vjp, ours.jvp,
    )  # fmt: skip

    @staticmethod
    def grad_and_value(function: Callable) -> Callable:
        return lambda *args: ours.value_and_grad(function)(*args)[::-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_requires_grad_is_what_torch_says(name: str) -> None:
    program = PROGRAMS[name]
    want = program(torch.func)
    assert_same(program(Ours), want)
    assert_same(thunder.jit(lambda _: program(torch.func), transforms=[NormTransform()])(x), want)


def test_what_requires_grad_outside_does_inside_too() -> None:
    w = torch.ones(3, requires_grad=True)
    for of in (torch.func, Ours):
        found = of.vmap(lambda t: twice(t, w) * w)(rows)
        torch.testing.assert_close(found, (rows * 2).sin())
