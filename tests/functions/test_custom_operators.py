"""Operators of somebody else (``torch.library``) are asked for the gradients that are wanted, and for no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from thunder_norm.transforms import NormTransform
import thunder

ASKED: list[tuple[bool, ...]] = []


@torch.library.custom_op("thunder_norm_tests::weighted", mutates_args=())
def weighted(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * w, w.exp()


@weighted.register_fake
def _(x, w):
    return torch.empty_like(x), torch.empty_like(w)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, g, _):
    x, w = ctx.saved_tensors
    ASKED.append(ctx.needs_input_grad)
    return tuple(g * other if needed else None for other, needed in zip((w, x), ctx.needs_input_grad, strict=True))


weighted.register_autograd(_backward, setup_context=_keep)

PROGRAMS = {
    "an input": lambda x, w: weighted(x, w)[0].sin(),
    "by the overload": lambda x, w: torch.ops.thunder_norm_tests.weighted.default(x, w)[0],
    "computed": lambda x, w: weighted(x.cos(), w * 2)[0],
    "detached": lambda x, w: weighted(x, x.detach())[0],
    "a constant": lambda x, w: weighted(torch.ones(3), x + w)[0],
    "both": lambda x, w: weighted(x, x * w)[0],
    "twice": lambda x, w: weighted(weighted(x, w)[0], w)[0],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_asked_for_as_in_eager_mode(name: str) -> None:
    program: Callable = PROGRAMS[name]
    found = []
    for run in (program, thunder.jit(program, transforms=[NormTransform()])):
        x, w = torch.tensor([0.5, -1.0, 2.0], requires_grad=True), torch.tensor([1.0, 3.0, -2.0])
        result = run(x, w)
        ASKED.clear()
        result.sum().backward()
        found.append((result.detach(), x.grad, ASKED.copy()))
    torch.testing.assert_close(found[1][:2], found[0][:2])
    assert found[1][2] == found[0][2]
