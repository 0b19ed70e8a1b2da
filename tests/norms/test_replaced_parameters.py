"""Parameters whose data a program replaces in normed calls and norm maps: ``key.data = key.data * m + query.data * (1 - m)`` (MoCo)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import RMSTensor, build_norm_map, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder


class Momentum(nn.Module):
    """An encoder of keys that follows one of queries."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * 0.75 + q.data * 0.25
            keys = self.key(x)
        return self.query(x) * keys


class Twice(nn.Module):
    """What it reads in between stays what it was."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        with torch.no_grad():
            self.weight.data = self.weight.data * 3
            between = self.weight.data
            self.weight.data = self.weight.data * 2
        return x @ self.weight.t() + x @ between.t()


def made(cls):
    torch.manual_seed(seeded(0))
    return cls(), torch.randn(5, 4)


@pytest.mark.parametrize("cls", [Momentum, Twice])
@pytest.mark.parametrize("is_normed", [False, True])
def test_each_call_goes_on_from_what_the_last_left(cls, is_normed):
    model, x = made(cls)
    eager, jitted = copy.deepcopy(model), thunder.jit(model, transforms=[NormTransform()])
    for _ in range(3):
        y = (normed(jitted) if is_normed else jitted)(x)
        torch.testing.assert_close(y.backing if is_normed else y, eager(x))
        if is_normed:
            assert actual_norm(y) <= y.norm_size * (1 + 1e-5)
    assert thunder.cache_misses(jitted) == 1
    torch.testing.assert_close(dict(model.named_parameters()), dict(eager.named_parameters()))


def test_norm_maps_follow_them_and_leave_the_parameters():
    model, x = made(Twice)
    before = model.weight.detach().clone()
    found = build_norm_map(model, x, parameters="unit")(RMSTensor(1.0))
    assert found.norm_size.item() == pytest.approx(9.0)  # 6 and 3 times a matrix of norm 1
    torch.testing.assert_close(model.weight.detach(), before)


def test_where_a_norm_is_given_for_it_it_is_refused():
    model, x = made(Twice)
    with pytest.raises(UnsupportedOpError, match=r"\.data of a tensor is set"):
        normed(thunder.jit(model, transforms=[NormTransform(parameters={"weight": RMSTensor(1.0)})]))(x)
