"""Thunder's own check of traces (``debug_options=DebugOptions(check_traces=...)``) passes for what we write into them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same, nested, two
from thunder_norm.transforms import NormTransform, SubclassTransform, grad
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


_ON_WRAPPERS = {
    "operations": lambda w, x: ((w @ x).sin(), w.t()[0].sum()),
    "in place": lambda w, x: (w * 2).add_(x).mul_(w),
    "made inside": lambda w, x: TwoTensor(x, x * 2) @ w,
    "a gradient inside": lambda w, x: grad(lambda y: (y * y).sum())(w) + x,
}


@pytest.mark.parametrize("make", [two, nested])
@pytest.mark.parametrize("program", _ON_WRAPPERS)
def test_checked_with_wrappers(program: str, make: Callable) -> None:
    f, found = _ON_WRAPPERS[program], []
    jf = thunder.jit(f, transforms=[SubclassTransform()], debug_options=thunder.DebugOptions(check_traces=True))
    for call in (f, jf, jf) if "gradient" not in program else (lambda w, x: 2 * w + x, jf, jf):
        torch.manual_seed(seeded(0))
        found.append(call(make(3, 3), torch.randn(3, 3)))
    assert_same(found[1:], [found[0]] * 2)
