"""norm_report: every operation with its norm, its sensitivity and how tight the bound is."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from tests.norms.norm_models import Tied
from tests.seeds import seeded
from thunder_norm import (
    LinfTensor,
    RMSTensor,
    RMSToRMSTensor,
    build_norm_map,
    norm_report,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import MissingNormRuleError, NormMapKeyError, NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder


class Block(nn.Module):
    """One residual block."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return x + 0.5 * F.relu(self.linear(x))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(seeded(1))
    return Model()


@pytest.fixture(scope="module")
def x() -> RMSTensor:
    torch.manual_seed(seeded(2))
    return RMSTensor.of(torch.randn(4, 6))


@pytest.fixture(scope="module")
def report(model, x):
    return norm_report(thunder.jit(model, transforms=[NormTransform()]), x, sensitivity="global")


def test_rows_are_the_operations_in_order(report):
    assert [r.op for r in report] == ["linear", "relu", "mul", "add"] * 2 + ["linear"]
    assert [r.module for r in report] == ["blocks.0.linear", *["blocks.0"] * 3, "blocks.1.linear", *["blocks.1"] * 3, "head"]
    assert len(report) == 9 and all(r.kind == "RMSTensor" and r.elem_dims == (-1,) for r in report)
    assert report.rows[-1].shape == (4, 3) and report.rows[0].shape == (4, 6)
    assert "return x + 0.5 * F.relu(self.linear(x))" in report.rows[1].location and __file__ in report.rows[1].location


def test_sizes_and_actual_norms_are_those_of_the_program(report, model, x):
    with torch.no_grad():
        y = model(x)
    last = report.rows[-1]
    assert last.norm_size == pytest.approx(y.norm_size.item(), rel=1e-6)
    assert last.actual == pytest.approx(RMSTensor.of(model(x.backing).detach()).norm_size.item(), rel=1e-5)
    assert all(0 < r.tightness <= 1 + 1e-6 and r.tightness == pytest.approx(r.actual / r.norm_size) for r in report)


def test_sensitivities_are_products_along_the_paths(report, model):
    w0, w1 = (RMSToRMSTensor.of(b.linear.weight.detach()).norm_size.item() for b in model.blocks)
    head = RMSToRMSTensor.of(model.head.weight.detach()).norm_size.item()
    # from the end: the head, then block 1 with its skip connection
    expected = {8: 1.0, 7: head, 6: head, 5: 0.5 * head, 4: 0.5 * head, 3: head * (1 + w1 / 2), 0: 0.5 * head * (1 + w1 / 2)}
    for i, s in expected.items():
        assert report.rows[i].sensitivity == pytest.approx(s, rel=1e-5), i
    entering = report.rows[3].norm_size
    assert report.parameters["blocks.1.linear.weight"].sensitivity == pytest.approx(0.5 * head * entering, rel=1e-5)
    assert report.parameters["blocks.1.linear.weight"].norm_size == pytest.approx(w1, rel=1e-5)
    assert report.parameters["head.weight"].sensitivity == pytest.approx(report.rows[7].norm_size, rel=1e-5)
    assert report.parameters["head.weight"].kind == "RMSToRMSTensor" and w0 > 0


def test_parameters_have_the_sensitivities_of_the_traced_program(report, model, x):
    leaves = {n: with_perturbation(RMSToRMSTensor(r.norm_size, elem_dims=r.elem_dims)) for n, r in report.parameters.items()}
    assert set(leaves) == {n for n, _ in model.named_parameters()}
    y = build_norm_map(model, x.backing)(RMSTensor(x.norm_size.item()), normed_state_dict=leaves)
    for name, s in sensitivities(y, leaves).items():
        assert report.parameters[name].sensitivity == pytest.approx(s.item(), rel=1e-12)


def test_the_table_has_a_line_for_each_operation(report):
    text = report.table(width=200)
    assert str(report) == report.table()
    header = text.splitlines()[1]
    for column in ("module", "op", "line", "kind", "shape", "norm", "sensitivity", "actual", "tightness"):
        assert column in header
    for row in report:
        assert f"{row.norm_size:.4g}" in text and f"{row.sensitivity:.4g}" in text
    assert "blocks.1.linear" in text and "test_report.py" in text and "RMSTensor[-1]" in text and "4x6" in text


