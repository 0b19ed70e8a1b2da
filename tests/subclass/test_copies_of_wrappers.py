"""``copy.copy`` and ``copy.deepcopy`` of wrappers: torch copies what an object holds, whatever its class does with a clone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing._internal.custom_tensor import ConstantExtraMetadataTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import EscapeError
from thunder_norm.transforms import SubclassTransform
import thunder


class _Doubled(torch.Tensor):
    """A clone counts itself, and has twice what there was."""

    def __new__(cls, a, clones=0):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)

    def __init__(self, a, clones=0):
        self.a, self.clones = a, clones

    def __tensor_flatten__(self):
        return ["a"], self.clones

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["a"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain, named = tree_map_only(_Doubled, lambda t: t.a, (args, kwargs or {}))
        clones = max(t.clones for t in tree_leaves((args, kwargs)) if isinstance(t, cls))
        if func is torch.ops.aten.clone.default:
            return cls(plain[0] * 2, clones + 1)
        return tree_map_only(torch.Tensor, lambda t: cls(t, clones), func(*plain, **named))


class _Own(_Doubled):
    def __deepcopy__(self, memo):
        return type(self)(copy.deepcopy(self.a, memo), self.clones + 10)

    def __copy__(self):
        return type(self)(self.a, self.clones + 100)


class _Told(_Doubled):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__:
            return cls(args[0].a + 1, 7)
        return super().__torch_function__(func, types, args, kwargs or {})


def deep(x):
    y = copy.deepcopy(x)
    return y, y * 2, y.requires_grad, y.is_leaf


def written(x):
    y = copy.deepcopy(x)
    y.mul_(2)
    return y, x * 1


def copied_twice(x):
    y, z = copy.deepcopy([x, x])
    return y is z, y


def with_what_is_inside(x):
    y, a = copy.deepcopy((x, x.a))
    a.add_(1)
    return y * 1, a


def with_attributes(x):
    x.note = [1, 2]
    y = copy.deepcopy(x)
    return y.note, y


def made_inside(x):
    return copy.deepcopy(type(x)(x.a * 2, 3))


def shallow(x):
    y = copy.copy(x.detach())
    y.mul_(2)
    return y, x * 1


def around_the_very_tensors(x):
    y = copy.copy(x)
    y.a.add_(1)
    return y.a is x.a, y is x, y, x * 1


def around_what_is_made(x):
    return around_the_very_tensors(x * 2)


def around_the_very_lists(x):
    y = copy.copy(x)
    y.labels.append("more")
    y.note = 5
    return y.labels is x.labels, x.labels, y.labels, y.note, x.note


@pytest.mark.parametrize("cls", [_Doubled, _Own, _Told])
@pytest.mark.parametrize(
    "program",
    [
        deep,
        written,
        copied_twice,
        with_what_is_inside,
        with_attributes,
        made_inside,
        shallow,
        around_the_very_tensors,
        around_what_is_made,
        around_the_very_lists,
    ],
)
def test_copies_are_eagers(program, cls):
    outcomes = []
    for call in (program, thunder.jit(program, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        x = cls(torch.randn(3, 4), 3)
        x.labels, x.note = ["one"], 3
        try:
            outcomes.append((call(x), x, x.labels))
        except AttributeError as e:  # a class that makes another object does not hand attributes on
            outcomes.append(str(e))
    assert_same(*outcomes)


@pytest.mark.parametrize("program", [deep, copied_twice])
def test_a_copy_of_what_requires_grad_is_a_leaf_with_its_gradient(program):
    torch.manual_seed(seeded(1))
    x = _Doubled(torch.randn(3, 4), 3).requires_grad_()
    x.grad = _Doubled(torch.randn(3, 4), 5)
    jf = thunder.jit(lambda x: (program(x), copy.deepcopy(x).grad * 2), transforms=[SubclassTransform()])
    assert_same(jf(x), (program(x), copy.deepcopy(x).grad * 2))


def test_a_number_that_the_program_changes_is_in_the_copy():
    def program(x):
        x.add_constant(2)
        y = copy.deepcopy(x)
        return y, y.constant_attribute

    made = lambda: ConstantExtraMetadataTensor(torch.ones(3))  # noqa: E731
    assert_same(thunder.jit(program, transforms=[SubclassTransform()])(made()), program(made()))


def test_quantised_weights_are_not_quantised_anew():
    torch.manual_seed(seeded(2))
    weight = to_nf4(torch.randn(128, 128), 64, 256)
    jf = thunder.jit(lambda w: copy.deepcopy(w), transforms=[SubclassTransform()])
    assert_same(jf(weight), copy.deepcopy(weight))


def test_a_shallow_copy_is_no_operation():
    class NoView(_Doubled):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.view.default:
                raise ValueError("no views of these")
            return super().__torch_dispatch__(func, types, args, kwargs)

    x = NoView(torch.ones(3))
    jf = thunder.jit(lambda x: copy.copy(x).a * 2, transforms=[SubclassTransform()])
    assert_same(jf(x), copy.copy(x).a * 2)


def test_two_inner_tensors_in_one_memory_are_refused():
    a = torch.ones(3)
    with pytest.raises(EscapeError, match="several tensors in one memory"):
        thunder.jit(lambda x: copy.deepcopy(x), transforms=[SubclassTransform()])(TwoTensor(a, a))
