"""Tensors of classes that do not dispatch which a program makes itself, and what it does with them: eager mode's answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import crossed, seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


class Simple(torch.Tensor):
    factor = 3.0

    def double(self):  # torch's converts to float64
        return self * self.factor

    @property
    def label(self):
        return self.__dict__.get("_label", "?")

    @label.setter
    def label(self, value):
        self._label = value + "!"


class Unit(Simple):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.unit = next((getattr(a, "unit", "none") for a in args if isinstance(a, cls)), "none")
        return result


class Meta(torch.Tensor):
    """As torch's notes on extending it have it: unwrapped by hand, and made anew."""

    @staticmethod
    def __new__(cls, data, meta=None, **options):
        return torch.as_tensor(data, **options).as_subclass(cls)

    def __init__(self, data, meta=None, **options):
        self.meta = meta

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        metas = [a.meta for a in args if hasattr(a, "meta")]
        args = [a.as_subclass(torch.Tensor) if isinstance(a, Meta) else a for a in args]
        result = func(*args, **(kwargs or {}))
        return Meta(result, meta=metas[0]) if isinstance(result, torch.Tensor) else result


class Made(torch.Tensor):
    def __new__(cls, data, tag="x"):
        made = super().__new__(cls, data)
        made.tag = tag
        return made


class Detached(torch.Tensor):
    @staticmethod
    def __new__(cls, data, tag):
        return torch.Tensor._make_subclass(cls, data)

    def __init__(self, data, tag):
        self.tag = tag

    def __getattr__(self, name):
        if name == "other":
            return self.tag + self.tag
        raise AttributeError(name)


class Operators(torch.Tensor):
    def __add__(self, other):
        return torch.Tensor.__sub__(self, other)

    def __rmul__(self, other):
        return self + 10

    def __neg__(self):
        return self * 7

    def __getitem__(self, at):
        return self * 3

    def __iadd__(self, other):
        return self * 100

    def __eq__(self, other):
        return "equal"

    def __contains__(self, other):
        return True

    def __len__(self):
        return 42

    __hash__ = torch.Tensor.__hash__


class Members(torch.Tensor):
    def __iter__(self):
        return iter([1, 2])

    def __hash__(self):
        return 3

    def __setattr__(self, name, value):
        super().__setattr__(name, (value, "set"))

    @functools.cached_property
    def total(self):
        return self.sum()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Scalar:
    """No tensor: a multiple of the identity."""

    def __init__(self, n, value):
        self.n, self.value = n, value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.mean:
            return args[0].value / args[0].n
        args = [a.value * torch.eye(a.n) if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))


CLASSES = {
    "plain": lambda x: x,
    "simple": lambda x: x.as_subclass(Simple),
    "unit": lambda x: x.as_subclass(Unit),
    "meta": lambda x: Meta(x, meta="m"),
    "operators": lambda x: x.as_subclass(Operators),
}


def made(x):
    y = x.as_subclass(torch.Tensor)
    return (
        Simple(y) * 2,
        Simple([1.0, 2.0]),
        Simple(y.as_subclass(Unit)),
        Made(y),
        Made(y, "z") * 2,
        Detached(y, "a"),
        Meta(y * 2, meta="b"),
    )


def viewed(x):
    return x.as_subclass(Simple), x.as_subclass(Simple).double(), x.as_subclass(torch.Tensor) * 2, x.as_subclass(Unit) + 1, x


def operators(x):
    z = x * 1
    z += 2
    y = x.as_subclass(torch.Tensor)
    return x + y, y + x, y - x, y * x, 2 * x, -x, x[0], len(x), 3 in x, z, x.mT @ x, abs(x), x**2, 2**x


def comparisons(x):
    y = x.as_subclass(torch.Tensor) * 2
    return x > 0, 0 > x, x <= y, x == y, y == x, x != y, x == 3, x == None  # noqa: E711 - what a class says to it


def attributes(x):
    y = x.as_subclass(Unit) * 1
    y.label, z = "a", Detached(x, "t")
    return y, y.label, dict(vars(y)), z.other, getattr(z, "another", "none"), hasattr(y, "unit"), y.shape


def in_place(x):
    y = x.as_subclass(Simple) * 2
    z = y.add_(1)
    y.view(-1)[0] = 5
    return y, z, y is z


def written(x):
    y = x.as_subclass(torch.Tensor)
    y.add_(1)
    x.mul_(2)
    return x, y, [type(row).__name__ for row in x]


def inside(x):
    return {"a": [x * 2, (x.as_subclass(Unit) + 1,)], "b": x}


def functions(x):
    return torch.func.grad(lambda t: t.sin().sum())(x), torch.func.vmap(lambda t: t * 2)(x), torch.autograd.grad((x * x).sum(), x)


def disabled(x):
    with torch._C.DisableTorchFunctionSubclass():
        y = x * 2
    return y, x * 3


def no_tensor(x):
    scalar = Scalar(3, 2.0)
    return torch.add(scalar, x), torch.mean(scalar), torch.matmul(x, scalar)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    others: list


@torch.jit.script
def scripted(x: torch.Tensor):
    return x * 2


