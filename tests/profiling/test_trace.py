"""Profiles of the programs that Thunder runs, against those runs: FLOPs, the saved tuple, peak memory."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests import measured
from tests.profiling import profiled
from tests.seeds import seeded
from thunder_norm.errors import ProfileError
from thunder_norm.transforms import ProfileTransform, SubclassTransform, profile
import thunder

PROGRAMS = {f.__name__: f for f in (profiled.mlp, profiled.tied, profiled.convolutions, profiled.addmm)}


@functools.cache
def compiled(name):
    """A jitted program, its inputs, and its profile with a backward: acquired once for all tests."""
    torch.manual_seed(seeded(0))
    model, inputs = PROGRAMS[name]()
    transform = ProfileTransform()
    jm = thunder.jit(model, transforms=[transform])
    return jm, inputs, profile(jm, **inputs, backward=True), transform


@pytest.mark.parametrize("name", PROGRAMS)
def test_profile_is_what_a_run_takes(name):
    jm, inputs, found, _ = compiled(name)

    def run():
        return jm(**inputs)

    def run_both():
        for p in jm.parameters():
            p.grad = None
        measured.backward(run())

    assert thunder.cache_misses(jm) == 1
    with FlopCounterMode(display=False) as forward:
        result = run()
    with FlopCounterMode(display=False, custom_mapping=measured.FORMULAS) as backward:
        measured.backward(result)
    assert (found.forward_flops, found.backward_flops) == (forward.get_total_flops(), backward.get_total_flops())
    assert found.unknown == {}

    for p in jm.parameters():
        p.grad = None
    del result
    peak = measured.peak_bytes(run_both)
    own = found.peak_bytes - found.resident_bytes
    if name == "convolutions":  # the CPU's convolutions keep copies of their operands in other layouts
        assert own <= peak
    else:
        assert own <= peak <= own + 64
    assert thunder.cache_misses(jm) == 1


def test_the_gradient_of_added_products_runs_nothing_again():
    found = compiled("addmm")[2]
    first, second = (2 * 16 * 8 * 32,) * 2
    assert found.forward_flops == first + second
    assert found.backward_flops == first + 2 * second  # the input has no gradient


@pytest.mark.parametrize("loss", [F.binary_cross_entropy_with_logits, F.huber_loss, F.soft_margin_loss])
def test_a_gradient_that_torch_computes_takes_what_it_takes_in_a_run(loss):
    """A profile runs torch's own formula as the program does, not the parts that torch.func would take the operation to."""
    x, target = torch.randn(64, 4, requires_grad=True), torch.rand(64, 4)
    jf = thunder.jit(lambda x, target: loss(x.sin(), target), transforms=[SubclassTransform()])
    found = profile(jf, x, target, backward=True)
    peak = measured.peak_bytes(lambda: measured.backward(jf(x, target)))
    assert thunder.cache_misses(jf) == 1
    assert found.peak_bytes - found.resident_bytes <= peak + 64


@pytest.mark.parametrize("name", PROGRAMS)
def test_saved_bytes_are_those_of_the_saved_tuple(name):
    jm, inputs, found, _ = compiled(name)
    own = {t.untyped_storage().data_ptr() for t in (*jm._model.parameters(), *jm._model.buffers())}
    entry, flat, _ = thunder.compile_data(jm).get_computation_and_inputs(**inputs)
    _, (saved, _) = entry.computation_fn(*flat)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert found.saved_bytes == sum(n for pointer, n in storages.items() if pointer not in own)
    assert found.saved_parameter_bytes == sum(n for pointer, n in storages.items() if pointer in own)
    assert sum(r.saved_bytes for r in found.rows) == found.saved_bytes - found.saved_input_bytes


def test_both_programs_take_the_same_flops_and_keep_the_same():
    jm, inputs, found, _ = compiled("tied")
    eager = profile(jm, **inputs, backward=True, target="eager")
    assert (eager.forward_flops, eager.backward_flops) == (found.forward_flops, found.backward_flops)
    assert found.saved_bytes == pytest.approx(eager.saved_bytes, abs=8)  # the same kernels keep the same tensors


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_transform_fills_itself(name):
    jm, inputs, found, transform = compiled(name)
    assert transform.reports[0].rows == found.rows
    assert transform.reports[0].backward_rows == found.backward_rows
    assert transform.reports[0].peak_bytes == found.peak_bytes