def test_given_and_unit_parameters(model, x):
    unit = norm_report(thunder.jit(model, transforms=[NormTransform(parameters="unit")]), x)
    n = x.norm_size.item()
    assert unit.rows[-1].norm_size == pytest.approx(n * 1.5**2)
    assert [r.norm_size for r in unit.parameters.values()] == [1.0] * 3
    given = norm_report(thunder.jit(model, transforms=[NormTransform(parameters={"head.weight": 5.0})]), x)
    assert given.parameters["head.weight"].norm_size == 5
    typical = norm_report(thunder.jit(model, transforms=[NormTransform(parameters="unit", mode="typical")]), x)
    assert typical.rows[1].norm_size == pytest.approx(n / math.sqrt(2))


def test_the_report_runs_nothing_twice_and_leaves_no_trace(model, x):
    jm = thunder.jit(model, transforms=[NormTransform()])
    norm_report(jm, x)
    assert thunder.cache_misses(jm) == 0
    assert x.perturbation_size is None and all(p.grad is None for p in model.parameters())
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks


def test_token_ids_and_tied_weights():
    transform = NormTransform(parameters={"head.weight": RMSTensor(1.0)})
    report = norm_report(thunder.jit(Tied(), transforms=[transform]), torch.tensor([[1, 2]]))
    assert [r.op for r in report] == ["embedding", "linear"]
    (row,) = report.parameters.values()
    # one leaf, both uses: logits are at most 6, and move by 6 through the embedding and by 6 through the head
    assert row.norm_size == 1 and report.rows[-1].norm_size == 6 and row.sensitivity == 12


def test_a_result_is_told_from_the_argument_it_was_made_from():
    """Both move alike, but only the argument is used twice."""

    def f(x):
        y = -x
        return y + F.relu(y)

    report = norm_report(thunder.jit(f, transforms=[NormTransform()]), RMSTensor.of(torch.ones(3)))
    assert [(r.op, r.sensitivity) for r in report] == [("neg", 2.0), ("relu", 1.0), ("add", 1.0)]


def test_an_operation_the_output_does_not_depend_on_has_sensitivity_0():
    def f(x):
        F.relu(x)
        return x * 3

    report = norm_report(thunder.jit(f, transforms=[NormTransform()]), LinfTensor.of(torch.ones(3)))
    assert [(r.op, r.sensitivity, r.tightness) for r in report] == [("relu", 0.0, 1.0), ("mul", 1.0, 1.0)]
    assert report.parameters == {}


def test_reports_of_norm_maps(model, report):
    norm_map = build_norm_map(model, torch.empty(4, 6))
    leaves = {n: RMSToRMSTensor(2.0) for n, _ in model.named_parameters()}
    norm_map(RMSTensor(1.0), normed_state_dict=leaves)
    of_last_call, of_arguments = norm_report(norm_map), norm_report(norm_map, RMSTensor(1.0), normed_state_dict=leaves)
    for found in (of_last_call, of_arguments):
        assert [r.op for r in found] == [r.op for r in report]
        assert found.rows[-1].norm_size == pytest.approx(2 * (1 + 0.5 * 2) ** 2)
        assert all(r.actual is None and r.tightness is None for r in found)
        assert found.parameters["head.weight"].norm_size == 2 and found.parameters["head.weight"].sensitivity == 4
    assert "tightness" in str(of_last_call)


def test_reports_of_norm_maps_on_meta():
    model = Model().to("meta")
    norm_map = build_norm_map(model, torch.empty(4, 6, device="meta"))
    found = norm_report(norm_map, RMSTensor(1.0), normed_state_dict={n: 1.0 for n, _ in model.named_parameters()})
    assert found.rows[-1].norm_size == pytest.approx(1.5**2) and found.rows[-1].actual is None


def test_plot(report, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "norms.png"
    figure = report.plot(path)
    assert isinstance(figure, matplotlib.figure.Figure) and path.read_bytes().startswith(b"\x89PNG")
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert "norm_size (bound)" in labels and "actual norm" in labels
    assert report.without_data().plot() is not None


def test_plot_without_matplotlib_says_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"thunder_norm\[plot\]"):
        report.plot()


