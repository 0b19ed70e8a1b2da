"""Regions of the executor `inductor`: what goes into them, which compiled code a call uses, and what a call leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests import ROOT
from tests.seeds import seeded
from thunder_norm import executors, transforms
from thunder_norm.errors import CompilerError, DataDependentError
from thunder_norm.executors import calls, graphs
from thunder_norm.executors.plans import Layout
from thunder_norm.transforms import NormTransform
import thunder


@pytest.fixture(autouse=True)
def _one_compiler() -> Iterator[None]:
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The compilations of a test, by the strides of their inputs."""
    found: list[Any] = []
    original = calls.compiled

    def compiled(function: Any, inputs: Any, *rest: Any) -> Any:
        found.append([t.stride() for t in inputs])
        return original(function, inputs, *rest)

    monkeypatch.setattr(calls, "compiled", compiled)
    return found


class OneByOne(TorchDispatchMode):
    """Under a mode that listens nothing is compiled, so that programs can be looked at in little time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def jit(f: Any) -> Any:
    return thunder.jit(f, transforms=[NormTransform()], executors=[executors.inductor])


def program(f: Any, *inputs: torch.Tensor) -> list[str]:
    """The names of the operations that run, without what only names and forgets."""
    jitted = jit(f)
    with OneByOne():
        assert_close(jitted(*(t.clone() for t in inputs)), f(*(t.clone() for t in inputs)))
    found = [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]
    return [name for name in found if name not in ("unpack_trivial", "python_del", "python_return")]


# -- what is in a region -----------------------------------------------------------------------------------------------


def test_two_operations_are_a_region_and_one_is_not():
    x = torch.randn(3, 3)
    assert program(lambda x: x.sin().cos(), x) == ["inductor0"]
    assert program(lambda x: x.sin(), x) == ["sin"]
    assert "inductor0" not in program(lambda x: x.t()[1:].unsqueeze(0), x)


def test_views_stay_outside_and_share_memory():
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin() * 2
        return x.t(), y, y.t(), y[1:]

    x = torch.randn(3, 3)
    assert program(f, x)[0] == "inductor0"
    a, b, c, d = jit(f)(x)
    expected = f(x)
    assert a.data_ptr() == x.data_ptr() and c.data_ptr() == b.data_ptr() and d.data_ptr() == b[1:].data_ptr()
    b.add_(1)  # seen in what shares memory with it, as in eager
    expected[1].add_(1)
    assert_close((a, b, c, d), expected)


def test_what_a_value_or_a_write_decides_stays_outside():
    def f(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = (x.sin() + 1).cos()
        s.add_(y.sum())
        return (y * s).exp() + 1

    x, s = torch.randn(3), torch.zeros(())
    found = program(f, x, s)
    assert [name for name in found if name != "update_aliases"] == ["inductor0", "copy_", "inductor1"]
    jitted, other = jit(f), torch.zeros(())
    for _ in range(2):
        assert_close(jitted(x, s), f(x, other))
        assert_close(s, other)


def test_a_value_is_read_before_it_is_overwritten():
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.t().reshape(-1)  # a copy
        y = x.sin().cos()
        x.copy_(y)
        return before.exp().log(), (x * 2).tanh()

    mine, theirs = torch.rand(3, 3), torch.rand(3, 3)
    theirs.copy_(mine)
    jitted = jit(f)
    for _ in range(2):
        assert_close(jitted(mine), f(theirs))
        assert_close(mine, theirs)


def test_complex_numbers_stay_outside():
    x = torch.randn(3, dtype=torch.complex64)
    assert "inductor0" not in program(lambda x: (x * x + x).abs(), x)[:-1]


def test_the_last_trace_shows_a_region_with_what_is_in_it():
    jitted = jit(lambda x, y: (x.sin() * y).exp())
    with OneByOne():
        jitted(torch.randn(2), torch.randn(2))
    lines = [line.strip() for line in str(thunder.last_traces(jitted)[-1]).splitlines()]
    (at,) = [i for i, line in enumerate(lines) if line.startswith("[")]
    assert lines[at].partition(" = ")[2] == "inductor0(x, y)"
    assert lines[at + 1].startswith("# t") and "torch.sin(x)" in lines[at + 1]


# -- calls -------------------------------------------------------------------------------------------------------------


def test_other_strides_are_compiled_once_and_alternate(compilations: list[Any]):
    jitted = jit(lambda x: (x.sin() + 1).sum(0))
    x = torch.randn(4, 4)
    for t in (x, x.t(), x, x.t(), x.clone(), torch.randn(5, 4)[1:], torch.randn(4, 8)[:, ::2]):
        assert_close(jitted(t), (t.sin() + 1).sum(0))
    assert compilations == [[(4, 1)], [(1, 4)], [(8, 2)]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_numbers_that_an_operation_makes_do_not_keep_it_from_being_compiled(reduction: str, weighted: bool, monkeypatch: Any):
    made = []
    original = calls.compiled
    monkeypatch.setattr(calls, "compiled", lambda *args: made.append(original(*args)) or made[-1])
    weight = torch.rand(5) if weighted else None

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # its gradient in Thunder is written with torch.tensor(0.0)
        return torch.nn.functional.cross_entropy(x, y, weight=weight, reduction=reduction).sum()

    x, y = torch.randn(3, 4, 5), torch.tensor([[0, 1, 4, 4], [2, -100, 3, 0], [1, 1, 1, 2]])
    with torch.no_grad():
        jitted = jit(transforms.vmap(transforms.grad(loss)))
        for _ in range(2):
            assert_close(jitted(x, y), torch.func.vmap(torch.func.grad(loss))(x, y))
    assert made and all(made)


def test_one_tensor_in_two_places_is_found_again(compilations: list[Any]):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).sin())

    model, x = Tied(), torch.randn(2, 3)
    jitted = jit(model)
    with torch.no_grad():
        for _ in range(3):
            assert_close(jitted(x), model(x))
        model.b.weight = torch.nn.Parameter(torch.randn(3, 3))  # no longer the same one
        for _ in range(2):
            assert_close(jitted(x), model(x))
    assert len(compilations) == 1


def test_with_and_without_gradients_of_an_input(compilations: list[Any]):
    jitted = jit(lambda x, y: ((x.sin() + 1) * y).sum())
    x, y = torch.randn(4), torch.randn(4, requires_grad=True)
    found, expected = jitted(x, y), ((x.sin() + 1) * y).sum()
    (g,) = torch.autograd.grad(found, y)
    assert_close((found, g), (expected, torch.autograd.grad(expected, y)[0]))
    count = len(compilations)
    for _ in range(3):
        torch.autograd.grad(jitted(x, y), y)
    assert len(compilations) == count


def test_results_have_eagers_strides():
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.permute(2, 0, 1).sin() + 1
        return y, y.transpose(0, 1) * 2, (y + x.permute(2, 0, 1)).contiguous()

    x = torch.randn(2, 3, 4)
    for found, expected in zip(jit(f)(x), f(x), strict=True):
        assert found.stride() == expected.stride()
        assert_close(found, expected)


def test_inductors_cache_is_used_and_tells_graphs_apart_by_which_results_keep_strides():
    """A convolution has its channels last where nobody asks for strides; the code for both is the same but for that."""

    def f(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.conv2d(x.relu(), weight)]

    inputs = torch.randn(2, 16, 9, 9), torch.randn(32, 16, 3, 3)
    hits = lambda: torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]  # noqa: E731
    for layout in (Layout.ANY, Layout.AS_IN_TORCH) * 2:
        before = hits()
        (found,) = graphs.compiled(f, inputs, [layout], False)(list(inputs))
        assert_close(found, f(*inputs)[0], check_stride=layout is Layout.AS_IN_TORCH)
    assert hits() == before + 1


def test_regions_let_go_of_what_nobody_needs_after_them(monkeypatch: pytest.MonkeyPatch):
    """What the backward gets of its forward, and the gradients of results: inductor's functions take them from a list."""
    alive: list[int] = []

    def compiled(function: Any, inputs: Any, *rest: Any) -> Any:
        def run(given: list[torch.Tensor]) -> Any:
            results = function(*given)
            seen = [weakref.ref(t) for t in given if t.numel() == 12]
            given.clear()
            alive.append(sum(ref() is not None for ref in seen))
            return results

        return run

    monkeypatch.setattr(calls, "compiled", compiled)
    weight = torch.randn(4, 4, requires_grad=True)
    jitted = jit(lambda x, w: ((torch.rand(3, 4) + (x @ w).tanh()) @ w).sin().exp())
    x = torch.randn(3, 4)
    for _ in range(2):
        result = jitted(x, weight)
        result.backward(torch.ones(3, 4))
        assert alive == [1, 2]  # x; x and the result, whose exp is its own derivative
        alive.clear()
        del result


