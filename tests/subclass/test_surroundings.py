"""What surrounds a program: autocast, grad mode, modules moved and parameters replaced; and classes that decline an operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.subclasses import assert_same
from thunder_norm.errors import ThunderNormError, UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder


def jit(function: Callable) -> Callable:
    return thunder.jit(function, transforms=[SubclassTransform()])


def two(*shape: int) -> TwoTensor:
    return TwoTensor(torch.randn(shape), torch.randn(shape))


def layers(x, w):
    return F.softmax(F.linear(x, w), -1), (x @ w.t()).sum(), x + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_the_call(dtype: torch.dtype):
    x, w = two(3, 4), two(5, 4)
    jitted = jit(layers)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            assert_same(jitted(x, w), layers(x, w))
    assert thunder.cache_misses(jitted) == 2


def test_autocast_inside_the_program():
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w)
        z = F.linear(x, w)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return y, z, F.linear(x, w)

    x, w = two(3, 4), two(5, 4)
    assert_same(jit(f)(x, w), f(x, w))


def test_grad_mode_is_what_it_is_at_the_call():
    x = two(3).requires_grad_()
    jitted = jit(lambda x: x * 2)
    for is_enabled in (True, False, True, False):
        with torch.set_grad_enabled(is_enabled):
            assert jitted(x).requires_grad is is_enabled


def test_a_module_of_another_dtype_and_with_other_parameters():
    model = torch.nn.Linear(4, 3)
    for name, p in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(TwoTensor(p.detach(), p.detach() + 1), requires_grad=False))
    jitted = jit(lambda x: model(x) * 2)
    x = two(2, 4)
    assert_same(jitted(x), model(x) * 2)
    model.double()
    x = TwoTensor(x.a.double(), x.b.double())
    assert_same(jitted(x), model(x) * 2)
    model.weight = torch.nn.Parameter(TwoTensor(torch.ones(3, 4).double(), torch.zeros(3, 4).double()), requires_grad=False)
    assert_same(jitted(x), model(x) * 2)
    model.weight = torch.nn.Parameter(torch.randn(3, 4).double(), requires_grad=False)
    assert_same(jitted(x), model(x) * 2)
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    assert_same(jitted(x), model(x) * 2)


class Declines(torch.Tensor):
    """A class that adds and multiplies, alone, and leaves everything else to the others that take part."""

    value: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, strides=value.stride(), dtype=value.dtype)

    def __init__(self, value: torch.Tensor):
        self.value = value

    def __tensor_flatten__(self):
        return ["value"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, ctx, outer_size, outer_stride):
        return cls(inner["value"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket not in (torch.ops.aten.add, torch.ops.aten.mul) or any(t is not cls for t in types):
            return NotImplemented
        args, kwargs = tree_map_only(cls, lambda x: x.value, (args, kwargs or {}))
        return cls(func(*args, **kwargs))


class Helps(Declines):
    """A class that takes in the other one."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Declines, lambda x: x.value, (args, kwargs or {}))
        return cls(func(*args, **kwargs))


def test_another_class_may_do_what_one_declines():
    def f(x, y):
        return x + x, x * y, y.sin(), y + x

    x, y = Declines(torch.randn(3)), Helps(torch.randn(3))
    for got, want in zip(jit(f)(x, y), f(x, y), strict=True):
        assert type(got) is type(want)
        torch.testing.assert_close(got.value, want.value)


def test_what_all_classes_decline_is_an_error_that_says_so():
    jitted = jit(lambda x, flag: x.sin() if flag else x + x)
    x = Declines(torch.randn(3))
    with pytest.raises(TypeError):
        x.sin()
    with pytest.raises((TypeError, ThunderNormError)) as error:
        jitted(x, True)
    assert "Declines" in str(error.value) and "sin" in str(error.value)
    torch.testing.assert_close(jitted(x, False).value, x.value * 2)


def test_whether_a_wrapper_was_made_in_inference_mode():
    jitted = thunder.jit(
        lambda x: (x.is_inference(), torch.is_inference(x), (x * 2).is_inference()), transforms=[SubclassTransform()]
    )
    for is_inference in (False, True, False):
        with torch.inference_mode(is_inference):
            x = two(3)
        assert jitted(x) == (is_inference, is_inference, False)
    assert thunder.cache_misses(jitted) == 2


@pytest.mark.parametrize("asked", [torch.Tensor.is_inference, torch.is_inference])
def test_whether_a_result_was_made_in_inference_mode_is_refused(asked):
    def program(x):
        with torch.inference_mode():
            y = x * 2
        return asked(y), x * 1

    with pytest.raises(UnsupportedOpError, match=r"is_inference\(\) of a tensor that is no input"):
        thunder.jit(program, transforms=[SubclassTransform()])(two(3))
