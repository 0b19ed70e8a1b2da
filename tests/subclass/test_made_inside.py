"""What an operation makes on the way, and a wrapper keeps although it is none of its tensors: later operations go on with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform
import thunder


class Sequence(nn.Module):
    """The results of a recurrent layer are views of what it made, batch first, with norms of their own."""

    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.recurrent, self.linear = kind(3, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        found, _ = self.recurrent(x)
        first, mean = x[:, 0], x.mean(1)
        return self.linear(found) * (1 + first.sum() + mean.sum())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_input_may_be_used_again_before_the_result_is(kind):
    torch.manual_seed(seeded(0))
    model = Sequence(kind).double()
    x = RMSTensor.of(torch.randn(2, 4, 3, dtype=torch.float64))
    jm = thunder.jit(model, transforms=[NormTransform()])
    found, expected = jm(x), model(x)
    torch.testing.assert_close(found.backing, expected.backing)
    torch.testing.assert_close(found.norm_size, expected.norm_size)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_layer_is_in_the_trace_once(kind):
    """Its steps were taken again for each operation on its result."""
    model = Sequence(kind)
    jm = thunder.jit(model, transforms=[NormTransform()])
    jm(RMSTensor.of(torch.randn(2, 4, 3)))
    steps = [line for line in str(thunder.last_traces(jm)[0]).splitlines() if "unbind(" in line and "prims" not in line]
    assert len(steps) == 1
