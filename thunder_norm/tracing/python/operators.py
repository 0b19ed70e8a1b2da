"""Operators that ask the right operand first, and exceptions that are raised while another is handled."""

from __future__ import annotations

import operator
from typing import Any

from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import BINARY_OP, InterpreterRuntimeCtx, InterpreterStack, wrap_const
from thunder.core.proxies import Proxy

_REFLECTED = (
    *("__radd__", "__rand__", "__rfloordiv__", "__rlshift__", "__rmatmul__", "__rmul__", "__rmod__"),
    *("__ror__", "__rpow__", "__rrshift__", "__rsub__", "__rtruediv__", "__rxor__"),
)
_thunders_binary_op = thunders._binary_op_helper
_curexc = vars(InterpreterRuntimeCtx)["curexc"]
_nothing = object()


def _binary_op(stack: InterpreterStack, op: BINARY_OP) -> Any:
    """``a op b`` where the class of b derives from that of a and has a reflected method of its own: that is asked first."""
    b, a = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    kind, base = type(b.value), type(a.value)
    if kind is base or not issubclass(kind, base) or isinstance(a.value, Proxy):
        return _thunders_binary_op(stack, op)
    name = _REFLECTED[op.value % BINARY_OP.IADD.value]
    method = in_classes(kind.__mro__, name, _nothing)
    # of lists Python asks for ``+=`` and ``*=`` last
    is_in_place = op.value >= BINARY_OP.IADD.value and hasattr(base, name.replace("__r", "__i", 1)) and not issubclass(base, list)
    if is_in_place or method is _nothing or method is in_classes(base.__mro__, name, _nothing):
        return _thunders_binary_op(stack, op)
    result = thunders._interpret_call(wrap_const(method), b, a)
    if result is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        stack.pop_wrapped()
        stack.pop_wrapped()
        return result
    if result.value is NotImplemented:
        return _thunders_binary_op(stack, op)
    stack.pop_wrapped()
    stack.pop_wrapped()
    stack.append(result)
    return None


def _set_current(runtime: InterpreterRuntimeCtx, e: BaseException | None) -> None:
    """Set the exception that is on its way: one that is raised while another is handled has that as its context."""
    handled = runtime.exception_stack[-1]
    if e is not None and handled is not None and e.__context__ is None and not _is_in_contexts(e, handled):
        e.__context__ = handled
    assert _curexc.fset is not None
    _curexc.fset(runtime, e)


def _is_in_contexts(e: BaseException, handled: BaseException) -> bool:
    current: BaseException | None = handled
    while current is not None:
        if current is e:
            return True
        current = current.__context__
    return False


# Natively they would ask what stands for a tensor, which makes another one.
_IN_PLACE = {
    **{"iadd": "+", "isub": "-", "imul": "*", "itruediv": "/", "ifloordiv": "//", "imod": "%", "ipow": "**", "imatmul": "@"},
    **{"iand": "&", "ior": "|", "ixor": "^", "ilshift": "<<", "irshift": ">>", "iconcat": "+"},
}


def _register(name: str, sign: str) -> None:
    made: dict[str, Any] = {"__name__": __name__}
    exec(f"def {name}(a, b, /):\n    a {sign}= b\n    return a", made)  # noqa: S102 - of a name and a sign
    instead_of(getattr(operator, name))(lambda *args, **kwargs: thunders._interpret_call(made[name], *args, **kwargs))


for _name, _sign in _IN_PLACE.items():
    _register(_name, _sign)


REPLACEMENTS = (
    Replacement(thunders, "_binary_op_helper", _binary_op, "outofplace_impl in _binary_op, which asks the left operand first"),
    Replacement(InterpreterRuntimeCtx, "curexc", property(_curexc.fget, _set_current), "do_raise: runtimectx.curexc = value"),
)
