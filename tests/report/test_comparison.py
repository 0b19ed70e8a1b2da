"""Reports of two checkpoints beside each other."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from thunder_norm import RMSTensor, norm_report
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder


def report(model, x, **options):
    return norm_report(thunder.jit(model, transforms=[NormTransform()]), RMSTensor.of(x), **options)


@pytest.fixture
def x():
    return torch.randn(8, 6)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.ReLU(), nn.Linear(10, 3, bias=False))


def test_ratios_are_those_of_a_change_that_is_known(model, x):
    later = copy.deepcopy(model)
    with torch.no_grad():
        later.get_submodule("0").weight.mul_(4.0)
    found = report(model, x).compare(report(later, x))
    ratios = {d.name: [d.ratio(what) for what in ("norm_size", "sensitivity", "actual")] for d in found.operations}
    assert ratios == {
        "0: linear": pytest.approx([4, 1, 4]),
        "1: relu": pytest.approx([4, 1, 4]),
        "2: linear": pytest.approx([4, 1, 4]),
    }
    changes = {name: [d.ratio("norm_size"), d.ratio("sensitivity")] for name, d in found.parameters.items()}
    assert changes == {"0.weight": pytest.approx([4, 1]), "2.weight": pytest.approx([1, 4])}
    assert found.only_before == found.only_after == ()
    assert [d.change for d in found.sorted()] == pytest.approx([4.0] * 5)


def test_what_one_lacks_is_listed_and_what_is_done_again_is_numbered(x):
    def program(x):
        return (x + 1) + 2

    def longer(x):
        return ((x + 1) + 2).relu()

    found = report(program, x).compare(report(longer, x))
    assert [d.name for d in found.operations] == ["add #1", "add #2"]
    assert (found.only_before, found.only_after) == ((), ("relu",))
    assert "only after: relu" in str(found)
    back = report(longer, x).compare(report(program, x))
    assert (back.only_before, back.only_after) == (("relu",), ())


def test_the_largest_change_is_first_and_what_is_nan_before_all(model, x):
    later = copy.deepcopy(model)
    with torch.no_grad():
        later.get_submodule("2").weight[0, 0] = math.nan
    found = report(model, x).compare(report(later, x))
    assert math.isnan(found.sorted()[0].change)
    assert found.table(width=80).count("nan") >= 2
    later = copy.deepcopy(model)
    with torch.no_grad():
        later.get_submodule("2").weight.mul_(100.0)
    assert found.parameters.keys() == {"0.weight", "2.weight"}
    found = report(model, x).compare(report(later, x))
    assert found.sorted()[0].change == pytest.approx(100)
    assert found.parameters["2.weight"].ratio("norm_size") == pytest.approx(100)


def test_norms_of_other_kinds_are_not_compared(x):
    one, other = (
        report(lambda x: x.sum(-1, keepdim=True), x),
        norm_report(thunder.jit(lambda x: x.sum(-1, keepdim=True), transforms=[NormTransform()]), RMSTensor.of(x, (-2, -1))),
    )
    found = one.compare(other)
    assert math.isnan(found.operations[0].ratio("norm_size"))


def test_a_data_frame(model, x):
    pytest.importorskip("pandas")
    frame = report(model, x).compare(report(model, 2 * x)).to_dataframe()
    assert frame["name"].tolist() == ["0: linear", "1: relu", "2: linear", "0.weight", "2.weight"]
    assert frame["actual_ratio"].tolist()[:3] == pytest.approx([2, 2, 2])


def test_mistakes_are_refused(model, x):
    with pytest.raises(NormMismatchError, match="scopes"):
        report(model, x).compare(report(model, x, sensitivity="global"))
    with pytest.raises(NormMismatchError, match="another report"):
        report(model, x).compare(model)
    with pytest.raises(NormMismatchError, match="max_rows"):
        report(model, x).compare(report(model, x)).table(max_rows=-1)


def test_what_is_done_once_more_is_compared_with_the_first(x):
    found = report(lambda x: x.relu(), x).compare(report(lambda x: (x.relu() * 2).relu(), x))
    assert [d.name for d in found.operations] == ["relu #1"]
    assert found.only_after == ("mul", "relu #2")


def test_reports_of_other_radii_are_not_compared(model, x):
    with pytest.raises(NormMismatchError, match="scopes"):
        report(model, x, radius=0.1).compare(report(model, x, radius=1.0))
