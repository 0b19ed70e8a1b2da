"""Coroutines and asynchronous generators in traced programs wait, are driven and are thrown into as in eager mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from tests.tracing.as_in_eager_mode import check_program
from thunder_norm.transforms import NormTransform
import thunder

PROGRAMS: list[Callable] = []


def program(f: Callable) -> Callable:
    PROGRAMS.append(f)
    return f


class Waiting:
    """Hands out a value and is sent another; returns both."""

    def __init__(self, value):
        self.value = value

    def __await__(self):
        sent = yield self.value
        return self.value, sent


def driven(awaited):
    """What something that waits for nothing returns or raises."""
    try:
        awaited.send(None)
    except (StopIteration, RuntimeError, OSError) as e:
        return repr(e), repr(e.__context__), repr(e.__cause__)
    except StopAsyncIteration:
        return "ended"


@program
def a_coroutine_that_waits(x):
    async def inner(n):
        try:
            return await Waiting(n)
        except ValueError as e:
            return repr(e)

    async def outer():
        return await inner(1), await inner(2)

    made = outer()
    seen = [made.send(None), made.send("sent")]
    try:
        made.throw(ValueError(3))
    except StopIteration as e:
        seen.append(e.value)
    return x * seen[1], seen, made.__name__, made.__qualname__


@program
def a_coroutine_that_is_closed(x):
    seen = []

    async def inner():
        try:
            await Waiting(1)
        finally:
            seen.append("inner")

    async def outer():
        try:
            await inner()
        finally:
            seen.append("outer")

    made = outer()
    made.send(None)
    made.close()
    outer().close()
    return x * len(seen), seen


@program
def a_coroutine_that_stops(x):
    async def stops():
        raise StopIteration(3)

    return x, driven(stops())


@program
def an_asynchronous_generator(x):
    seen = []

    async def generator():
        try:
            seen.append((yield 1))
            yield 2
        except KeyError as e:
            seen.append(repr(e))
            yield 3
        finally:
            seen.append("finally")

    made, closed = generator(), generator()
    seen += [driven(made.__anext__()), driven(made.asend("sent")), driven(made.athrow(KeyError(4)))]
    seen += [driven(made.__anext__()), driven(made.__anext__())]
    seen += [driven(closed.__anext__()), driven(closed.aclose())]
    return x * len(seen), seen


@program
def what_an_asynchronous_generator_raises(x):
    async def generator(kind):
        try:
            yield 1
        except KeyError:
            pass
        try:
            yield 2
        except ValueError:
            raise kind(3)  # noqa: B904 - its context is looked at

    seen = []
    for kind in (OSError, StopIteration, StopAsyncIteration):
        made = generator(kind)
        seen += [driven(made.__anext__()), driven(made.athrow(KeyError(4))), driven(made.athrow(ValueError(5)))]
    return x, seen


@program
def an_asynchronous_generator_that_goes_on_when_closed(x):
    async def generator():
        try:
            yield 1
        except GeneratorExit:
            yield 2

    made = generator()
    return x, driven(made.__anext__()), driven(made.aclose())


@program
def what_is_thrown_where_an_asynchronous_generator_waits(x):
    async def generator():
        try:
            await Waiting(1)
        except KeyError as e:
            yield repr(e)
        yield await Waiting(2)

    made, seen = generator(), []
    first, second = made.__anext__(), made.__anext__()
    seen.append(first.send(None))
    try:
        first.throw(KeyError(3))
    except StopIteration as e:
        seen.append(e.value)
    seen.append(second.send(None))
    try:
        second.send("sent")
    except StopIteration as e:
        seen.append(e.value)
    return x, seen


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_they_do_what_they_do_in_eager_mode(f):
    check_program(f)


def test_an_event_loop_runs_them():
    def f(x):
        async def one(factor):
            await asyncio.sleep(0)
            return x * factor

        async def both():
            first, second = await asyncio.gather(one(2), one(3))
            return first + second

        return asyncio.run(both())

    x = torch.tensor([1.0, 2.0])
    jitted = thunder.jit(f, transforms=[NormTransform()])
    for given in (x, x + 1):
        torch.testing.assert_close(jitted(given), f(given), rtol=0, atol=0)
