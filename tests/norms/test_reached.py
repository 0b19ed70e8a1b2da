"""Parameters that move the output are reached; where that cannot be said, there is an error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, build_norm_map, norm_report
from thunder_norm.errors import NormMismatchError, UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


class ThroughUnknown(nn.Module):
    """A weight by way of an operation that no rule bounds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

    def forward(self, x):
        return x @ torch.linalg.pinv(self.weight)


def test_a_report_does_not_call_a_parameter_unreached_because_a_rule_is_missing():
    model, x = ThroughUnknown(), torch.randn(2, 4)
    found = norm_report(thunder.jit(model, transforms=[NormTransform()]), LinfTensor.of(x)).parameters["weight"].sensitivity
    slopes = torch.autograd.functional.jacobian(lambda w: x @ torch.linalg.pinv(w), model.weight.detach())
    assert slopes.flatten(2).norm(dim=-1).max() / 2 <= found < math.inf  # a norm of at most 1 for every entry of the weight's row


class Dropped(nn.Module):
    """A layer that a random mask leaves out."""

    def __init__(self, keep):
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 4), keep

    def forward(self, x):
        return x + self.layer(x) * (torch.rand(x.shape[0], 1) < self.keep) / 0.5


@pytest.mark.parametrize("keep", [-1.0, 0.5, 2.0])  # nothing, something, everything
def test_what_a_random_mask_drops_is_reached(keep):
    sensitivities = ModularNorm(Dropped(keep), torch.randn(2, 4)).sensitivities
    assert sensitivities == ModularNorm(Dropped(2.0), torch.randn(2, 4)).sensitivities
    assert all(s > 0 for s in sensitivities.values())


def drop_path(x, keep):
    """As torchvision has it."""
    noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1)).bernoulli_(keep)
    noise.div_(0.5)
    return x * noise


@pytest.mark.parametrize("drop", [drop_path, lambda x, keep: x * torch.bernoulli(torch.full((2, 1), keep)) / 0.5])
def test_a_dropped_branch_is_reached(drop):
    class Branch(nn.Module):
        def __init__(self, keep):
            super().__init__()
            self.layer, self.keep = nn.Linear(4, 4), keep

        def forward(self, x):
            return x + drop(self.layer(x), self.keep)

    found = [ModularNorm(Branch(keep), torch.randn(2, 4)).sensitivities for keep in (0.0, 1.0)]
    assert found[0] == found[1] == {"layer.weight": 2.0, "layer.bias": 2.0}


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("target", torch.randn(2, 4))

    def forward(self, x):
        return nn.functional.mse_loss(x, self.target)


def test_a_model_of_buffers_alone_has_a_modular_norm():
    norm = ModularNorm(Loss(), torch.randn(2, 4))
    assert norm.sensitivities == {} and norm.outputs.norm_size > 0


def test_data_parallel_is_the_module_inside():
    torch.manual_seed(seeded(0))
    inside, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    expected, outer = ModularNorm(inside, x), nn.DataParallel(inside)
    norm = ModularNorm(outer, x)
    assert norm.targets == expected.targets
    assert norm.first_names["module.0.weight"] == "0.weight"
    nested = ModularNorm(nn.Sequential(nn.DataParallel(inside)), x)
    assert list(nested.targets.values()) == list(expected.targets.values())
    report = norm_report(thunder.jit(outer, transforms=[NormTransform()]), LinfTensor.of(x))
    expected_report = norm_report(thunder.jit(inside, transforms=[NormTransform()]), LinfTensor.of(x))
    assert [r.norm_size for r in report] == [r.norm_size for r in expected_report]
    assert list(report.parameters) == [f"module.{name}" for name in expected_report.parameters]


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 4))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_of_torch_jit_is_refused(compiled):
    model = compiled(nn.Linear(4, 4))
    with pytest.raises(UnsupportedOpError, match="torch.jit"):
        ModularNorm(model, torch.randn(2, 4))


def test_a_lazy_module_is_refused_until_it_has_been_called():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(3, 2)
    uses = [
        lambda: thunder.jit(model, transforms=[NormTransform()])(x),
        lambda: ModularNorm(model, x),
        lambda: norm_report(thunder.jit(model, transforms=[NormTransform()]), LinfTensor.of(x)),
        lambda: build_norm_map(model, x, parameters="unit")(LinfTensor(1.0)),
    ]
    for use in uses:
        with pytest.raises(NormMismatchError, match="call the model once"):
            use()
    model(x)
    assert all(s > 0 for s in ModularNorm(model, x).sensitivities.values())


@pytest.mark.parametrize("power", [lambda x: x**3, lambda x: 2**x, lambda x: x.square() ** 2])
def test_powers_written_with_operators(power):
    x = LinfTensor.of(torch.tensor([0.5, -1.5]))
    y = power(x)
    torch.testing.assert_close(y.backing, power(x.backing))
    assert y.backing.abs().max() <= y.norm_size * (1 + 1e-6)
