"""What a backward computes again of the forward: what is kept, that gradients are as without it, and what is left alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tests.seeds import seeded
from thunder_norm import executors
from thunder_norm.executors import recomputed
from thunder_norm.transforms import CheckpointTransform, NormTransform
import thunder


@pytest.fixture(autouse=True)
def _quick_kernels() -> Iterator[None]:
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        yield


def _jit(f: Any) -> Any:
    return thunder.jit(f, transforms=[NormTransform()], executors=[executors.inductor])


def _saved(jitted: Any) -> list[Any]:
    """What the forward keeps for the backward, but for the program's inputs."""
    trace = thunder.last_traces(jitted)[-1]
    given = {p.name for p in trace.args}
    return [p for p in trace.bound_symbols[-1].args[1][0] if p.name not in given]


def _bytes(jitted: Any) -> int:
    return sum(math.prod(p.shape) * p.dtype.bytes for p in _saved(jitted))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(_gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gelu_that_is_written_out_keeps_its_argument_alone(dtype: torch.dtype):
    torch.manual_seed(seeded(0))
    model, x = nn.Sequential(_Block(), _Block()).to(dtype), torch.randn(5, 8, dtype=dtype)
    jitted = _jit(model)
    jitted(x).square().sum().backward()
    found = [p.grad for p in model.parameters()]
    widths = [p.shape[-1] for p in _saved(jitted)]
    assert widths.count(32) == 2  # one for each block: the argument
    model.zero_grad()
    precise = nn.Sequential(_Block(), _Block()).double()
    precise.load_state_dict(model.state_dict())
    precise(x.double()).square().sum().backward()
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 0.1}[dtype]
    for gradient, p in zip(found, precise.parameters(), strict=True):
        assert_close(gradient.double(), p.grad, rtol=tolerance, atol=tolerance * p.grad.abs().max().item())


def _kept_bytes(call: Callable, model: nn.Module, x: torch.Tensor) -> int:
    """What torch's autograd is given to keep, but for parameters."""
    known = {p.untyped_storage()._cdata for p in (*model.parameters(), x)}
    found: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in known:
            found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        kept_until_here = call(x)
    del kept_until_here
    return sum(found.values())


@pytest.mark.slow
def test_no_more_is_kept_than_with_torch_compile():
    torch.manual_seed(seeded(0))
    model, x = nn.Sequential(*(_Block() for _ in range(3))), torch.randn(16, 8)
    calls = _jit(model), torch.compile(model)
    for call in calls:
        call(x).sum().backward()
    ours, torchs = (_kept_bytes(call, model, x) for call in calls)
    assert 0 < ours <= torchs


# -- drawn programs ----------------------------------------------------------------------------------------------------

_UNARY = [
    torch.tanh,
    torch.exp,
    lambda a: a * 0.5,
    lambda a: a + 1,
    lambda a: a * a,
    torch.sigmoid,
    F.relu,
    lambda a: a.reshape(6, 4).reshape(4, 6),
]
_BINARY = [torch.mul, torch.add, lambda a, b: a - 0.3 * b, lambda a, b: torch.where(a > b, a, 0.1 * b)]
_OTHERS = [
    lambda a, w: a @ w,
    lambda a, w: a - a.mean(-1, keepdim=True),
    lambda a, w: torch.softmax(a, -1),
    lambda a, w: a.sum(0) + w[:1],
]


