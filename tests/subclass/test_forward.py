"""Programs on wrapper subclasses give what eager gives: values, types, metadata and contexts, on the first call and from the cache."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from tests.subclass.wrapper_programs import OPERATIONS, check, jit, one, pair, with_plain
from tests.subclasses import OpCounter, Overriding, ScaleTensor, assert_same, two
import thunder

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclass
class Box:
    first: torch.Tensor
    second: Any = None


def scaled() -> tuple:
    return (ScaleTensor(torch.randn(3, 4), torch.tensor(2.0)),)


def quantized() -> tuple:
    return (ScaleTensor.quantize(torch.randn(3, 4)),)


# -- operations ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gives_what_eager_gives(name: str):
    check(*OPERATIONS[name])


CLASSES: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "int data": (lambda q: (q * 2, q + 1, q @ q.t(), q.view(-1), q[1:], q.dequantize()), quantized),
    "dtype of the context": (lambda s: (s * 2, s.dtype), lambda: (ScaleTensor.quantize(torch.randn(4)),)),
    "plain result": (lambda s: s + 1, scaled),
    "method": (lambda s: s.dequantize() * 2, quantized),
    "method with control flow": (lambda s: s.shifted(1.0, times=3), scaled),
    "method that makes a wrapper": (lambda s: s.with_label("other") * 2, scaled),
    "property": (lambda s: s.doubled_scale + s.scale, scaled),
    "classmethod": (lambda p: ScaleTensor.quantize(p), lambda: (torch.randn(3, 4),)),
    "classmethod of an instance": (lambda s, p: type(s).quantize(p), lambda: (*scaled(), torch.randn(3, 4))),
    "constructor": (lambda p, s: ScaleTensor(p, s, "made") * 2, lambda: (torch.randn(3, 4), torch.tensor(3.0))),
    "constructor of what was computed": (lambda p: TwoTensor(p + 1, p * 2) * p, lambda: (torch.randn(3, 4),)),
    "constructor by keyword": (lambda p: ScaleTensor(data=p, scale=p.sum(), label="k"), lambda: (torch.randn(3),)),
    "constructor from an instance": (lambda x: type(x)(x.a, x.a * 2), one),
    "flatten and unflatten": (
        lambda x: type(x).__tensor_unflatten__(
            {n: getattr(x, n) * 2 for n in x.__tensor_flatten__()[0]}, x.__tensor_flatten__()[1], x.shape, x.stride()
        ),
        one,
    ),
    "context of results": (lambda c: (c, c + 1, (c + 1) * 2, ((c + 1) * 2).count), lambda: (OpCounter(torch.randn(3)),)),
    "torch function of its own": (lambda o: F.softplus(o), lambda: (Overriding(torch.randn(3)),)),
    "torch function changes arguments": (
        lambda o: F.linear(o, torch.ones(5, 4), torch.ones(5)),
        lambda: (Overriding(torch.randn(3, 4)),),
    ),
    "torch function hands on": (lambda o: F.relu(o).mT + 1, lambda: (Overriding(torch.randn(3, 4)),)),
}


@pytest.mark.parametrize("name", CLASSES)
def test_class_is_followed(name: str):
    check(*CLASSES[name])


# -- metadata and control flow ---------------------------------------------------------------------------------------------


WRAPPER_DTYPE = torch.float32


CPU = torch.device("cpu")


METADATA: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "isinstance": (lambda x: [isinstance(x, c) for c in (torch.Tensor, TwoTensor, ScaleTensor, torch.nn.Parameter)], one),
    "type": (lambda x: [type(x) is TwoTensor, x.__class__ is TwoTensor, type(x).__name__], one),
    "type of results": (
        lambda s: [isinstance(s * 2, ScaleTensor), type(s + 1) is torch.Tensor, type(s.scale) is torch.Tensor],
        scaled,
    ),
    "dtype": (lambda x: [x.dtype == torch.float32, x.dtype is torch.float32, x.dtype == WRAPPER_DTYPE, x.dtype], one),
    "dtype of an inner tensor": (
        lambda x: [x.a.dtype == torch.float32, x.a.dtype is torch.float32, x.a.dtype in (torch.half,), (x.a * 2).dtype],
        one,
    ),
    "dtype beside a wrapper": (
        lambda x, p: [p.dtype == torch.float32, p.dtype == x.dtype, (p > 0).dtype == torch.bool],
        with_plain,
    ),
    "dtype as a key": (lambda x: {torch.float32: 3, torch.float64: 4}[x.a.dtype], one),
    "dtype as an argument": (lambda x, p: torch.zeros(2, dtype=p.dtype) + torch.finfo(x.dtype).max, with_plain),
    "int and float": (lambda x: [x.dtype.is_floating_point, x.is_floating_point(), x.is_complex(), torch.is_tensor(x)], one),
    "device": (lambda x, p: [x.device == p.device, x.device == torch.device("cpu"), x.device == CPU, x.device.type], with_plain),
    "shape": (lambda x, p: [x.shape == p.shape, x.shape == (3, 4), x.shape[0], x.size(1), x.ndim, x.dim(), len(x)], with_plain),
    "shape as an argument": (lambda x: x.view(x.shape[1:] + (-1,)) + x.reshape(*x.size()[::-1]).sum(), one),
    "strides": (lambda x: [x.stride(), x.stride(0), x.t().stride(), x.is_contiguous(), x.t().is_contiguous()], one),
    "other": (
        lambda x: [x.layout is torch.strided, x.requires_grad, x.is_leaf, x.grad_fn is None, x.is_cuda, x.element_size()],
        one,
    ),
    "hasattr": (lambda x: [hasattr(x, n) for n in ("a", "c", "sum", "__tensor_flatten__")], one),
    "getattr with default": (lambda x: getattr(x, "missing", 3), one),
    "context": (lambda s: s + 1 if s.label == "plain" else s - 1, scaled),
    "property of the context": (lambda s: s + 1 if s.is_labelled else s - 1, scaled),
    "property of another context": (lambda s: s + 1 if s.is_labelled else s - 1, quantized),
    "context of a result": (lambda c: c * 3 if (c + 1).count == 1 else c * 5, lambda: (OpCounter(torch.randn(3)),)),
    "result type": (lambda s: (s * 2) * 3 if isinstance(s * 2, ScaleTensor) else s + 7, scaled),
    "is": (lambda x: [x is x, x is not None, x.relu() is x], one),
    "is with in-place": (lambda x: (lambda z: [z.add_(1) is z, z.detach() is z])(x * 2), one),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_what_eager_has(name: str):
    check(*METADATA[name])


# -- containers, identities, arguments -------------------------------------------------------------------------------------


def held_twice(x: TwoTensor) -> Any:
    z = x + 1
    return z, z, x, {"z": z, "x": [x, (x.a, 3)]}


CONTAINERS: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "list in": (lambda xs: torch.cat(xs), lambda: ([two(3, 4), two(2, 4)],)),
    "tuple in": (lambda xs: torch.stack(xs) + xs[1], lambda: ((two(3, 4), two(3, 4)),)),
    "dict in": (lambda d: d["a"] + torch.stack(list(d.values())), lambda: ({"a": two(3, 4), "b": two(3, 4)},)),
    "namedtuple in": (lambda n: n.first + n.second, lambda: (Pair(two(3), two(3)),)),
    "dataclass in": (lambda b: b.first * 2, lambda: (Box(two(3)),)),
    "nested containers in": (lambda t: t["a"][0].relu() + t["b"]["c"][1], lambda: ({"a": [two(3)], "b": {"c": (1, two(3))}},)),
    "containers out": (lambda x, y: {"sum": x + y, "both": [x, (y, 3)], "none": None}, pair),
    "dataclass out": (lambda x: Box(x * 2, [x, x.a]), one),
    "identity": (lambda x: x, one),
    "inner tensors out": (lambda x: (x, x.a, x.a + 1, x.b), one),
    "held twice": (held_twice, one),
    "one wrapper given twice": (lambda x, y: (x + y, x * 2), lambda: (lambda x: (x, x))(two(3, 4))),
    "one inner tensor in two wrappers": (
        lambda x, y: (x + y, x * 2, y),
        lambda: (lambda t: (TwoTensor(t, torch.randn(3)), TwoTensor(torch.randn(3), t)))(torch.randn(3)),
    ),
    "one inner tensor twice": (lambda x: x + 1, lambda: (lambda t: (TwoTensor(t, t),))(torch.randn(3))),
    "an inner tensor also given": (lambda x, t: (x + t, t * 2), lambda: (lambda x: (x, x.a))(two(3, 4))),
    "strided inner tensors": (lambda x: (x + 1, x.stride()), lambda: (TwoTensor(torch.randn(4, 3).t(), torch.randn(4, 3).t()),)),
    "no tensor out": (lambda x: (x.shape[0], "text", None), one),
    "sum of a list": (lambda x, p: sum([x, x, p]), with_plain),
    "functions of the operator module": (
        lambda x, p: (operator.add(x, p), operator.mul(p, x), operator.getitem(x, 0)),
        with_plain,
    ),
    "reduce": (lambda x, p: functools.reduce(operator.mul, [x, x, p]), with_plain),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_and_identities(name: str):
    check(*CONTAINERS[name])


def test_arguments_by_keyword_and_defaults():
    def function(x: torch.Tensor, *more: torch.Tensor, scale: float = 2.0, **named: torch.Tensor) -> torch.Tensor:
        return x * scale + more[0] - named["last"]

    x, y, z = two(3), two(3), two(3)
    jf = jit(function)
    assert_same(jf(x, y, last=z), function(x, y, last=z))
    assert_same(jf(x, y, last=z, scale=3.0), function(x, y, last=z, scale=3.0))
    assert thunder.cache_misses(jf) == 2


def test_identity_output_shares_the_inner_tensors():
    x = two(3)
    y = jit(lambda x: x)(x)
    assert y.a.data_ptr() == x.a.data_ptr() and y.b.data_ptr() == x.b.data_ptr()
