"""Norm maps of programs that ask for the values of their arguments."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor, build_norm_map, load_norm_map
from thunder_norm.errors import AcquiredAnewWarning, NormMismatchError, ThunderNormError


class Reads(nn.Module):
    """Layers with what a program does with integers between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between
        self.register_buffer("sizes", torch.tensor([2, 3]))

    def forward(self, x, given):
        return self.between(self, self.first(x), given)


def condition(m, y, given):
    return m.second(y) if given[0] == 1 else y


def numbers(m, y, given):
    parts = y[: int(given.sum())].split(given.tolist())
    return condition(m, torch.stack([p.sum(0) for p in parts])[torch.repeat_interleave(torch.arange(len(given)), given)], given)


def masks(m, y, given):
    return m.second(y[given > 1]) + y.masked_select((given > 1)[:, None]).reshape(-1, 8)


VALUES = {numbers: ([1, 2], [3, 1]), masks: ([2, 0, 1, 2, 3], [0, 0, 2, 0, 0])}


@pytest.mark.parametrize("between", VALUES)
def test_a_norm_map_is_of_the_values_that_the_program_asks_for(between):
    torch.manual_seed(seeded(0))
    model, x = Reads(between), torch.randn(5, 8)
    first, other = map(torch.tensor, VALUES[between])
    norm_map = build_norm_map(model, x, first)
    for given in (first, other, first):
        eager = model(x, given)
        found = norm_map(RMSTensor.of(x), given)
        assert found.shape == eager.shape
        assert RMSTensor.of(eager).norm_size <= found.norm_size * 1.00001 <= 1e3 * RMSTensor.of(eager).norm_size
    assert len(norm_map._programs) == 2


def test_arguments_whose_values_are_asked_for_have_data_where_the_model_has_none():
    model, x, given = Reads(numbers), torch.randn(5, 8), torch.tensor([1, 2])
    as_unit = build_norm_map(model, x, given, parameters="unit")(RMSTensor(2.0), given)
    on_meta = build_norm_map(model.to("meta"), x.to("meta"), given, parameters="unit")
    assert on_meta(RMSTensor(2.0), given).norm_size == as_unit.norm_size
    with pytest.raises(ThunderNormError, match="on the meta device"):
        on_meta(RMSTensor(2.0), given.to("meta"))


def test_what_values_a_norm_map_is_of_stays_with_its_copies(tmp_path):
    torch.manual_seed(seeded(0))
    model, x = Reads(condition), torch.randn(5, 8)
    first, other = torch.tensor([1, 2]), torch.tensor([0, 2])
    norm_map = build_norm_map(model, x, first)
    expected = [norm_map(RMSTensor(1.0), given).norm_size for given in (first, other)]
    assert expected[0] != expected[1]
    norm_map.save(tmp_path / "map")
    without_model = load_norm_map(tmp_path / "map")
    for again in (
        without_model,
        load_norm_map(tmp_path / "map", model),
        pickle.loads(pickle.dumps(norm_map)),
        copy.copy(norm_map),
        copy.deepcopy(norm_map),
    ):
        assert [again(RMSTensor(1.0), given).norm_size for given in (first, other)] == expected
        assert len(again._programs) == 2
    with pytest.raises(NormMismatchError, match="without its model"):
        without_model(RMSTensor(1.0), torch.tensor([0, 3]))


def test_a_buffer_is_asked_again():
    torch.manual_seed(seeded(0))
    model, x = Reads(lambda m, y, given: torch.stack([m.second(p).sum(0) for p in y.split(m.sizes.tolist())])), torch.randn(5, 8)
    norm_map = build_norm_map(model, x, 0)
    assert norm_map(RMSTensor.of(x), 0).shape == (2, 8)
    model.sizes.copy_(torch.tensor([1, 4]))
    found, eager = norm_map(RMSTensor.of(x), 0), model(x, 0)
    assert RMSTensor.of(eager).norm_size <= found.norm_size * 1.00001
    model.register_buffer("sizes", torch.tensor([5]))
    assert norm_map(RMSTensor.of(x), 0).shape == (1, 8)


@pytest.mark.parametrize(
    "between, match",
    [
        (lambda m, y, given: y if given.sum() > 0 else -y, "which stands for all"),
        (lambda m, y, given: m.second(y[given[0] > 0]), "which stands for all"),
        (lambda m, y, given: y * int(m.first.weight.sum()), "norm map has the norm"),
        (lambda m, y, given: y if y.sum() > 0 else -y, "norm map has the norm"),
        (lambda m, y, given: y * int(torch.rand(()) * 5), "random numbers"),
    ],
)
def test_values_of_what_has_a_norm_and_what_is_random_are_refused(between, match):
    norm_map = build_norm_map(Reads(between), torch.randn(5, 8), torch.randn(2, 5))
    with pytest.raises(ThunderNormError, match=match):
        norm_map(RMSTensor(1.0), RMSTensor(1.0))


def test_one_program_serves_all_values_where_none_needs_to_be_asked_for():
    model = Reads(lambda m, y, given: (y[given > 0] ** 2).mean())
    norm_map = build_norm_map(model, torch.randn(5, 8), torch.tensor([1, 2, 0, 0, 0]))
    for given in ([1, 2, 0, 0, 0], [0, 0, 1, 0, 0]):
        norm_map(RMSTensor(1.0), torch.tensor(given))
    assert len(norm_map._programs) == 1


def test_of_ever_other_values_the_first_programs_are_kept(monkeypatch):
    monkeypatch.setattr("thunder_norm.norms.maps.norm_map.MAX_TRACES", 2)
    model = Reads(lambda m, y, given: y * given.item())
    norm_map = build_norm_map(model, torch.randn(5, 8), torch.tensor(1))
    sizes = []
    with pytest.warns(AcquiredAnewWarning, match="others in 2 calls"):
        for n in (1, 2, 3):
            sizes.append(norm_map(RMSTensor(1.0), torch.tensor(n)).norm_size.item())
    assert [s / sizes[0] for s in sizes] == pytest.approx([1, 2, 3]) and len(norm_map._programs) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert norm_map(RMSTensor(1.0), torch.tensor(1)).norm_size.item() == sizes[0]


@pytest.mark.parametrize("dims", [({0: "rows"}, None), (None, {0: "entries"})])
def test_dynamic_dimensions_beside_values_that_are_asked_for(dims):
    torch.manual_seed(seeded(0))
    model, x, given = Reads(lambda m, y, given: m.second(y) * given.max().item()), torch.randn(5, 8), torch.tensor([1, 2])
    norm_map = build_norm_map(model, x, given, dynamic_shapes=dims)
    if dims[0] is None:  # what stands for an argument of another size has no values
        with pytest.raises(ThunderNormError, match="with dynamic dimensions"):
            norm_map(RMSTensor(1.0), given)
        return
    for x, values in ((torch.randn(7, 8), given), (torch.randn(6, 8), torch.tensor([2, 3]))):
        found, eager = norm_map(RMSTensor.of(x), values), model(x, values)
        assert found.shape == eager.shape
        assert RMSTensor.of(eager).norm_size <= found.norm_size * 1.00001
