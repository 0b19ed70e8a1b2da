"""Programs with the executor `inductor` give what eager gives, in regions of forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm import RMSTensor, executors
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    ProfileTransform,
    SubclassTransform,
    grad,
    hessian,
    profile,
    vmap,
)
import thunder

INDUCTOR = {"executors": [executors.inductor]}


@pytest.fixture(autouse=True, scope="module")
def _one_compiler() -> Iterator[None]:
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture
def without_vectors() -> Iterator[None]:
    """Kernels of scalar instructions compile in half the time."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield


def regions(trace: Any) -> list[Any]:
    """The regions of a program, in order."""
    return [b for b in trace.bound_symbols if b.sym.executor is executors.inductor]


def last_regions(jitted: Any) -> list[Any]:
    return regions(thunder.last_traces(jitted)[-1])


def names(bsyms: Any) -> list[str]:
    return [b.sym.name for b in bsyms]


# -- models ------------------------------------------------------------------------------------------------------------


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)), torch.randn(5, 8)


def _gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
    return model, torch.randint(0, 32, (2, 8))


class _ResNet(nn.Module):
    """A stem and a residual block with batch norm, whose running statistics change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms, self.head = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.stem(x)).relu(), 2)
        y = self.norms[1](self.b(self.norms[0](self.a(x)).relu()))
        return self.head((x + y).relu().mean((2, 3)))


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    return _ResNet(), torch.randn(2, 3, 16, 16)


def _loss(y: Any) -> torch.Tensor:
    return (y.logits if hasattr(y, "logits") else y).square().mean()


@pytest.mark.parametrize("make", [_mlp, _gpt2, _resnet])
def test_models_have_eagers_results_and_gradients(make: Callable):
    torch.manual_seed(seeded(1))
    model, x = make()
    jitted = thunder.jit(model, transforms=[NormTransform()], **INDUCTOR)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    found = _loss(jitted(x))
    found.backward()
    gradients, buffers = [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()]
    assert len(last_regions(jitted)) == 1  # the forward is one
    assert len(regions(thunder.last_backward_traces(jitted)[-1])) == 1
    model.zero_grad()
    model.load_state_dict(state)
    expected = _loss(model(x))
    expected.backward()
    assert_close(found, expected)
    assert_close(gradients, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-5)
    assert_close(buffers, list(model.buffers()))


# -- drawn programs ----------------------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)

# From two matrices of four rows and as many columns, of small integers in any dtype, to another: without rounding.
_EXACT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a.to(torch.float32) - b.to(torch.float32),
    "multiply": lambda a, b: a * b,
    "by a number": lambda a, b: a * 2,
    "where": lambda a, b: torch.where(a > b, a, b),
    "transposed": lambda a, b: a.t(),
    "rows backwards": lambda a, b: a.flip(0),
    "reshaped": lambda a, b: a.t().reshape(2, 8).reshape(4, 4),
    "some": lambda a, b: torch.cat([a[1:], b[:1]]),
    "expanded": lambda a, b: a[:, :1].expand(4, 4) + b,
    "sum": lambda a, b: a.sum(0, keepdim=True) + b,
    "largest": lambda a, b: torch.maximum(a.to(torch.float64), b.to(torch.float64)) - a.to(torch.float64).amax(1, keepdim=True),
    "product": lambda a, b: a.to(torch.float32) @ b.to(torch.float32),
    "running sum": lambda a, b: a.to(torch.float64).cumsum(0),
    "to float32": lambda a, b: a.to(torch.float32),
    "to bfloat16": lambda a, b: a.to(torch.bfloat16),
    "to integers": lambda a, b: a.to(torch.int64),
    "comparison": lambda a, b: a > b,
    "stacked": lambda a, b: torch.stack([a, a])[1],
    "split": lambda a, b: torch.cat(a.split(2)[::-1]),
    "contiguous": lambda a, b: a.t().contiguous(),
}
# What rounds comes last, so that nothing jumps because of it.
_ROUNDED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda a: a.to(torch.float32).softmax(-1),
    lambda a: a.to(torch.float64).mean(1).sin(),
    lambda a: a.to(torch.bfloat16).tanh() * 0.5 + 1,
    lambda a: a.to(torch.float32).square().sum().add(1).rsqrt(),
]


def _drawn(seed: int, steps: int) -> Callable:
    """A program of drawn operations; what it returns includes views of arguments, and arguments."""
    draw = random.Random(seeded(seed))
    chosen = [(draw.choice(list(_EXACT)), draw.random(), draw.random()) for _ in range(steps)]

    def program(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for name, i, j in chosen:
            found = _EXACT[name](values[int(i * len(values))], values[int(j * len(values))])
            values.append(found if found.dtype is torch.bool else found.clamp(-8, 8))
        rounded = [f(values[-1 - k]) for k, f in enumerate(_ROUNDED)]
        return (*rounded, *values[::3], values[-1], inputs[0].t(), inputs[0])

    return program


def _drawn_inputs(seed: int) -> list[torch.Tensor]:
    generator, draw = torch.Generator().manual_seed(seeded(seed)), random.Random(seeded(seed))
    dtypes = [torch.float32, *draw.choices(_DTYPES, k=3)]
    return [torch.randint(-3, 4, (4, 4), generator=generator).to(dtype) for dtype in dtypes]


def _elsewhere(t: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, in another place or order of memory."""
    if how == "columns first":
        return t.t().contiguous().t()
    return torch.cat([t, t])[4:] if how == "behind others" else t


