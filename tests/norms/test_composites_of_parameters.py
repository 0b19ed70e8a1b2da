"""Functions that torch's C++ code takes apart, of parameters: their norms are those of the operations inside, with no rule for the function."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor, RMSToRMSTensor, build_norm_map, norm_report
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

OF_PARAMETERS = {
    "kron": lambda m: torch.kron(m.weight, m.weight),
    "kron beside a constant": lambda m: torch.kron(m.weight, torch.eye(2)),
    "tensordot": lambda m: torch.tensordot(m.weight, m.weight, 1),
    "cartesian_prod": lambda m: torch.cartesian_prod(m.vector, m.vector),
    "meshgrid": lambda m: torch.meshgrid(m.vector, m.vector, indexing="ij")[1],
    "trapezoid": lambda m: torch.trapezoid(m.vector),
    "gradient": lambda m: torch.gradient(m.vector)[0],
    "combinations": lambda m: torch.combinations(m.vector),
    "diff": lambda m: torch.diff(m.weight, dim=-1),
    "take_along_dim": lambda m: torch.take_along_dim(m.weight, torch.tensor([[0], [2], [1]]), 1),
    "atleast_3d": lambda m: torch.atleast_3d(m.weight),
}


class Scales(nn.Module):
    def __init__(self, of_parameters):
        super().__init__()
        self.weight, self.vector, self.of_parameters = (
            nn.Parameter(torch.randn(3, 3)),
            nn.Parameter(torch.randn(3)),
            of_parameters,
        )

    def forward(self, x):
        return x * self.of_parameters(self)


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_norms_hold_for_all_parameters_of_norm_1(name):
    """Refused before, with the advice to write a rule."""
    torch.manual_seed(seeded(0))
    model, x = Scales(OF_PARAMETERS[name]), torch.ones(1)
    given = {n: RMSTensor(1.0) for n, _ in model.named_parameters()}
    bound = build_norm_map(model, x, parameters="unit")(RMSTensor(1.0), normed_state_dict=given)
    assert math.isfinite(bound.norm_size)
    for _ in range(20):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p).pow(3))
                p.div_(p.square().mean(-1, keepdim=True).sqrt())
            y = model(x)
        assert y.square().mean(bound.elem_dims).sqrt().max() <= bound.norm_size * (1 + 1e-5)


@pytest.mark.filterwarnings("ignore::thunder_norm.errors.VanishingTargetWarning")
@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_steps_of_the_targets_move_the_output_by_no_more_than_one(name):
    torch.manual_seed(seeded(0))
    model, x = Scales(OF_PARAMETERS[name]), torch.ones(1)
    norm = ModularNorm(model, x)
    (used,) = [n for n, p in model.named_parameters() if n not in norm.unreached]
    before, p, h = model(x).detach(), model.get_parameter(used), 1e-3
    unit = torch.rand_like(p) * torch.randn_like(p).sign()  # entries of one size can cancel
    with torch.no_grad():
        p.add_(h * norm.targets[used] * unit)
        moved = (model(x) - before).square().mean(norm.outputs.elem_dims).sqrt().max() / h
    assert 0 < moved <= 1.02


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.linear(x, self.mask * self.weight)


def test_a_masked_matrix_keeps_the_kind_of_what_uses_it():
    """Its rows were known alone: the norm of n features was n times that of the input."""
    torch.manual_seed(seeded(0))
    model, x = Masked(torch.ones(6, 4).tril()), torch.randn(3, 4)
    given = {"weight": RMSToRMSTensor(1.0)}
    traced = thunder.jit(model, transforms=[NormTransform(parameters=given)])(RMSTensor(1.0, backing=x))
    assert traced.elem_dims == (-1,) and traced.norm_size <= 2, "Schur: sqrt(min(out, in)) times as large at most"
    torch.testing.assert_close(ModularNorm(model, x, mode="typical").targets["weight"], 1.0)
    for _ in range(20):
        w = torch.randn(6, 4)
        w = w / torch.linalg.matrix_norm(w, 2) / (4 / 6) ** 0.5
        x = torch.linalg.svd(model.mask * w)[2][:1]  # where it is longest
        y = F.linear(x, model.mask * w)
        assert y.square().mean().sqrt() <= traced.norm_size * x.square().mean().sqrt() * (1 + 1e-5)
    exact = norm_report(thunder.jit(model, transforms=[NormTransform()]), torch.ones(1, 4)).rows[-1]
    sigma = torch.linalg.matrix_norm(model.mask * model.weight, 2).item() * (4 / 6) ** 0.5
    assert exact.norm_size <= sigma * (1 + 1e-5), "that of its values, where that is what counts"


class Scaled(nn.Module):
    def __init__(self, is_written):
        super().__init__()
        self.weight, self.is_written = nn.Parameter(torch.randn(6, 4)), is_written

    def forward(self, x):
        gain = torch.ones(6, 4)
        w = self.weight * gain
        if self.is_written:
            gain.zero_()
        return F.linear(x, w)


def test_a_constant_that_is_written_into_later_has_multiplied_a_matrix_before():
    norms, targets = [], []
    for is_written in (False, True):
        model, x = Scaled(is_written), torch.ones(2, 4)
        norms.append(build_norm_map(model, x, parameters="unit")(RMSTensor(1.0)).norm_size.item())
        targets.append(ModularNorm(model, x).targets["weight"])
    assert norms[0] == norms[1] >= 1 and targets[0] == targets[1] > 0
