"""What a process finds of another's regions on disk: the same region is not traced again, and no other is taken for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.seeds import seeded
from thunder_norm import executors
from thunder_norm.executors import graphs, stored
from thunder_norm.transforms import NormTransform
import thunder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder for inductor's cache, one compiler, and kernels of scalar instructions, which compile in half the time."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each region that is traced."""
    found: list[int] = []
    original = graphs._traced
    monkeypatch.setattr(graphs, "_traced", lambda *args: found.append(1) or original(*args))
    return found


def _jit(f: Any) -> Any:
    return thunder.jit(f, transforms=[NormTransform()], executors=[executors.inductor])


def test_a_model_that_was_compiled_before_is_not_traced_again(traced: list[int]):
    torch.manual_seed(seeded(0))
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    expected = model(x)
    gradients = torch.autograd.grad(expected.square().mean(), list(model.parameters()))
    counts = []
    for _ in range(2):
        own = copy.deepcopy(model)
        found = _jit(own)(x)
        assert_close(found, expected)
        found.square().mean().backward()
        assert_close([p.grad for p in own.parameters()], list(gradients))
        counts.append(len(traced))
    assert counts == [2, 2]


_ALIKE: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda a, b: (a * 2).sin(),
    lambda a, b: (a * 3).sin(),
    lambda a, b: (a * 2.0).cos(),
    lambda a, b: (a * 2).sin() - b,
    lambda a, b: (a * 2).sin() + b,
    lambda a, b: (a.sin().sum(0), a.cos()),
    lambda a, b: (a.cos(), a.sin().sum(0)),
    lambda a, b: a.sin().sum(1).cos(),
    lambda a, b: a.sin().to(torch.float64) * 2,
]


def test_regions_that_are_alike_are_not_mistaken_for_each_other(traced: list[int]):
    torch.manual_seed(seeded(0))
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    jitted = []
    for _ in range(2):
        jitted = [_jit(f) for f in _ALIKE]
        for f, g in zip(_ALIKE, jitted, strict=True):
            assert_close(g(a, b), f(a, b))
    assert len(traced) == len(_ALIKE)
    for f, g in zip(_ALIKE, jitted, strict=True):  # other strides are another region
        assert_close(g(a.t(), b), f(a.t(), b))
    assert len(traced) == 2 * len(_ALIKE)


def test_names_of_tensors_are_no_names_of_operations(traced: list[int]):
    def f(sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        return (sin.sin() * cos).exp()

    def g(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (cos.cos() * sin).exp()

    def h(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() * y).exp()

    torch.manual_seed(seeded(0))
    a, b = torch.randn(3), torch.randn(3)
    for program in (f, g, h):
        assert_close(_jit(program)(a, b), program(a, b))
    assert len(traced) == 2  # f is h


@pytest.mark.parametrize("what", ["not JSON", '{"graph": "none", "plan": {"views": [], "is_direct": true}}', "[]", '{"plan": 3}'])
def test_what_cannot_be_used_is_compiled_again(what: str, tmp_path: Path, traced: list[int]):
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    torch.manual_seed(seeded(0))
    x = torch.randn(3)
    _jit(f)(x)
    (path,) = (tmp_path / "thunder_norm").iterdir()
    path.write_text(what)
    assert_close(_jit(f)(x), f(x))
    assert_close(_jit(f)(x), f(x))
    assert len(traced) == 2  # and kept again


def test_the_state_of_the_process_that_decides_is_part_of_the_question():
    fakes = [torch.empty(2)]
    before = stored.key_of("region", fakes, "how")
    assert before == stored.key_of("region", fakes, "how")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert stored.key_of("region", fakes, "how") != before
    with torch.backends.mkldnn.flags(enabled=False):
        assert stored.key_of("region", fakes, "how") != before
    with torch._inductor.config.patch({"epilogue_fusion": not torch._inductor.config.epilogue_fusion}):
        assert stored.key_of("region", fakes, "how") != before
    assert (
        len(
            {
                before,
                *(
                    stored.key_of(r, f, h)
                    for r, f, h in (("a", fakes, "how"), ("region", [torch.empty(3)], "how"), ("region", fakes, "b"))
                ),
            }
        )
        == 4
    )
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert stored.key_of("region", fakes, "how") is None


def test_an_operation_of_the_users_is_told_by_no_text():
    def mine(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(stored._Untold):
        stored._name_of(mine)
    assert stored._name_of(torch.sin) != stored._name_of(torch.cos)
