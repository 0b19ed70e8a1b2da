"""Reports of recurrent layers, composed and within a radius: against Jacobians of eager PyTorch, to inputs and to parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, norm_report
from thunder_norm.transforms import NormTransform
import thunder

F64 = torch.float64
LAYERS = {
    "GRU": (nn.GRU, {}),
    "GRU without biases, of two layers": (nn.GRU, {"bias": False, "num_layers": 2}),
    "LSTM": (nn.LSTM, {}),
    "LSTM in both directions": (nn.LSTM, {"bidirectional": True}),
    "LSTM of two layers": (nn.LSTM, {"num_layers": 2}),
    "LSTM with a projection": (nn.LSTM, {"proj_size": 2}),
    "RNN": (nn.RNN, {}),
}
WAYS = {"composed": {"sensitivity": "composed"}, "at the data": {"radius": 0.0}, "near it": {"radius": 0.05}}


class Classifier(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        kind, options = LAYERS[name]
        self.layer = kind(3, 4, batch_first=True, **options)
        width = options.get("proj_size", 4) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def rms(t: torch.Tensor) -> torch.Tensor:
    return t.square().mean(-1).sqrt()


def steepest_direction(gradient: torch.Tensor, *, is_matrix: bool) -> torch.Tensor:
    """Of norm 1, RMS to RMS or RMS over the last dimension, whichever moves furthest along a gradient."""
    if not is_matrix:
        return gradient / rms(gradient)[..., None].clamp(min=1e-30)
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    return u @ v * math.sqrt(gradient.shape[0] / gradient.shape[1])


def found(f, at: torch.Tensor, *, is_matrix: bool) -> float:
    """The furthest that a row of f moves, in RMS, when its argument does by 1: power iterations through all outputs."""
    jacobian, best = torch.autograd.functional.jacobian(f, at), 0.0
    for row in range(jacobian.shape[0]):
        w = torch.ones(jacobian.shape[1], dtype=F64)
        for _ in range(20):
            u = steepest_direction(torch.einsum("o,o...->...", w, jacobian[row]), is_matrix=is_matrix)
            w = torch.einsum("o...,...->o", jacobian[row], u)
            best = max(best, rms(w).item())
    return best


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), crossed(LAYERS, WAYS))
def test_no_jacobian_is_steeper(name: str, way: str):
    torch.manual_seed(seeded(0))
    model, x = Classifier(name).double().eval(), torch.randn(2, 4, 3, dtype=F64)
    report = norm_report(thunder.jit(model, transforms=[NormTransform()]), RMSTensor.of(x), **WAYS[way])
    radius = WAYS[way].get("radius", 0.3)
    for _ in range(3):
        moved = torch.randn_like(x)
        at = x + moved / rms(moved)[..., None] * radius * (way != "composed")
        assert found(model, at, is_matrix=False) <= report.rows[-1].sensitivity * (1 + 1e-6)
        for parameter, row in report.parameters.items():
            p = model.get_parameter(parameter)
            f = lambda t, name=parameter, at=at: torch.func.functional_call(model, {name: t}, at)  # noqa: E731
            assert found(f, p.detach(), is_matrix=row.kind == "RMSToRMSTensor") <= row.sensitivity * (1 + 1e-6), parameter


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["GRU", "LSTM in both directions"])
def test_rows_are_the_layers(name: str, way: str):
    torch.manual_seed(seeded(0))
    model = Classifier(name).eval()
    reports = [
        norm_report(thunder.jit(model, transforms=[NormTransform()]), RMSTensor.of(torch.randn(1, n, 3)), **WAYS[way])
        for n in (2, 6)
    ]
    assert [r.op for r in reports[0]] == [r.op for r in reports[1]]
    local = norm_report(thunder.jit(model, transforms=[NormTransform()]), RMSTensor.of(torch.randn(1, 2, 3)))
    uses = [[(name, len(i.uses)) for name, i in r.inferred.items()] for r in (local, *reports)]
    assert uses[0] == uses[1] == uses[2]


def test_of_one_sequence_at_the_data_it_is_the_jacobian():
    torch.manual_seed(seeded(1))
    model, x = Classifier("LSTM").double().eval(), torch.randn(1, 5, 3, dtype=F64)
    report = norm_report(thunder.jit(model, transforms=[NormTransform()]), RMSTensor.of(x, (-2, -1)), radius=0.0)
    jacobian = torch.autograd.functional.jacobian(model, x).reshape(2, 15)
    assert report.rows[-1].sensitivity == pytest.approx(
        torch.linalg.matrix_norm(jacobian, 2).item() * math.sqrt(15 / 2), rel=1e-4
    )
