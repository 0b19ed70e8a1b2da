"""Programs on wrapper subclasses give what eager gives: values, types, metadata and contexts, on the first call and from the cache."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import thunder
import torch
import torch.nn.functional as F
from subclasses import OpCounter, Overriding, ScaleTensor, assert_same, leaves, nested, two
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.transforms import NormTransform, SubclassTransform

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclass
class Box:
    first: torch.Tensor
    second: Any = None


def jit(function: Callable, transform: type[SubclassTransform] = SubclassTransform, **options: Any) -> Callable:
    return thunder.jit(function, transforms=[transform()], **options)


def check(
    function: Callable, make: Callable[[], tuple], transform: type[SubclassTransform] = SubclassTransform, **kwargs: Any
) -> Any:
    """Compare two calls of the jitted function with eager, also in what they do to their arguments; returns the jitted function."""

    def inputs() -> tuple:
        torch.manual_seed(seeded(0))
        return make()

    expected_args = inputs()
    expected = function(*expected_args, **kwargs)
    jf = jit(function, transform)
    for _ in range(2):
        args = inputs()
        assert_same(jf(*args, **kwargs), expected)
        assert_same(args, expected_args)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)
    return jf


def one() -> tuple:
    return (two(3, 4),)


def pair() -> tuple:
    return two(3, 4), two(3, 4)


def with_plain() -> tuple:
    return two(3, 4), torch.randn(3, 4)


def scaled() -> tuple:
    return (ScaleTensor(torch.randn(3, 4), torch.tensor(2.0)),)


def quantized() -> tuple:
    return (ScaleTensor.quantize(torch.randn(3, 4)),)


# -- operations -------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "two wrappers": (lambda x, y: x + y, pair),
    "alpha": (lambda x, y: torch.add(x, y, alpha=2), pair),
    "numbers": (lambda x: (x * 3, 2 + x, 1 - x, 1 / x, x / 2, x**2, x // 2, x % 2), one),
    "plain on the right": (lambda x, p: x * p, with_plain),
    "plain on the left": (lambda x, p: (p * x, p - x, p / x, p @ x.T), with_plain),
    "unary operators": (lambda x: (-x, +x, abs(x), ~(x > 0)), one),
    "comparisons": (lambda x, p: (x > 0, x <= p, p < x, x == x, x != p), with_plain),
    "method": (lambda x: x.relu().sum(-1, keepdim=True).exp(), one),
    "aten overload": (lambda x, y: torch.ops.aten.add.Tensor(x, y), pair),
    "aten packet": (lambda x, y: torch.ops.aten.mul(x, y), pair),
    "linear": (lambda x, w, b: F.linear(x, w, b), lambda: (two(3, 4), two(5, 4), two(5))),
    "linear with plain weight": (lambda x, w: F.linear(x, w), lambda: (two(3, 4), torch.randn(5, 4))),
    "linear with plain input": (lambda x, w: F.linear(x, w), lambda: (torch.randn(3, 4), two(5, 4))),
    "matmul": (lambda x, y: x @ y.t(), pair),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), pair),
    "addmm": (lambda x, y: torch.addmm(x[:, :3], x, y.T, beta=0.5, alpha=2.0), pair),
    "normalizations and activations": (lambda x: F.layer_norm(F.gelu(F.softmax(x, -1)), (4,)), one),
    "layer_norm with weight": (lambda x, w: F.layer_norm(x, (4,), w), lambda: (two(3, 4), torch.randn(4))),
    "convolution": (lambda x, w: F.conv1d(x, w, padding=1), lambda: (two(2, 3, 4), torch.randn(5, 3, 2))),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), lambda: (two(1, 3, 4),)),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), lambda: (two(3, 4), torch.tensor([0, 2, 1]))),
    "losses with a reduction": (lambda x, p: (F.mse_loss(x, p, reduction="sum"), F.l1_loss(x, p, reduction="none")), with_plain),
    "embedding": (lambda w, i: F.embedding(i, w), lambda: (two(5, 4), torch.tensor([[0, 4], [2, 2]]))),
    "pooling": (lambda x: F.max_pool1d(x[None], 2), one),
    "interpolate": (lambda x: F.interpolate(x[None], scale_factor=2.0), one),
    "dropout of nothing": (lambda x: F.dropout(F.dropout(x, 0.0), 0.5, training=False), one),
    "views": (lambda x: x.view(2, 6).t().T.reshape(-1)[1:5].unsqueeze(0).squeeze(0), one),
    "permute, flatten, expand": (lambda x: x.permute(1, 0).flatten().view(4, 1, 3).expand(4, 2, 3), one),
    "indexing": (lambda x: (x[0], x[..., 1], x[:, None, 1:3], x[torch.tensor([0, 2])], x[-1, -1]), one),
    "iteration": (lambda x: sum(row * 2 for row in x), one),
    "unpacking": (lambda x: (lambda a, b, c: a + b * c)(*x), one),
    "cat and stack": (lambda x, p: (torch.cat([x, p]), torch.stack((x, p, x), dim=1)), with_plain),
    "split and chunk": (lambda x: (torch.split(x, 2, dim=1), x.chunk(2, dim=1)[1], x.unbind(0)[2]), one),
    "structseq": (lambda x: (x.max(-1).values, x.max(dim=-1).indices, x.sort(-1)[0], x.topk(2).values), one),
    "cumulative": (lambda x: (x.cumsum(0), x.cumprod(1)), one),
    "reductions": (lambda x: (x.sum(), x.mean(0), x.amax(1), x.var(-1), x.norm(), x.prod(1), x.logsumexp(0)), one),
    "where": (lambda x, p: torch.where(p > x, x, p), with_plain),
    "masked_fill": (lambda x, p: x.masked_fill(p > 0, 2.0), with_plain),
    "scatter and gather": (
        lambda x, i: (x.gather(1, i), x.scatter(1, i, 1.0)),
        lambda: (two(3, 4), torch.tensor([[0], [1], [3]])),
    ),
    "casts": (lambda x: (x.to(torch.bfloat16).float(), x.double(), x.half().dtype), one),
    "cast to the dtype it has": (lambda x: x.to(torch.float32).contiguous() + 1, one),
    "factories like it": (lambda x: (torch.ones_like(x), torch.zeros_like(x) + x, torch.full_like(x, 2.0), x.new_ones(2)), one),
    "clone and detach": (lambda x: x.clone() + x.detach(), one),
    "unknown to Thunder": (lambda x: torch.special.bessel_j0(x), one),
    "linear algebra": (lambda x: (torch.linalg.svdvals(x), torch.linalg.inv(x[:3, :3])), one),
    "shared computation": (lambda x, y: (x @ y.T + (x @ y.T)) * (x @ y.T).sum(), pair),
    "nested": (lambda n: (n @ n + n, (n * 2).a, (n * 2).a.b), lambda: (nested(2, 2),)),
    "nested in another class": (
        lambda t: (t + 1, t.a, t.b.scale * 2),
        lambda: (TwoTensor(*(ScaleTensor(torch.randn(2, 2), torch.tensor(s)) for s in (2.0, 3.0))),),
    ),
    "checkpoint": (lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin() * 2, x, use_reentrant=False), one),
}


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


# -- metadata and control flow ----------------------------------------------------------------------------------------

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


# -- containers, identities, arguments --------------------------------------------------------------------------------


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


# -- in-place ---------------------------------------------------------------------------------------------------------


def every_inplace_operator(x: torch.Tensor) -> torch.Tensor:
    z = x + 1
    z += x
    z -= 1
    z *= 2
    z /= 3
    z **= 2
    return z.sin_().relu_().clamp_(max=0.5)


def fill_a_copy(x: torch.Tensor) -> torch.Tensor:
    z = torch.empty_like(x)
    z.copy_(x)
    w = x.clone()
    w.fill_(2.0)
    return z + w.zero_()


def through_a_list(x: torch.Tensor) -> torch.Tensor:
    z = x * 2
    held = [z]
    z.add_(1)
    return held[0]


def shared_after_mutation(n: TwoTensor) -> Any:
    z = n * 2
    inner = z.a
    z.add_(1)
    return inner, inner * 2, z


def inner_wrapper_mutated(n: TwoTensor) -> Any:
    z = n * 2
    inner = z.a
    inner.add_(1)
    return z, z * 2


def inner_tensor_mutated(x: TwoTensor) -> Any:
    z = x * 2
    view = z.view(-1)
    z.a.add_(1)
    z.a[0] = 5.0
    return z, z + 1, view, view + 1


def input_inner_tensor_mutated(x: TwoTensor) -> Any:
    before = x * 2
    x.a.add_(1)
    return before, x * 2


def plain_mutated_under_a_wrapper(p: torch.Tensor, q: torch.Tensor) -> Any:
    z = p + 0
    t = TwoTensor(z, q)
    before = t * 3
    z.add_(1)
    p.mul_(2)
    return t, t * 2, before


IN_PLACE: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "operators and methods": (every_inplace_operator, one),
    "functional inplace=True": (lambda x: F.relu(x + 0, inplace=True), one),
    "copy_, fill_, zero_": (fill_a_copy, one),
    "seen through a list": (through_a_list, one),
    "seen through an inner wrapper": (shared_after_mutation, lambda: (nested(2, 2),)),
    "of an inner wrapper": (inner_wrapper_mutated, lambda: (nested(2, 2),)),
    "of an inner tensor": (inner_tensor_mutated, one),
    "of an inner tensor of an input": (input_inner_tensor_mutated, one),
    "of a plain tensor under a wrapper": (plain_mutated_under_a_wrapper, lambda: (torch.randn(3), torch.randn(3))),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_are_seen_wherever_eager_sees_them(name: str):
    check(*IN_PLACE[name])


# -- random operations ------------------------------------------------------------------------------------------------


def test_random_operations_draw_anew():
    jf = jit(lambda x: (torch.rand_like(x), torch.rand_like(x), torch.bernoulli(x.sigmoid())))
    x = two(20, 20)
    drawn = [leaves(jf(x)) for _ in range(2)]
    uniform = [t for leaf in drawn for t in leaf[:4]]
    assert all(0 <= t.min() and t.max() < 1 and abs(t.mean() - 0.5) < 0.1 for t in uniform)
    assert len({float(t.sum()) for t in uniform}) == 8  # neither merged within a call nor kept between calls
    assert all(set(t.unique().tolist()) <= {0.0, 1.0} and 0.2 < t.mean() < 0.8 for leaf in drawn for t in leaf[4:])


def test_random_plain_tensor_beside_a_wrapper():
    jf = jit(lambda x: x * 0 + torch.randn(3, 4))
    first, second = jf(two(3, 4)), jf(two(3, 4))
    assert_same(first.a, first.b)
    assert not torch.equal(first.a, second.a)


# -- modules ----------------------------------------------------------------------------------------------------------


def module_with_wrapper_weight() -> torch.nn.Module:
    torch.manual_seed(seeded(0))
    module = torch.nn.Linear(4, 5)
    module.weight = torch.nn.Parameter(two(5, 4), requires_grad=False)
    module.register_buffer("shift", two(5))
    module.forward = lambda x: F.linear(x, module.weight, module.bias) + module.shift
    return module


class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)
        self.linear.weight = torch.nn.Parameter(two(5, 4), requires_grad=False)
        self.register_buffer("shift", two(5))

    def forward(self, x: torch.Tensor) -> Any:
        kinds = [isinstance(self.linear.weight, torch.nn.Parameter), type(self.linear.weight) is TwoTensor]
        return self.linear(x) + self.shift, kinds


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_module_with_frozen_wrapper_parameter_and_buffer(transform: type[SubclassTransform]):
    torch.manual_seed(seeded(0))
    module = Shifted()
    jm = jit(module, transform)
    for x in (torch.randn(3, 4), two(3, 4)):
        assert_same(jm(x), module(x))
    jm(torch.randn(3, 4))
    assert (thunder.cache_misses(jm), thunder.cache_hits(jm)) == (2, 1)


def test_state_dict_round_trip():
    module, other = Shifted(), Shifted()
    jm, x = jit(module), torch.randn(3, 4)
    jm(x)
    state = jm.state_dict()
    assert type(state["linear.weight"]) is TwoTensor and type(state["shift"]) is TwoTensor
    jm.load_state_dict(other.state_dict())
    assert_same(jm(x), other(x))
    assert thunder.cache_misses(jm) == 1


WEIGHT = two(5, 4)


def test_wrapper_from_a_global_or_closure_is_an_input():
    closed_over = two(3, 4)
    jf = jit(lambda p: F.linear(closed_over + p, WEIGHT))
    for _ in range(2):
        p = torch.randn(3, 4)
        assert_same(jf(p), F.linear(closed_over + p, WEIGHT))
    closed_over.a.add_(1)  # read anew in each call
    assert_same(jf(p), F.linear(closed_over + p, WEIGHT))
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 2)


# -- options ----------------------------------------------------------------------------------------------------------


def test_no_caching():
    jf = jit(lambda x, n: x * n, cache="no caching")
    x = two(3)
    assert_same(jf(x, 2), x * 2)
    assert_same(jf(x, 3), x * 3)
    assert thunder.cache_hits(jf) == 0


@pytest.mark.parametrize("name", ["linear", "nested", "views"])
def test_norm_transform_interprets_other_wrappers_too(name: str):
    check(*OPERATIONS[name], NormTransform)


def test_both_transforms_together():
    x = two(3, 4)
    jf = thunder.jit(lambda x: x.relu() + 1, transforms=[SubclassTransform(), NormTransform()])
    assert_same(jf(x), x.relu() + 1)
