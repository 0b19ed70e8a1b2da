"""``except*`` in traced programs takes what it takes in eager mode, and what leaves the statement is the same (PEP 654)."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.tracing.as_in_eager_mode import check_program

PROGRAMS: list[Callable] = []


def program(f: Callable) -> Callable:
    PROGRAMS.append(f)
    return f


class WithTensor(Exception):
    def __init__(self, tensor):
        self.tensor = tensor


class Derived(ExceptionGroup):
    def derive(self, excs):
        return Derived(self.message + "!", excs)


class Split(ExceptionGroup):
    def split(self, types):
        return ExceptionGroup("split by itself", [ValueError(7)]), None


@program
def several_clauses(x):
    seen = []
    try:
        raise ExceptionGroup("g", [ValueError(1), TypeError(2), ExceptionGroup("n", [ValueError(3), OSError(4)])])
    except* ValueError as e:
        seen.append(repr(e))
    except* (TypeError, OSError) as e:
        seen.append(repr(e))
    return x, seen


@program
def what_no_clause_takes(x):
    y = x
    try:
        try:
            raise ExceptionGroup("g", [ValueError(1), KeyError(2)])
        except* ValueError:
            y = x * 3
    except ExceptionGroup as e:
        return y, repr(e)


@program
def one_without_a_group(x):
    seen = []
    try:
        raise ValueError(1)
    except* ValueError as e:
        seen.append(repr(e))
    try:
        try:
            raise KeyError(2)
        except* ValueError:
            seen.append("never")
    except KeyError as e:
        seen.append(repr(e))
    return x, seen


@program
def raised_in_clauses(x):
    seen = []
    try:
        try:
            raise ExceptionGroup("g", [ValueError(1), TypeError(2), KeyError(3)])
        except* ValueError as e:
            seen.append(repr(sys.exception()))
            try:
                raise e
            except* ValueError:
                seen.append(repr(sys.exception()))
            seen.append(sys.exception() is e)
            raise
        except* TypeError:
            raise OSError(4)  # noqa: B904 - its context is looked at
    except BaseExceptionGroup as e:
        seen += [repr(e), *(repr(inner.__context__) for inner in e.exceptions)]
    return x * len(seen), seen, sys.exception()


@program
def with_else_and_finally(x):
    seen = []
    for n in range(3):
        try:
            if n:
                raise ExceptionGroup("g", [ValueError(n)])
        except* ValueError as e:
            seen.append(repr(e))
        else:
            seen.append("else")
        finally:
            seen.append("finally")
    return x * len(seen), seen


@program
def groups_of_their_own_kind(x):
    seen = []
    try:
        raise Derived("d", [ValueError(1), TypeError(2)])
    except* TypeError as e:
        seen.append(repr(e))
    except* ValueError as e:
        seen.append(repr(e))
    try:
        raise Split("s", [ValueError(1), TypeError(2)])
    except* ValueError as e:
        seen.append(repr(e))
    return x, seen


@program
def types_that_no_clause_can_have(x):
    seen = []
    for types in (int, (ValueError, 3), (KeyError, ExceptionGroup)):
        try:
            try:
                raise ValueError(1)
            except* types:
                seen.append("never")
        except TypeError as e:
            seen.append(str(e))
    return x, seen


@program
def thrown_into_a_generator(x):
    def generator():
        try:
            yield x
        except* ValueError as e:
            yield x * len(e.exceptions)

    made = generator()
    next(made)
    return made.throw(ExceptionGroup("g", [ValueError(1), ValueError(2)])), list(made)


@program
def tensors_inside(x):
    try:
        raise ExceptionGroup("g", [WithTensor(x * 2), WithTensor(x * 3)])
    except* WithTensor as e:
        y = sum(inner.tensor for inner in e.exceptions)
    return (y,)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_exception_groups_are_those_of_eager_mode(f):
    check_program(f)
