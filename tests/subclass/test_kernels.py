"""Kernels without a symbol in Thunder: one call each by default, inside one region where an executor fuses; aten called by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.subclasses import assert_same, two
from thunder_norm.transforms import SubclassTransform
import thunder

aten = torch.ops.aten


def layer_norm_backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _, mean, rstd = aten.native_layer_norm(x, [4], None, None, 1e-5)
    return aten.native_layer_norm_backward(g, x, [4], mean, rstd, None, None, [True, False, False])[0]


def nll_loss_backward(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    target, weight = torch.tensor([1, 0, 3]), torch.tensor(3.0)
    return aten.nll_loss_backward(g.sum(), x, target, None, 1, -100, weight)


KERNELS: dict[str, Callable] = {
    "threshold_backward": lambda g, x: aten.threshold_backward(g, x, 0),
    "tanh_backward": lambda g, x: aten.tanh_backward(g, x),
    "sigmoid_backward": lambda g, x: aten.sigmoid_backward(g, x),
    "gelu_backward": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "silu_backward": lambda g, x: aten.silu_backward(g, x),
    "_softmax_backward_data": lambda g, x: aten._softmax_backward_data(g, x.softmax(-1), -1, torch.float32),
    "_log_softmax_backward_data": lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(-1), -1, torch.float32),
    "native_layer_norm_backward": layer_norm_backward,
    "nll_loss_backward": nll_loss_backward,
}


def names(trace) -> list[str]:
    return [b.sym.name for b in trace.bound_symbols if b.sym.name not in ("python_return", "unpack_trivial", "python_del")]


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_one_call_and_what_it_consists_of_can_be_claimed(name: str):
    g, x = two(3, 4), two(3, 4)
    jf = thunder.jit(KERNELS[name], transforms=[SubclassTransform()])
    assert_same(jf(g, x), KERNELS[name](g, x))
    called = [n for n in names(thunder.last_traces(jf)[-1]) if name in n]
    assert len(called) == 2  # one for each inner tensor
    (composite,) = (b for b in thunder.last_traces(jf)[0].bound_symbols if b.sym.name == f"TwoTensor.{name}")
    kernels = [b for b in composite.subsymbols if b.sym.name.startswith("aten_")]
    assert len(kernels) == 2
    for kernel in kernels:  # nothing opaque inside
        assert not kernel.sym.is_prim and all(sub.sym.executor is None for sub in kernel.subsymbols)


@pytest.mark.slow
def test_torch_compile_claims_a_program_with_kernels_as_one_region():
    def program(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = aten.threshold_backward(g, x, 0) + aten.tanh_backward(g, x)
        return torch.special.bessel_j0(y) * aten._softmax_backward_data(g, x.softmax(-1), -1, torch.float32)

    g, x = two(3, 4), two(3, 4)
    jf = thunder.jit(program, transforms=[SubclassTransform()], executors=["torchcompile"])
    torch.testing.assert_close(jf(g, x).b, program(g, x).b)
    assert names(thunder.last_traces(jf)[-1]) == ["TorchCompile0"]


CALLED_BY_NAME: dict[str, Callable] = {
    "aten packet": lambda x, y: aten.add(x, y) + 1,
    "aten overload": lambda x, y: aten.add.Tensor(x, y, alpha=2),
    "aten with several results": lambda x, y: aten.native_layer_norm(x, [4], None, None, 1e-5)[0] * y,
    "prims": lambda x, y: torch.ops.prims.mul(x, y) + torch.ops.prims.sin.default(x),
}


@pytest.mark.parametrize("make", [lambda: two(3, 4), lambda: torch.randn(3, 4)], ids=["wrapper", "plain"])
@pytest.mark.parametrize("name", CALLED_BY_NAME)
def test_operations_called_by_name(name: str, make: Callable):
    function, x, y = CALLED_BY_NAME[name], make(), make()
    jf = thunder.jit(function, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(jf(x, y), function(x, y))
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)


@pytest.mark.parametrize("name", [name for name in CALLED_BY_NAME if name != "prims"])  # torch does not differentiate those
def test_operations_called_by_name_on_plain_tensors_have_gradients(name: str):
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    function = CALLED_BY_NAME[name]
    expected = torch.autograd.grad(function(x, y).sin().sum(), (x, y))
    found = torch.autograd.grad(thunder.jit(function, transforms=[SubclassTransform()])(x, y).sin().sum(), (x, y))
    torch.testing.assert_close(found, expected)


def test_private_functions_of_torch():
    x = two(3, 4)
    jf = thunder.jit(lambda x: torch._chunk_cat([x, x], 0, 2), transforms=[SubclassTransform()])
    assert_same(jf(x), torch._chunk_cat([x, x], 0, 2))
    assert type(jf(x)) is TwoTensor
