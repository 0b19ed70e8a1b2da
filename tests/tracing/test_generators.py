"""Generators in a traced program: thrown into, closed, returned from and left, as in eager mode."""

from __future__ import annotations

import contextlib
import contextvars

import pytest
import torch

from thunder_norm.tracing import native as natively
from thunder_norm.transforms import SubclassTransform, grad, vmap
import thunder


@contextlib.contextmanager
def noting(seen, catches=()):
    seen.append(1)
    try:
        yield seen
    except catches:
        seen.append(3)
    finally:
        seen.append(2)


def left_by_an_exception(x):
    seen = []
    with contextlib.suppress(ValueError), noting(seen):
        raise ValueError
    return x * sum(seen)


def caught_inside(x):
    with noting([], (ValueError,)) as seen:
        raise ValueError
    return x * sum(seen)


def another_is_raised(x):
    def f():
        try:
            yield 1
        except ValueError as e:
            raise KeyError from e

    it = f()
    next(it)
    try:
        it.throw(ValueError("a"))
    except KeyError as e:
        return x * (2 if isinstance(e.__cause__, ValueError) else 3)


def thrown_and_gone_on(x):
    def f():
        for i in range(3):
            try:
                y = yield x * i
            except ValueError:
                y = yield x * 10
            assert y in (None, 5)

    it = f()
    first, second = next(it), it.send(5)
    return first + second + it.throw(ValueError()) + next(it)


def returned(x):
    def inner():
        yield x
        return 3

    def outer():
        found = yield from inner()
        yield x * found

    return sum(outer())


def closed(x):
    seen = []

    def f():
        try:
            yield 1
        finally:
            seen.append(4)

    it = f()
    next(it)
    it.close()
    return x * sum(seen)


def stack(x):
    seen = []
    with contextlib.ExitStack() as entered:
        entered.enter_context(noting(seen, (ValueError,)))
        entered.enter_context(noting(seen))
        raise ValueError
    return x * len(seen)


def sent(x):
    def f():
        y = yield x
        while y is not None:
            y = yield y * 2

    it = f()
    next(it)
    return it.send(it.send(x) + 1) + it.send(x)


def waiting(x, ends="yields"):
    try:
        yield x
    except ValueError as e:
        if ends == "raises":
            raise KeyError("a") from e
        x = x * 7
        if ends == "yields":
            yield x
    return x * 9


class Waiting:
    """An iterator in Python that has something to say to what is thrown into it."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return self

    def __next__(self):
        return self.x

    def throw(self, error):
        return self.x * 5


def thrown_further(make, depth=1):
    def handing_on(iterator):
        found = yield from iterator
        yield found

    def catching(x, iterator):
        try:
            yield from iterator
        except (KeyError, ValueError):
            yield x * 13

    def f(x):
        it = make(x)
        for _ in range(depth):
            it = handing_on(it)
        it = catching(x, it)
        next(it)
        return it.throw(ValueError("a")) + next(it, x * 21)

    return f


def closed_further(x):
    seen = []

    def inner():
        with noting(seen):
            yield 1

    def outer():
        try:
            yield from inner()
        finally:
            seen.append(5)

    it = outer()
    next(it)
    it.close()
    return x * sum(seen)


class Awaited:
    def __init__(self, seen):
        self.seen = seen

    def __await__(self):
        try:
            return (yield len(self.seen)) * 2
        except ValueError:
            return 5
        finally:
            self.seen.append(1)


def coroutines_that_wait(x):
    seen = []

    async def factor():
        return await Awaited(seen)

    async def scaled():
        y = x * await factor()
        try:
            return y + await Awaited(seen) + await factor()
        finally:
            seen.append(2)

    running = scaled()
    told = [running.send(None), running.send(3), running.throw(ValueError)]
    try:
        running.send(4)
    except StopIteration as stopped:
        return stopped.value * sum(told) + len(seen)


def a_coroutine_that_is_closed(x):
    seen = []

    async def waits():
        await Awaited(seen)

    running = waits()
    running.send(None)
    running.close()
    return x * len(seen)


PROGRAMS = (
    *(sent, left_by_an_exception, caught_inside, another_is_raised, thrown_and_gone_on, returned, closed, stack, closed_further),
    *(coroutines_that_wait, a_coroutine_that_is_closed),
    *(
        thrown_further(lambda x, ends=ends: waiting(x, ends), depth)
        for ends, depth in (("yields", 0), ("yields", 2), ("returns", 1), ("raises", 0), ("raises", 2))
    ),
    *(thrown_further(make) for make in (Waiting, lambda x: iter([x, x * 2]))),
)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("f", PROGRAMS)
def test_generators_do_what_they_do_in_eager_mode(f, native):
    x = torch.tensor([1.0, -2.0])
    with natively.switched_off() if native == "0" else contextlib.nullcontext():
        torch.testing.assert_close(thunder.jit(f, transforms=[SubclassTransform()])(x), f(x))
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: f(x).sum())(x))
    torch.testing.assert_close(vmap(f)(x), torch.func.vmap(f)(x))


def uses_of_a_generator(made):
    """Ways to leave a generator before its end; each is dropped at once."""
    yield lambda: any(made())
    yield lambda: next(v for v in made() if v)
    yield lambda: [v for v, _ in zip(made(), [1], strict=False)]
    yield lambda: next(enumerate(made()))
    yield lambda: next(map(abs, made()))
    yield lambda: [made()].pop().send(None)
    yield lambda: 1 in made()


def test_a_generator_is_closed_as_soon_as_it_is_dropped():
    seen = []

    def made():
        try:
            yield from range(4)
        finally:
            seen.append("closed")

    def program(x):
        for i, use in enumerate(uses_of_a_generator(made)):
            use()
            seen.append(i)
        for v in made():
            if v == 1:
                break
        seen.append("left")
        it = made()
        next(it)
        it = held = {"a": made()}
        next(held["a"])
        held.clear()
        seen.append("cleared")
        return x * len(seen)

    program(torch.ones(2))
    expected = [*seen]
    seen.clear()
    thunder.jit(program, transforms=[SubclassTransform()])(torch.ones(2))
    assert seen == expected


def test_an_exception_that_nobody_handles_leaves_by_the_context_managers():
    variable = contextvars.ContextVar("variable", default=0)

    @contextlib.contextmanager
    def set_to(value):
        token = variable.set(value)
        try:
            yield
        finally:
            variable.reset(token)

    def f(x):
        with set_to(1):
            raise ValueError("said")

    with pytest.raises(ValueError, match="said"):
        thunder.jit(f, transforms=[SubclassTransform()])(torch.ones(2))
    assert variable.get() == 0