def test_mistakes_are_refused(model, x):
    for target in (model, thunder.jit(model), len):
        with pytest.raises(NormMismatchError, match="needs a norm map or a function jitted with NormTransform"):
            norm_report(target, x)
    with pytest.raises(NormMismatchError, match="needs the arguments"):
        norm_report(thunder.jit(model, transforms=[NormTransform()]))
    with pytest.raises(NormMismatchError, match="has not been called yet"):
        norm_report(build_norm_map(model, torch.empty(4, 6)))


def test_a_missing_rule_is_reported_at_the_users_line():
    def f(x):
        return torch.detach_copy(x)

    with pytest.raises(
        MissingNormRuleError,
        match=rf"(?s)no norm rule for torch.detach_copy.*{__file__}:\d+:  return torch.detach_copy",
    ):
        norm_report(thunder.jit(f, transforms=[NormTransform()]), RMSTensor.of(torch.ones(3, 4)), sensitivity="global")


# -- how it shows ----------------------------------------------------------------------------------------------------------


def rendered(value, **options) -> str:
    console = Console(file=io.StringIO(), **options)
    console.print(value)
    return console.file.getvalue()


def test_rich_prints_the_table_and_colours_tightness(report):
    assert rendered(report, width=160) == report.table(width=160) == str(report)
    styled = rendered(report, width=160, force_terminal=True, color_system="standard")
    assert re.sub(r"\x1b\[[0-9;]*m", "", styled) == report.table(width=160)
    tight = next(r for r in report if r.tightness >= 0.5)
    assert re.search(rf"\x1b\[([12];)*32m *{re.escape(f'{tight.tightness:.4g}')}\x1b", styled)  # green
    wrong = dataclasses.replace(report, rows=(dataclasses.replace(tight, tightness=1.5),))
    assert re.search(r"\x1b\[1;(2;)?31m *1\.5\x1b", rendered(wrong, width=160, force_terminal=True, color_system="standard"))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_narrow_table_cuts_no_numbers_and_no_operations(report, width):
    text = report.table(width=width)
    assert max(map(len, text.splitlines())) <= width
    for row in report:
        for value in (row.norm_size, row.sensitivity, row.actual, row.tightness):
            assert f" {value:.4g} " in text
        assert f" {row.op} " in text
    assert ("line" in text.splitlines()[1]) == (width >= 120)


def test_a_printed_explanation_follows_the_table(report):
    explained = dataclasses.replace(report, explains=True)
    assert str(explained) == f"{report.table()}\n{report.explain()}\n"
    text = rendered(explained, width=160, soft_wrap=True)
    assert text.startswith(report.table(width=160)) and "rule linear.linear: y = x W^T + b." in text


def long_report(report, n):
    return dataclasses.replace(report, rows=tuple(dataclasses.replace(report.rows[0], op=f"op{i}") for i in range(n)))


def test_a_long_report_is_short_when_printed_and_whole_when_asked_for(report):
    long = long_report(report, 1001)
    for text in (str(long), rendered(long, width=160), long.table(max_rows=200)):
        assert "op0 " in text and "op99 " in text and "op901 " in text and "op1000 " in text
        assert "op100 " not in text and "op900 " not in text and "... 801 more operations" in text
        assert len(text.splitlines()) == 200 + 1 + 4
    assert "op500 " in long.table() and "more operations" not in long.table()
    text = long.explain(max_rows=3)
    assert [line.split()[:2] for line in text.splitlines() if re.match(r"\d+\. op", line)] == [
        ["1.", "op0"],
        ["2.", "op1"],
        ["1001.", "op1000"],
    ]
    assert "... 998 more operations" in text and "op500" in long.explain()
    assert "... 1001 more operations" in long.table(max_rows=0)
    assert repr(long) == "<NormReport of 1001 operations and 3 parameters>"
    for bad in (lambda: long.table(max_rows=-1), lambda: long.explain(max_rows=-1)):
        with pytest.raises(NormMismatchError, match="max_rows must be >= 0, got -1"):
            bad()


