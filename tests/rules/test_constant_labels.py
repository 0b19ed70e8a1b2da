"""Labels that a program makes of its results (`torch.ones_like(y)`): constants, for all inputs, where a loss wants plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, normed
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

LOSSES = {
    "margin_ranking": lambda y: F.margin_ranking_loss(y[0], y[1], torch.ones_like(y[0]), margin=0.3),
    "margin_ranking, the other way": lambda y: F.margin_ranking_loss(y[0], y[1], -torch.ones_like(y[0])),
    "cosine_embedding": lambda y: F.cosine_embedding_loss(y, y.flip(0), torch.ones_like(y[:, 0])),
    "hinge_embedding": lambda y: F.hinge_embedding_loss(y, torch.full_like(y, -1.0)),
    "soft_margin": lambda y: F.soft_margin_loss(y, 2 * torch.ones_like(y) - 1),
    "multilabel_soft_margin": lambda y: F.multilabel_soft_margin_loss(y, y.new_ones(y.shape)),
}


class Loss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), loss

    def forward(self, x):
        return self.loss(self.linear(x))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_labels_made_of_results_have_bounds_and_targets(name):
    """Refused before, as if the labels were sets of tensors."""
    torch.manual_seed(seeded(0))
    model, x = Loss(LOSSES[name]), torch.randn(4, 4)
    jm = normed(thunder.jit(model, transforms=[NormTransform()]))
    for scale in (1.0, 5.0):
        y = jm(scale * x)
        torch.testing.assert_close(y.backing, model(scale * x))
        assert 0 < actual_norm(y) <= y.norm_size * (1 + 1e-5)
        assert model(RMSTensor.of(scale * x)).norm_size >= actual_norm(y) * (1 - 1e-5)
    inputs, h = x / x.square().mean(-1, keepdim=True).sqrt(), 1e-3
    targets = ModularNorm(model, inputs).targets
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(4))
        before = model(inputs)
        model.linear.weight.add_(h * targets["linear.weight"] * torch.linalg.qr(torch.randn(4, 4))[0])
        assert (model(inputs) - before).abs() / h <= 1.02


def test_labels_that_depend_on_the_inputs_are_refused():
    torch.manual_seed(seeded(0))
    model, x = Loss(lambda y: F.soft_margin_loss(y, y.tanh())), torch.randn(4, 4)
    with pytest.raises(NormMismatchError, match="labels, weights and variances are data"):
        model(RMSTensor.of(x))
