"""Programs of tensors on a GPU, as traces: no GPU is needed to write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.subclass.acquiring.fallback import fallback
from thunder_norm.subclass.crossing.broadcast import broadcast_scalars
from thunder_norm.subclass.crossing.devices import apart_by_device
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder
import thunder.torch as ltorch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import OperatorExecutor, register_executor
from thunder.transforms.cudagraph import CUDAGraphTransform


def recorded(program: Callable, *tensors: tuple[str, tuple[int, ...], torch.dtype]) -> TraceCtx:
    """The trace of a program on tensors of which each has a device, a shape and a dtype."""
    trace = TraceCtx(None)
    with tracectx(trace):
        inputs = [
            TensorProxy(shape=shape, device=devices.to_device(device), dtype=dtypes.to_dtype(dtype))
            for device, shape, dtype in tensors
        ]
        prims.python_return(program(*inputs))
    trace.args = tuple(inputs)
    return trace


def on(trace: TraceCtx) -> list[tuple[str, list[str]]]:
    """Each operation of a trace, and the devices of its results."""
    found = [
        (b.sym.name, [str(p.device.devicetype).split(".")[-1].lower() for p in b.flat_proxy_outs]) for b in trace.bound_symbols
    ]
    return [(name, where) for name, where in found if name != "python_return"]


GPU = "cuda:0", (2, 3), torch.float32
SIZE = "cpu", (), torch.float64


def test_an_operation_with_results_on_two_devices_is_what_it_consists_of():
    inner = Symbol("inner", lambda x, s: (ltorch.exp(x), ltorch.sqrt(s)), id="tests.inner")
    outer = Symbol("outer", lambda x, s: (*inner(x, s), ltorch.add(s, 1.0)), id="tests.outer")
    trace = apart_by_device(recorded(outer, GPU, SIZE))
    assert on(trace) == [("exp", ["cuda"]), ("sqrt", ["cpu"]), ("add", ["cpu"])]
    on_one = recorded(outer, GPU, ("cuda:0", (), torch.float64))
    assert apart_by_device(on_one) is on_one


def test_a_number_on_the_cpu_goes_where_it_is_broadcast():
    trace = broadcast_scalars(recorded(prims.mul, GPU, ("cpu", (), torch.float32)))
    assert on(trace) == [("device_put", ["cuda"]), ("broadcast_in_dim", ["cuda"]), ("mul", ["cuda"])]
    trace = broadcast_scalars(recorded(prims.mul, ("cpu", (2, 3), torch.float32), ("cpu", (), torch.float32)))
    assert on(trace) == [("broadcast_in_dim", ["cpu"]), ("mul", ["cpu"])]


def test_products_of_float8_are_inferred_by_columns():
    product = fallback(torch.ops.aten._scaled_mm.default, (True,))
    one = "cuda:0", (), torch.float32
    trace = recorded(
        lambda a, b, s, t: product(a, b, s, t, None, None, torch.bfloat16)[0],
        ("cuda:0", (32, 64), torch.float8_e4m3fn),
        ("cuda:0", (64, 16), torch.float8_e4m3fn),
        one,
        one,
    )
    (out,) = trace.bound_symbols[-2].flat_proxy_outs
    assert out.shape == (32, 16) and out.dtype is dtypes.bfloat16


def test_a_cuda_graph_leaves_norms_on_the_cpu_alone():
    """A graph that is replayed would have those of the call that was recorded; on the CPU nothing can be recorded."""
    torch.manual_seed(seeded(0))
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3)).requires_grad_(False)
    backing = torch.randn(2, 3)
    with_graphs = thunder.jit(model, transforms=[NormTransform(), CUDAGraphTransform()])
    for size in (2.0, 5.0, 3.0):
        y = with_graphs(RMSTensor(size, backing=backing))
        torch.testing.assert_close(y.backing, model(backing))
        torch.testing.assert_close(
            y.norm_size, thunder.jit(model, transforms=[NormTransform()])(RMSTensor(size, backing=backing)).norm_size
        )


def test_a_cuda_graph_leaves_numbers_that_change_alone():
    def f(x, k):
        return x, k * 2 + 1, x.sum().item() - k

    with_graphs = thunder.jit(f, transforms=[NormTransform(), CUDAGraphTransform()])
    for k in range(1, 6):
        assert with_graphs(torch.full((2,), 1.0 * k), k)[1:] == f(torch.full((2,), 1.0 * k), k)[1:]
    assert thunder.cache_misses(with_graphs) == 2


@pytest.fixture
def asking() -> Any:
    """An executor that has a gradient for sines, and asks for the size of what it is given, as cuDNN's does."""
    executor = OperatorExecutor("tests_asking", version="1")
    register_executor(executor)

    def grad(x: Any) -> Any:
        prims.put_grad(x, ltorch.mul(prims.get_grad(y := ltorch.sin(x)), ltorch.cos(x)))
        return y

    executor.register_implementation(
        ltorch.sin, checker=lambda x: x.size()[-1] == 3, execution_transform=ltorch.sin, grad_transform=grad
    )
    yield executor
    thunder.extend.deregister_executor(executor)


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_an_executor_may_ask_for_sizes(asking, transform):
    x = torch.randn(2, 3, requires_grad=True)
    jitted = thunder.jit(lambda x: torch.isfinite(x.sin()) * x.sin(), transforms=[transform()], executors=[asking])
    torch.testing.assert_close(*(torch.autograd.grad(f(x).sum(), x) for f in (jitted, torch.sin)))
