"""``thunder.core.interpreter``: single steps of the interpretation."""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

from thunder_norm.tracing import coroutines, generators
from thunder_norm.tracing.hooks.participants import has_part
from thunder_norm.tracing.hooks.replaced import replaces
from thunder.core import interpreter

_original_is_capsule = interpreter.is_pycapsule
_original_make_generator = interpreter.make_generator
_original_make_coroutine = interpreter.make_coroutine
_original_make_async_generator = interpreter.make_async_generator
_original_stop_iteration_error = interpreter._stopiteration_error_intrinsic


@replaces(interpreter, "is_pycapsule", "x", lines="_call_dispatch: not is_pycapsule(slf)")
def _is_capsule(x: Any) -> bool:
    """Whether the ``__self__`` of a function in C is no object that it is a method of.

    Thunder asks whether a type is a capsule: pybind11's functions, whose ``__self__`` is a record of it, are called as methods of that
    record, which aborts the process.
    """
    return _original_is_capsule(x) or (type(x).__module__ == "pybind11_builtins" and has_part())


@replaces(
    interpreter,
    "make_generator",
    "frame",
    "compilectx",
    "runtimectx",
    lines="_run_frame: return make_generator(frame, compilectx, runtimectx)",
)
def _make_generator(frame: Any, compilectx: Any, runtimectx: Any) -> Any:
    """What stands for a generator; what is thrown into Thunder's own passes the generator by."""
    make = generators.make_generator if has_part() else _original_make_generator
    return make(frame, compilectx, runtimectx)


@replaces(
    interpreter,
    "make_coroutine",
    "frame",
    "compilectx",
    "runtimectx",
    lines="_run_frame: return make_coroutine(frame, compilectx, runtimectx)",
)
def _make_coroutine(frame: Any, compilectx: Any, runtimectx: Any) -> Any:
    """What stands for a coroutine; Thunder's own cannot wait."""
    make = coroutines.make_coroutine if has_part() else _original_make_coroutine
    return make(frame, compilectx, runtimectx)


@replaces(
    interpreter,
    "make_async_generator",
    "frame",
    "compilectx",
    "runtimectx",
    lines="_run_frame: return make_async_generator(frame, compilectx, runtimectx)",
)
def _make_async_generator(frame: Any, compilectx: Any, runtimectx: Any) -> Any:
    """What stands for an asynchronous generator; what is thrown into Thunder's own passes it by."""
    make = coroutines.make_async_generator if has_part() else _original_make_async_generator
    return make(frame, compilectx, runtimectx)


@replaces(
    interpreter,
    "_stopiteration_error_intrinsic",
    "exc",
    lines="_call_intrinsic_1_handler: intrinsics_1 = {... INTRINSIC_STOPITERATION_ERROR: _stopiteration_error_intrinsic}",
)
def _stop_iteration_error(exc: Any) -> Any:
    """What leaves a generator, from Python 3.12 on: no StopIteration (PEP 479), unless it stands for an iterator in C, whose end that is.

    Thunder asserts that it is an ``Exception``, which a ``GeneratorExit`` is not, and has the value of a StopIteration for a cause.
    """
    if not has_part():
        return _original_stop_iteration_error(exc)
    e, frame = interpreter.unwrap(exc), interpreter.get_interpreterruntimectx().frame_stack[-1]
    return interpreter.wrap_const(stopped) if (stopped := generators.stopped(e, frame)) is not None else exc


def _stack() -> Any:
    """``inspect.stack()`` of the function that calls this, of which only the third frame is there: no other is asked for.

    For each frame Python's looks at every module of the process, hundreds of frames in a test or a notebook.
    """
    frame = sys._getframe(3)
    if has_part():
        return None, None, _frame_info(frame)
    found = inspect.getframeinfo(frame)  # all that Python's has of this one
    return None, None, inspect.FrameInfo(frame, *found, positions=found.positions)


def _frame_info(frame: FrameType) -> inspect.FrameInfo:
    """What the interpreter asks of the place it was called from, without the lines of its source."""
    code = frame.f_code
    of_instructions = itertools.islice(code.co_positions(), frame.f_lasti // 2, None)
    position = dis.Positions(*next(of_instructions, (frame.f_lineno, None, None, None)))
    return inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None, positions=position)


@replaces(
    interpreter,
    "InterpreterRuntimeCtx",
    "record_history",
    "debug_log",
    lines="InterpreterRuntimeCtx.__init__: inspect.stack()[2]; interpret: runtimectx = InterpreterRuntimeCtx(",
)
class _RuntimeContext(interpreter.InterpreterRuntimeCtx):
    """The state of one interpretation: Thunder's own constructor, to which `_stack` is ``inspect.stack``."""

    __init__ = FunctionType(
        interpreter.InterpreterRuntimeCtx.__init__.__code__, {"inspect": SimpleNamespace(stack=_stack)}, "__init__"
    )
