"""Gradients of programs whose transform leaves wrappers alone, where a tensor without dimensions meets a larger one: torch's."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm.transforms import CheckpointTransform, ProfileTransform, SplitBiasTransform
import thunder

MASK = torch.tensor([[True, False], [False, True]])
OTHER = torch.tensor([[0.5, -1.0], [2.0, 0.25]])
PROGRAMS = {
    "divided by a sum": lambda w: w / w.sum(),
    "chosen": lambda w: torch.where(MASK, w.sum(), OTHER),
    "chosen by a method": lambda w: OTHER.where(MASK, w.mean()),
    "an entry less": lambda w: OTHER - w[0, 0],
    "a mean times": lambda w: w.mean() * OTHER,
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
