"""A model and comparisons that tests of `NormTransform` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

from tests.sizes import assert_same_size
from thunder_norm import (
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    with_perturbation,
)
from thunder_norm.transforms import NormTransform
import thunder


def jit(fn: Callable, **options: Any) -> Callable:
    """`fn` compiled with a NormTransform."""
    return thunder.jit(fn, transforms=[NormTransform(**options)])


class Net(nn.Module):
    """Two layers, in one module because tracing costs by the call; sizes that are no powers of 2, so that roundings show."""

    def __init__(self):
        super().__init__()
        first, second = nn.Linear(6, 10), nn.Linear(10, 3)
        self.w1, self.b1, self.w2, self.b2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.w1, self.b1)), self.w2, self.b2)


def leaves_for(model: nn.Module, size: float = 1.5) -> dict[str, NormedTensor]:
    """A differentiable, movable norm for each parameter."""
    found = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        kind = RMSToRMSTensor if p.ndim == 2 else RMSTensor
        found[name] = with_perturbation(kind(size + i / 8, norm_size_requires_grad=True))
    return found


def assert_same_normed(a: Any, b: Any, *, same_values: bool = True) -> None:
    """Two results of one program: the same kinds, shapes, sizes and values."""
    flat_a, structure_a = tree_flatten(a)
    flat_b, structure_b = tree_flatten(b)
    assert structure_a == structure_b
    for x, y in zip(flat_a, flat_b, strict=True):
        assert type(x) is type(y)
        if isinstance(x, NormedTensor):
            assert x.elem_dims == y.elem_dims and x.shape == y.shape and x.dtype == y.dtype
            assert_same_size(x.norm_size, y.norm_size)
            assert (x.perturbation_size is None) == (y.perturbation_size is None)
            if x.perturbation_size is not None:
                assert_same_size(x.perturbation_size, y.perturbation_size)
            x, y = x.backing, y.backing
        if isinstance(x, torch.Tensor) and same_values:
            torch.testing.assert_close(x, y)


class Tied(nn.Module):
    """Token ids in, logits out: nothing to wrap, and one weight under two names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))
