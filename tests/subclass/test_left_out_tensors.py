"""Attributes that a class leaves out of what it flattens, or has a default for: tensors, numbers, functions, of wrappers inside others too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.seeds import seeded
from tests.subclasses import OneTensor, assert_same
from thunder_norm.transforms import SubclassTransform
import thunder


class Noted(OneTensor):
    """Its operations read what somebody has noted on it, which its class says is nothing, and does not flatten."""

    note: Any = None

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride(), requires_grad=inner.requires_grad
        )

    def total(self):
        result = self.inner
        if callable(self.note):
            return self.note(result)
        for part in tree_leaves(self.note):
            if part is not None:
                result = result + part if isinstance(part, torch.Tensor) else result * part
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*tree_map_only(Noted, Noted.total, args), **tree_map_only(Noted, Noted.total, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, out)


class NotedEach(Noted):
    """Every one of them starts with a note of its own."""

    def __init__(self, inner):
        super().__init__(inner)
        self.note = None


def read(x):
    return x.total()


def in_an_operation(x):
    return x * 2


def in_both(x):
    return (x * 2).inner + x.total() + (x * 3).inner


def in_an_operation_on_what_holds_it(x):
    return (x * 2).inner


def read_inside(x):
    return x.inner.total()


def _add_one(t):
    return t + 1


_ONES = torch.ones(3)
NOTES: dict[str, tuple] = {
    "numbers": (None, 3, 4, None),
    "tensors": (None, _ONES * 2, _ONES * 5, None),
    "tuples": ((_ONES, None), (None, _ONES), (_ONES * 2, None), None),
    "dicts": ({"a": _ONES}, {"b": _ONES * 2}, {"a": _ONES * 3}),
    "functions": (None, _add_one, torch.neg, None),
    "tensors that require grad": (None, (_ONES * 1).requires_grad_(), _ONES * 3, (_ONES * 2).requires_grad_()),
    "of two dtypes": (_ONES, _ONES.double(), 2, _ONES * 4),
}


def _plain(t: Any) -> torch.Tensor:
    while isinstance(t, Noted):
        t = t.inner
    return t


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("notes", NOTES)
@pytest.mark.parametrize("function", [read, in_an_operation, in_both, in_an_operation_on_what_holds_it, read_inside])
@pytest.mark.parametrize("kind", [Noted, NotedEach])
def test_each_call_finds_its_own(kind: type, function: Callable, notes: str, is_reversed: bool):
    jitted = thunder.jit(function, transforms=[SubclassTransform()])
    torch.manual_seed(seeded(0))
    for note in NOTES[notes][:: -1 if is_reversed else 1]:
        x = kind(torch.randn(3))
        if note is not None:
            x.note = note
        given = kind(x) if function in (in_an_operation_on_what_holds_it, read_inside) else x
        want, got = function(given), jitted(given)
        assert type(got) is type(want) and got.requires_grad == want.requires_grad
        assert _plain(got).dtype == _plain(want).dtype
        torch.testing.assert_close(_plain(got), _plain(want))
        if want.requires_grad:
            torch.testing.assert_close(
                torch.autograd.grad(got.sum(), note), torch.autograd.grad(want.sum(), note), check_layout=False
            )


def keep(x):
    x.note["twice"] = (x * 2).inner
    return x.note["a"] + x.total()


def test_a_dict_that_is_written_into_keeps_what_is_written():
    made = [Noted(torch.arange(3.0)) for _ in range(2)]
    for x in made:
        x.note = {"a": torch.ones(3)}
    want, got = keep(made[0]), thunder.jit(keep, transforms=[SubclassTransform()])(made[1])
    torch.testing.assert_close(got, want)
    assert list(made[0].note) == list(made[1].note)
    torch.testing.assert_close(made[1].note["twice"], made[0].note["twice"])


class LeavesNotes(Noted):
    """Its operations leave something in their results."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def noted(t: torch.Tensor) -> torch.Tensor:
            out = cls(t)
            out.note, out.made_by, out.letters = (t * 10, None), {"op": func.__name__, "sizes": [1, 2]}, ("a", "b")
            out.largest = t.amax()
            return out

        plain = tree_map_only(Noted, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, noted, func(*plain[0], **plain[1]))


class LeavesNotesAnew(LeavesNotes):
    """Starts with attributes that its operations set anew."""

    def __init__(self, inner):
        super().__init__(inner)
        self.note, self.square = None, inner * inner


class Caching(Noted):
    """Its operations keep in their arguments what they compute once."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        for x in (a for a in args if isinstance(a, Noted) and a.note is None):
            x.note, x.count = x.inner * 10, 1
        plain = tree_map_only(Noted, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*plain[0], **plain[1]))


def one(x):
    return x * 2


def with_the_input(x):
    return (x * 2) + 1, x


def read_of_a_result(x):
    y = x * 2
    return y.note, y


def set_anew(x):
    y = x * 2
    y.note = "mine"
    return y, [x.sum()]


def _described(value: Any) -> Any:
    if isinstance(value, Noted):
        return type(value).__name__, {k: _described(v) for k, v in sorted(vars(value).items())}
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return [_described(v) for v in value]
    return {k: _described(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", [one, with_the_input, read_of_a_result, set_anew])
@pytest.mark.parametrize("kind", [LeavesNotes, LeavesNotesAnew, Caching])
def test_what_operations_leave_is_there_after_the_call(kind: type, function: Callable, requires_grad: bool):
    jitted = thunder.jit(function, transforms=[SubclassTransform()])
    for inner in torch.arange(6.0).reshape(2, 3):
        given = [kind(inner.clone()) for _ in range(2)]
        if requires_grad:
            for x in given:
                x.requires_grad_()
        want, got = function(given[0]), jitted(given[1])
        assert_same(_described([got, given[1]]), _described([want, given[0]]))
    assert thunder.cache_misses(jitted) == 1
