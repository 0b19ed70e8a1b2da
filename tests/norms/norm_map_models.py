"""A model and its norm map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thunder_norm import (
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
)
from thunder_norm.norms.maps.norm_map import Program


class Net(nn.Module):
    """Two layers and a buffer."""

    def __init__(self):
        super().__init__()
        first, second = nn.Linear(6, 10), nn.Linear(10, 3, bias=False)
        self.w1, self.b1, self.w2 = first.weight, first.bias, second.weight
        self.register_buffer("scale", torch.full((10,), 0.5))

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.w1, self.b1)) * self.scale, self.w2)


KINDS = {"w1": RMSToRMSTensor, "b1": RMSTensor, "w2": RMSToRMSTensor, "scale": LinfTensor}


SIZES = {"w1": 1.5, "b1": 0.25, "w2": 2.0, "scale": 0.75}


def state(**options: Any) -> dict[str, NormedTensor]:
    """A norm for every parameter and buffer of `Net`, unfinalized."""
    return {name: KINDS[name](size, **options) for name, size in SIZES.items()}


def formula(x: Any, w1: Any, b1: Any, w2: Any, scale: Any) -> Any:
    """The norm of Net's output by hand."""
    return (x * w1 + b1) * scale * w2


def count_acquisitions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry for each program that is acquired."""
    seen: list[int] = []
    acquire = Program.acquire

    def counting(*args: Any) -> Program:
        seen.append(1)
        return acquire(*args)

    monkeypatch.setattr(Program, "acquire", staticmethod(counting))
    return seen