def _drawn(seed: int) -> Callable:
    """A program of two matrices, of entrywise operations, views, products and reductions."""
    draw = random.Random(seeded(seed))
    steps = [(draw.choice("uubbbo"), draw.random(), draw.random(), draw.random()) for _ in range(14)]

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [x, x[:, :1] * 0.1 + w[:4]]
        for kind, which, first, second in steps:
            a, b = (found[int(part * len(found))] for part in (first, second))
            if kind == "u":
                new = _UNARY[int(which * len(_UNARY))](a)
            elif kind == "b":
                new = _BINARY[int(which * len(_BINARY))](a, b)
            else:
                new = _OTHERS[int(which * len(_OTHERS))](a, w)
            found.append(new / (1 + new.square().mean()))
        return found[-1], found[len(found) // 2]

    return f


def _gradients(f: Callable, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    results = f(*leaves)
    loss = sum((i + 1) * (r * torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view_as(r)).sum() for i, r in enumerate(results))
    return [*(r.detach() for r in results), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def test_drawn_programs_have_eagers_gradients_and_keep_less(monkeypatch: pytest.MonkeyPatch):
    """None keeps more, and all together less: there are programs that compute again nothing that takes less room."""
    kept, without = [], []
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    for f in map(_drawn, range(6)):
        jitted = _jit(f)
        for found, wanted in zip(_gradients(jitted, x, w), _gradients(f, x, w), strict=True):
            assert_close(found, wanted, rtol=1e-8, atol=1e-10)
        kept.append(_bytes(jitted))
        with monkeypatch.context() as patched:
            patched.setattr(recomputed, "recomputing", lambda bsyms, trace: list(bsyms))
            keeping = _jit(f)
            _gradients(keeping, x, w)
        without.append(_bytes(keeping))
    assert all(a <= b for a, b in zip(kept, without, strict=True)) and sum(kept) < sum(without)


# -- the cut -----------------------------------------------------------------------------------------------------------


class _Given:
    """A forward as the search for a cut sees one: sizes, and what can be computed of what."""

    def __init__(self, sizes: dict[str, int], recomputable: dict[str, tuple[str, ...]], asked: list[str]):
        self.proxies, self.recomputable, self.asked = sizes, recomputable, asked

    def size(self, name: str) -> float:
        return self.proxies[name]


def _computes(kept: set[str], given: _Given) -> bool:
    """Whether all that is asked for can be computed of what is kept."""
    waiting = [name for name in given.asked if name not in kept]
    while waiting:
        name = waiting.pop()
        if name not in given.recomputable:
            return False
        waiting += [source for source in given.recomputable[name] if source not in kept]
    return True


@pytest.mark.parametrize("seed", range(60))
def test_what_is_kept_is_the_least_of_all_that_will_do(seed: int):
    draw = random.Random(seeded(seed))
    names = [f"t{i}" for i in range(draw.randint(2, 8))]
    sizes, recomputable = {}, {}
    for i, name in enumerate(names):
        sizes[name] = draw.choice([1, 2, 3, 4, 8, math.inf])
        if i and draw.random() < 0.8:
            recomputable[name] = tuple(draw.sample(names[:i], min(i, draw.randint(0 if draw.random() < 0.1 else 1, 3))))
    asked = draw.sample(names, draw.randint(1, len(names)))
    sizes.update((name, draw.choice([1, 2, 3, 5])) for name in asked)
    given = _Given(sizes, recomputable, asked)
    kept = recomputed._kept(given)  # type: ignore[arg-type]
    subsets = (set(subset) for n in range(len(names) + 1) for subset in itertools.combinations(names, n))
    assert _computes(kept, given)
    assert sum(sizes[n] for n in kept) == min(sum(sizes[n] for n in subset) for subset in subsets if _computes(subset, given))


# -- what is left alone ------------------------------------------------------------------------------------------------


def test_no_input_is_kept_that_the_backward_did_not_ask_for():
    """So that an input may be written into before the backward where eager lets one write into it."""
    torch.manual_seed(seeded(0))

    def f(w: torch.Tensor) -> torch.Tensor:
        return torch.exp(w * 2)  # whose derivative is of the result

    found = []
    for call in (f, _jit(f)):
        w = torch.linspace(-1, 1, 8, requires_grad=True)
        loss = call(w * 1).tanh().sum()
        leaf = torch.linspace(-1, 1, 8)
        given = leaf.clone().requires_grad_()
        y = call(given)
        with torch.no_grad():
            given.add_(100.0)
        (gradient,) = torch.autograd.grad(y.sum(), given)
        found.append((loss.detach(), gradient))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)


def test_a_result_is_not_kept_in_place_of_what_was_kept():
    """Eager lets one write into a result whose value its backward does not need."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sum(0) + 1
        return y, torch.exp(y * 0.5)

    found = []
    for call in (f, _jit(f)):
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        y, z = call(x)
        with torch.no_grad():
            y.zero_()
        found.append(torch.autograd.grad(z.sum(), x)[0])
    assert_close(*found)


def test_what_is_overwritten_is_not_computed_again():
    def f(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(torch.sigmoid(state * 1.5)) * x
        state.mul_(0.5)
        return (y * torch.sigmoid(state)).sin()

    found = []
    for call in (f, _jit(f)):
        torch.manual_seed(seeded(0))
        x, state = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
        y = call(x, state)
        found += [(*torch.autograd.grad(y.square().sum(), x), state)]
    for a, b in zip(*found, strict=True):
        assert_close(a, b)


def test_a_sum_through_all_layers_is_kept_at_each():
    """Computed again from the first layer on, the last would be needed before all others."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + torch.sin(x) @ w
        return x

    torch.manual_seed(seeded(0))
    x, w = (torch.randn(6, 6, requires_grad=True) for _ in range(2))
    jitted = _jit(f)
    jitted(x, w).sum().backward()
    assert len(_saved(jitted)) == 2  # the sums after the first and the second layer; their sines come of them


def test_regions_of_checkpoints_are_computed_again_as_before():
    torch.manual_seed(seeded(0))
    model, x = nn.Sequential(_Block(), _Block()), torch.randn(5, 8)
    checkpointed = thunder.jit(model, transforms=[CheckpointTransform(["0"])], executors=[executors.inductor])
    checkpointed(x).square().sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for gradient, p in zip(found, model.parameters(), strict=True):
        assert_close(gradient, p.grad, rtol=1e-4, atol=1e-5)
