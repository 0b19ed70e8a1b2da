"""Values that Python's or torch's own C code looks into, and no code that a trace follows: another one is another trace."""

from __future__ import annotations

import contextvars
import copy
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from thunder_norm.transforms import SubclassTransform
import thunder

X = torch.arange(12.0).view(3, 4)


class Formatted:
    def __init__(self, n: int):
        self.n = n

    def __format__(self, specification: str) -> str:
        return specification + "z" * self.n


class Named:
    def __init__(self, n: int):
        self.n = n

    def __str__(self) -> str:
        return "y" * self.n


class Shown(Named):
    def __repr__(self) -> str:
        return "x" * self.n


class Several:
    def __init__(self, *n: int):
        self.n = list(n)

    def __iter__(self) -> Iterator[int]:
        return iter(self.n)

    def __len__(self) -> int:
        return len(self.n)

    def __getitem__(self, i: int) -> int:
        return self.n[i]


@dataclass
class Record:
    n: int


def attention(v: SDPBackend, x: torch.Tensor) -> torch.Tensor:
    heads = x[None, None]  # four dimensions: flash attention of torch 2.11 takes no fewer
    with sdpa_kernel(v):
        return F.scaled_dot_product_attention(heads, heads, heads)[0] * (2 if v == SDPBackend.MATH else 3)


# what a program does with a value, and two values
CASES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Any, Any]] = {
    "enum of C++": (attention, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    "context variable": (
        lambda v, x: x * v.get(),
        contextvars.ContextVar("v", default=2),
        contextvars.ContextVar("w", default=3),
    ),
    "values of a dict": (lambda v, x: x * sum(v), {"a": 1}.values(), {"a": 2}.values()),
    "items of a dict": (lambda v, x: x * sum(n for _, n in v), {"a": 1}.items(), {"a": 2}.items()),
    "items of a dict in another": (lambda v, x: x * {"m": 1, **v}["n"], {"n": 2}, {"n": 3}),
    "items of a dict beside others": (lambda v, x: x * {**v, "m": 1}["n"], {"n": 2, "m": 5}, {"n": 3, "m": 5}),
    "items of an ordered dict in another": (lambda v, x: x * {**v}["n"], OrderedDict(n=2), OrderedDict(n=3)),
    "number of items of a dict in another": (lambda v, x: x * len({**v}), {"n": 2}, {"n": 2, "m": 3}),
    "elements of a list in a set": (lambda v, x: x * sum({*v}), [1, 2], [1, 3]),
    "number of elements of a list in a set": (lambda v, x: x * len({*v, 1}), [1, 2], [1, 2, 3]),
    "what an object iterates over, summed": (lambda v, x: x * sum(v), Several(1, 2), Several(1, 3)),
    "what an object iterates over, in a set": (lambda v, x: x * sum(set(v)), Several(1, 2), Several(1, 3)),
    "what an object iterates over, in a chain": (lambda v, x: x * [*itertools.chain(v)][1], Several(1, 2), Several(1, 3)),
    "what an object has": (lambda v, x: x * (2 + operator.countOf(v, 2)), Several(1, 2), Several(1, 3)),
    "a list in a tensor": (lambda v, x: x * torch.Tensor(v)[1], [1.0, 2.0], [1.0, 3.0]),
    "a list in a tensor of a type": (lambda v, x: x * torch.FloatTensor([v])[0, 1], [1.0, 2.0], [1.0, 3.0]),
    "a namespace that is compared": (
        lambda v, x: x * (2 if v == SimpleNamespace(n=1) else 3),
        SimpleNamespace(n=1),
        SimpleNamespace(n=2),
    ),
    "a namespace in a list": (
        lambda v, x: x * (2 if v in [SimpleNamespace(n=1)] else 3),
        SimpleNamespace(n=1),
        SimpleNamespace(n=2),
    ),
    "a namespace as a word": (
        lambda v, x: x * (2 if str(v) == "namespace(n=1)" else 3),
        SimpleNamespace(n=1),
        SimpleNamespace(n=2),
    ),
    "records in lists": (lambda v, x: x * (2 if [v] == [Record(1)] else 3), Record(1), Record(2)),
    "a copy of a record": (lambda v, x: x * copy.deepcopy(v).n, Record(1), Record(2)),
    "f-string": (lambda v, x: x * len(f"{v}"), Formatted(1), Formatted(2)),
    "f-string with a specification": (lambda v, x: x * len(f"{v:ab}"), Formatted(1), Formatted(2)),
    "f-string of a string": (lambda v, x: x * len(f"{v}"), Named(1), Named(2)),
    "f-string of a string, by name": (lambda v, x: x * len(f"{v!s:>9}" + f"{v!s}"), Named(1), Named(2)),
    "f-string of what it is": (lambda v, x: x * len(f"{v!r}"), Shown(1), Shown(2)),
    "f-string of a list": (lambda v, x: x * len(f"{v}"), [1, (2, 3)], [1, (2, 33)]),
    "f-string of a number": (lambda v, x: x * len(f"{v:.3}{v}"), 2.5, 2.25),
    "format": (lambda v, x: x * len(format(v)), Named(1), Named(2)),
    "format with a specification": (lambda v, x: x * len(format(v, "q")), Formatted(1), Formatted(2)),
    "format of a word": (lambda v, x: x * len("{} {}".format(1, v)), Formatted(1), Formatted(2)),  # noqa: UP032
    "format of a word, a string": (lambda v, x: x * len("{}".format(v)), Named(1), Named(2)),  # noqa: UP032
    "percent": (lambda v, x: x * len("%s" % v), Named(1), Named(2)),  # noqa: UP031
}


@pytest.mark.parametrize("name", CASES)
def test_another_value_is_another_trace(name: str):
    use, one, other = CASES[name]
    of_argument, of_attribute = (thunder.jit(f, transforms=[SubclassTransform()]) for f in (use, lambda o, x: use(o.v, x)))
    assert not torch.equal(use(one, X), use(other, X))
    for value in (one, other, one, other):
        torch.testing.assert_close(of_argument(value, X), use(value, X))
        torch.testing.assert_close(of_attribute(SimpleNamespace(v=value), X), use(value, X))
    assert (thunder.cache_misses(of_argument), thunder.cache_hits(of_argument)) == (2, 2)


HELD = {"w": torch.ones(3, 4)}


def test_a_tensor_of_a_dict_in_another_is_the_one_that_is_there() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return {"x": x, **HELD}["w"] * x

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    torch.testing.assert_close(jf(X), X)
    HELD["w"] = torch.full((3, 4), 2.0)
    torch.testing.assert_close(jf(X), 2 * X)


class AnswersNothing:
    """As libraries do that hand calls on to another one: whatever it is asked for raises an error of its own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name}")


_NOTHING = AnswersNothing()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1 if (1, _NOTHING) in [(2, _NOTHING)] else x * 3,
        lambda x: x + 1 if {(1, _NOTHING): 1}.get((1, _NOTHING)) else x * 3,
        lambda x: sorted([(2, _NOTHING), (1, _NOTHING)])[0][0] * x,
    ],
)
def test_objects_that_answer_nothing_stand_in_what_is_compared(function: Callable):
    x = torch.ones(2)
    assert torch.equal(thunder.jit(function, transforms=[SubclassTransform()])(x), function(x))
