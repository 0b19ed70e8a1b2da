"""Coroutines and asynchronous generators of a traced program: what they wait for reaches the one that drives them, and what is thrown arrives.

Thunder's coroutines cannot wait, and its asynchronous generators raise what is thrown into them outside of the program.
"""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Generator
from typing import Any

from thunder_norm.tracing.generators import handed_out, is_at_yield, steps_of
from thunder.core.interpreter import InterpreterFrame


def make_coroutine(frame: InterpreterFrame, compilectx: Any, runtimectx: Any) -> Any:
    """What stands for a coroutine whose function has been called; of the interpreter's ``make_coroutine``."""
    return handed_out(_coroutine(steps_of(frame, compilectx, runtimectx)), frame, make_coroutine)


def make_async_generator(frame: InterpreterFrame, compilectx: Any, runtimectx: Any) -> Any:
    """What stands for an asynchronous generator whose function has been called; of the interpreter's ``make_async_generator``."""
    return handed_out(_async_generator(steps_of(frame, compilectx, runtimectx), frame), frame, make_async_generator)


async def _coroutine(steps: Generator[Any, Any, Any]) -> Any:
    return await _waiting(steps)


@types.coroutine
def _waiting(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    return (yield from steps)


async def _async_generator(steps: Generator[Any, Any, Any], frame: InterpreterFrame) -> AsyncGenerator[Any, Any]:
    sent: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            found = await _until_yielded(steps, frame, sent, thrown)
        finally:
            thrown = None  # its traceback has this frame, as in `generators`
        if found is None:
            return
        sent = None
        try:
            sent = yield found[0]
        except BaseException as e:
            thrown = e


@types.coroutine
def _until_yielded(
    steps: Generator[Any, Any, Any], frame: InterpreterFrame, sent: Any, thrown: BaseException | None
) -> Generator[Any, Any, tuple[Any] | None]:
    """Go on to the next ``yield`` of the program, and wait for what it awaits before; None at its end."""
    while True:
        try:
            value = steps.send(sent) if thrown is None else steps.throw(thrown)
        except StopIteration:
            return None
        finally:
            thrown = None
        if is_at_yield(frame):
            return (value,)
        sent = None
        try:
            sent = yield value
        except BaseException as e:
            thrown = e
