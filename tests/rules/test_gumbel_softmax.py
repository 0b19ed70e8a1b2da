"""`F.gumbel_softmax` of normed tensors: eager mode's numbers under eager mode's seed, in its bound, with its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, normed
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

OPTIONS = [{}, {"hard": True}, {"tau": 0.5, "dim": 0}, {"hard": True, "dim": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_traced", [False, True])
def test_values_gradients_and_bound(options, is_traced):
    def choose(x):
        return F.gumbel_softmax(x, **options)

    run = normed(thunder.jit(choose, transforms=[NormTransform()])) if is_traced else choose
    for seed in range(2):
        torch.manual_seed(seeded(0))
        x, same = (t.requires_grad_() for t in torch.randn(3, 5).expand(2, 3, 5).clone())
        weight = torch.randn(3, 5)
        torch.manual_seed(seeded(seed))
        found = run(RMSTensor.of(x))
        torch.manual_seed(seeded(seed))
        expected = choose(same)
        torch.testing.assert_close(found.backing, expected)
        assert actual_norm(found) <= found.norm_size * (1 + 1e-6)
        (g,) = torch.autograd.grad((found.backing * weight).sum(), x)
        torch.testing.assert_close(g, torch.autograd.grad((expected * weight).sum(), same)[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_comes_before_it_is_reached(options):
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(F.gumbel_softmax(self.logits(x), **options))

    torch.manual_seed(seeded(0))
    assert min(ModularNorm(Chooses(), torch.randn(3, 5), mode="typical").targets.values()) > 0
