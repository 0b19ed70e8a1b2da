"""Generators of a traced program: what is thrown into one arrives at its ``yield``, and what it returns is returned.

Thunder's raise what is thrown outside of the program, so that ``finally`` and ``except`` around a ``yield`` do not run, and a context
manager made of a generator is not left when its block raises; they return None.  What is thrown into one that waits in a ``yield from``
arrives where the other waits.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any

from thunder_norm.user_code import is_of_tracing
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    InterpreterError,
    InterpreterFrame,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.proxies import Proxy

_EXCEPTION_RAISED = INTERPRETER_SIGNALS.EXCEPTION_RAISED
_OF_OTHERS = ("thunder.core.", "thunder_norm.")
_AFTER_YIELD, _AFTER_YIELD_FROM, _AFTER_AWAIT = 1, 2, 3  # of ``RESUME``
Handler = tuple[int, int, int, int, bool]  # start, end, target, height of the stack, whether the last instruction is pushed


def make_generator(frame: InterpreterFrame, compilectx: Any, runtimectx: Any) -> Any:
    """What stands for a generator whose function has been called; of the interpreter's ``make_generator``."""
    return handed_out(steps_of(frame, compilectx, runtimectx), frame, make_generator)


def handed_out(made: Any, frame: InterpreterFrame, maker: Callable) -> WrappedValue:
    """A generator, or its like, as the program gets it from `maker`.

    Where it comes from does not say which one it is: what it yields comes from there too, and would keep it from being closed when the
    program drops it.
    """
    inputs = [wrap_const(v).provenance for v in (maker, (), {})]
    made.__name__, made.__qualname__ = frame.code.co_name, frame.qualname
    return wrap(made, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=inputs))


def steps_of(frame: InterpreterFrame, compilectx: Any, runtimectx: Any) -> Generator[Any, Any, Any]:
    """A generator that goes on with a frame of the program, from where it waits to where it waits next."""
    sent: dict[str, Any] = {"send_value": None}
    thrown: BaseException | None = None
    handled: BaseException | None = None  # by the generator itself, where it waits
    while True:
        pending = runtimectx.curexc  # of the program: a generator that nobody has any more is closed at any time
        runtimectx.exception_stack.append(handled)
        try:
            with thunders.interpreter_ctx(compilectx, runtimectx):
                result, status = _resumed(frame, compilectx, runtimectx, sent, thrown)
        finally:
            handled = runtimectx.exception_stack.pop()
            runtimectx._curexc = pending
            thrown = None  # its traceback has this frame, and would keep what the generator has after its end
        if status is INTERPRETER_SIGNALS.RETURN_VALUE:
            return unwrap(result)
        assert status is INTERPRETER_SIGNALS.YIELD_VALUE
        try:
            sent = {"send_value": (yield unwrap(result))}
        except BaseException as e:
            if thunders.get_interpretercompilectx_if_available() is not compilectx:
                raise  # the trace is there: nobody is to write into it
            thrown = e


def _resumed(
    frame: InterpreterFrame, compilectx: Any, runtimectx: Any, sent: dict, thrown: BaseException | None
) -> tuple[Any, Any]:
    """What the program yields or returns next, raising what it raises."""
    if thrown is not None:
        sent = {}
        begun = _begun_by(frame)
        found = None if begun is None else _thrown_further(frame, runtimectx, thrown, begun)
        if found is not None and found is not _EXCEPTION_RAISED:
            return found, INTERPRETER_SIGNALS.YIELD_VALUE
        if found is None:
            runtimectx._curexc = thrown  # what the one that throws it handles is no context of it
        handlers = dis._parse_exception_table(frame.code)  # type: ignore[attr-defined]
        if runtimectx.curexc is not None and not is_handled(frame, runtimectx, handlers):
            thrown = None
            raise _taken(runtimectx)
    if isinstance(sent.get("send_value"), Proxy):  # Thunder asks whether what is sent is unequal to its own mark
        sent = {"send_value": wrap_const(sent["send_value"])}
    try:
        result, status = thunders._run_frame(frame, compilectx, runtimectx, **sent)
    except Exception as e:
        raise InterpreterError(f"Encountered exception {type(e).__name__}: {e}") from e
    if status is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return result, status
    e = _taken(runtimectx)
    if isinstance(e, StopIteration) and not _is_of_program(frame):
        return wrap_const(unwrap(e.value)), INTERPRETER_SIGNALS.RETURN_VALUE
    e = stopped(e, frame) or e  # from 3.12 on the generator's own code says so
    try:
        raise e
    finally:
        del e, thrown  # as above


def stopped(e: BaseException, frame: InterpreterFrame) -> RuntimeError | None:
    """What leaves a generator of the program instead of a StopIteration that it raises (PEP 479); None for anything else."""
    for flag, kind, errors in _STOPPED:
        if frame.code.co_flags & flag and isinstance(e, errors) and _is_of_program(frame):
            error = RuntimeError(f"{kind} raised {'StopIteration' if isinstance(e, StopIteration) else 'StopAsyncIteration'}")
            error.__cause__ = error.__context__ = e
            return error
    return None


