"""Views of what `einsum` makes, where torch has them: Thunder's own einsum has other strides, and none of its kernels makes these."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def convolved_by_location(x, kernel):
    return (torch.einsum("bildsk,biokl->bolsd", x, kernel) + 1).view(x.shape[0], kernel.shape[2], -1)


def activated(x, kernel):
    y = F.silu(torch.einsum("bildsk,biokl->bolsd", x, kernel))
    return y.view_as(torch.empty(2, 7, 24)) * 2


@pytest.mark.parametrize("f", [convolved_by_location, activated])
def test_views_of_einsum(f):
    torch.manual_seed(seeded(0))
    x, kernel = torch.randn(2, 3, 6, 1, 4, 5), torch.randn(2, 3, 7, 5, 6)
    expected = f(x, kernel)
    for transform in (NormTransform, SubclassTransform):
        jitted = thunder.jit(f, transforms=[transform()])
        torch.testing.assert_close(jitted(x, kernel), expected)
        leaves = [t.clone().requires_grad_() for t in (x, kernel)]
        for a, b in zip(*(torch.autograd.grad(g(*leaves).square().sum(), leaves) for g in (jitted, f)), strict=True):
            torch.testing.assert_close(a, b)
    found = thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x, elem_dims=(-1,)), kernel)
    torch.testing.assert_close(found.backing, expected)
    assert type(found).of(expected, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)
