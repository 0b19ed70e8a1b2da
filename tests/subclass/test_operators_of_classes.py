"""Python's operators that a class of tensors defines itself: they are the class's, as in eager mode, for wrappers and for what does not dispatch."""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from tests.subclasses import OneTensor, assert_same
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class _Wrapper(OneTensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inner_args, inner_kwargs = tree_map_only(_Wrapper, lambda t: t.inner, (args, kwargs))
        out = tree_map_only(torch.Tensor, cls, func(*inner_args, **inner_kwargs))
        return return_and_correct_aliasing(func, args, kwargs, out)


class _LeftOut:
    """An object of the program's that leaves operators to the other operand."""

    factor = 3.0

    def __add__(self, other: Any) -> Any:
        return NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other * self.factor


def _refusal(program: Callable) -> str:
    try:
        program()
    except TypeError as e:
        return type(e).__name__
    return "none"


def _added_to(a: Any, b: Any) -> Any:
    a += b
    return a


def _multiplied_by(a: Any, b: Any) -> Any:
    a @= b
    return a


def _counted_down(a: Any) -> tuple:
    times = 0
    while a:
        a, times = a - 1, times + 1
    return a, times


def _leaving(*_: Any) -> Any:
    return NotImplemented


# What a class has of its own, and what is done with a tensor of it and one of the class it derives from.
_OPERATORS: dict[str, tuple[dict[str, Any], Callable]] = {
    "sums": (
        {"__add__": lambda s, o: s * o, "__radd__": lambda s, o: s * o * 7},
        lambda a, b: (a + 1, 1 + a, a + b, b + a, sum([a, a]), functools.reduce(operator.add, [b, a]), operator.add(a, 2)),
    ),
    "reflected alone": (
        {"__rsub__": lambda s, o: s * 20, "__rtruediv__": lambda s, o: s * 30},
        lambda a, b: (1 - a, 1 / a, b - a, torch.ones(3) - a, a - 1),
    ),
    "in place": ({"__iadd__": lambda s, o: s * 50}, lambda a, b: (_added_to(a, 2), a + 1)),
    "in place, which is torch's": ({"__add__": lambda s, o: s * 9}, lambda a, b: (_added_to(a, 2), a + 1)),
    "in place, which torch has not": ({"__matmul__": lambda s, o: s * 9}, lambda a, b: (_multiplied_by(a, b), a @ b, b @ a)),
    "in place, left to the other": (
        {"__iadd__": _leaving, "__add__": lambda s, o: s * 4},
        lambda a, b: (_added_to(a, 3), a * 2),
    ),
    "left to the other": (
        {"__add__": _leaving},
        lambda a, b: (_refusal(lambda: a + 1), _refusal(lambda: a + a), a + _LeftOut(), a + b, b + a),
    ),
    "of objects and sequences": (
        {"__radd__": lambda s, o: s * 4, "__ror__": lambda s, o: s * 5, "__rmul__": lambda s, o: s * 6},
        lambda a, b: (_LeftOut() + a, [1] + a, "x" + a, {} | a, None + a, [1, 2] * a, _added_to([1], a)),
    ),
    "powers": (
        {"__pow__": lambda s, o, m=None: s * 2, "__rpow__": lambda s, o: s * 3, "__rdivmod__": lambda s, o: (s, o)},
        lambda a, b: (a**2, 2**a, pow(a, 2), pow(2, a), divmod(2, a)),
    ),
    "quotients": (
        {"__floordiv__": lambda s, o: s * 2, "__divmod__": lambda s, o: (s, o), "__mod__": lambda s, o: s * 7},
        lambda a, b: (a // 2, divmod(a, 3), a % 2),
    ),
    "signs": (
        {"__neg__": lambda s: s * 5, "__abs__": lambda s: s * 6, "__invert__": lambda s: s * 8, "__pos__": lambda s: s * 9},
        lambda a, b: (-a, abs(a), ~a, +a, operator.neg(a), operator.abs(a)),
    ),
    "roundings": (
        {"__round__": lambda s, n=0: s * (n + 2), "__trunc__": lambda s: s * 3},
        lambda a, b: (round(a), round(a, 2), a * 2),
    ),
    "super": ({"__add__": lambda s, o: super(type(s), s).__add__(o) * 2}, lambda a, b: (a + 1, a + b)),
    "orders": (
        {"__lt__": lambda s, o: s * 3, "__gt__": lambda s, o: s * 4},
        lambda a, b: (a < b, a > b, 3 < a, b < a, a <= b),
    ),
    "equality": (
        {"__eq__": lambda s, o: s is o, "__hash__": lambda s: 5},
        lambda a, b: (a == b, 3 == a, a in [b, a], [b, a].index(a), {a: 2}[a], hash(a), a != b),
    ),
    "a comparison left to Python": ({"__eq__": _leaving, "__hash__": lambda s: 3}, lambda a, b: (a == 3, a == a, a * 2)),
    "truth": (
        {"__bool__": lambda s: s.dtype is torch.float32},
        lambda a, b: (bool(a), not a, a and b, a or b, 1 if a else 2, all([a, a]), operator.truth(a), a * 2),
    ),
    "numbers": (
        {"__int__": lambda s: 1, "__float__": lambda s: 2.5, "__complex__": lambda s: 2j, "__index__": lambda s: 4},
        lambda a, b: (int(a), float(a), complex(a), operator.index(a), a * 2),
    ),
    "calls": ({"__call__": lambda s, x, k=1: s * x * k}, lambda a, b: (a(2), a(3, k=4), callable(a), callable(b))),
    "calls with arguments in lists and dicts": (
        {"__call__": lambda s, x, k=1: s * x * k},
        lambda a, b: (a(*[2]), a(*[3], **{"k": 4}), list(map(a, [1, 2])), list(itertools.starmap(a, [(1,), (2, 3)]))),
    ),
    "containers": (
        {"__contains__": lambda s, x: x == 3, "__reversed__": lambda s: [s * 2], "__getitem__": lambda s, i: s * len(i)},
        lambda a, b: (3 in a, 4 in a, operator.contains(a, 3), reversed(a), a["ab"]),
    ),
}


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
@pytest.mark.parametrize("base", [_Wrapper, torch.Tensor])
@pytest.mark.parametrize("name", _OPERATORS)
def test_operators_are_those_of_the_class(name: str, base: type, transform: type):
    members, program = _OPERATORS[name]
    cls = type("_Own", (base,), members)

    def given() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seeded(0))
        x, y = torch.rand(3) + 0.5, torch.rand(3)
        return (x.as_subclass(cls), y) if base is torch.Tensor else (cls(x), base(y))  # type: ignore[call-arg]

    jitted = thunder.jit(lambda a, b: program(a, b), transforms=[transform()])
    for _ in range(2):
        want, got = given(), given()
        assert_same(jitted(*got), program(*want))
        assert_same(got, want)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


@pytest.mark.parametrize("base", [_Wrapper, torch.Tensor])
def test_truth_that_is_no_truth_is_refused_as_python_does(base: type):
    cls = type("_Own", (base,), {"__bool__": lambda s: 3})
    x = torch.ones(2).as_subclass(cls) if base is torch.Tensor else cls(torch.ones(2))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="__bool__ should return bool"):
        thunder.jit(bool, transforms=[SubclassTransform()])(x)


@pytest.mark.parametrize("base", [_Wrapper, torch.Tensor])
@pytest.mark.parametrize("call", [lambda x: x(2), lambda x: x(*[2]), lambda x: x(**{"k": 2}), lambda x: list(map(x, [2]))])
def test_what_is_not_callable_is_so_in_pythons_words(call, base: type):
    def program(x):
        try:
            return call(x)
        except TypeError as e:
            return str(e), x * 2

    x = torch.ones(2) if base is torch.Tensor else base(torch.ones(2))
    assert_same(thunder.jit(program, transforms=[SubclassTransform()])(x), program(x))


def test_gradients_go_through_operators_of_the_class():
    cls = type("_Own", (_Wrapper,), {"__matmul__": lambda s, o: s.inner.square() @ o})
    x, y = (torch.tensor([0.5, 2.0], requires_grad=True) for _ in range(2))
    program = lambda x: cls(x) @ torch.ones(2)  # noqa: E731 - what is jitted
    thunder.jit(program, transforms=[SubclassTransform()])(x).backward()
    program(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