def test_each_compilation_has_a_report():
    transform = ProfileTransform()
    jitted = thunder.jit(lambda x, w: F.linear(x, w).sum(), transforms=[transform])
    with pytest.raises(ProfileError, match="nothing was compiled"):
        _ = transform.report
    w = torch.randn(4, 3, requires_grad=True)
    plain = thunder.jit(lambda x, w: F.linear(x, w).sum())
    assert torch.equal(jitted(torch.ones(2, 3), w), plain(torch.ones(2, 3), w))
    with torch.no_grad():
        jitted(torch.ones(5, 3), w)
    assert [r.forward_flops for r in transform.reports] == [48, 120]
    assert [bool(r.backward_rows) for r in transform.reports] == [True, False]
    assert transform.report.forward_flops == 120


def test_rows_say_where_they_come_from():
    _, _, found, _ = compiled("tied")
    linear = next(r for r in found.rows if r.module == "blocks.0.mlp.0" and r.op == "linear")
    assert linear.location.startswith(profiled.__file__) and linear.location.endswith("return x + self.mlp(x)")
    assert (linear.flops, linear.backward_flops) == (2 * 16 * 32 * 128, 2 * 2 * 16 * 32 * 128)
    derivative = [r for r in found.backward_rows if r.derivative_of == linear.number]
    assert sum(r.flops for r in derivative) == linear.backward_flops
    assert {r.module for r in derivative} == {"blocks.0.mlp.0"}
    eager = profile(*_tied(), backward=True, target="eager")
    for name in ("embedding", "head", "blocks.0.qkv", "blocks.0.out", "blocks.0.mlp.2"):
        assert found.by_module()[name].forward_flops == eager.by_module()[name].forward_flops
        assert found.by_module()[name].backward_flops == eager.by_module()[name].backward_flops


def _tied():
    model, inputs = profiled.tied()
    return model, inputs["ids"]


def test_without_backward_it_is_the_program_without_gradients():
    model, inputs = profiled.mlp()
    jm = thunder.jit(model)
    found = profile(jm, **inputs)
    assert found.backward_rows == () and found.saved_bytes == 0
    with torch.no_grad():
        jm(**inputs)
        assert found.peak_bytes - found.resident_bytes == measured.peak_bytes(lambda: jm(**inputs))
    assert thunder.cache_misses(jm) == 1


def test_meta_takes_no_memory_and_counts_the_same():
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            x = torch.empty(2, 8)
        found.append(profile(model, x, backward=True, device="cpu"))
        assert all(p.device.type == device and p.grad is None for p in model.parameters())
    assert found[0].rows == found[1].rows and found[0].backward_rows == found[1].backward_rows
    huge = torch.empty(2**22, 2**22, device="meta")
    assert profile(torch.matmul, huge, huge, device="cpu").forward_flops == 2 * 2**66


def test_a_fusion_is_one_operation():
    """What is inside counts, what passes between its operations is never stored, and its bytes are those at its boundary."""

    def program(x, w):
        return torch.sin(torch.exp(x) * 2 + 1) * torch.cos(x) + (x @ w)

    x, w = torch.randn(16, 16), torch.randn(16, 16)
    plain = profile(program, x, w, count="all")
    fused = profile(program, x, w, count="all", executors=["torchcompile"])
    assert plain.flops == fused.flops == 16 * 16 * (7 + 32)
    fusions = [r for r in fused.rows if r.is_fused]
    assert len(fusions) == 1 and len(fusions[0].kernels) > 3
    assert fusions[0].bytes_written == fusions[0].output_bytes == x.nbytes
    assert fused.peak_bytes < plain.peak_bytes
    assert sum(r.bytes_read for r in fused) < sum(r.bytes_read for r in plain)


def test_dropout_and_random_numbers_are_not_drawn():
    state = torch.get_rng_state()
    found = profile(lambda x: F.dropout(x, 0.5) * torch.rand(3), torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state) and found.unknown == {}


def test_a_jitted_program_has_executors_already():
    with pytest.raises(ProfileError, match="executors"):
        profile(thunder.jit(torch.sin), torch.ones(3), executors=["torch"])
    with pytest.raises(ProfileError, match="executors"):
        profile(torch.sin, torch.ones(3), executors=["torch"], target="eager")


def test_a_backward_of_nothing_is_refused():
    with pytest.raises(ProfileError, match="requires grad"):
        profile(torch.exp, torch.ones(3), backward=True)