_STOPPED = (
    (inspect.CO_GENERATOR, "generator", StopIteration),
    (inspect.CO_COROUTINE, "coroutine", StopIteration),
    (inspect.CO_ASYNC_GENERATOR, "async generator", (StopIteration, StopAsyncIteration)),
)


def _is_of_program(frame: InterpreterFrame) -> bool:
    """Whether a generator is the program's, and none that stands for an iterator in C (`map`), which a StopIteration ends."""
    return not unwrap(frame.globals).get("__name__", "").startswith(_OF_OTHERS)


def is_at_yield(frame: InterpreterFrame) -> bool:
    """Whether what waits does so in a ``yield``, and no ``yield from`` or ``await``."""
    return any(i.offset == frame.inst_ptr * 2 and _resumes(i) == _AFTER_YIELD for i in dis.get_instructions(frame.code))


def _resumes(inst: dis.Instruction | None) -> int | None:
    """What an instruction goes on after, if it does."""
    return inst.arg & 3 if inst is not None and inst.opname == "RESUME" and inst.arg is not None else None


def _begun_by(frame: InterpreterFrame) -> dis.Instruction | None:
    """The instruction of the ``yield from`` or ``await`` that what waits does so in: it hands on what it is sent; None in a ``yield``."""
    by_offset = {inst.offset: inst for inst in dis.get_instructions(frame.code)}
    resumed = by_offset.get(frame.inst_ptr * 2)
    if resumed is None or _resumes(resumed) not in (_AFTER_YIELD_FROM, _AFTER_AWAIT):
        return None
    back = next(inst for offset, inst in sorted(by_offset.items()) if offset > resumed.offset)
    return by_offset[back.argval]


def _thrown_further(frame: InterpreterFrame, runtimectx: Any, thrown: BaseException, begun: dis.Instruction) -> Any:
    """What the iterator of a ``yield from`` yields for what is thrown into it (PEP 380).

    None where it is thrown into the generator itself.  Where the iterator raises, or returns, that is set up to go on with.
    """
    stack = frame.interpreter_stack
    iterator = unwrap(stack.getitem_wrapped(-1))
    if isinstance(thrown, GeneratorExit):
        close = getattr(iterator, "close", None)
        if close is not None and thunders._interpret_call_with_unwrapping(close) is _EXCEPTION_RAISED:
            return _EXCEPTION_RAISED
        return None
    throw = getattr(iterator, "throw", None)
    if throw is None:
        return None
    found = thunders._interpret_call_with_unwrapping(lambda: throw(thrown))
    if found is not _EXCEPTION_RAISED or not isinstance(runtimectx.curexc, StopIteration):
        return found if found is _EXCEPTION_RAISED else wrap_const(found)
    returned = _taken(runtimectx)
    with stack.set_cur_instruction(PseudoInst.SEND):
        if sys.version_info < (3, 12):
            stack.pop_wrapped()  # from 3.12 on the instruction that it goes on with takes the iterator away
        stack.append(unwrap(returned.value))  # type: ignore[attr-defined]
    frame.inst_ptr = begun.argval // 2
    return _EXCEPTION_RAISED


def _taken(runtimectx: Any) -> BaseException:
    e, runtimectx.curexc = runtimectx.curexc, None
    assert isinstance(e, BaseException)
    return e


def is_handled(frame: InterpreterFrame, runtimectx: Any, handlers: Iterable[Handler]) -> bool:
    """Go on where the function handles the exception, which has this frame in its traceback from then on; False if it does not."""
    e = _taken(runtimectx)
    if not _is_raised_again(frame.inst):
        python_frame = frame.get_or_make_python_frame()
        e = e.with_traceback(TracebackType(e.__traceback__, python_frame, python_frame.f_lasti, python_frame.f_lineno))
    stack = frame.interpreter_stack
    for start, end, target, height, pushes_last in handlers:
        if start <= frame.inst_ptr * 2 < end:
            assert len(stack) >= height
            del stack[height:]
            e = e.with_traceback(_of_program(e.__traceback__))
            with stack.set_cur_instruction(PseudoInst.EXCEPTION_HANDLER):
                if pushes_last:
                    stack.append(frame.lasti)
            with stack.set_cur_instruction(PseudoInst.EXCEPTION_HANDLER):
                stack.append(e)
            frame.inst_ptr = target // 2
            return True
    runtimectx.curexc = e
    return False


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback that the program looks at, without the functions by which the interpreter does a step."""
    found = []
    while traceback is not None:
        if not is_of_tracing(traceback.tb_frame.f_code.co_filename):
            found.append(traceback)
        traceback = traceback.tb_next
    for entry, inner in itertools.pairwise([*found, None]):
        entry.tb_next = inner
    return found[0] if found else None


def _is_raised_again(inst: dis.Instruction | None) -> bool:
    """Whether an instruction goes on with an exception that was in this frame before, which its traceback says already."""
    return inst is not None and (inst.opname == "RERAISE" or (inst.opname == "RAISE_VARARGS" and not inst.arg))
