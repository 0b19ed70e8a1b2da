"""Norm maps where autocast is on: the same numbers, and autocast is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thunder_norm import RMSTensor, build_norm_map, load_norm_map


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def called(norm_map, size):
    n = torch.tensor(size, dtype=torch.float64, requires_grad=True)
    y = norm_map(RMSTensor(n))
    (derivative,) = torch.autograd.grad(y.norm_size, n)
    return y.norm_size.item(), derivative.item()


@pytest.mark.parametrize("first", [True, False], ids=["called before", "not called before"])
@pytest.mark.parametrize("parameters", ["measured", "unit"])
def test_it_is_the_same_and_autocast_is_left_as_it_was(first, parameters, tmp_path):
    net, x = model(), torch.randn(4, 6)
    norm_map = build_norm_map(net, x, parameters=parameters)
    expected = called(build_norm_map(net, x, parameters=parameters), 1.5)
    if first:
        assert called(norm_map, 1.5) == pytest.approx(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert called(norm_map, 1.5) == pytest.approx(expected)
            assert torch.is_autocast_enabled("cpu")
            assert (net(x).dtype, net[0](x).dtype) == (torch.bfloat16, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")
    assert called(norm_map, 1.5) == pytest.approx(expected)
    assert not torch.is_autocast_enabled("cpu")
    norm_map.save(tmp_path / "map")
    loaded = load_norm_map(tmp_path / "map", model=net) if parameters == "measured" else load_norm_map(tmp_path / "map")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert called(loaded, 1.5) == pytest.approx(expected)
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
