"""``except*``: which exceptions of a group a clause takes, and what leaves the statement (PEP 654).

Thunder's interpreter lacks both instructions.
"""

from __future__ import annotations

import dis
from typing import Any

from thunder_norm.tracing.python.instructions import natively
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    InterpreterStack,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    unwrap,
    wrap,
)

_handlers = thunders._default_opcode_handler_map


def _match(inst: dis.Instruction, /, stack: InterpreterStack, exception_stack: list, **state: Any) -> Any:
    """What of the exceptions is of the types of a clause is handled from here on, and the others are left to the next; None for none."""
    types, raised = stack.pop(), stack.pop()
    if (error := _misused(types)) is not None:
        return do_raise(error)
    match, rest = None, raised
    if isinstance(raised, types):
        match, rest = raised, None
        if not isinstance(raised, BaseExceptionGroup):
            match = BaseExceptionGroup("", (raised,)).with_traceback(raised.__traceback__)
    elif isinstance(raised, BaseExceptionGroup):
        parts = thunders._interpret_call_with_unwrapping(lambda: raised.split(types))
        if parts is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return parts
        if not isinstance(parts, tuple):
            return do_raise(TypeError(f"{type(raised).__name__}.split must return a tuple, not {type(parts).__name__}"))
        match, rest = parts[:2]
    stack.append(_raised(rest))
    stack.append(_raised(match))
    if match is not None:
        exception_stack[-1] = match


def _raised(e: BaseException | None) -> WrappedValue:
    """What stands for an exception that a handler gets: it comes from no input."""
    return wrap(e, provenance=ProvenanceRecord(PseudoInst.EXCEPTION_HANDLER, inputs=[]))


def _misused(types: Any) -> TypeError | None:
    """Python's error for types that no clause can have."""
    of = types if isinstance(types, tuple) else (types,)
    if not all(isinstance(t, type) and issubclass(t, BaseException) for t in of):
        return TypeError("catching classes that do not inherit from BaseException is not allowed")
    if any(issubclass(t, BaseExceptionGroup) for t in of):
        return TypeError("catching ExceptionGroup with except* is not allowed. Use except instead.")
    return None


def leave(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> None:
    """What leaves the statement, None for nothing, of what was raised and a list of what the clauses raised and left."""
    raised, original = unwrap(stack.pop_wrapped()), stack.pop()
    run = natively(2, inst.opname, inst.arg or 0)
    stack.append(_raised(run(original, raised)))


REPLACEMENTS = (
    Replacement(_handlers, "CHECK_EG_MATCH", _match, "_run_frame: Encountered unimplemented opcode"),
    # from 3.12 on it is a CALL_INTRINSIC_2
    Replacement(_handlers, "PREP_RERAISE_STAR", leave, "_run_frame: Encountered unimplemented opcode"),
)
