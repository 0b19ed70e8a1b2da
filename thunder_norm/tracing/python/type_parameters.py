"""Parameters of types, from Python 3.12 on (PEP 695): ``def first[T](of: list[T])``, ``class Box[T]``, ``type Pair[T] = tuple[T, T]``.

Python has an instruction for each, which Thunder's interpreter lacks.  They concern no tensor, and Python runs them.
"""

from __future__ import annotations

import dis
from typing import Any

from thunder_norm.tracing.python import exception_groups
from thunder_norm.tracing.python.instructions import natively
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterFrame, InterpreterStack, do_raise, unwrap

_handlers = thunders._default_opcode_handler_map
_thunders_of_one = _handlers.get("CALL_INTRINSIC_1")
_OF_ONE = {"TYPEVAR", "PARAMSPEC", "TYPEVARTUPLE", "SUBSCRIPT_GENERIC", "TYPEALIAS"}
_OF_TWO = {"TYPEVAR_WITH_BOUND", "TYPEVAR_WITH_CONSTRAINTS", "SET_TYPEPARAM_DEFAULT"}
_OF_FUNCTIONS = "SET_FUNCTION_TYPE_PARAMS"


def _name(descriptions: list[str], number: int | None) -> str:
    assert number is not None
    return descriptions[number].removeprefix("INTRINSIC_")


def _of_one(inst: dis.Instruction, /, stack: InterpreterStack, frame: InterpreterFrame, **state: Any) -> Any:
    assert _thunders_of_one is not None
    if _name(dis._intrinsic_1_descs, inst.arg) not in _OF_ONE:  # type: ignore[attr-defined]
        return _thunders_of_one(inst, stack=stack, frame=frame, **state)
    return _made(inst, stack, frame, stack.pop_wrapped())


def _of_two(inst: dis.Instruction, /, stack: InterpreterStack, frame: InterpreterFrame, **state: Any) -> Any:
    name = _name(dis._intrinsic_2_descs, inst.arg)  # type: ignore[attr-defined]
    if name == "PREP_RERAISE_STAR":
        return exception_groups.leave(inst, stack=stack, frame=frame, **state)
    if name not in _OF_TWO and name != _OF_FUNCTIONS:
        raise NotImplementedError(f"Encountered unimplemented opcode {inst.opname} {name} while tracing.")
    second, first = stack.pop_wrapped(), stack.pop_wrapped()
    if name == _OF_FUNCTIONS:
        first.value.__type_params__ = unwrap(second)
        return stack.append(first)
    return _made(inst, stack, frame, first, second)


def _made(inst: dis.Instruction, stack: InterpreterStack, frame: InterpreterFrame, *operands: Any) -> Any:
    assert inst.arg is not None
    run = natively(len(operands), inst.opname, inst.arg, unwrap(frame.globals).get("__name__"))
    try:
        found = run(*map(unwrap, operands))
    except Exception as e:  # noqa: BLE001 - the program's
        return do_raise(e)
    return stack.append(found)


REPLACEMENTS = (
    (
        Replacement(_handlers, "CALL_INTRINSIC_1", _of_one, 'NotImplementedError(f"CALL_INTRINSIC_1 {intrinsic_name}")'),
        Replacement(_handlers, "CALL_INTRINSIC_2", _of_two, "_run_frame: Encountered unimplemented opcode"),
    )
    if "CALL_INTRINSIC_2" in dis.opmap
    else ()
)
