"""Conditions on the values of tensors that a program stops at: ``assert x.isfinite().all()``, ``if (y < 0).any(): raise ValueError(...)``.

A trace has no values, but it need not know which way the program goes: one of the two ends in an exception.  The other one is traced, and
the condition is looked at in every call.  `asserted` is called with it, for which `subclass` has an answer.
"""

from __future__ import annotations

import builtins
import dis
import functools
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import INTERPRETER_SIGNALS, InterpreterStack, wrap_const
from thunder.core.proxies import NumberProxy, TensorProxy

_handlers = thunders._default_opcode_handler_map
_JUMP = re.compile(r"POP_JUMP_(FORWARD_)?IF_(TRUE|FALSE)")
_NOTHING = ("NOP", "NOT_TAKEN", "PUSH_NULL", "PRECALL", "EXTENDED_ARG")  # between what counts here
_CALL = ("CALL", "CALL_FUNCTION")


class Assertion(NamedTuple):
    """Of a jump: what the condition has to be, or else the program raises `error`, a builtin's name, with `message` if that is a constant."""

    holds: bool
    error: str
    message: str | None


def asserted(value: Any, holds: bool, error: str, message: str) -> bool:
    """Whether a value is true, of one that has to be, or must not be, or else the program raises the builtin `error`."""
    return bool(value)


@functools.lru_cache(maxsize=4096)
def _assertions(code: CodeType) -> dict[int, Assertion]:
    """By where the jump stands, or what makes a bool for it."""
    instructions = list(dis.get_instructions(code))
    index_at = {inst.offset: i for i, inst in enumerate(instructions)}
    found = {}
    for i, inst in enumerate(instructions):
        if _JUMP.fullmatch(inst.opname) is None:
            continue
        jumps_if = inst.opname.endswith("TRUE")
        for start, holds in ((i + 1, jumps_if), (index_at[inst.argval], not jumps_if)):
            raised = _raised(instructions, start)
            if raised is not None:
                found[inst.offset // 2] = Assertion(holds, *raised)
                if i > 0 and instructions[i - 1].opname == "TO_BOOL":
                    found[instructions[i - 1].offset // 2] = Assertion(holds, *raised)
                break
    return found


def _raised(instructions: list[dis.Instruction], start: int) -> tuple[str, str | None] | None:
    """The builtin exception that is raised from here on, whatever happens, and its message."""
    seen: list[dis.Instruction] = []
    for inst in instructions[start:]:
        if inst.opname in _NOTHING:
            continue
        if not seen:
            error = _builtin_error(inst)
            if error is None:
                return None
        elif inst.opname == "RAISE_VARARGS":
            return (error, _message(seen)) if inst.arg in (1, 2) else None
        elif inst.opcode in _JUMPS or inst.opname.startswith(("RETURN", "YIELD", "STORE", "DELETE")):
            return None
        seen.append(inst)
    return None


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def _builtin_error(inst: dis.Instruction) -> str | None:
    """The exception class that an instruction loads."""
    if inst.opname == "LOAD_ASSERTION_ERROR" or (inst.opname == "LOAD_COMMON_CONSTANT" and "AssertionError" in inst.argrepr):
        return "AssertionError"
    found = getattr(builtins, inst.argval, None) if inst.opname == "LOAD_GLOBAL" else None
    return inst.argval if isinstance(found, type) and issubclass(found, Exception) else None


def _message(seen: list[dis.Instruction]) -> str | None:
    """What the class is called with, if it is one string or nothing."""
    if len(seen) == 1 or (len(seen) == 2 and seen[1].opname in _CALL):
        return ""
    is_constant = len(seen) == 3 and seen[1].opname == "LOAD_CONST" and seen[2].opname in _CALL
    return seen[1].argval if is_constant and isinstance(seen[1].argval, str) else None


def _is_caught() -> bool:
    """Whether an exception that is raised here may be caught in the program, which would then go on."""
    return any(
        _catches(list(dis.get_instructions(frame.code)), handler)
        for frame in thunders.get_interpreterruntimectx().frame_stack
        for handler in _handlers_around(frame)
    )


def _handlers_around(frame: Any) -> Iterator[int]:
    """The offsets of those that an exception raised in a frame goes to."""
    parse = getattr(dis, "_parse_exception_table", None)  # from Python 3.11 on; before, there is a stack of blocks
    if parse is None:
        yield from (2 * block.handler for block in frame.try_stack)
    else:
        yield from (h.target for h in parse(frame.code) if h.start <= 2 * frame.inst_ptr < h.end)


def _catches(instructions: list[dis.Instruction], handler: int) -> bool:
    """Whether a handler is an ``except``: ``finally`` and ``with`` raise again."""
    for inst in instructions:
        if inst.offset < handler:
            continue
        if inst.opname in ("RERAISE", "WITH_EXCEPT_START"):
            return False
        if inst.opname in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH", "POP_EXCEPT"):
            return True
    return True


def _asking(opname: str) -> Any:
    """The handler of an instruction that asks for the truth of a value."""
    step = _handlers[opname]

    def handler(inst: dis.Instruction, /, stack: InterpreterStack, inst_ptr: int, co: CodeType, frame: Any, **state: Any) -> Any:
        value = stack.getitem_wrapped(-1).value
        if type(value) is TensorProxy or isinstance(value, NumberProxy):
            found = _assertions(co).get(inst_ptr)
            if found is not None and found.error not in frame.globals.value and not _is_caught():
                message = found.message
                if message is None:
                    message = f"not so: {location_of_user()}"
                given = (stack.pop_wrapped(), *map(wrap_const, (found.holds, found.error, message)))
                answer = thunders._interpret_call(asserted, *given)
                if answer is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
                    return answer
                stack.append(answer)
        return step(inst, stack=stack, inst_ptr=inst_ptr, co=co, frame=frame, **state)

    return handler


REPLACEMENTS = tuple(
    Replacement(
        _handlers, name, _asking(name), "_pop_jump_forward_if_true_handler_3_11 and its likes: _interpret_call(bool, tos)"
    )
    for name in _handlers
    if _JUMP.fullmatch(name) or name == "TO_BOOL"
)