def test_modes_that_listen_see_every_operation():
    jitted = jit(lambda x: (x @ x).sin() @ x)
    x = torch.randn(4, 4)
    jitted(x)
    with FlopCounterMode(display=False) as counted:
        jitted(x)
    assert counted.get_total_flops() == 2 * 2 * 4**3


def test_a_region_called_with_gradients_recorded_has_them():
    jitted = jit(lambda x: (x.sin() * x).exp())
    x = torch.randn(3)
    jitted(x)
    (region,) = [b for b in thunder.last_traces(jitted)[-1].bound_symbols if b.sym.is_fusion]
    leaf = x.clone().requires_grad_()
    (y,) = region._call_ctx["inductor0"](leaf)
    assert_close(torch.autograd.grad(y.sum(), leaf), torch.autograd.grad((leaf.sin() * leaf).exp().sum(), leaf))


def test_another_fusing_executors_pass_may_make_regions_anew():
    from thunder.executors.passes import update_fusion_call_ctx

    jitted = jit(lambda x: (x.sin() * x).exp())
    x = torch.randn(3)
    with OneByOne():
        expected = jitted(x)
        renewed = update_fusion_call_ctx(thunder.last_traces(jitted)[-1])
        assert_close(renewed.python_callable()(x)[0], expected)


