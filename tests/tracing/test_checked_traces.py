"""Thunder's own check of traces (``debug_options=DebugOptions(check_traces=...)``) passes for what we write into them."""

import pytest
import torch
from torch import nn

from thunder_norm.transforms import NormTransform
import thunder


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_calls, self.held = nn.Linear(4, 4), 0, []

    def forward(self, x):
        self.num_calls += 1
        self.held = [x]
        return self.layer(x)


def _writing(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0].mul_(2)
    return y


_PROGRAMS = {
    "a network": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True)),
    "attributes": _Counting,
    "views that are written into": lambda: _writing,
    "a gradient inside": lambda: lambda x: torch.func.grad(lambda y: (y**2).sum())(x),
    "vmap inside": lambda: lambda x: torch.vmap(torch.sin)(x),
    "recurrent": lambda: nn.LSTM(4, 4),
}


@pytest.mark.parametrize("program", _PROGRAMS)
def test_checked(program: str) -> None:
    f, x = _PROGRAMS[program](), torch.randn(3, 4)
    jf = thunder.jit(f, transforms=[NormTransform()], debug_options=thunder.DebugOptions(check_traces=True))
    want, got = f(x), jf(x)
    want, got = (want[0], got[0]) if isinstance(want, tuple) else (want, got)
    torch.testing.assert_close(got, want)
    if got.requires_grad:
        got.sum().backward()
