"""Gradients of programs whose transform leaves wrappers alone, where Thunder's own are others or none: torch's."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.transforms import CheckpointTransform, ProfileTransform, SplitBiasTransform, SubclassTransform
import thunder

MASK = torch.tensor([[True, False], [False, True]])
OTHER = torch.tensor([[0.5, -1.0], [2.0, 0.25]])
PROGRAMS = {
    "divided by a sum": lambda w: w / w.sum(),
    "chosen": lambda w: torch.where(MASK, w.sum(), OTHER),
    "chosen by a method": lambda w: OTHER.where(MASK, w.mean()),
    "an entry less": lambda w: OTHER - w[0, 0],
    "a mean times": lambda w: w.mean() * OTHER,
    "beside each other": lambda w: torch.hstack([w, w.sin()]),
    "an rnn": lambda w: torch.rnn_tanh(OTHER[None], w[None, :1], [w, w.exp()], False, 1, 0.0, True, False, True)[0],
    "attention without weights": lambda w: torch.nn.functional.multi_head_attention_forward(
        *(OTHER[:, None],) * 3, 2, 1, torch.cat([w, w.cos(), w]), None, None, None, False, 0.0, w, None, need_weights=False
    )[0],
    "entries put": lambda w: OTHER.index_put((torch.tensor([0]),), w[1]) * w,
    "a product with a zero": lambda w: (w * MASK).prod(0) + w,
    "complex numbers": lambda w: torch.fft.fft(torch.complex(w, w * OTHER)).exp().real,
    "of one argument of two": lambda w: torch.special.zeta(OTHER.abs() + 2, w),
    "at the bounds of a clamp": lambda w: w.detach().sub(w).clamp(0.0, 1.0),
    "beside each other in a region": lambda w: torch.utils.checkpoint.checkpoint(
        lambda w: torch.vstack([w, w.prod(0)]), w, use_reentrant=False
    ),
    "what requires grad": lambda w: (lambda y: y.sin() if y.requires_grad else -y)(w * OTHER),
    "what requires grad no more": lambda w: w * (2 if (w * OTHER).detach().requires_grad else 3),
    "in a region": lambda w: torch.utils.checkpoint.checkpoint(lambda w: (w.amax() * w).sin(), w, use_reentrant=False),
}


@pytest.mark.parametrize("transform", [CheckpointTransform, ProfileTransform, SplitBiasTransform])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_torchs(name, transform):
    torch.manual_seed(seeded(0))
    w = (torch.rand(2, 2) + 0.5).requires_grad_()
    found = [
        torch.autograd.grad(f(w).sin().sum(), w) for f in (thunder.jit(PROGRAMS[name], transforms=[transform()]), PROGRAMS[name])
    ]
    torch.testing.assert_close(*found)


class Detached(torch.nn.Module):
    """Uses one layer for its values alone, in a checkpointed region or not, and a parameter not at all."""

    def __init__(self, in_region: bool):
        super().__init__()
        self.used, self.values, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))
        self.in_region = in_region

    def forward(self, x):
        def region(x):
            with torch.no_grad():
                factor = self.values(x)
            return self.used(x) * factor + self.values(x).detach()

        y = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False) if self.in_region else region(x)
        return y, self.unused.detach() * 2


@pytest.mark.parametrize("transform", [CheckpointTransform, ProfileTransform, SplitBiasTransform, SubclassTransform])
@pytest.mark.parametrize("in_region", [False, True])
def test_what_has_no_gradient_in_torch_has_none(in_region, transform):
    torch.manual_seed(seeded(0))
    model, x = Detached(in_region), torch.randn(3, 2)
    found = []
    for f in (thunder.jit(model, transforms=[transform()]), model):
        model.zero_grad()
        y, unused = f(x)
        y.sin().sum().backward()
        found.append([y.requires_grad, unused.requires_grad, *(p.grad is None for p in model.parameters())])
    assert found[0] == found[1]


def returned_under_two_names(w):
    n = w.square()
    v = n
    v += v.sum()
    return n, v


def returned_as_what_it_shares_memory_with(w):
    n = w.square()
    v = n.float()
    v += v.sum()
    n.mul_(2)
    return v, n.sin(), n


@pytest.mark.parametrize("transform", [CheckpointTransform, ProfileTransform, SplitBiasTransform, SubclassTransform])
@pytest.mark.parametrize("f", [returned_under_two_names, returned_as_what_it_shares_memory_with])
def test_one_tensor_returned_under_two_names_has_the_gradients_of_both(f, transform):
    """They were zeros, for the backward has one cotangent of a tensor that comes out twice."""
    torch.manual_seed(seeded(0))
    w = (torch.rand(2, 2) + 0.5).requires_grad_()
    found = []
    for g in (thunder.jit(f, transforms=[transform()]), f):
        results = g(w)
        assert results[0] is results[-1]
        found.append(torch.autograd.grad(sum((i + 1) * r.sum() for i, r in enumerate(results)), w))
    torch.testing.assert_close(*found)
