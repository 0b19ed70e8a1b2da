"""Gradients that the executor `inductor` brings along, against eager mode: their formulas, operation by operation, without a compiler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.seeds import seeded
from tests.test_executors_calls import OneByOne, jit
import thunder


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("how", ["training", "eval", "plain", "without statistics", "bfloat16"])
def test_batch_norms_have_eagers_gradients_and_statistics(how: str, shape: tuple[int, ...]) -> None:
    classes = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    norm = classes[len(shape)](3, affine=how != "plain", track_running_stats=how != "without statistics", momentum=0.3)
    torch.manual_seed(seeded(len(shape)))
    for p in norm.parameters():
        nn.init.normal_(p, 1.0, 0.3)
    x, other = torch.randn(shape, dtype=torch.float64) * 2 + 1, torch.randn(shape, dtype=torch.float64)
    dtype, tolerance = (torch.bfloat16, 5e-2) if how == "bfloat16" else (torch.float64, 1e-9)
    norm.to(torch.float32 if how == "bfloat16" else dtype).train(how != "eval")
    mine, theirs = copy.deepcopy(norm), copy.deepcopy(norm)
    jitted = jit(mine)
    for _ in range(2):
        found = [x.to(dtype).requires_grad_() for _ in range(2)]
        for f, t in zip((jitted, theirs), found, strict=True):
            with OneByOne():
                ((f(t).tanh() + t) * other.to(dtype)).sum().backward()
        assert_close(found[0].grad, found[1].grad, rtol=tolerance, atol=tolerance)
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance, msg=name)
    for (name, b), c in zip(mine.named_buffers(), theirs.buffers(), strict=True):
        assert_close(b, c, rtol=tolerance, atol=tolerance, msg=name)


def test_both_gradients_of_a_convolution_are_one_operation_where_both_are_wanted() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    jitted = jit(model)
    with OneByOne():
        jitted(torch.randn(1, 2, 7, 7)).sum().backward()
    names = [b.sym.name for r in thunder.last_backward_traces(jitted)[-1].bound_symbols for b in (r, *r.subsymbols)]
    assert (names.count("convolution_gradients"), names.count("convolution_weight_gradient")) == (1, 1)  # none of the input
    assert "convolution_input_gradient" not in names


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_leaves_have_the_strides_and_values_of_eager(memory_format: torch.memory_format) -> None:
    torch.manual_seed(seeded(3))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, groups=1))
    model.double().to(memory_format=memory_format)
    theirs = copy.deepcopy(model)
    jitted = jit(model)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = [x.clone().requires_grad_() for _ in range(2)]
    for _ in range(2):
        for f, t in zip((jitted, theirs), found, strict=True):
            f(t).square().sum().backward()
    for mine, other in zip((found[0], *model.parameters()), (found[1], *theirs.parameters()), strict=True):
        assert_close(mine.grad, other.grad)
        assert mine.grad is not None and mine.grad.stride() == mine.stride()