@pytest.mark.usefixtures("without_vectors")
@pytest.mark.parametrize("seed", range(3))
def test_drawn_programs_give_eagers_results_for_all_strides(seed: int):
    program = _drawn(seed, steps=14)
    inputs = _drawn_inputs(seed + 100)
    jitted = thunder.jit(program, transforms=[NormTransform()], **INDUCTOR)
    for how in ("as they are", "columns first", "as they are", "behind others"):
        given = [_elsewhere(t, how) for t in inputs]
        found, expected = jitted(*given), program(*given)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert a.dtype is b.dtype and a.stride() == b.stride()
            tolerance = 0.0 if i >= len(_ROUNDED) else 0.01 if b.dtype is torch.bfloat16 else 1e-5
            assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert found[-1].data_ptr() == found[-2].data_ptr() == given[0].data_ptr()


_SMOOTH: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "means": lambda a, b: a.mean(1, keepdim=True) * b,
    "softmax": lambda a, b: a.softmax(-1) - b,
    "product": lambda a, b: a @ b,
    "sine": lambda a, b: a.sin() / (1 + b.square()),
    **{name: _EXACT[name] for name in ("add", "multiply", "transposed", "reshaped", "some", "expanded", "running sum")},
}


@pytest.mark.usefixtures("without_vectors")
@pytest.mark.parametrize("seed", range(2))
def test_drawn_programs_have_eagers_gradients(seed: int):
    draw = random.Random(seeded(seed))
    chosen = [(draw.choice(list(_SMOOTH)), draw.random(), draw.random()) for _ in range(10)]

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values = [a, b]
        for name, i, j in chosen:
            values.append(_SMOOTH[name](values[int(i * len(values))], values[int(j * len(values))]).tanh())
        return torch.cat(values).square().sum()

    generator = torch.Generator().manual_seed(seeded(seed))
    inputs = [torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    jitted = thunder.jit(program, transforms=[NormTransform()], **INDUCTOR)
    found, expected = jitted(*inputs), program(*inputs)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs))


def test_dropout_draws_eagers_numbers_and_leaves_eagers_state():
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.dropout(torch.tanh(x @ w) * 2, 0.5) + 1
        return F.dropout(y.exp() - 1, 0.25) * x

    inputs = [torch.randn(6, 6, requires_grad=True) for _ in range(2)]
    jitted = thunder.jit(f, transforms=[NormTransform()], **INDUCTOR)
    plain = thunder.jit(f, transforms=[NormTransform()])
    results = {}
    for name, call in {"eager": f, "inductor": jitted, "thunder": plain, "inductor again": jitted}.items():
        torch.manual_seed(seeded(3))
        y = call(*inputs)
        results[name] = (y, *torch.autograd.grad(y.sum(), inputs), torch.get_rng_state())
    for found in results.values():
        assert_close(found[:-1], results["eager"][:-1], rtol=1e-4, atol=1e-4)
        assert torch.equal(found[-1], results["eager"][-1])
    torch.manual_seed(seeded(3))
    assert not torch.equal(torch.get_rng_state(), results["inductor"][-1])
    assert names(thunder.last_traces(jitted)[-1].bound_symbols).count("torch_dropout_noise") == 2
    assert last_regions(jitted)


# -- beside what else there is --------------------------------------------------------------------------------------------


def test_wrapper_subclasses():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    jitted = thunder.jit(model, transforms=[SubclassTransform()], **INDUCTOR)
    x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    with torch.no_grad():
        y, expected = jitted(x), model(x)
    assert isinstance(y, TwoTensor) and len(last_regions(jitted)) == 1
    assert_close((y.a, y.b), (expected.a, expected.b))