def test_a_part_of_a_report(report):
    part = report.select("blocks.1")
    assert [r.module for r in part] == ["blocks.1.linear", *["blocks.1"] * 3] and list(part.parameters) == [
        "blocks.1.linear.weight"
    ]
    assert list(part.inferred) == ["blocks.1.linear.weight"] and "blocks.0" not in part.explain()
    assert report.select("").rows == report.rows
    with pytest.raises(NormMapKeyError, match=r"(?s)module 'block.1'.*did you mean +'blocks.1'"):
        report.select("block.1")
    with pytest.raises(NormMapKeyError):
        report.select("blocks.10")


class FakePandas(types.ModuleType):
    """As much of pandas as a data frame needs."""

    def __init__(self):
        super().__init__("pandas")

    @staticmethod
    def DataFrame(data):  # noqa: N802
        assert len({len(column) for column in data.values()}) == 1
        return data


def test_a_data_frame_has_a_row_for_each_operation(report, monkeypatch):
    if importlib.util.find_spec("pandas") is None:
        monkeypatch.setitem(sys.modules, "pandas", FakePandas())
    frame = report.to_dataframe()
    assert list(frame["op"]) == [r.op for r in report] and list(frame["rule"])[:2] == ["linear", "relu"]
    assert list(frame["norm_size"]) == [r.norm_size for r in report]
    assert list(frame["tightness"]) == [r.tightness for r in report] and list(frame["shape"])[-1] == (4, 3)
    columns = {
        "op",
        "module",
        "location",
        "kind",
        "elem_dims",
        "shape",
        "norm_size",
        "sensitivity",
        "actual",
        "tightness",
        "rule",
    }
    assert set(frame) == columns
    assert set(dataclasses.replace(report, rows=()).to_dataframe()) == columns


def test_a_data_frame_without_pandas_says_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"thunder_norm\[dataframe\]"):
        report.to_dataframe()


def test_the_plot_has_an_axis_for_tightness(report):
    pytest.importorskip("matplotlib")
    norms, tightness = report.plot().axes
    (line,) = (line for line in tightness.lines if line.get_label() == "tightness")
    assert list(line.get_ydata()) == [r.tightness for r in report]
    assert tightness.get_ylabel() == "tightness" and tightness.get_xlabel() == "operation"
    by_label = {line.get_label(): list(line.get_ydata()) for line in norms.lines}
    assert by_label["sensitivity of the output"] == [r.sensitivity for r in report]
    assert len(report.without_data().plot().axes) == 1


@pytest.mark.parametrize("how", [{"sensitivity": "composed"}, {"radius": 0.1}, {"sensitivity": "global"}])
def test_a_report_of_a_convolution_says_which_norm_keeps_it_a_matrix(how):
    jm = thunder.jit(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()), transforms=[NormTransform()])
    images = torch.randn(2, 2, 6, 6)
    lines, whole = (norm_report(jm, RMSTensor.of(images, dims), **how) for dims in (None, (-3, -2, -1)))
    advice = "inputs with elem_dims=(-3, -2, -1) keep it a matrix"
    assert (advice in lines.table(width=160)) == ("global" not in how.values())
    assert advice not in whole.table(width=160)


def test_no_report_advises_what_does_not_help():
    """An image of more entries than matrices have is none by any norm."""
    jm = thunder.jit(nn.Conv2d(2, 3, 3), transforms=[NormTransform()])
    report = norm_report(jm, RMSTensor.of(torch.randn(1, 2, 40, 40)), sensitivity="composed")
    assert "keep it a matrix" not in report.table(width=160)


def test_tightness_where_norms_are_infinite_or_0():
    """Scores that are masked are as large as their bound; a norm of 0 that was given to other data is exceeded, and shows."""
    jm = thunder.jit(
        lambda x: x.masked_fill(torch.eye(4, dtype=torch.bool), -math.inf).softmax(-1) * 0.0, transforms=[NormTransform()]
    )
    filled, _, zeros = norm_report(jm, RMSTensor.of(torch.randn(4, 4)))
    assert filled.actual == filled.norm_size == math.inf and filled.tightness == 1
    assert zeros.actual == zeros.norm_size == 0 and zeros.tightness is None
    x = torch.ones(2, 3)
    doubled = norm_report(
        thunder.jit(lambda x: x * 2, transforms=[NormTransform()]), RMSTensor(0.0, backing=x), sensitivity="global"
    )
    assert doubled.rows[0].tightness == math.inf
