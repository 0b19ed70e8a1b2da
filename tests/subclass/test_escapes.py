"""What leaves a jitted call has data: gradients that are wrappers hold masks and codes, results no tensors of the trace."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.fuzz.wrapper_classes import Dual, Masked
from tests.subclasses import assert_same
from thunder_norm.errors import EscapeError, UnsupportedOpError
from thunder_norm.subclass.backward.encoding import decode, encode
from thunder_norm.transforms import SubclassTransform
import thunder

INTEGERS = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def jit(f):
    return thunder.jit(f, transforms=[SubclassTransform()])


class Tagged(torch.Tensor):
    """Values, and a tensor of any dtype that goes along with them."""

    @staticmethod
    def __new__(cls, values, tag):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values, tag):
        self.values_, self.tag = values, tag

    def __tensor_flatten__(self):
        return ["values_", "tag"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Tagged(inner["values_"], inner["tag"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tag = next(a.tag for a in args if isinstance(a, cls))
        args, kwargs = tree_map_only(cls, lambda x: x.values_, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, lambda t: cls(t, tag), func(*args, **kwargs))


def tag_of(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    if dtype.is_floating_point:
        return torch.tensor([0.25, -1.5, 1e9], dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([info.min, info.max, info.max // 3], dtype=dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_travel_through_autograd_exactly(dtype):
    t = tag_of(dtype)
    carried = encode(t)
    assert carried.is_floating_point() and torch.equal(decode(carried, dtype), t)
    assert torch.equal(decode(encode(t[0]), dtype), t[0])


@pytest.mark.parametrize("dtype", (*INTEGERS, torch.float64))
@pytest.mark.parametrize("program", [lambda x: x * x, lambda x: (x * x).sum(), lambda x: (x.sin(), x * 2)])
def test_gradients_hold_what_eager_ones_hold(dtype, program):
    found = []
    for f in (program, jit(program)):
        for values in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, 0.5, 7.0])):  # the second call is served from the cache
            x = Tagged(values, tag_of(dtype)).requires_grad_()
            out = f(x)
            outs = out if isinstance(out, tuple) else (out,)
            torch.autograd.backward(outs, [torch.ones_like(t.detach()) for t in outs])
            found.append((out, x.grad))
    for (want_out, want), (got_out, got) in zip(found[:2], found[2:], strict=True):
        assert_same(
            tree_map_only(torch.Tensor, lambda t: t.detach(), got_out),
            tree_map_only(torch.Tensor, lambda t: t.detach(), want_out),
        )
        assert_same(got, want)
        assert type(got.tag) is torch.Tensor


def test_the_mask_of_a_gradient_of_a_wrapper_in_a_wrapper():
    def masked():
        return Masked(torch.arange(4.0), torch.tensor([True, False, True, True]))

    grads = []
    for f in (lambda x: x * x, jit(lambda x: x * x)):
        x = TwoTensor(masked(), masked()).requires_grad_()
        f(x).backward(TwoTensor(masked(), masked()))
        grads.append(x.grad)
    assert_same(grads[1], grads[0])


class Keeping(TwoTensor):
    """Keeps the first second tensor that it is made of, be it a fake one."""

    kept: list[torch.Tensor] = []

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        if not Keeping.kept:
            Keeping.kept.append(inner["b"])
        return Keeping(inner["a"], Keeping.kept[0])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        a, b = (tree_map_only(cls, lambda x, n=n: getattr(x, n), args) for n in "ab")
        return cls(func(*a, **(kwargs or {})), func(*b, **(kwargs or {})))


def test_a_fake_tensor_that_a_class_keeps_does_not_leave():
    Keeping.kept.clear()
    try:
        with pytest.raises(EscapeError, match="the result.b would have been a fake tensor"):
            # the class has kept a tensor of the trace
            jit(lambda x: x.clone())(Keeping(torch.ones(2), torch.ones(2)))
    finally:
        Keeping.kept.clear()


def test_what_came_in_without_data_comes_out_without():
    f = jit(lambda x: (x * 2, x.sum()))
    with FakeTensorMode() as mode:
        fake = torch.empty(3)
    assert all(isinstance(t, FakeTensor) and t.fake_mode is mode for t in f(fake))
    assert jit(lambda x: x * 2)(torch.empty(3, device="meta")).is_meta


class ForwardOnly(torch.Tensor):
    """Knows sin and the sum, and nothing that their derivatives need."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)

    def __init__(self, value):
        self.value = value

    def __tensor_flatten__(self):
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return ForwardOnly(inner["value"])

    asked: list = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        cls.asked.append(func)
        if func is aten.sum.default:
            return func(args[0].value)
        if func in (aten.sin.default, aten.detach.default, aten.alias.default):
            return ForwardOnly(func(args[0].value))
        raise NotImplementedError(f"no {func}")


@pytest.mark.parametrize("program", [lambda x: x.sin(), lambda x: x.sin().sum(), lambda x: (x.sin(), x.sin().sum())])
def test_a_class_without_backward_operations_runs_forwards(program):
    value = torch.tensor([0.5, 1.0])
    x = ForwardOnly(value).requires_grad_()
    out, want = jit(program)(x), program(ForwardOnly(value))
    assert_same(tree_map_only(torch.Tensor, lambda t: t.detach(), out), want)
    outs = out if isinstance(out, tuple) else (out,)
    assert all(t.requires_grad for t in outs)
    with pytest.raises(UnsupportedOpError, match="the backward needs aten.cos.default on a ForwardOnly"):
        torch.autograd.backward(outs, [torch.ones(t.shape) for t in outs])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_without_gradients_nothing_of_the_backward_is_asked(requires_grad):
    ForwardOnly.asked.clear()
    x = ForwardOnly(torch.ones(2)).requires_grad_(requires_grad)
    with torch.set_grad_enabled(not requires_grad):
        assert not jit(lambda x: x.sin())(x).requires_grad
    assert torch.ops.aten.cos.default not in ForwardOnly.asked and torch.ops.aten.ones_like.default not in ForwardOnly.asked


def test_results_without_gradient_come_out_without_beside_those_with():
    def f(w, x, y):
        return w * x, y + 1, x.detach() * 2, x * 3

    w = Dual(torch.randn(3), torch.randn(3)).requires_grad_()
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    assert [t.requires_grad for t in jit(f)(w, x, y)] == [t.requires_grad for t in f(w, x, y)]