def held(x):
    y = x.as_subclass(Unit) * 2
    pair = Pair(y, [x.as_subclass(Simple) + 1])
    return pair.first, pair.others, vars(pair)["others"], [vars(p) for p in [Pair(y, [x * 3])]]


def leaves(x):
    return x.detach().requires_grad_(), torch.Tensor._make_subclass(Simple, x.detach(), True), Simple(x.detach()).requires_grad_()


def written_in_c(x):
    y = x * 1
    return torch.exp_(y), scripted(x), y * 2


PROGRAMS = [
    made,
    viewed,
    operators,
    comparisons,
    attributes,
    in_place,
    written,
    inside,
    functions,
    disabled,
    no_tensor,
    held,
    leaves,
    written_in_c,
]


def given(kind: str, requires_grad: bool) -> torch.Tensor:
    torch.manual_seed(seeded(0))
    return CLASSES[kind](torch.randn(3, 3)).detach().requires_grad_(requires_grad)


def outcome(f: Callable, kind: str, requires_grad: bool) -> Any:
    """What a program returns, and the gradients of its input."""
    x = given(kind, requires_grad)
    found = f(x)
    tensors = [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        followed = [t.as_subclass(torch.Tensor) for t in tensors if t.requires_grad and t is not x]
        known = [(vars(t), t.requires_grad, t.is_leaf, t is x) for t in tensors]
        if followed:
            sum(t.square().sum() for t in followed).backward()
        return found, known, x.grad


@pytest.mark.parametrize(
    ("program", "kind", "requires_grad"),
    [
        (p, "unit" if p in (functions, written_in_c) and kind == "meta" else kind, p is functions or (r and p is not written))
        for p, kind, r in crossed(PROGRAMS, CLASSES, [False, True])
    ],
)
def test_eager_mode_is_met(program: Callable, kind: str, requires_grad: bool):
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(outcome(jitted, kind, requires_grad), outcome(program, kind, requires_grad))


@pytest.mark.parametrize("transform", [NormTransform, CheckpointTransform])
@pytest.mark.parametrize("program", [made, viewed, operators, comparisons, inside])
def test_under_other_transforms(program: Callable, transform: type):
    jitted = thunder.jit(program, transforms=[transform()])
    for kind in ("simple", "plain", "simple"):
        assert_same(outcome(jitted, kind, True), outcome(program, kind, True))


def test_what_is_kept_is_of_the_class():
    class Holder(nn.Module):
        def forward(self, x):
            self.seen = x * 2
            self.several = [x + 1, x]
            return x.sum()

    for f in (holder := Holder(), thunder.jit(other := Holder(), transforms=[SubclassTransform()])):
        assert_same(f(given("unit", False)), given("unit", False).sum())
    assert_same((other.seen, other.several, vars(other.seen)), (holder.seen, holder.several, vars(holder.seen)))


def test_the_computation_has_plain_tensors():
    jitted = thunder.jit(lambda x: (x * 2).double(), transforms=[SubclassTransform()])
    jitted(given("unit", False))
    jitted(given("unit", False))
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)
    assert "as_plain_tensor" in str(thunder.last_traces(jitted)[-1])
    assert "as_Unit" in str(thunder.compile_stats(jitted).last_epilogue_traces[-1])


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (lambda x: x.as_subclass(TwoTensor), UnsupportedSubclassError),
        (lambda x: x.as_subclass(int), TypeError),
        (lambda x: TwoTensor(x.as_subclass(Simple), x), UnsupportedSubclassError),
        (lambda x: TwoTensor(x, x) + x.as_subclass(Unit), UnsupportedSubclassError),
    ],
)
def test_refused(program: Callable, error: type[Exception]):
    with pytest.raises(error):
        thunder.jit(program, transforms=[SubclassTransform()])(torch.ones(2))


def test_special_methods_and_what_meets_none_of_a_class():
    def program(x):
        y = x.as_subclass(Members) * 2
        function = Twice.apply(x.as_subclass(torch.Tensor)).as_subclass(Simple)
        with torch._C.DisableTorchFunctionSubclass():
            beside = TwoTensor(x, x) + x.as_subclass(Simple)
        return list(y), [*y], hash(y), function, beside

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(jitted(torch.ones(2)), program(torch.ones(2)))


def test_functions_in_c_are_told():
    class Telling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            return (result, func.__name__) if func in (torch.relu_, torch._foreach_add) else result

    def program(x):
        y = x.as_subclass(Telling) * 1
        return torch.relu_(y), torch._foreach_add([y], 1)

    assert_same(thunder.jit(program, transforms=[SubclassTransform()])(torch.ones(2)), program(torch.ones(2)))


def test_classes_that_do_not_answer():
    class One(torch.Tensor):
        pass

    class Two(torch.Tensor):
        pass

    def program(x, y):
        return x + y

    args = torch.ones(2).as_subclass(One), torch.ones(2).as_subclass(Two)
    for f in (program, thunder.jit(program, transforms=[SubclassTransform()])):
        with pytest.raises(TypeError):
            f(*args)


def test_errors_name_the_line_of_the_program():
    def program(x):
        return x.mul_(2)  # the line

    with pytest.raises(UnsupportedOpError, match="x.mul_\\(2\\)  # the line"):
        thunder.jit(program, transforms=[CheckpointTransform()])(given("simple", True))