def test_numbers_are_drawn_as_without_it():
    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.rand_like(x) + x.sin()).exp() * torch.bernoulli(x.sigmoid())

    jitted, plain, x = jit(f), thunder.jit(f, transforms=[NormTransform()]), torch.randn(8)
    results = []
    for call in (jitted, plain):
        torch.manual_seed(seeded(5))
        results.append((call(x), torch.get_rng_state()))
    assert_close(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# -- errors, and what is not touched ---------------------------------------------------------------------------------------


def test_without_a_compiler_the_error_says_so():
    jitted = jit(lambda x: (x.sin() * 3.25).tanh())
    patched = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(patched),
        pytest.raises(CompilerError, match=r"(?s)cannot be compiled.*no C\+\+ compiler.*instead"),
    ):
        jitted(torch.randn(3, 7))


_SCRIPT = """
import thunder_norm
import sys
import thunder
from thunder.extend import _executor_map
assert "thunder_norm_inductor" not in _executor_map and "torch._inductor.compile_fx" not in sys.modules
from thunder_norm import executors, transforms
assert "thunder_norm_inductor" not in _executor_map
assert executors.inductor is _executor_map["thunder_norm_inductor"]
import torch
from torch._inductor import config, cpu_vec_isa
config.compile_threads, config.cpp_cache_precompile_headers = 1, False
cpu_vec_isa.valid_vec_isa_list = list  # which of the processor's the compiler knows is found by compiling for each
f = lambda x: torch.nn.functional.max_pool1d(x.sin(), 2).cos()
jf = thunder.jit(f, executors=[executors.inductor])  # without a transform of ours as well
assert "torch._inductor.compile_fx" not in sys.modules
x = torch.randn(1, 2, 4)
assert torch.allclose(jf(x), f(x))
assert "torch._inductor.compile_fx" in sys.modules
try:
    executors.other
except AttributeError:
    print("done")
"""


@pytest.mark.usefixtures("without_imports")
def test_it_is_registered_when_it_is_named_and_imports_inductor_when_it_compiles(tmp_path: Path):
    """In a cache of its own: what was compiled in a run before needs no compiler.  One kernel, of scalar instructions, is soon compiled."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr


def test_what_multiplies_by_one_is_no_input_and_no_other_result():
    """Inductor takes it away, and the program or its caller may write into what is left."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x * 1, x.sin()
        a.clamp_(max=0.4)
        return a, b * 1, b + 0

    torch.manual_seed(seeded(0))
    x = torch.randn(4, 4)
    kept = x.clone()
    results = jit(f)(x)
    assert_close(results, f(kept.clone()))
    assert torch.equal(x, kept)
    assert len({t.data_ptr() for t in (x, *results)}) == 4


def test_values_of_tensors_are_not_guessed_with_the_executor_alone():
    def branches(x, y):
        return x * 2 if y.item() > 2 else x * 3

    def is_parameter(x, y):
        return x * 2 if isinstance(y, torch.nn.Parameter) else x * 3

    x, five = torch.ones(2), torch.tensor(5.0)
    with pytest.raises(DataDependentError, match=r"y\.item\(\) > 2"):
        thunder.jit(branches, executors=[executors.inductor])(x, five)
    jitted = thunder.jit(is_parameter, executors=[executors.inductor])
    for y in (five, torch.nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)):
        assert_close(jitted(x, y), is_parameter(x, y))


def test_operations_whose_sizes_are_values_stand_outside_of_regions() -> None:
    """Of tensors without data they give their sizes alone: compiled they would be what lies in memory."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x[x > 0].sum() * 2).sin() + torch.masked_select(x, x < 0).exp().sum()

    torch.manual_seed(seeded(0))
    x = torch.randn(4, 4, dtype=torch.float64)
    assert {"aten_index_Tensor_float64", "aten_masked_select_default_float64"} <= set(program(f, x))
    assert_close(jit(f)(x), f(x))


def test_what_nothing_has_written_is_not_compiled() -> None:
    def read(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (t.new_empty(3) + t,)

    def filled(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.empty_like(t).copy_(t) * 2, t.new_empty(3))

    like = [((3,), torch.float32, torch.device("cpu"))]
    assert not graphs.is_compilable(read, like)
    assert not graphs.is_compilable(filled, like)  # nobody has written the second result
    assert graphs.is_compilable(lambda t: filled(t)[:1], like)
