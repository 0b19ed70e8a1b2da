"""Exceptions that are raised while another is handled: which is the context of which (PEP 3134)."""

from __future__ import annotations

import re
import sys
from typing import Any

from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    InterpreterFrame,
    InterpreterRuntimeCtx,
    InterpreterStack,
    check_and_append,
    do_raise,
    unwrap,
    wrap_const,
)

_curexc = vars(InterpreterRuntimeCtx)["curexc"]
_handlers = thunders._default_opcode_handler_map
_original_raise = _handlers["RAISE_VARARGS"]
_AS_PYTHON_SAYS = {
    **{f"{kind} index out of range": f"{kind.__name__} index out of range" for kind in (list, tuple)},
    f"pop on empty {list}": "pop from empty list",
}
_OF_UNBOUND = re.compile(r"(?:local|free) variable '(\w+)' referenced before assignment(?: in enclosing scope)?")


def _set_current(runtime: InterpreterRuntimeCtx, e: BaseException | None) -> None:
    """Set the exception that is on its way."""
    if type(e) is IndexError and e.args and e.args[0] in _AS_PYTHON_SAYS:
        e.args = (_AS_PYTHON_SAYS[e.args[0]],)
    elif isinstance(e, NameError) and e.args and (found := _OF_UNBOUND.fullmatch(str(e.args[0]))):
        e = of_unbound(found[1], runtime.frame_stack[-1])
    if e is not None and e.__context__ is None and not _is_under_way(e):
        _put_into_context(e, handled(runtime))
    assert _curexc.fset is not None
    _curexc.fset(runtime, e)


def of_unbound(name: str, frame: InterpreterFrame) -> NameError:
    """Python's error for a variable that has no value; Thunder has other words, and takes all that closures share for another function's."""
    if name in frame.code.co_freevars:
        return NameError(
            f"cannot access free variable {name!r} where it is not associated with a value in enclosing scope", name=name
        )
    return UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")


def _is_under_way(e: BaseException) -> bool:
    """Whether an exception has left an instruction of the program already: no function that it passes is a context of it."""
    tb = e.__traceback__
    while tb is not None:
        if tb.tb_frame.f_globals is vars(thunders) and tb.tb_frame.f_code.co_filename != thunders.__file__:
            return True  # a frame that stands for one of the program
        tb = tb.tb_next
    return False


def _put_into_context(e: BaseException, outer: BaseException | None) -> None:
    """As Python does where an exception is raised: what is handled is its context, whatever that was, and no context goes round."""
    if outer is None or outer is e:
        return
    current, seen = outer, {id(outer)}
    while (context := current.__context__) is not None:
        if context is e:
            current.__context__ = None
            break
        if id(context) in seen:  # a program can set contexts so that they go round
            break
        seen.add(id(context))
        current = context
    e.__context__ = outer


def _raise(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    """``raise e``, of which e may have been raised before, or ``raise``."""
    runtime = thunders.get_interpreterruntimectx()
    if not inst.arg:
        e = handled(runtime)
        if e is None:
            return do_raise(RuntimeError("No active exception to reraise"))
        runtime.curexc = e
        return thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
    raised = unwrap(stack[-inst.arg])
    if isinstance(raised, BaseException):
        _put_into_context(raised, handled(runtime))
    return _original_raise(inst, stack=stack, **state)


def handled(runtime: InterpreterRuntimeCtx) -> BaseException | None:
    """What the program handles: natively Python knows of nothing that is.

    Each generator that runs has a place on the stack, and where it handles nothing what called it does.
    """
    return next((e for e in reversed(runtime.exception_stack) if e is not None), None)


def _leave(inst: Any, /, stack: InterpreterStack, **state: Any) -> Any:
    """``__exit__`` where a block has raised: what it reads of the exception comes from there, and is no constant that a prologue would read."""
    e = stack.getitem_wrapped(-1)
    traceback = thunders._interpret_call(getattr, e, wrap_const("__traceback__"))
    return check_and_append(stack, thunders._interpret_call(stack.getitem_wrapped(-4), wrap_const(type(e.value)), e, traceback))


@instead_of(sys.exc_info)
def _exc_info() -> Any:
    e = handled(thunders.get_interpreterruntimectx())
    return wrap_const((None, None, None) if e is None else (type(e), e, e.__traceback__))


instead_of(sys.exception)(lambda: wrap_const(handled(thunders.get_interpreterruntimectx())))


REPLACEMENTS = (
    Replacement(InterpreterRuntimeCtx, "curexc", property(_curexc.fget, _set_current), "do_raise: runtimectx.curexc = value"),
    Replacement(_handlers, "RAISE_VARARGS", _raise, "do_raise, which sets no context"),
    Replacement(_handlers, "WITH_EXCEPT_START", _leave, "_with_except_start_handler_3_11: without its unwrapping"),
)
