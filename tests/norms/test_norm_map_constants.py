"""Norm maps of programs that read tensors from elsewhere: attributes of modules that are no buffers, closures, global variables."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor, build_norm_map, load_norm_map
from thunder_norm.errors import NormMismatchError, SavedFileError

MASK = torch.tensor([[1.0, 0.0], [2.0, 3.0]])


class Positions(nn.Module):
    """A plain attribute is added to what the layers make."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.positions = torch.tensor([[3.0, -4.0], [0.5, 1.0]])

    def forward(self, x):
        return self.layer(x) + self.positions.to(x.device, dtype=x.dtype)


def norm_of(norm_map):
    return norm_map(RMSTensor(1.0)).norm_size.item()


@pytest.fixture
def model():
    torch.manual_seed(seeded(0))
    return Positions()


def test_an_attribute_counts(model):
    found = norm_of(build_norm_map(model, torch.empty(2, 2), parameters="unit"))
    bias = 1.0
    expected = 1.0 + bias + RMSTensor.of(model.positions).norm_size.item()
    assert found == pytest.approx(expected)


def test_so_it_does_where_the_model_is_on_meta(model):
    expected = norm_of(build_norm_map(model, torch.empty(2, 2), parameters="unit"))
    assert norm_of(build_norm_map(model.to("meta"), torch.empty(2, 2, device="meta"), parameters="unit")) == pytest.approx(
        expected
    )


def test_what_is_written_into_it_is_seen_and_what_takes_its_place(model):
    norm_map = build_norm_map(model, torch.empty(2, 2), parameters="unit")
    before = norm_of(norm_map)
    model.positions.mul_(2)
    assert norm_of(norm_map) == pytest.approx(before + RMSTensor.of(model.positions).norm_size.item() / 2)
    model.positions = torch.zeros(2, 2)
    assert norm_of(norm_map) == pytest.approx(2.0)
    model.positions = torch.zeros(2)
    with pytest.raises(NormMismatchError, match="'positions' of the model is no longer the tensor"):
        norm_map(RMSTensor(1.0))


def test_it_is_copied_pickled_and_saved(model, tmp_path):
    norm_map = build_norm_map(model, torch.empty(2, 2), parameters="unit")
    expected = norm_of(norm_map)
    norm_map.save(tmp_path / "map")
    others = [copy.deepcopy(norm_map), pickle.loads(pickle.dumps(norm_map)), load_norm_map(tmp_path / "map")]
    own = Positions()
    own.positions = torch.zeros(2, 2)
    with_model = load_norm_map(tmp_path / "map", own)
    model.positions.zero_()
    assert norm_of(norm_map) == pytest.approx(2.0)
    assert [norm_of(m) for m in others] == [pytest.approx(expected)] * 3
    assert norm_of(with_model) == pytest.approx(2.0)
    own.positions = torch.ones(2, 2)
    assert norm_of(with_model) == pytest.approx(3.0)


def test_closures_and_global_variables_count_and_are_not_saved(tmp_path):
    held = torch.full((2, 2), 2.0)
    norm_map = build_norm_map(lambda x: x + held - MASK, torch.empty(2, 2))
    assert norm_of(norm_map) == pytest.approx(3.0 + RMSTensor.of(MASK).norm_size.item())
    with pytest.raises(SavedFileError, match="from a closure or a global variable"):
        norm_map.save(tmp_path / "map")
