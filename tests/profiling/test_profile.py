"""What a profile shows, and what users add to it: rules, devices, views."""

from __future__ import annotations

import importlib.util
import io
import json

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils import flop_counter

from tests.profiling import profiled
from tests.seeds import seeded
from thunder_norm.errors import ProfileError, UnsupportedOpError
from thunder_norm.profiling import flops as flop_rules
from thunder_norm.profiling import shapes
from thunder_norm.profiling.rows import Kernel
from thunder_norm.profiling.views import bytes_text, flops_text
from thunder_norm.transforms import (
    DEVICES,
    Device,
    NormTransform,
    ProfileTransform,
    measure_cpu,
    measure_gpu,
    profile,
    register_flop_rule,
    register_shape_rule,
)
import thunder
from thunder.core.proxies import TensorProxy
from thunder.executors.custom_op_ex import custom_op_ex
from thunder.extend import OperatorExecutor
from thunder.torch.custom_op import _register_custom_op


@pytest.fixture(autouse=True)
def no_rules_left_over(monkeypatch):
    monkeypatch.setattr(flop_rules, "_rules", dict(flop_rules._rules))
    monkeypatch.setattr(shapes, "_rules", dict(shapes._rules))


@pytest.fixture(scope="module")
def found():
    """A language model's profile, forward and backward."""
    torch.manual_seed(seeded(0))
    model, inputs = profiled.tied()
    return profile(model, **inputs, backward=True, target="eager")