@pytest.mark.parametrize(
    "transforms",
    [
        lambda: [SubclassTransform()],
        lambda: [CheckpointTransform(), SubclassTransform()],
        lambda: [SubclassTransform(), CheckpointTransform()],
        lambda: [NormTransform(), ProfileTransform()],
    ],
    ids=["subclass", "checkpoint, subclass", "subclass, checkpoint", "norm, profile"],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_gradients_of_wrapper_subclasses(depth, transforms):
    model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.ReLU())])
    jitted = thunder.jit(model, transforms=transforms(), **INDUCTOR)

    def gradients(f):
        x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()
        y = f(x)
        torch.autograd.backward((y,), (TwoTensor(torch.ones(3, 4), torch.full((3, 4), 2.0)),))
        found = [x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
        return [t for g in found for t in (g.a, g.b)]

    torch.manual_seed(seeded(4))
    expected = gradients(model)
    for _ in range(2):
        torch.manual_seed(seeded(4))
        assert_close(gradients(jitted), expected, rtol=1e-4, atol=1e-5)


def test_function_transforms():
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.square()).sum()

    x = torch.randn(3, dtype=torch.float64)
    for ours, theirs in ((grad(f), torch.func.grad(f)), (hessian(f), torch.func.hessian(f))):
        jitted = thunder.jit(ours, transforms=[NormTransform()], **INDUCTOR)
        assert_close(jitted(x), theirs(x))
        assert last_regions(jitted)
    xs = torch.randn(2, 3, dtype=torch.float64)
    jitted = thunder.jit(vmap(grad(f)), transforms=[NormTransform()], **INDUCTOR)
    assert_close(jitted(xs), torch.func.vmap(torch.func.grad(f))(xs))


@pytest.mark.usefixtures("without_vectors")
def test_normed_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    jitted, plain = (thunder.jit(model, transforms=[NormTransform()], **how) for how in (INDUCTOR, {}))
    x = RMSTensor.of(torch.randn(3, 4))
    found, expected = jitted(x), plain(x)
    assert_close(found.norm_size, expected.norm_size)
    assert_close(found.backing, expected.backing)
    assert last_regions(jitted)


def test_checkpointed_regions_are_computed_again():
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).sin()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False).square().sum()

    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    jitted = thunder.jit(f, transforms=[CheckpointTransform()], **INDUCTOR)
    found = torch.autograd.grad(jitted(*inputs), inputs)
    assert_close(found, torch.autograd.grad(f(*inputs), inputs))
    again = [b.sym.name for r in regions(thunder.last_backward_traces(jitted)[-1]) for b in r.subsymbols]
    assert "matmul" in again[: again.index("cos")]  # before what uses it: computed again, not kept


def test_profile_of_a_trace_counts_what_regions_do():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(2, 8)
    with_regions, without = (profile(model, x, backward=True, target="trace", **how) for how in (INDUCTOR, {}))
    assert with_regions.forward_flops == without.forward_flops > 0
    assert with_regions.backward_flops == without.backward_flops > 0


@pytest.mark.parametrize("x", [torch.ones(4), torch.ones(4, dtype=torch.int64)], ids=["floats", "integers"])
@pytest.mark.parametrize(
    "f", [lambda x: torch.bitwise_and(x.sin() * 2, x) + 1, lambda x: ((x * 2) ^ x.sin()) + 1, lambda x: ((x + 1) | 2.0) + 1]
)
def test_bits_of_floating_tensors_are_torchs_affair(f, x):
    with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
        f(x)
    with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
        thunder.jit(f, transforms=[NormTransform()], **INDUCTOR)(x)


@pytest.mark.parametrize(
    "f", [lambda x: torch.hypot(x * 2, x) + 1, lambda x: (x * 2).hypot(x) + 1, lambda x: torch.nextafter(x * 2, x) + 1]
)
def test_functions_of_floating_tensors_alone_refuse_integers_as_in_torch(f):
    jitted = thunder.jit(f, transforms=[NormTransform()], **INDUCTOR)
    x = torch.arange(1, 5)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        f(x)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        jitted(x)
    assert_close(jitted(x.double()), f(x.double()))


def test_whether_any_of_bytes_is_true_is_a_byte():
    f = lambda x: ((x * 2).any() + 200, (x + 1).any(0), torch.any(x * 2, 1) * 3)  # noqa: E731 - called below
    x = torch.tensor([[0, 2], [0, 0]], dtype=torch.uint8)
    assert_close(thunder.jit(f, transforms=[NormTransform()], **INDUCTOR)(x), f(x))
