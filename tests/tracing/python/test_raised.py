"""Exceptions of a traced program have the contexts and tracebacks that they have in eager mode, and hold its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from thunder_norm.transforms import NormTransform
import thunder

PROGRAMS: list[Callable] = []


def program(f: Callable) -> Callable:
    PROGRAMS.append(f)
    return f


def chain(e: BaseException | None) -> list[str]:
    found = []
    while e is not None and len(found) < 9:
        found.append(repr(e))
        e = e.__context__
    return found


@program
def raised_again_elsewhere(x):
    seen, kept = [], ValueError(1)
    for kind in (KeyError, IndexError):
        try:
            try:
                raise kind
            except LookupError:
                raise kept  # noqa: B904 - its context is looked at
        except ValueError as e:
            seen.append(chain(e))
    return x, seen


@program
def raised_again_inside(x):
    seen, inner = [], None
    try:
        raise KeyError(1)
    except KeyError as outer:
        try:
            try:
                raise ValueError(2)
            except ValueError as e:
                inner = e
                raise outer  # noqa: B904 - its context is looked at
        except KeyError as e:
            seen.append((chain(e), chain(inner)))
    return x, seen


@program
def thrown_where_another_is_handled(x):
    seen = []

    def waits():
        try:
            yield x
        except ValueError as e:
            seen.append(chain(e))
            raise KeyError(3) from None

    generator = waits()
    next(generator)
    try:
        try:
            raise IndexError
        except IndexError:
            generator.throw(ValueError)
    except KeyError as e:
        seen.append(chain(e))
    return x, seen


@program
def handled_in_a_generator(x):
    seen = []

    def waits():
        try:
            raise KeyError(1)
        except KeyError:
            yield x
            try:
                raise
            except KeyError as e:
                seen.append(chain(e))
        try:
            raise IndexError(9)
        except IndexError as e:
            seen.append(chain(e))
        yield x

    generator = waits()
    next(generator)
    try:
        raise OSError(3)
    except OSError as e:
        seen.append(chain(e))
        next(generator)
    return x, seen


@program
def left_with_a_traceback(x):
    seen: list[Any] = []

    class Left:
        def __enter__(self):
            return self

        def __exit__(self, kind, e, tb):
            places = []
            while tb is not None:
                places.append(tb.tb_lineno)
                tb = tb.tb_next
            seen.append(places)
            return True

    def deep(n):
        if n == 0:
            raise KeyError(n)
        deep(n - 1)

    with Left():
        raise ValueError
    with Left():
        deep(2)
    with Left(), contextlib.suppress(KeyError):
        try:
            deep(0)
        except KeyError:
            raise
        finally:
            seen.append("finally")
            raise IndexError
    return x, seen


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_contexts_and_tracebacks_are_those_of_eager_mode(function):
    x = torch.tensor([1.0, 2.0])
    found, seen = thunder.jit(function, transforms=[NormTransform()])(x)
    expected, expected_seen = function(x)
    assert torch.equal(found, expected) and seen == expected_seen


class Told(Exception):
    pass


def in_an_attribute(x):
    e = Told(1)
    e.value = {"of": [x + 1]}
    raise e


def in_the_cause(x):
    raise Told(1) from Told(x + 1)


@pytest.mark.parametrize(
    "held",
    [lambda x: (_ for _ in ()).throw(Told([x * 2])), in_an_attribute, in_the_cause],
    ids=["arguments", "an attribute", "the cause"],
)
def test_an_exception_holds_tensors(held):
    def at(e: Any) -> torch.Tensor:
        return e.value["of"][0] if hasattr(e, "value") else e.__cause__.args[0] if e.__cause__ else e.args[0][0]

    x = torch.tensor([1.0, 2.0])
    raised = []
    for call in (held, thunder.jit(held, transforms=[NormTransform()])):
        with pytest.raises(Told) as caught:
            call(x)
        raised.append(at(caught.value))
    assert type(raised[1]) is torch.Tensor and torch.equal(*raised)
