"""Running the bytecode of a function: what can be known of a code object is found once, not for each frame."""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

from thunder_norm.tracing.generators import Handler, is_handled
from thunder_norm.tracing.native import misfits
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import INTERPRETER_SIGNALS, InterpreterFrame, PseudoInst, Py_NULL

_original_run_frame = thunders._run_frame
_EXCEPTION_RAISED = INTERPRETER_SIGNALS.EXCEPTION_RAISED
_IS_RELATIVE = sys.version_info >= (3, 12)  # jumps count from the next instruction


@dataclass(frozen=True, slots=True)
class _Code:
    """A code object as the interpreter needs it.

    instructions:  the visible ones
    pointers:      of each, where it stands
    next_pointers: of each, where the next visible one stands
    index_at:      of each place, the visible instruction there or next: some places hold caches
    effects:       of each, what it does to the height of the stack, without and with a jump
    handlers:      (start, end, target, height, whether the last instruction is pushed) of each region that exceptions leave
    """

    instructions: tuple[dis.Instruction, ...]
    pointers: tuple[int, ...]
    next_pointers: tuple[int, ...]
    index_at: tuple[int, ...]
    effects: tuple[tuple[int, int], ...]
    handlers: tuple[Handler, ...]


@functools.lru_cache(maxsize=4096)
def _decoded(code: CodeType) -> _Code:
    instructions = tuple(dis.get_instructions(code))
    pointers = tuple(i.offset // 2 for i in instructions)
    index_at: list[int] = []
    for index, pointer in enumerate(pointers):
        index_at.extend([index] * (pointer + 1 - len(index_at)))
    handlers = tuple((h.start, h.end, h.target, h.depth, h.lasti) for h in dis._parse_exception_table(code))  # type: ignore[attr-defined]
    next_pointers = (*pointers[1:], len(code.co_code))
    return _Code(instructions, pointers, next_pointers, tuple(index_at), tuple(map(_effects, instructions)), handlers)


def _effects(inst: dis.Instruction) -> tuple[int, int]:
    """What the interpreter's handler of the instruction does to the height of the stack, without and with a jump."""
    if sys.version_info < (3, 12):  # PRECALL takes the arguments off the stack, which the handler of CALL does here
        if inst.opname == "PRECALL":
            return 0, 0
        if inst.opname == "CALL":
            assert inst.arg is not None
            return -inst.arg - 1, -inst.arg - 1
    return dis.stack_effect(inst.opcode, inst.arg, jump=False), dis.stack_effect(inst.opcode, inst.arg, jump=True)


def _run_frame(frame: InterpreterFrame, compilectx: Any, runtimectx: Any, *, send_value: Any = Py_NULL()) -> Any:  # noqa: B008
    if runtimectx._record_history or compilectx._opcode_interpreter is not thunders.default_opcode_interpreter:
        return _original_run_frame(frame, compilectx, runtimectx, send_value=send_value)
    runtimectx._push_frame_stack(frame)
    try:
        return _run(frame, compilectx, runtimectx, send_value)
    finally:
        popped = runtimectx._pop_frame_stack()
        assert popped is frame, "Frame stack inconsistency"


def _run(frame: InterpreterFrame, compilectx: Any, runtimectx: Any, send_value: Any) -> Any:
    stack = frame.interpreter_stack
    if send_value != Py_NULL():
        with stack.set_cur_instruction(PseudoInst.SEND):
            stack.append(send_value)
    code = _decoded(frame.code)
    handler_of = thunders._default_opcode_handler_map
    state = {
        "stack": stack,
        "globals_dict": frame.globals,
        "try_stack": frame.try_stack,
        "exception_stack": runtimectx.exception_stack,
        "co": frame.code,
        "frame": frame,
    }
    while True:
        index = code.index_at[frame.inst_ptr]
        inst = code.instructions[index]
        frame.inst_ptr = frame.lasti = pointer = code.pointers[index]
        frame.inst = inst
        if inst.positions is not None:
            frame.positions = inst.positions
        height = len(stack._stack)
        handler = handler_of.get(inst.opname)
        if handler is None:
            raise NotImplementedError(f"Encountered unimplemented opcode {inst.opname} while tracing.")
        stack.provenance_inst, stack.provenance_inputs, stack.output_idx = inst, [], 0
        try:
            result = handler(inst, inst_ptr=pointer, **state)
        except (TypeError, ValueError) as e:
            result = thunders.do_raise(misfits.error_of(e))
        finally:
            stack.provenance_inst = stack.provenance_inputs = None
        if result is None:
            frame.inst_ptr = pointer + 1
            _check_height(len(stack._stack) - height, code.effects[index][0], inst)
        elif isinstance(result, int):
            frame.inst_ptr = code.next_pointers[index] + result if _IS_RELATIVE else result
            _check_height(len(stack._stack) - height, code.effects[index][result != -1], inst)
        elif result is _EXCEPTION_RAISED:
            if not is_handled(frame, runtimectx, code.handlers):
                return _EXCEPTION_RAISED, _EXCEPTION_RAISED
        else:
            frame.inst_ptr = pointer + 1
            return _returned(frame, compilectx, runtimectx, result)


def _check_height(found: int, expected: int, inst: dis.Instruction) -> None:
    assert found == expected, (
        f"Unexpected stack effect from {inst.opname}: expected {expected}, but the actual effect was {found} at {inst}"
    )


def _returned(frame: InterpreterFrame, compilectx: Any, runtimectx: Any, signal: INTERPRETER_SIGNALS) -> tuple[Any, Any]:
    if signal is INTERPRETER_SIGNALS.RETURN_VALUE or signal is INTERPRETER_SIGNALS.YIELD_VALUE:
        return frame.interpreter_stack.pop_wrapped(), signal
    assert signal is INTERPRETER_SIGNALS.RETURN_GENERATOR, signal
    for flag, make in _GENERATORS:
        if frame.code.co_flags & flag:
            return getattr(thunders, make)(frame, compilectx, runtimectx), signal
    raise NotImplementedError(
        f"Not implemented: RETURN_GENERATOR from code of {frame.qualname} with flags {dis.pretty_flags(frame.code.co_flags)}"
    )


_GENERATORS = (
    (thunders.inspect.CO_GENERATOR, "make_generator"),
    (thunders.inspect.CO_COROUTINE, "make_coroutine"),
    (thunders.inspect.CO_ASYNC_GENERATOR, "make_async_generator"),
)


def _python_frame(self: InterpreterFrame) -> FrameType:
    assert self.positions is not None
    lineno = self.code.co_firstlineno if self.positions.lineno is None else self.positions.lineno
    return _frame_at(self.code, self.code.co_filename, lineno, self.qualname)


@functools.lru_cache(maxsize=1024)
def _frame_at(code: CodeType, filename: str, lineno: int, qualname: str) -> FrameType:  # code is equal to that of another file
    """A frame of Python's own that stands at this line; made in a thread, so that nothing called it."""
    empty_lines = "\n" * (lineno - code.co_firstlineno)
    raising = compile(empty_lines + "raise ValueError()", filename, "exec").replace(
        co_filename=filename, co_firstlineno=code.co_firstlineno, co_name=code.co_name, co_qualname=qualname
    )
    found: list[FrameType] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except ValueError as e:
            tb = e.__traceback__
            while tb is not None and tb.tb_next is not None:
                tb = tb.tb_next
            assert tb is not None
            found.append(tb.tb_frame)

    thread = threading.Thread(target=run, args=(FunctionType(raising, vars(thunders)),))
    thread.start()
    thread.join()
    return found[0]


REPLACEMENTS = (
    ()
    if sys.version_info < (3, 11)  # other blocks, other handling of exceptions
    else (
        Replacement(thunders, "_run_frame", _run_frame, "_run_frame, which disassembles the function for each frame"),
        Replacement(InterpreterFrame, "get_or_make_python_frame", _python_frame, "the same, which spins until a thread has run"),
    )
)
