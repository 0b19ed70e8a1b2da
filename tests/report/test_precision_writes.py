"""Reports of programs in low precision that write into parts of tensors, and that have operations of ours in them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.report.test_precision import is_near, jitted
from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_report, normed_op
from thunder_norm.errors import NormMismatchError


def _part(y, z):
    y[..., :8] = z[..., 8:] * 2
    return y


def _added(y, z):
    y[..., 8:] += z[..., 8:]
    return y


def _scaled_rows(y, z):
    y[:2] *= 3
    return y + z


def _constants(y, z):
    y[:, 0] = 1.0
    y[:, 1] = y[:, 2]
    return y * z


def _view(y, z):
    y[:, :4].copy_(z[:, 4:8])
    y[1:3, 5:8].zero_()
    return y


def _made(y, z):
    states = y.new_zeros(4, *y.shape)
    for i in range(3):
        states[i + 1] = torch.tanh(states[i] + y)
    return states[1:].sum(0) + z


@normed_op
def gate(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(by)


@gate.register_norm
def _(x: RMSTensor, by: RMSTensor) -> RMSTensor:
    largest = x.norm_size * math.sqrt(x.shape[-1])
    return RMSTensor(x.norm_size, elem_dims=x.elem_dims, sensitivity={"x": 1.0, "by": largest / 4})


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.first, self.second, self.last, self.write = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8), write

    def forward(self, x):
        return self.last(self.write(self.first(x).clone(), self.second(x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("write", [_part, _added, _scaled_rows, _constants, _view, _made, gate])
def test_the_error_is_predicted_and_bounded(write, dtype):
    torch.manual_seed(seeded(0))
    report = norm_report(jitted(Writing(write)), RMSTensor.of(torch.randn(16, 16)), precision=dtype)
    assert report.precision is not None and is_near(report.precision)
    assert report.precision.measured <= report.precision.bound < math.inf
    assert all(math.isfinite(r.rounding.added) for r in report if r.rounding is not None)


def test_what_moves_entries_of_a_part_adds_nothing():
    torch.manual_seed(seeded(0))
    report = norm_report(jitted(Writing(_added)), RMSTensor.of(torch.randn(16, 16)), precision=torch.bfloat16)
    rounding = {r.op for r in report if r.rounding is not None and r.rounding.added}
    assert rounding == {"linear", "add"}


def test_what_torch_cannot_derive_is_refused():
    def program(x):
        return x.scatter(-1, torch.zeros(4, 1, dtype=torch.long), x * 2)

    with pytest.raises(NormMismatchError, match="no derivatives of this program"):
        norm_report(jitted(program), RMSTensor.of(torch.randn(4, 8)), precision=torch.bfloat16)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_weights_round_too(kind):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = kind(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    torch.manual_seed(seeded(0))
    report = norm_report(jitted(Classifier()), RMSTensor.of(torch.randn(8, 10, 8)), precision=torch.bfloat16)
    assert report.precision is not None and is_near(report.precision)
    assert report.precision.measured <= report.precision.bound < math.inf
    rounded = {name for name, row in report.parameters.items() if row.rounding is not None}
    assert rounded == set(report.parameters)
