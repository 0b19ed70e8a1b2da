"""Random operations on wrappers draw the numbers that eager draws under the same seed, and leave the generator where eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from tests.subclasses import OpCounter, assert_same, leaves, two
from thunder_norm.transforms import SubclassTransform
import thunder


def jit(function: Callable, **options: Any) -> Callable:
    return thunder.jit(function, transforms=[SubclassTransform()], **options)


def filled_in_place(x: torch.Tensor) -> tuple:
    return (
        torch.empty_like(x).normal_(1.0, 2.0),
        torch.empty_like(x).uniform_(-1, 3),
        torch.zeros_like(x).bernoulli_(),
        torch.zeros_like(x).bernoulli_(0.3),
        torch.zeros_like(x).bernoulli_(x.sigmoid()),
        x.clone().exponential_(2.0),
        x.clone().geometric_(0.4),
        x.clone().log_normal_(),
        x.clone().cauchy_(),
        x.clone().random_(3, 9),
    )


def drawn_and_dropped(x: torch.Tensor) -> torch.Tensor:
    torch.rand_like(x)
    return torch.rand_like(x) * x


def between_other_operations(x: torch.Tensor) -> torch.Tensor:
    y = (torch.rand_like(x) * x).sum() * torch.rand_like(x)
    return y + F.dropout(torch.sin(x) @ torch.rand_like(x).T, 0.2) @ x


PROGRAMS: dict[str, Callable] = {
    "dropout": lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5),
    "dropout of everything and of nothing": lambda x: (F.dropout(x, 1.0), F.dropout(x, 0.0)),
    "channel and alpha dropout": lambda x: F.dropout2d(F.alpha_dropout(x, 0.3, True)[None, :, None], 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "like": lambda x: (torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 5), torch.randint_like(x, 2, 5)),
    "of a distribution": lambda x: (
        torch.bernoulli(x.sigmoid()),
        torch.poisson(x.abs()),
        torch.multinomial(x.abs(), 2),
        torch.normal(x, 1.0),
        torch.normal(x, x.abs()),
    ),
    "filled in place": filled_in_place,
    "drawn and dropped": drawn_and_dropped,
    "between other operations": between_other_operations,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_draws_what_eager_draws(name: str):
    function, x = PROGRAMS[name], two(3, 4)
    jf = jit(function)
    for seed in range(2):
        torch.manual_seed(seeded(seed))
        expected, state = function(x), torch.get_rng_state()
        torch.manual_seed(seeded(seed))
        assert_same(jf(x), expected)
        assert torch.equal(torch.get_rng_state(), state)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)


def test_order_is_kept_between_fused_regions():
    x = two(3, 4)
    torch.manual_seed(seeded(0))
    expected = between_other_operations(x)
    jf = jit(between_other_operations, executors=["torchcompile"])
    torch.manual_seed(seeded(0))
    found = jf(x)
    for inner, wanted in zip(leaves([found]), leaves([expected]), strict=True):  # other draws would be far away
        torch.testing.assert_close(inner, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dropout", "native_dropout", "drawn and dropped", "between other operations"])
def test_gradient_uses_what_was_drawn(name: str):
    def function(x: torch.Tensor) -> torch.Tensor:
        out = PROGRAMS[name](x)
        return (out[0] if isinstance(out, tuple) else out) * x

    data = torch.randn(3, 4)
    grads = []
    for wrap, f in ((lambda t: t, function), (OpCounter, jit(function))):
        leaf = data.clone().requires_grad_()
        torch.manual_seed(seeded(0))
        out = f(wrap(leaf))
        grads.append(torch.autograd.grad(getattr(out, "value", out).sum(), leaf)[0])
        grads.append(torch.get_rng_state())
    torch.testing.assert_close(grads[2], grads[0])
    assert torch.equal(grads[1], grads[3])