@torch.library.custom_op("profile_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy().cumsum(-1))


@torch.library.custom_op("profile_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


@doubled.register_fake
def _(x):
    return x.new_empty(2 * x.shape[0], *x.shape[1:])


# -- rules ---------------------------------------------------------------------------------------------------------------


def test_an_unknown_operation_counts_zero_and_is_listed():
    found = profile(lambda x: doubled(x) @ x, torch.ones(3, 3), target="eager")
    assert (found.flops, found.unknown) == (2 * 6 * 3 * 3, {"profile_tests.doubled": 1})
    assert "no FLOP rule: profile_tests.doubled (1)" in found.summary() and "? 0" in found.table()


def test_an_executors_operation_that_needs_data_is_known_by_the_trace():
    executor = OperatorExecutor("profile_tests_numpy")

    def like(x):
        return TensorProxy(like=x)

    symbol = executor.register_operator(
        "by_numpy", meta=like, fn=lambda x: torch.from_numpy(x.numpy() * 2), replaces=_doubled_entries
    )
    x = torch.ones(4, 5)
    found = profile(lambda x: _doubled_entries(x).exp(), x, executors=[executor], count="all")
    assert (found.flops, found.unknown) == (20, {"by_numpy": 1})
    assert found.rows[0].output_bytes == x.nbytes
    assert found.peak_bytes - found.resident_bytes == 2 * x.nbytes

    register_shape_rule(symbol)(torch.empty_like)
    register_flop_rule(symbol)(lambda x, *, out: 3 * out.numel())
    assert profile(lambda x: _doubled_entries(x).exp(), x, executors=[executor], count="all").flops == 80


def _doubled_entries(x):
    return x * 2


def test_a_flop_rule_is_used_forward_wherever_the_operation_runs():
    @register_flop_rule(doubled)
    def rule(x, *, out):
        return 10 * out.numel()

    found = profile(lambda x: doubled(x), torch.ones(3, 3), target="eager")
    assert (found.flops, found.unknown) == (180, {})


@pytest.fixture(scope="module")
def doubled_in_traces():
    _register_custom_op(
        doubled
    )  # with Thunder, whose traces have it by its name in torch.ops; its nightly refuses to do so twice


@pytest.mark.usefixtures("doubled_in_traces")
@pytest.mark.parametrize("target", ["eager", "trace"])
def test_operations_of_torch_library(target):
    executors = [custom_op_ex] if target == "trace" else None

    def profiled():
        return profile(lambda x: torch.ops.profile_tests.doubled(x) @ x, torch.ones(3, 3), target=target, executors=executors)

    found = profiled()
    assert (found.flops, found.unknown) == (2 * 6 * 3 * 3, {"profile_tests.doubled": 1})
    register_flop_rule(doubled)(lambda x, *, out: 10 * out.numel())
    found = profiled()
    assert (found.flops, found.unknown) == (180 + 2 * 6 * 3 * 3, {})


@pytest.mark.parametrize("target", ["eager", "trace"])
def test_a_rule_for_a_function_replaces_those_of_its_kernels(target):
    @register_flop_rule(F.linear)
    def rule(x, weight, bias=None, *, out):
        return 7

    assert profile(lambda x, w: F.linear(x, w).relu(), torch.ones(2, 3), torch.ones(4, 3), target=target).forward_flops == 7


def test_a_rule_for_a_symbol_is_used_in_traces():
    executor = OperatorExecutor("profile_tests")

    def fused_like(x, y):
        return TensorProxy(like=x)

    symbol = executor.register_operator("fused", meta=fused_like, fn=lambda x, y: x * y + 1, replaces=_fused)
    x = torch.ones(4, 5)
    assert profile(_fused, x, x, executors=[executor]).flops == 0

    @register_flop_rule(symbol)
    def rule(x, y, *, out):
        return 2 * out.numel()

    assert profile(_fused, x, x, executors=[executor]).flops == 40


def _fused(x, y):
    return x * y + 1


def test_a_rule_is_not_replaced_by_accident():
    for op in (torch.ops.aten.mm.default, torch.ops.aten.mv):
        with pytest.raises(ProfileError, match="override=True"):
            register_flop_rule(op)(lambda *args, out: 0)
    register_flop_rule(torch.ops.aten.mm, override=True)(lambda a, b, *, out: 1)
    assert profile(torch.mm, torch.ones(2, 2), torch.ones(2, 2), target="eager").flops == 1
    with pytest.raises(ProfileError, match="operations, functions and Thunder symbols"):
        register_flop_rule(3)


def test_a_shape_rule_stands_in_for_what_cannot_run_without_data():
    x = torch.ones(3, 4)
    with pytest.raises(UnsupportedOpError, match=r"profile_tests.opaque does not run(.|\n)*register_shape_rule"):
        profile(lambda x: opaque(x) * 2, x, target="eager")

    @register_shape_rule(opaque)
    def rule(x):
        return torch.empty_like(x)

    found = profile(lambda x: opaque(x) * 2, x, target="eager", count="all")
    assert found.rows[-1].shape == (3, 4) and found.rows[-1].flops == 12
    assert found.unknown == {"profile_tests.opaque": 1}
    assert found.peak_bytes - found.resident_bytes == 2 * x.nbytes
    with pytest.raises(ProfileError, match="override=True"):
        register_shape_rule(opaque)(rule)
    register_shape_rule(opaque, override=True)(lambda x: "nothing")
    with pytest.raises(ProfileError, match="must return tensors"):
        profile(lambda x: opaque(x), x, target="eager")


def test_torch_formulas_are_used_for_all_that_torch_has():
    """Every formula of torch's counter is found for its operation, ours are beside them."""
    own = {torch.ops.aten.convolution_backward}
    for packet in set(flop_counter.flop_registry) - own:
        assert packet not in flop_rules._rules


def test_everything_counted():
    x = torch.ones(8, 16)
    cases = {
        lambda x: x + 1: 128,
        lambda x: x.sum(): 128,
        lambda x: x.T: 0,
        lambda x: x[2:].clone(): 0,
        lambda x: torch.softmax(x, -1): 5 * 128,
        lambda x: torch.cat([x, x]): 0,
        lambda x: (x @ x.T).relu(): 2 * 8 * 8 * 16 + 64,
        lambda x: torch.rand_like(x): 0,
        lambda x: torch.mv(x, x[0]): 2 * 128,
        lambda x: torch.dot(x[0], x[1]): 32,
    }
    for program, flops in cases.items():
        found = profile(program, x, target="eager", count="all")
        assert (found.flops, found.unknown) == (flops, {})
    assert profile(lambda x: torch.softmax(x + 1, -1), x, target="eager").flops == 0


# -- devices -------------------------------------------------------------------------------------------------------------


def test_roofline_is_the_slower_of_both():
    x, w = torch.ones(64, 64), torch.ones(64, 64)
    found = profile(lambda x: (x @ w).relu(), x, target="eager")
    flops, moved = 2 * 64**3, 4 * 64 * 64
    compute = found.roofline(Device("slow arithmetic", flops, 1e15))
    assert [t.bound for t in compute.rows] == ["compute", "memory"]
    assert compute.seconds == pytest.approx(1.0, rel=1e-6)
    memory = found.roofline(Device("slow memory", 1e18, moved))
    assert [t.bound for t in memory.rows] == ["memory", "memory"]
    assert memory.seconds == pytest.approx(3 + 2)
    assert memory.rows[0].intensity == flops / (3 * moved)


def test_presets():
    for name, device in DEVICES.items():
        assert device.name == name and device.source
        assert device.peak(torch.bfloat16) >= device.peak(torch.float32) >= device.peak(torch.float64)
        assert device.peak(torch.complex64) == device.peak(torch.float32)
    found = profile(nn.Linear(8, 8), torch.ones(2, 8), target="eager")
    assert (
        found.roofline("H200").seconds
        < found.roofline("H100").seconds
        < found.roofline("A100").seconds
        < found.roofline("CPU").seconds
    )
    with pytest.raises(ProfileError, match="no device 'T4'; there are H200"):
        found.roofline("T4")
    with pytest.raises(ProfileError, match="must be positive"):
        Device("none", 0, 1)


def test_a_gpu_that_is_not_there_cannot_be_measured():
    with pytest.raises(ProfileError, match="measure_cpu measures the processor"):
        measure_gpu("cpu")
    with pytest.raises(ProfileError, match="positive"):
        measure_gpu(size=0)


def test_the_cpu_can_be_measured():
    device = measure_cpu(size=64, repeats=1)
    assert device.bandwidth > 0 and device.peak(torch.float32) > 0
    with pytest.raises(ProfileError, match="positive"):
        measure_cpu(repeats=0)


# -- views ---------------------------------------------------------------------------------------------------------------


def test_modules_add_up(found):
    totals = found.by_module()
    assert totals[""].forward_flops == found.forward_flops
    assert totals[""].backward_flops == found.backward_flops
    assert totals[""].operations == len(found.rows)
    assert totals["blocks.0"].forward_flops > totals["blocks.0.mlp"].forward_flops == 2 * 2 * 16 * 32 * 128
    assert set(found.by_module(depth=1)) == {"", "embedding", "blocks", "head"}
    assert set(found.by_module(depth=0)) == {""}
    assert {r.module for r in found.select("blocks.0.mlp")} == {"blocks.0.mlp.0", "blocks.0.mlp.1", "blocks.0.mlp.2"}
    with pytest.raises(ProfileError, match="did you mean.*'blocks.0.mlp.1'"):
        found.select("blocks.0.mpl.1")
    with pytest.raises(ProfileError, match="depth"):
        found.by_module(depth=-1)


def test_memory_of_rows_fits_the_totals(found):
    assert found.peak_row is not None and found.peak_row.peak_bytes == found.peak_bytes
    assert all(r.live_bytes <= r.peak_bytes for r in found)
    assert found.resident_bytes == found.parameter_bytes + found.input_bytes
    assert found.parameter_bytes == 4 * (50 * 32 + 64 + 3 * 32 * 32 + 3 * 32 + 32 * 32 + 2 * 4 * 32 * 32 + 5 * 32)
    first = found.rows[0]
    assert (first.op, first.output_bytes) == ("embedding", 2 * 8 * 32 * 4)
    assert first.live_bytes == found.resident_bytes + first.output_bytes
    assert first.bytes_written == first.output_bytes and first.parameter_bytes == 50 * 32 * 4


def test_table_has_a_row_for_each_operation(found):
    text = found.table(width=220, backward=True)
    lines = [line for line in text.splitlines() if line.startswith("│")]
    assert len(lines) == len(found)
    assert "scaled_dot_product_attention" in text and "profiled.py:45" in text
    assert flops_text(found.forward_flops) in text and bytes_text(found.peak_bytes) in text
    narrow = found.table(width=90)
    assert " line " not in narrow and max(map(len, narrow.splitlines())) <= 90
    short = found.table(max_rows=4)
    assert f"... {len(found.rows) - 4} more operations" in short
    with pytest.raises(ProfileError, match="max_rows"):
        found.table(max_rows=-1)


def test_it_prints_itself(found):
    console = Console(file=io.StringIO(), width=120)
    console.print(found)
    assert "linear" in console.file.getvalue()
    assert "linear" in str(found)
    assert (
        repr(found)
        == f"<Profile of the eager program: {len(found.rows)} operations forward, {len(found.backward_rows)} backward>"
    )


@pytest.mark.parametrize(
    ("n", "flops", "size"),
    [
        (0, "0 ", "0 B"),
        (999, "999 ", "999 B"),
        (1000, "1.00 k", "1000 B"),
        (2048, "2.05 k", "2.00 KiB"),
        (123_456_789, "123 M", "118 MiB"),
    ],
)
def test_numbers_are_short(n, flops, size):
    assert (flops_text(n), bytes_text(n)) == (flops, size)


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs pandas")
def test_dataframe_has_all_columns(found):
    frame = found.to_dataframe()
    assert len(frame) == len(found)
    assert frame[frame.phase == "forward"].flops.sum() == found.forward_flops
    assert frame[frame.phase == "backward"].flops.sum() == found.backward_flops
    assert frame.peak_bytes.max() == found.peak_bytes
    assert frame.kernels[0] == ("aten.embedding",)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_picture_shows_memory_and_flops(found, tmp_path):
    path = tmp_path / "profile.png"
    figure = found.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    memory, flops = figure.axes
    assert max(memory.lines[0].get_ydata()) * 1024 == found.peak_bytes
    widths = sorted(p.get_width() for p in flops.patches)
    assert widths[-1] == 1.0
    assert any(w == pytest.approx(found.by_module()["head"].forward_flops * 3 / found.flops) for w in widths)


def test_chrome_trace_nests(found, tmp_path):
    path = tmp_path / "trace.json"
    assert found.to_chrome_trace(path, device=Device("one", 1e9, 1e9)) == json.loads(path.read_text())
    events = json.loads(path.read_text())["traceEvents"]
    operations = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [e["name"] for e in operations] == [r.op for r in found]
    for before, after in zip(operations, operations[1:], strict=False):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
    modules = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    inside = {e["args"]["module"]: (e["ts"], e["ts"] + e["dur"]) for e in modules}
    for e in operations:
        if e["args"]["module"] and e["cat"] == "forward":
            spans = [(m["ts"], m["ts"] + m["dur"]) for m in modules if m["args"]["module"] == e["args"]["module"]]
            assert any(start <= e["ts"] and e["ts"] + e["dur"] <= end * (1 + 1e-9) for start, end in spans)
    assert "blocks.0.mlp.0" in inside
    memory = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(memory) == found.peak_bytes
    seconds = found.roofline(Device("one", 1e9, 1e9)).seconds
    assert operations[-1]["ts"] + operations[-1]["dur"] == pytest.approx(seconds * 1e6, rel=1e-3)


# -- options ----------------------------------------------------------------------------------------------------------------


def test_unknown_options_are_refused():
    for bad in ({"target": "jit"}, {"count": "macs"}):
        with pytest.raises(ProfileError, match="must be one of"):
            profile(torch.sin, torch.ones(2), **bad)
    with pytest.raises(ProfileError, match="function or module"):
        profile(3)
    with pytest.raises(ProfileError, match="must be one of"):
        ProfileTransform(count="macs")
    with pytest.raises(ProfileError, match="strided"):
        profile(torch.sin, torch.ones(2, 2).to_sparse(), target="eager")


def test_a_normed_program_can_be_profiled():
    """Beside NormTransform, on plain tensors: the program is the one without it."""
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    transform = ProfileTransform()
    jm = thunder.jit(model, transforms=[NormTransform(), transform])
    with torch.no_grad():
        jm(x)
    assert transform.report.flops == profile(model, x).flops == 48
    assert transform.report.rows[0].kernels[0] == Kernel("aten.addmm", 48, 4 * (6 + 12 + 4), 32, torch.float32)
