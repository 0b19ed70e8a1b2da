"""Variables of a traced function are what they are in eager mode: those of comprehensions, without a value, in ``locals()``, of ``super()``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from thunder_norm.errors import RunByPythonWarning
from thunder_norm.transforms import NormTransform
import thunder


def _said_of(call) -> tuple[str, str]:
    try:
        return "no error", repr(call())
    except (NameError, RuntimeError, TypeError) as e:
        return type(e).__name__, str(e)


def a_comprehensions_variable_has_no_value_after_it(x):
    ys = [y * 2 for y in x]
    try:
        return ys, y  # type: ignore[name-defined]  # noqa: F821 - that is what Python says, too
    except NameError as e:
        said = type(e).__name__, str(e)
    y = 3
    return ys, y, said


def one_is_left_by_an_exception(x):
    try:
        [1 // (1 - n) for n in range(3)]
    except ZeroDivisionError:
        try:
            return n  # type: ignore[name-defined]  # noqa: F821
        except UnboundLocalError as e:
            said = str(e)
    n = 2
    return x * n, said


def a_variable_is_shared_inside_a_comprehension_alone(x):
    a, b = 3, x * 2

    def inner(c):
        i = 5
        inside = [(lambda: i + j + c)() for i in range(3) for j in range(2)]  # noqa: B023
        j = 7

        def shared():
            return j, a, c

        return i, inside, a, b, shared(), sorted(locals())

    return inner(4)


def text_that_is_run_has_comprehensions(x):
    names = {"x": x}
    exec(
        "i = 9\ny = [i * x for i in range(3)]\nz = [lambda: j for j in range(2)][0]()\nfrom math import *\nv = floor(2.5)", names
    )
    return names["y"], names["z"], names["i"], names["v"], eval("[i + 1 for i in range(4)]")


def variables_of_closures_without_a_value(x):
    def free():
        return a

    def taken():
        nonlocal b
        del b

    b = 1
    taken()
    found = [_said_of(free), _said_of(taken), _said_of(lambda: b)]  # noqa: F821
    try:
        del a  # type: ignore[name-defined]
    except NameError as e:
        found.append((type(e).__name__, str(e)))
    try:
        return a  # type: ignore[name-defined]
    except NameError as e:
        found.append((type(e).__name__, str(e)))
    a = 2
    return x * a, found


def variables_by_name(x):
    a, b = 1, 2

    def inner():
        nonlocal a
        a += 1
        return locals()["a"], dir()

    found = inner()
    return x * locals()["a"] * b, found, dir()


class _Base:
    pass


class _Derived(_Base):
    def of_all(*args):
        return super()

    def in_a_lambda(self):
        return (lambda: super())()

    def deleted(self):
        del self
        return super()

    def replaced(self):
        self = 3  # noqa: F841
        return super()

    def in_a_generator(self):
        return list(super() for _ in range(1))

    def of_another(self):
        return super(_Base, 3)

    def of_no_class(self):
        return super(5, self)


def super_without_an_object(x):
    made, names = _Derived(), ("of_all", "in_a_lambda", "deleted", "replaced", "in_a_generator", "of_another", "of_no_class")
    return x * 2, [_said_of(getattr(made, name)) for name in names]


def _keywords(**names):
    return names


def keywords_that_do_not_fit(x):
    calls: list[Any] = [
        lambda: _keywords(**{"a": 1}, **{"a": 2}),
        lambda: _keywords(a=1, **{"a": 2}),
        lambda: _keywords(**{1: 2}),
        lambda: _keywords(**5),
        lambda: _Derived(**{"a": 1}, **{"a": 2}),
    ]
    return x * 2, list(map(_said_of, calls))


def generators_have_names(x):
    def named():
        yield x

    made = named()
    return next(made) * 2, made.__name__, made.__qualname__, (y for y in x).__name__


def a_generator_stopped_with_a_value(x):
    def stopped():
        yield x
        raise StopIteration(4)

    try:
        return list(stopped())
    except RuntimeError as e:
        return x * e.__cause__.value, str(e), e.__cause__ is e.__context__


PROGRAMS = (
    a_comprehensions_variable_has_no_value_after_it,
    one_is_left_by_an_exception,
    a_variable_is_shared_inside_a_comprehension_alone,
    text_that_is_run_has_comprehensions,
    variables_of_closures_without_a_value,
    variables_by_name,
    super_without_an_object,
    keywords_that_do_not_fit,
    generators_have_names,
    a_generator_stopped_with_a_value,
)


def _in_numbers(results: Any) -> Any:
    return pytree.tree_map(lambda v: v.tolist() if isinstance(v, torch.Tensor) else v, results)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_variables_are_what_they_are_in_eager_mode(f):
    x = torch.tensor([1.0, 2.0, 3.0])
    jitted = thunder.jit(f, transforms=[NormTransform()])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunByPythonWarning)
        first, again = jitted(x), jitted(x + 1)
    assert _in_numbers([first, again]) == _in_numbers([f(x), f(x + 1)])
