"""Calls of jitted programs where torch follows operations as they run: results and derivatives are eager mode's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform, grad
import thunder

TRANSFORMS = (NormTransform, SubclassTransform, CheckpointTransform)


class Tripling(TorchFunctionMode):
    """Has ``torch.tanh`` return three times its value."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.tanh
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.tanh else result


def with_gradients(f, x):
    x = x.detach().requires_grad_()
    result = f(x)
    return result, *torch.autograd.grad(result.sum(), x)


@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_mode_around_a_call_is_told_of_the_programs_functions(transform, is_first):
    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4)

    def f(x):
        return torch.tanh(x) * x

    jitted = thunder.jit(f, transforms=[transform()])
    if not is_first:
        jitted(x)
    with Tripling() as mode:
        found = with_gradients(jitted, x)
        expected = with_gradients(f, x)
    assert_close(found, expected)
    assert mode.calls == 2
    assert_close(with_gradients(jitted, x), with_gradients(f, x))  # and none of it stays


def test_a_mode_around_a_call_with_norms():
    x = torch.linspace(-1, 1, 12).view(3, 4)
    jitted = thunder.jit(lambda x: torch.tanh(x) + 1, transforms=[NormTransform()])
    with Tripling():
        found = jitted(RMSTensor.of(x))
    assert_close(found.backing, torch.tanh(x) * 3 + 1)


@pytest.mark.parametrize("is_jitted", [True, False])
def test_derivatives_that_are_compiled_are_refused_in_a_mode(is_jitted):
    derivative = grad(lambda x: torch.tanh(x).sum())
    x = torch.linspace(-1, 1, 12)
    called = thunder.jit(derivative) if is_jitted else derivative
    called(x)
    with Tripling(), pytest.raises(UnsupportedOpError, match="torch follows operations as they run"):
        called(x)
    with pytest.raises(UnsupportedOpError, match="torch follows operations as they run"):
        torch.func.vmap(called)(torch.stack([x, x]))
    assert_close(called(x), 1 - torch.tanh(x) ** 2)


@pytest.mark.parametrize("around", [lambda: torch.device("meta"), lambda: DeviceContext("meta")])
def test_a_default_device_around_a_call_is_not_that_of_gradients(around):
    torch.manual_seed(seeded(4))
    x = torch.randn(200, 200)  # large enough for a backward of two nodes

    def f(x):
        return x.exp().sin()

    jitted = thunder.jit(f, transforms=[NormTransform()])
    for _ in range(2):
        with around():
            found = with_gradients(jitted, x)
        assert_close(found, with_gradients(f, x))


def test_a_default_device_around_calls_needs_no_eager_run():
    jitted = thunder.jit(lambda x: x + torch.ones(3), transforms=[NormTransform()])
    with torch.device("cpu"):
        assert_close(jitted(torch.ones(3)), torch.full((3,), 2.0))
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_dual_numbers_pass_calls(transform):
    torch.manual_seed(seeded(1))
    x, tangent = torch.randn(4, 4), torch.randn(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
    jitted = thunder.jit(model, transforms=[transform()])
    jitted(x)
    with forward_ad.dual_level():
        primal, found = forward_ad.unpack_dual(jitted(forward_ad.make_dual(x, tangent)))
    expected = torch.func.jvp(model, (x,), (tangent,))
    assert_close((primal, found), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_module", [True, False])
def test_torch_compile_takes_what_is_jitted(is_module):
    torch.manual_seed(seeded(2))
    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    jitted = thunder.jit(model if is_module else (lambda x: model(x)), transforms=[NormTransform()])
    found = torch.compile(lambda x: jitted(x).exp(), backend="eager", fullgraph=True)
    assert_close(with_gradients(found, x), with_gradients(lambda x: model(x).exp(), x))


class Squared(torch.autograd.Function):
    """Keeps what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0] * 2


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_hooks_on_saved_tensors_get_those_of_the_call(transform):
    torch.manual_seed(seeded(3))
    x, kept = torch.randn(3, 4), []

    def pack(t):
        kept.append(t.detach().numpy().copy())
        return kept[-1]

    def f(x):
        return Squared.apply(x).exp()

    jitted = thunder.jit(f, transforms=[transform()])
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            found = with_gradients(jitted, x)
        assert kept and all(isinstance(a, np.ndarray) for a in kept)
        kept.clear()
        assert_close(found, with_gradients(f, x))


class Operations(TorchDispatchMode):
    """Notes the operations that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default):  # which make nodes of autograd
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x if (x @ x).sum() > 100 else x % 2,
        lambda x: torch.linalg.svd(x).S + torch.tensor([1.0, 2.0]),
    ],
    ids=["attention", "condition", "svd"],
)
@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_a_dispatch_mode_around_a_call_is_told_of_the_same_operations_in_each(transform, program, requires_grad):
    jitted = thunder.jit(program, transforms=[transform()])
    x = torch.linspace(-1, 1, 4).view(2, 2).requires_grad_(requires_grad)
    told, flops = [], []
    for _ in range(4):
        with Operations() as mode:
            jitted(x)
        told.append(mode.names)
        with FlopCounterMode(display=False) as counter:
            jitted(x)
        flops.append(counter.get_total_flops())
    assert told[0] and all(names == told[0] for names in told)
    assert len(set(flops)) == 1


def test_a_flop_counter_around_a_first_call_counts_what_eager_mode_does():
    def attention(x):
        return F.scaled_dot_product_attention(x, x, x)

    counted = []
    for f in (attention, thunder.jit(attention, transforms=[NormTransform()])):
        with FlopCounterMode(display=False) as counter:
            f(torch.ones(3, 4))
        counted.append(counter.get_total_flops())
    assert counted == [144, 144]
