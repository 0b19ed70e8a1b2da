"""What classes of tensors and the contexts of wrappers hold: lists, dicts, tensors and objects, which programs read and write as in eager mode."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.seeds import seeded
from tests.subclasses import OneTensor, assert_same
from thunder_norm.errors import AcquiredAnewWarning
from thunder_norm.transforms import SubclassTransform
import thunder


class _Options:
    def __init__(self):
        self.factor = 2.0
        self.met: list = []


class _Holding:
    """What a class holds."""

    names: list = []
    options: dict = {"factor": 2.0}
    table = torch.ones(3)
    tensors: list = [torch.ones(3) * 4]
    settings = _Options()
    count = 1

    def named(self, name: str) -> Any:
        self.names.append(name)
        return self

    @classmethod
    def begin_again(cls) -> None:
        """Let it hold what it held."""
        cls.names.clear()
        cls.options.clear()
        cls.options["factor"] = 2.0
        cls.table, cls.count = torch.ones(3), 1
        cls.tensors[:] = [torch.ones(3) * 4]
        vars(cls.settings).update(vars(_Options()))

    @classmethod
    def held(cls) -> list:
        """What it holds now."""
        return copy.deepcopy([cls.names, cls.options, cls.table, cls.tensors, vars(cls.settings), cls.count])


class _Wrapper(_Holding, OneTensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = tree_map_only(_Wrapper, lambda t: t.inner, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


class _Plain(_Holding, torch.Tensor):
    pass


def _set_on_class(x: Any) -> Any:
    type(x).count += 1
    return x * x.count


def _set_on_result(x: Any) -> Any:
    y = x * 2
    y.options["factor"] *= 2
    return y * x.options["factor"]


def _counted(x: Any) -> Any:
    x.options["factor"] = x.options["factor"] + 1
    return x * x.options["factor"]


def _object(x: Any) -> Any:
    x.settings.factor += 1
    x.settings.met.append(x.settings.factor)
    return x * x.settings.factor


def _kept(x: Any) -> Any:
    x.tensors.append(torch.ones(3) * 2)
    return x * x.tensors[-1]


_PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "a method appends": lambda x: x.named("a") * 2,
    "the program appends": lambda x: (x.names.append("b"), x * len(x.names))[1],
    "a dict is read": lambda x: x * x.options["factor"],
    "a dict is written": _counted,
    "by a result": _set_on_result,
    "tensors are read": lambda x: (x * x.table, x * x.tensors[0]),
    "a tensor is kept": _kept,
    "an object": _object,
    "the class itself": _set_on_class,
    "what is one": lambda x: (x.names is type(x).names, (x * 2).options is x.options, x.settings is type(x).settings),
}


@pytest.mark.parametrize("cls", [_Wrapper, _Plain])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_what_a_class_holds_is_read_and_written(name: str, cls: type):
    program = _PROGRAMS[name]
    outcomes = []
    for call in (program, thunder.jit(lambda x: program(x), transforms=[SubclassTransform()])):
        _Holding.begin_again()
        cls.begin_again()
        outcomes.append([])
        for seed in range(3):
            torch.manual_seed(seeded(seed))
            x = torch.rand(3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AcquiredAnewWarning)
                outcomes[-1].append([call(cls(x) if cls is _Wrapper else x.as_subclass(cls)), cls.held()])
    assert_same(outcomes[1], outcomes[0])


class _WithContext(OneTensor):
    """A wrapper whose context is data that programs may change."""

    def __init__(self, inner: torch.Tensor, data: Any):
        super().__init__(inner)
        self.data_ = data

    def __tensor_flatten__(self):
        return ["inner"], self.data_

    @classmethod
    def __tensor_unflatten__(cls, inner, data, size, stride):
        return cls(inner["inner"], data)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        data = next(t.data_ for t in tree_leaves(args) if isinstance(t, cls))
        inner = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, lambda t: cls(t, data), func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


def _number(x: Any) -> Any:
    x.data_["n"] += 1
    return x * x.data_["n"], x.data_


def _of_result(x: Any) -> Any:
    y = x * 2
    y.data_["k"] = 5
    return y, x.data_, y.data_ is x.data_


def _inside(x: Any) -> Any:
    x.data_["in"][0].append(2)
    return x + 1, (x + 1).data_["in"][0][-1]


def _made_of_its_own(x: Any) -> Any:
    data = {"n": 1}
    w = _WithContext(x.inner, data)
    data["n"] = 2
    v = w * w.data_["n"]
    w.data_["k"] = 3
    return w, v, data, w.data_ is data


def _of_another_type(x: Any) -> Any:
    w = _WithContext(x.inner, collections.OrderedDict(a=1))
    return w * 2, type(w.data_).__name__


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": _number,
    "by a result": _of_result,
    "what is inside": _inside,
    "what the program makes": _made_of_its_own,
    "a class of dicts": _of_another_type,
    "read alone": lambda x: (x * x.data_["n"], list(x.data_), {**x.data_}),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", _CHANGES)
def test_contexts_are_read_and_written(name: str, requires_grad: bool):
    program = _CHANGES[name]
    jitted = thunder.jit(lambda x: program(x), transforms=[SubclassTransform()])
    for n in (1, 1, 4):
        torch.manual_seed(seeded(n))
        given = [_WithContext(t, {"n": n, "in": [[1]]}).requires_grad_(requires_grad) for t in torch.rand(1, 3).repeat(2, 1)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AcquiredAnewWarning)
            got, want = jitted(given[0]), program(given[1])
        assert_same(got, want)
        assert_same(given[0], given[1])
        assert got[0].requires_grad == want[0].requires_grad
        if want[0].requires_grad:
            (got_one,), (want_one,) = (torch.autograd.grad(y[0].sum(), x) for y, x in zip((got, want), given, strict=True))
            assert_same(got_one, want_one)
