"""What `__tensor_flatten__` returns beside the inner tensors: of any type, kept by results, guarded."""

from __future__ import annotations

import copy
import dataclasses
import enum
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from thunder_norm.transforms import SubclassTransform
import thunder


class Labelled(torch.Tensor):
    """A tensor with a context of any type, that each result inherits from the first argument that has one."""

    value: torch.Tensor
    context: Any

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: torch.Tensor, context: Any):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, strides=value.stride(), dtype=value.dtype)

    def __init__(self, value: torch.Tensor, context: Any):
        self.value, self.context = value, context

    def __tensor_flatten__(self):
        return ["value"], self.context

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return Labelled(inner["value"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        context = args[0].context
        args, kwargs = tree_map_only(Labelled, lambda x: x.value, (args, kwargs or {}))
        return Labelled(func(*args, **kwargs), context)


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


@dataclasses.dataclass(frozen=True)
class Block:
    size: int
    names: tuple[str, ...]


CONTEXTS = {
    "none": (None, 0),
    "bool": (True, False),
    "int": (3, 4),
    "float": (0.5, float("inf")),
    "str": ("a", "b"),
    "list": ([1, 2], [1, 3]),
    "tuple": ((1, None), (1, 2)),
    "dict": ({"a": 1, "b": [2.0]}, {"a": 1, "b": [3.0]}),
    "nested": (({"a": (1, [2, {"c": None}])}, "x"), ({"a": (1, [2, {"c": 0}])}, "x")),
    "dtype": (torch.int8, torch.int16),
    "device and size": ((torch.device("cpu"), torch.Size([2])), (torch.device("meta"), torch.Size([2]))),
    "enum": (Kind.FIRST, Kind.SECOND),
    "dataclass": (Block(2, ("x",)), Block(2, ("y",))),
    "class": (Labelled, torch.Tensor),
    "keys in another order": ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_are_kept_and_guarded(name: str):
    first, second = CONTEXTS[name]
    jitted = thunder.jit(lambda x: (x * 2, x.sin().t()), transforms=[SubclassTransform()])
    value = torch.randn(2, 3)
    for context, misses in ((first, 1), (copy.deepcopy(first), 1), (second, 2), (first, 2), (second, 2)):
        for got, want in zip(jitted(Labelled(value, context)), (value * 2, value.sin().t()), strict=True):
            assert type(got) is Labelled and got.context == context and type(got.context) is type(context)
            torch.testing.assert_close(got.value, want)
        assert thunder.cache_misses(jitted) == misses


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_of_parameters_are_guarded(name: str):
    model = torch.nn.Linear(3, 2, bias=False)
    jitted = thunder.jit(lambda x: x @ model.weight, transforms=[SubclassTransform()])
    x = Labelled(torch.randn(4, 2), "input")
    for misses, context in enumerate(CONTEXTS[name], start=1):
        weight = torch.randn(2, 3)
        model.weight = torch.nn.Parameter(Labelled(weight, context), requires_grad=False)
        for _ in range(2):
            y = jitted(x)
            assert y.context == "input" and thunder.cache_misses(jitted) == misses
            torch.testing.assert_close(y.value, x.value @ weight)


def test_a_context_read_by_the_program_decides_its_branch():
    jitted = thunder.jit(lambda x: x + 1 if x.context["sign"] > 0 else x - 1, transforms=[SubclassTransform()])
    for sign in (1, -1, 1):
        value = torch.randn(3)
        torch.testing.assert_close(jitted(Labelled(value, {"sign": sign})).value, value + sign)
