"""Operators that ask the right operand first, and exceptions that are raised while another is handled."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import BINARY_OP, InterpreterRuntimeCtx, InterpreterStack, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy

_REFLECTED = (
    *("__radd__", "__rand__", "__rfloordiv__", "__rlshift__", "__rmatmul__", "__rmul__", "__rmod__"),
    *("__ror__", "__rpow__", "__rrshift__", "__rsub__", "__rtruediv__", "__rxor__"),
)
_thunders_binary_op = thunders._binary_op_helper
_curexc = vars(InterpreterRuntimeCtx)["curexc"]
_SEQUENCES = (list, tuple, str, bytes)
_JOINING = ("__radd__", "__rmul__")
_nothing = object()


def _binary_op(stack: InterpreterStack, op: BINARY_OP) -> Any:
    """``a op b`` where the reflected method of b is asked first.

    It is if its class derives from that of a and has one of its own, or if a is a sequence, which Python joins last of all.
    """
    b, a = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    if (numbers := guards.changing_numbers()) is not None:
        name = _REFLECTED[op.value % BINARY_OP.IADD.value].strip("_").removeprefix("r")
        if (found := numbers.operation(name, a, b)) is not None:
            stack.pop_wrapped()
            stack.pop_wrapped()
            return found if found is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED else stack.append(found)
    kind, base = type(b.value), type(a.value)
    if kind is base or isinstance(a.value, Proxy) or not (issubclass(kind, base) or issubclass(base, _SEQUENCES)):
        return _thunders_binary_op(stack, op)
    name = _REFLECTED[op.value % BINARY_OP.IADD.value]
    method = in_classes(kind.__mro__, name, _nothing)
    if not issubclass(kind, base) and not (
        name in _JOINING and isinstance(method, FunctionType) and _joins_as_builtin(base, name)
    ):
        return _thunders_binary_op(stack, op)
    # of lists Python asks for ``+=`` and ``*=`` last
    is_in_place = op.value >= BINARY_OP.IADD.value and hasattr(base, name.replace("__r", "__i", 1)) and not issubclass(base, list)
    if is_in_place or method is _nothing or method is in_classes(base.__mro__, name, _nothing):
        return _thunders_binary_op(stack, op)
    result = thunders._interpret_call(wrap_const(method), b, a)
    if result is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        stack.pop_wrapped()
        stack.pop_wrapped()
        return result
    if result.value is NotImplemented and issubclass(kind, base):
        return _thunders_binary_op(stack, op)
    stack.pop_wrapped()
    stack.pop_wrapped()
    if result.value is NotImplemented:
        return do_raise(TypeError(f"unsupported operand types: {base.__name__!r} and {kind.__name__!r}"))
    stack.append(result)
    return None


def _joins_as_builtin(base: type, reflected: str) -> bool:
    """Whether a class of sequences does not say itself what is joined to it."""
    return not isinstance(in_classes(base.__mro__, reflected.replace("__r", "__", 1), None), FunctionType)


def _set_current(runtime: InterpreterRuntimeCtx, e: BaseException | None) -> None:
    """Set the exception that is on its way: one that is raised while another is handled has that as its context."""
    handled = runtime.exception_stack[-1]
    if e is not None and handled is not None and e.__context__ is None and not _is_in_contexts(e, handled):
        e.__context__ = handled
    assert _curexc.fset is not None
    _curexc.fset(runtime, e)


def _is_in_contexts(e: BaseException, handled: BaseException) -> bool:
    current: BaseException | None = handled
    seen: set[int] = set()
    while current is not None and id(current) not in seen:  # a program can set contexts so that they go round
        seen.add(id(current))
        current = current.__context__
    return id(e) in seen


# Natively they would ask what stands for a tensor, which makes another one.
_IN_PLACE = {
    **{"iadd": "+", "isub": "-", "imul": "*", "itruediv": "/", "ifloordiv": "//", "imod": "%", "ipow": "**", "imatmul": "@"},
    **{"iand": "&", "ior": "|", "ixor": "^", "ilshift": "<<", "irshift": ">>"},
}


def _register(name: str, sign: str) -> None:
    made: dict[str, Any] = {"__name__": __name__}
    exec(f"def {name}(a, b, /):\n    a {sign}= b\n    return a", made)  # noqa: S102 - of a name and a sign
    instead_of(getattr(operator, name))(lambda *args, **kwargs: thunders._interpret_call(made[name], *args, **kwargs))


for _name, _sign in _IN_PLACE.items():
    _register(_name, _sign)


def _joined(a: Any, b: Any, /) -> Any:
    return a + b


def _joined_to(a: Any, b: Any, /) -> Any:
    a += b
    return a


def _join(plus: Callable, a: WrappedValue, b: WrappedValue, /) -> Any:
    """Of sequences alone: Thunder adds tensors and numbers."""
    shown = next((v.value for v in (a, b) if isinstance(v.value, Proxy)), a.value)
    kind = (
        shown.python_type if isinstance(shown, NumberProxy) else torch.Tensor if isinstance(shown, TensorProxy) else type(shown)
    )
    if not isinstance(shown, Proxy) and in_classes(kind.__mro__, "__getitem__", None) is not None:
        return thunders._interpret_call(plus, a, b)
    if shown is a.value:
        return do_raise(TypeError(f"{kind.__name__!r} object can't be concatenated"))
    base = type(a.value).__name__
    return do_raise(TypeError(f'can only concatenate {base} (not "{kind.__name__}") to {base}'))


for _operator, _plus in ((operator.concat, _joined), (operator.iconcat, _joined_to)):
    instead_of(_operator)(functools.partial(_join, _plus))


def _set_item(obj: Any, key: Any, value: Any) -> None:
    obj[key] = value


def _delete_item(obj: Any, key: Any) -> None:
    del obj[key]


@instead_of(operator.setitem)
def _setitem(*args: WrappedValue) -> Any:
    """Natively it would change a list or dict beside what the interpreter knows of its items."""
    return thunders._interpret_call(_set_item, *args)


@instead_of(operator.delitem)
def _delitem(*args: WrappedValue) -> Any:
    return thunders._interpret_call(_delete_item, *args)


REPLACEMENTS = (
    Replacement(thunders, "_binary_op_helper", _binary_op, "outofplace_impl in _binary_op, which asks the left operand first"),
    Replacement(InterpreterRuntimeCtx, "curexc", property(_curexc.fget, _set_current), "do_raise: runtimectx.curexc = value"),
)
