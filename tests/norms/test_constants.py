"""Constants that a program makes of numbers, on the device of its inputs: of the same norm where that device has no data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from thunder_norm import RMSTensor, build_norm_map
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm


class Program(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f, self.up = f, nn.Linear(8, 8)

    def forward(self, x):
        return self.f(self.up, x)


def recurrent(up, x):
    h = torch.zeros(x.shape[0], 8, device=x.device)
    for t in range(x.shape[1]):
        h = torch.tanh(up(x[:, t] + h))
    return h


def causal(up, x):
    mask = torch.full((x.shape[1], x.shape[1]), -1e4, device=x.device).triu(1)
    scores = up(x) @ x.mT
    return (scores + mask).softmax(-1) @ x


def written_in_place(up, x):
    scale = torch.ones(8, device=x.device)
    scale.mul_(3).add_(1)
    return up(x) * scale


def filled(up, x):
    scale = torch.zeros(8, device=x.device)
    scale[:3] = 2.0
    scale[3:5] += 4
    scale[5:] = scale[:3] * 3
    return up(x) * scale


class Stepping(nn.Module):
    """Counts its calls in a buffer, and scales with the count."""

    def __init__(self):
        super().__init__()
        self.up, self.count = nn.Linear(8, 8), nn.Buffer(torch.full((), 3.0))

    def forward(self, x):
        self.count += 1
        return self.up(x) * self.count


PROGRAMS = {
    "filled": filled,
    "state of a recurrence": recurrent,
    "sinusoidal positions": lambda up, x: up(x + (torch.arange(8, device=x.device) / 8).cos()),
    "by a string": lambda up, x: up(x) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], device=str(x.device)),
    "moved": lambda up, x: up(x) * torch.arange(8.0).to(x.device),
    "causal mask": causal,
    "in place": written_in_place,
    "a divisor": lambda up, x: up(x) / torch.arange(1, 9, device=x.device),
    "of x's own": lambda up, x: up(x) * x.new_full((8,), 2.5),
    "chosen": lambda up, x: torch.where(torch.eye(8, device=x.device)[0] > 0, up(x), torch.full((), 5.0, device=x.device)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_constants_have_the_same_norms_on_meta(name):
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, x = Program(PROGRAMS[name]), torch.empty(2, 3, 8)
        targets = ModularNorm(model, x).targets
        size = build_norm_map(model, x, parameters="unit")(RMSTensor(1.0)).norm_size
        assert size.device.type == "cpu"
        found.append((targets, size.item()))
    assert found[1] == found[0]


def test_what_is_written_into_a_buffer_is_known_on_meta():
    model = Stepping()
    x = torch.randn(2, 8)
    expected = ModularNorm(model, x).sensitivities
    assert expected["up.weight"] == pytest.approx(4.0)
    on_meta = copy.deepcopy(model).to("meta")
    on_meta.count = model.count
    for m, given in ((model, x.to("meta")), (on_meta, x), (on_meta, x.to("meta"))):
        assert ModularNorm(m, given).sensitivities == expected
    assert model.count.item() == 3.0  # a run leaves nothing behind


def test_what_nobody_knows_is_written_over_what_was_known():
    """A constant that is filled with random numbers is no constant any more; in no view of it."""

    def program(up, x):
        scale = torch.ones(8, device=x.device)
        scale[2:].uniform_()
        return up(x) * scale

    with torch.device("meta"), pytest.raises(NormMismatchError, match="on the meta device"):
        ModularNorm(Program(program), torch.empty(2, 8))
