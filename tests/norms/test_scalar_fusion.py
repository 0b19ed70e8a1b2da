"""Norm arithmetic on Python numbers gives what torch gives, bit for bit, and the derivatives that torch gives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.seeds import LONG, seeded
from thunder_norm import L1Tensor, LinfTensor, RMSTensor, RMSToRMSTensor, build_norm_map, sensitivities, with_perturbation
from thunder_norm.norms.maps import scalars
from thunder_norm.norms.scalar_fusion import as_function_of_floats, fuse_scalars
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder
from thunder.core import devices

FUNCTIONS = {
    "sum": lambda a, b: a + b * 3 - 1,
    "quotient": lambda a, b: (a / b, 1 / a, a / 3, torch.reciprocal(b)),
    "roots": lambda a, b: (a.sqrt(), (a * b + 1).sqrt()),
    "extremes": lambda a, b: (torch.maximum(a, b), torch.minimum(a, b), a.abs(), -b),
    "clamps": lambda a, b: (
        a.clamp(max=1.0),
        a.clamp(min=0.0),
        b.clamp(-1.0, 0.5),
        torch.clamp(b, 0.25, -3.0),
        a.clamp_min(2),
        b.clamp_max(0.5),
    ),
    "choice": lambda a, b: torch.where(a > b, a, b * 2) + torch.where(a == b, 1.0, b),
    "powers": lambda a, b: (a**2, b**3, a**-1, a**1, b**0.5, a**2.5, a**b),
    "functions": lambda a, b: (a.exp(), b.tanh(), torch.erf(a), torch.sigmoid(b), torch.log1p(a), torch.expm1(b)),
    "constants": lambda a, b: (torch.ones_like(a) * b, torch.full_like(b, 2.5) + a, torch.zeros((), dtype=torch.float64) - a),
}
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-310, 1e308, math.inf, -math.inf, math.nan]),
    st.floats(width=64, allow_subnormal=False),
)


@pytest.fixture(scope="module")
def traces() -> dict[str, Any]:
    """The execution trace of each function, on 0-dim float64 tensors."""
    found = {}
    for name, function in FUNCTIONS.items():
        jitted = thunder.jit(function)
        jitted(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64))
        found[name] = thunder.last_traces(jitted)[-1]
    return found


@pytest.fixture(scope="module")
def compiled(traces) -> dict[str, tuple[Callable, Callable]]:
    """Each function on Python numbers, and fused into one that takes and returns tensors."""
    return {name: (as_function_of_floats(t), fuse_scalars(t).python_callable()) for name, t in traces.items()}


def _flat(result) -> list[float]:
    values = result if isinstance(result, tuple) else (result,)
    return [v.item() if isinstance(v, torch.Tensor) else float(v) for v in values]


def _same_bits(a: float, b: float) -> bool:
    return a != a and b != b or a == b and math.copysign(1.0, a) == math.copysign(1.0, b)


def _within_ulps(number: int, a: float, b: float) -> bool:
    return _same_bits(a, b) or math.isfinite(a) and abs(a - b) <= number * math.ulp(b)


_ULPS = {"roots": 1, "functions": 4}  # torch's square root, and its functions in a vector, are not correctly rounded on every CPU


def _same(name: str) -> Callable[[float, float], bool]:
    return functools.partial(_within_ulps, _ULPS[name]) if name in _ULPS else _same_bits


@pytest.mark.parametrize("name", FUNCTIONS)
@given(a=VALUES, b=VALUES)
def test_numbers_give_what_torch_gives(compiled, name, a, b):
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    expected = _flat(FUNCTIONS[name](x, y))
    on_floats, fused = compiled[name]
    same = _same(name)
    for got in (_flat(on_floats(a, b)), _flat(fused(x, y))):
        assert all(map(same, got, expected)), (got, expected)


def test_a_program_with_a_tensor_in_it_is_left_to_tensors():
    jitted = thunder.jit(lambda a, v: a * v.sum())
    jitted(torch.tensor(0.5, dtype=torch.float64), torch.randn(3, dtype=torch.float64))
    assert as_function_of_floats(thunder.last_traces(jitted)[-1]) is None


# -- norm maps ---------------------------------------------------------------------------------------------------------


def _leaves(model: torch.nn.Module) -> dict:
    kinds = {name: RMSTensor if "bias" in name else RMSToRMSTensor for name, _ in model.named_parameters()}
    kinds |= {name: LinfTensor for name in kinds if name.startswith("2.")}
    return {
        name: with_perturbation(kind(1.0 + i / 10, norm_size_requires_grad=True)) for i, (name, kind) in enumerate(kinds.items())
    }


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(seeded(0))
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.GELU(),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 4),
        torch.nn.Softmax(-1),
        torch.nn.Linear(4, 4),
    )


def _all_derivatives(model: torch.nn.Module) -> list[float | None]:
    mapped, leaves, x = build_norm_map(model, torch.empty(3, 8)), _leaves(model), RMSTensor(2.0, norm_size_requires_grad=True)
    y = mapped(x, normed_state_dict=leaves)
    sizes = [x.norm_size, *(leaf.norm_size for leaf in leaves.values()), *(leaf.perturbation_size for leaf in leaves.values())]
    first = torch.autograd.grad(y.norm_size + y.perturbation_size, sizes, retain_graph=True, allow_unused=True)
    found = sensitivities(y, leaves)
    second = torch.autograd.grad(sum(found.values()), sizes, allow_unused=True)
    return [None if v is None else v.item() for v in (y.norm_size, y.perturbation_size, *first, *found.values(), *second)]


def test_numbers_and_tensors_give_the_same_norms_and_derivatives(model, monkeypatch):
    on_numbers = _all_derivatives(model)
    monkeypatch.setattr(scalars.Scalars, "of", staticmethod(lambda entry: None))
    for ours, expected in zip(on_numbers, _all_derivatives(model), strict=True):
        assert (ours is None) == (expected is None) and (ours is None or ours == pytest.approx(expected, rel=1e-13, abs=0))


def test_compiled_derivatives_are_those_of_the_graph(model):
    # one of the outputs of softmax is a constant: its other output must keep its derivative
    mapped, leaves = build_norm_map(model, torch.empty(3, 8)), _leaves(model)
    y = mapped(RMSTensor(2.0), normed_state_dict=leaves)
    moves = [leaf.perturbation_size for leaf in leaves.values()]
    compiled = torch.autograd.grad(y.perturbation_size, moves, retain_graph=True)
    graph = torch.autograd.grad(y.perturbation_size, moves, create_graph=True)
    torch.testing.assert_close(compiled, graph, rtol=1e-12, atol=0)
    assert all(g.item() > 0 for g in compiled)


def test_second_derivatives_refuse_sizes_changed_in_place(model):
    mapped, leaves = build_norm_map(model, torch.empty(3, 8)), _leaves(model)
    y = mapped(RMSTensor(2.0), normed_state_dict=leaves)
    size = leaves["0.weight"].norm_size
    with torch.no_grad():
        size.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.norm_size, size, create_graph=True)


def test_a_call_reads_sizes_anew_and_notices_other_kinds(model):
    mapped, leaves, x = build_norm_map(model, torch.empty(3, 8)), _leaves(model), RMSTensor(2.0)
    before = mapped(x, normed_state_dict=leaves)
    program = mapped.last_program
    with torch.no_grad():
        leaves["5.weight"].norm_size.mul_(2)
    after = mapped(x, normed_state_dict=leaves)
    assert after.norm_size > before.norm_size and mapped.last_program is program

    assert mapped(x, normed_state_dict={**leaves, "5.bias": LinfTensor(1.0)}).norm_size > 0
    assert mapped.last_program is not program
    program = mapped.last_program
    assert mapped(x, normed_state_dict={**leaves, "5.bias": 1.0}).norm_size > 0
    assert mapped.last_program is not program
    assert mapped(x, normed_state_dict=dict(reversed(leaves.items()))).norm_size == after.norm_size
    assert mapped(L1Tensor(2.0), normed_state_dict=leaves).norm_size > 0


# -- random programs ------------------------------------------------------------------------------------------------------

# without the square root, which torch does not round correctly on every CPU
UNARY = [torch.neg, torch.abs, torch.reciprocal, torch.exp, torch.tanh, torch.erf]
BINARY = [torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum]
COMPARISONS = [torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne]


@st.composite
def programs(draw: Any) -> Callable:
    """A straight-line program of two scalars: each step uses any values before it."""
    steps = []
    for count in range(2, 2 + draw(st.integers(2, 8))):
        value = st.integers(0, count - 1)
        kind = draw(st.sampled_from(["unary", "binary", "number", "where"]))
        if kind == "unary":
            steps.append((draw(st.sampled_from(UNARY)), draw(value)))
        elif kind == "binary":
            steps.append((draw(st.sampled_from(BINARY)), draw(value), draw(value)))
        elif kind == "number":
            steps.append((draw(st.sampled_from(BINARY[:4])), draw(value), draw(st.sampled_from([0.0, 1.0, -2.5, 1e300]))))
        else:
            steps.append((draw(st.sampled_from(COMPARISONS)), draw(value), draw(value), draw(value), draw(value)))

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values = [a, b]
        for op, *operands in steps:
            taken = [values[i] if type(i) is int else i for i in operands]
            values.append(torch.where(op(*taken[:2]), *taken[2:]) if len(taken) == 4 else op(*taken))
        return values[-1] * 1.0, a - b

    return program


# Compiling is slow, so failing programs are not shrunk.
@pytest.mark.slow
@settings(max_examples=48 if LONG else 6, phases=[Phase.generate])
@given(program=programs(), values=st.lists(st.tuples(VALUES, VALUES), min_size=10, max_size=10))
def test_random_programs_give_what_torch_gives(program, values):
    jitted = thunder.jit(program, transforms=[SubclassTransform()])  # which is soon acquired
    jitted(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64))
    trace = thunder.last_traces(jitted)[-1]
    fused, on_floats = fuse_scalars(trace).python_callable(), as_function_of_floats(trace)
    for a, b in values:
        x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        expected = _flat(program(x, y))
        for got in (_flat(fused(x, y)), _flat(on_floats(a, b))):
            assert all(map(_same_bits, got, expected)), (a, b, got, expected)


@pytest.mark.slow
@settings(max_examples=32 if LONG else 4, phases=[Phase.generate])
@given(program=programs(), points=st.lists(st.tuples(st.floats(0.3, 2.0), st.floats(0.3, 2.0)), min_size=3, max_size=3))
def test_derivatives_of_random_programs(program, points):
    """Sums in another order differ in their last bits, nothing else."""

    def as_norms(x: RMSTensor, y: RMSTensor) -> RMSTensor:
        return program(x.norm_size, y.norm_size)

    jitted = thunder.jit(as_norms, transforms=[NormTransform()])
    for a, b in points:
        x, y = (RMSTensor(v, backing=torch.ones(2), norm_size_requires_grad=True) for v in (a, b))
        sizes = [x.norm_size, y.norm_size]
        got = torch.autograd.grad(sum(jitted(x, y)), sizes, allow_unused=True, materialize_grads=True)
        want = torch.autograd.grad(sum(program(*sizes)), sizes, allow_unused=True, materialize_grads=True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12, equal_nan=True)


# -- on a GPU: the numbers are the same, and come and go together -----------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scalars_of_a_gpu_are_the_same_numbers(name):
    """As a trace alone: nothing of it is run there."""
    jitted = thunder.jit(FUNCTIONS[name])
    a, b = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)
    jitted(a, b)
    trace = thunder.last_traces(jitted)[-1]
    for bsym in trace.bound_symbols:
        for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs):
            p._device = devices.to_device("cuda:0")
    assert fuse_scalars(trace) is trace  # it would wait for the GPU
    assert all(map(_same(name), _flat(as_function_of_floats(trace)(0.5, 0.25)), _flat(FUNCTIONS[name](a, b))))


def test_what_goes_to_another_device_goes_together():
    numbers, vector = [torch.tensor(float(i)) for i in range(4)], torch.ones(3)
    meta, cpu = torch.device("meta"), torch.device("cpu")
    first, second, stays, none, moved = scalars._moved([*numbers[:3], None, vector], [meta, meta, cpu, meta, meta])
    assert first._base is second._base is not None and first.is_meta and second.is_meta
    assert stays is numbers[2] and none is None and moved.is_meta and moved.shape == (3,)


def test_a_map_whose_scalars_are_moved_is_the_same_map(monkeypatch):
    """There is no second device here, and so nothing that moves; outputs and gradients take that way."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 3))

    def found() -> list[torch.Tensor]:
        norm_map = build_norm_map(model, torch.randn(2, 3))
        size = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        y = norm_map(RMSTensor(size)).norm_size
        return [y, *torch.autograd.grad(y, [size, model[0].weight])]

    expected = found()
    monkeypatch.setattr(scalars, "_devices", lambda trace: [torch.device("cpu")] * len(trace.bound_symbols[-1].args[0]["output"]))
    torch.testing.assert_close(found(), expected, rtol=0, atol=0)
