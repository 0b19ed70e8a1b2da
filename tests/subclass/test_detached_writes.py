"""Plain inputs that require grad, beside wrappers, written into where autograd does not see it: through ``.detach()`` and ``.data``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder


def _before_it_is_used(w, x):
    y = x.detach().add_(1)
    return w * 2, y + y, x * 2


def _by_data(w, x):
    x.data.mul_(2)
    return w * x


def _a_part(w, x):
    x.detach()[0].mul_(2)
    return w * x


def _and_used_beside_it(w, x):
    y = x.detach()
    y.mul_(3)
    return w * y


def _copied_from_a_wrapper(w, x):
    x.data.copy_((w * 2).a)
    return w * x


def _copied_from_itself(w, x):
    x.detach().copy_(x * 2)
    return w * x


def _and_returned(w, x):
    y = x.detach()
    y.add_(1)
    return w * 2, y


def _beside_a_view(w, x):
    y, z = x.detach(), x.view(2, 2)
    y.add_(1)
    return w * 2, z * 2, x * 3


def _twice(w, x):
    x.data[1:].zero_()
    x.detach().clamp_(min=1.5)
    return (w * x).sin(), x.sin()


def _without_autograd(w, x):
    with torch.no_grad():
        x[0].mul_(2)
    return w.a * x, x.sin()


def _by_what_data_returns(w, x):
    y = x.data.mul_(2)
    return w * y, x.outer(x), y


PROGRAMS = (
    _without_autograd,
    _by_what_data_returns,
    _before_it_is_used,
    _by_data,
    _a_part,
    _and_used_beside_it,
    _copied_from_a_wrapper,
    _copied_from_itself,
    _and_returned,
    _beside_a_view,
    _twice,
)


def given(*, moves: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seeded(0))
    return TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_(moves), torch.randn(4).requires_grad_()


def outcome(function: Callable, *, moves: bool) -> list[Any]:
    w, x = given(moves=moves)
    found = function(w, x)
    results = found if isinstance(found, tuple) else (found,)
    flags = [(t.requires_grad, t.is_leaf, t is x) for t in results]
    lies_in_x = [type(t) is torch.Tensor and t.data_ptr() == x.data_ptr() for t in results]
    moving = [t for t in results if t.requires_grad]
    torch.autograd.backward(moving, [torch.ones_like(t.detach()) for t in moving])
    return [[t.detach() for t in results], flags, lies_in_x, w.grad, x.grad, x.detach()]


@pytest.mark.parametrize("moves", [True, False], ids=["beside one that requires grad", "beside one that does not"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_results_gradients_and_what_is_written_are_eagers(program: Callable, moves: bool):
    want, jitted = outcome(program, moves=moves), thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(outcome(jitted, moves=moves), want)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


def test_a_backward_that_needs_what_was_there_is_refused_where_it_runs():
    def f(w, x):
        y = w * x
        x.detach().mul_(2)
        return y

    w, x = given()
    y = f(w, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y.detach()))
    w, x = given()
    z = thunder.jit(f, transforms=[SubclassTransform()])(w, x)
    assert_same(z.detach(), y.detach())
    with pytest.raises(UnsupportedOpError, match="modified by an inplace operation"):
        z.backward(torch.ones_like(z.detach()))
