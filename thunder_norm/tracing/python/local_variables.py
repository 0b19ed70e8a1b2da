"""Variables of functions: ``del z`` of one that has no value, those that a comprehension has for itself, ``locals()`` and ``dir()``."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from types import CellType, CodeType
from typing import Any

from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.python.raised import of_unbound
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterFrame, InterpreterStack, Py_NULL, do_raise, interpreter_needs_wrap, wrap_const

_handlers = thunders._default_opcode_handler_map
_thunders_delete_fast, _thunders_delete_deref = _handlers["DELETE_FAST"], _handlers["DELETE_DEREF"]
_thunders_load_and_clear = _handlers.get("LOAD_FAST_AND_CLEAR")
_thunders_locals = thunders._locals_lookaside
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED


def _delete_fast(inst: dis.Instruction, /, co: CodeType, frame: InterpreterFrame, **state: Any) -> Any:
    assert inst.arg is not None
    if isinstance(frame.localsplus[inst.arg], Py_NULL):
        return do_raise(of_unbound(inst.argval, frame))
    return _thunders_delete_fast(inst, co=co, frame=frame, **state)


def _delete_deref(inst: dis.Instruction, /, co: CodeType, frame: InterpreterFrame, **state: Any) -> Any:
    assert inst.arg is not None
    if _is_empty(frame.localsplus[inst.arg].value):
        return do_raise(of_unbound(inst.argval, frame))
    return _thunders_delete_deref(inst, co=co, frame=frame, **state)


def _is_empty(cell: CellType) -> bool:
    return cell == CellType()


def _load_and_clear(inst: dis.Instruction, /, stack: InterpreterStack, frame: InterpreterFrame, **state: Any) -> Any:
    """What a variable of a comprehension's was before it, from Python 3.12 on (PEP 709), to be put back after it.

    Thunder wraps the mark of one that had no value, and takes it for a value after the comprehension.
    """
    assert inst.arg is not None and _thunders_load_and_clear is not None
    if isinstance(frame.localsplus[inst.arg], Py_NULL):
        stack._stack.append(Py_NULL())
        return None
    return _thunders_load_and_clear(inst, stack=stack, frame=frame, **state)


class _Frame(InterpreterFrame):
    """A frame with a place for each variable, in the order of Python's.

    From Python 3.12 on the text that `exec` runs has variables of its own, which are those of its comprehensions, and a variable of a
    function is at one place where functions inside a comprehension share the comprehension's of the same name.
    """

    def __init__(self, code: CodeType, *args: Any, localsplus: Sequence[Any] = (), **kwargs: Any):
        of_cells = [name for name in code.co_cellvars if name not in code.co_varnames]
        if len(localsplus) != code.co_nlocals + len(of_cells) + len(code.co_freevars):
            local = localsplus[: code.co_nlocals] or [Py_NULL()] * code.co_nlocals
            free = localsplus[len(localsplus) - len(code.co_freevars) :]
            localsplus = [*local, *[Py_NULL()] * len(of_cells), *free]
        super().__init__(code, *args, localsplus=list(localsplus), **kwargs)


@instead_of(locals)
def _locals() -> Any:
    return locals_of(thunders.get_interpreterruntimectx().frame_stack[-1])


def locals_of(frame: InterpreterFrame) -> Any:
    """``locals()``: of a variable that functions share, which is in a cell, the value; in text that is run, the dict of its names."""
    if not frame.code.co_flags & inspect.CO_OPTIMIZED:
        return frame.names
    held = frame.localsplus
    shared = {*frame.code.co_cellvars, *frame.code.co_freevars}
    values = []
    for index, value in enumerate(held):
        if frame.get_localsplus_name(index) in shared and type(thunders.unwrap(value)) is CellType:
            value = Py_NULL() if _is_empty(value.value) else thunders._interpret_call(getattr, value, wrap_const("cell_contents"))
            if value is _EXCEPTION_RAISED:
                return value
        values.append(value)
    frame.localsplus = values
    frames = thunders.get_interpreterruntimectx().frame_stack
    frames.append(frame)  # whose variables Thunder's gives
    try:
        return _thunders_locals()
    finally:
        frames.pop()
        frame.localsplus = held


@instead_of(dir)
def _dir(*objects: Any) -> Any:
    """``dir()``: the names of ``locals()``."""
    if objects:
        return interpreter_needs_wrap(dir)(*objects)
    names = thunders._interpret_call(locals)
    return names if names is _EXCEPTION_RAISED else thunders._interpret_call(sorted, names)


REPLACEMENTS = (
    Replacement(_handlers, "DELETE_FAST", _delete_fast, "_delete_fast_handler: frame.localsplus[var_num] = Py_NULL()"),
    Replacement(_handlers, "DELETE_DEREF", _delete_deref, "_delete_deref_handler: del cell.cell_contents"),
    *(
        (
            Replacement(_handlers, "LOAD_FAST_AND_CLEAR", _load_and_clear, "_load_fast_and_clear_handler: wrap_const(Py_NULL())"),
            Replacement(thunders, "InterpreterFrame", _Frame, "InterpreterFrame(..., localsplus=...), of exec and of functions"),
        )
        if _thunders_load_and_clear is not None
        else ()
    ),
)
