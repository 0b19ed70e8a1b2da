"""Operators that ask the right operand first."""

from __future__ import annotations

import collections
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
from thunder_norm.tracing.torch_functions.tensor_classes import class_in_eager, is_asked_first, may_have_operators, own_operator
from thunder_norm.tracing.torch_functions.torch_arguments import holds_number
from thunder.core import interpreter as thunders
from thunder.core.interpreter import (
    BINARY_OP,
    InterpreterRuntimeCtx,
    InterpreterStack,
    WrappedValue,
    do_raise,
    unwrap,
    wrap_const,
)
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy

_REFLECTED = (
    *("__radd__", "__rand__", "__rfloordiv__", "__rlshift__", "__rmatmul__", "__rmul__", "__rmod__"),
    *("__ror__", "__rpow__", "__rrshift__", "__rsub__", "__rtruediv__", "__rxor__"),
)
_SIGNS = ("+", "&", "//", "<<", "@", "*", "%", "|", "**", ">>", "-", "/", "^")  # as `_REFLECTED`
_thunders_helper = thunders._binary_op_helper
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
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
            return found if found is _EXCEPTION_RAISED else stack.append(found)
    if may_have_operators(a) or may_have_operators(b):
        found = _of_class(op, a, b)
        if found is not None:
            stack.pop_wrapped()
            stack.pop_wrapped()
            return found if found is _EXCEPTION_RAISED else stack.append(found)
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
    if result is _EXCEPTION_RAISED:
        stack.pop_wrapped()
        stack.pop_wrapped()
        return result
    if result.value is NotImplemented and issubclass(kind, base):
        return _thunders_binary_op(stack, op)
    stack.pop_wrapped()
    stack.pop_wrapped()
    if result.value is NotImplemented:
        return do_raise(_unsupported(op, base, kind))
    stack.append(result)
    return None


def _of_class(op: BINARY_OP, a: WrappedValue, b: WrappedValue) -> Any:
    """What ``a op b`` is where the class of a tensor has a method of its own for it; None where torch's or Python's is asked first."""
    is_in_place = op.value >= BINARY_OP.IADD.value
    reflected = _REFLECTED[op.value % BINARY_OP.IADD.value]
    in_place, name = (reflected.replace("__r", f"__{kind}", 1) for kind in ("i", ""))
    asked = [(a, name, b), (b, reflected, a)]
    if is_asked_first(b, a, reflected):
        asked.reverse()
    elif class_in_eager(a) is class_in_eager(b):
        asked.pop()
    if is_in_place:
        asked.insert(0, (a, in_place, b))
    if all(own_operator(x, method) is None for x, method, _ in asked):
        return None
    is_first = True
    for x, method, other in asked:
        found = _method(x, method, other)
        if found is None:
            continue
        if is_first and own_operator(x, method) is None and isinstance(x.value, TensorProxy):
            return None
        is_first = False
        result = thunders._interpret_call(wrap_const(found), x, other)
        if result is _EXCEPTION_RAISED or result.value is not NotImplemented:
            return result
    return do_raise(_unsupported(op, class_in_eager(a), class_in_eager(b)))


def _method(x: WrappedValue, name: str, other: WrappedValue) -> Any:
    """What the class of an operand has for an operator; None of what leaves it to the other operand."""
    if not isinstance(x.value, TensorProxy):
        found = in_classes(type(x.value).__mro__, name, None)  # those of Python's own classes leave it to a tensor
        return found if isinstance(found, FunctionType) and _noted(x, name) else None
    own = own_operator(x, name)
    is_operand = isinstance(other.value, Proxy | int | float | complex) or holds_number(other)
    return getattr(torch.Tensor, name, None) if own is None and is_operand else own


def _noted(obj: WrappedValue, name: str) -> bool:
    guards.note_attribute(obj, name)
    return True


def _thunders_binary_op(stack: InterpreterStack, op: BINARY_OP) -> Any:
    """Thunder's answer, where it asks the classes of the operands: a metaclass has methods too, as ``type.__or__``.

    And of two operands of one class Python asks the method of the left alone.
    """
    b, a = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    kinds = type(a.value), type(b.value)
    reflected = _REFLECTED[op.value % BINARY_OP.IADD.value]
    names = reflected.replace("__r", "__", 1), reflected
    is_left_alone = kinds[0] is kinds[1] and isinstance(in_classes(kinds[0].__mro__, reflected, None), FunctionType)
    is_left_alone = is_left_alone and not isinstance(a.value, Proxy)
    if not is_left_alone and not any(hasattr(type(kind), name) for kind, name in zip(kinds, names, strict=True)):
        result = _thunders_helper(stack, op)
        error = thunders.get_interpreterruntimectx().curexc if result is _EXCEPTION_RAISED else None
        if type(error) is TypeError and str(error).endswith(f": '{kinds[0]}' and '{kinds[1]}'"):
            return do_raise(_unsupported(op, *kinds))
        return result
    stack.pop_wrapped()
    stack.pop_wrapped()
    in_place = reflected.replace("__r", "__i", 1)
    asked = [(in_place, a, b)] * (op.value >= BINARY_OP.IADD.value) + [(names[0], a, b), (names[1], b, a)][: 2 - is_left_alone]
    for name, asks, other in asked:
        method = in_classes(type(asks.value).__mro__, name, _nothing)
        result = asks if method is _nothing else thunders._interpret_call(wrap_const(method), asks, other)
        if method is not _nothing and result is _EXCEPTION_RAISED:
            return result
        if method is not _nothing and result.value is not NotImplemented:
            stack.append(result)
            return None
    return do_raise(_unsupported(op, *kinds))


_REPEATED = (list, tuple, str, bytes, bytearray, collections.deque)


def _unsupported(op: BINARY_OP, left: type, right: type) -> TypeError:
    """Python's error for operands that have no such operator."""
    sign = _SIGNS[op.value % BINARY_OP.IADD.value] + "=" * (op.value >= BINARY_OP.IADD.value)
    repeats = [issubclass(kind, _REPEATED) for kind in (left, right)]
    if sign.startswith("*") and not sign.startswith("**") and any(repeats):
        other = right if repeats[0] else left
        return TypeError(f"can't multiply sequence by non-int of type {other.__name__!r}")
    shown = "** or pow()" if sign == "**" else sign
    return TypeError(f"unsupported operand type(s) for {shown}: {left.__name__!r} and {right.__name__!r}")


def _joins_as_builtin(base: type, reflected: str) -> bool:
    """Whether a class of sequences does not say itself what is joined to it."""
    return not isinstance(in_classes(base.__mro__, reflected.replace("__r", "__", 1), None), FunctionType)


# Natively they would ask what stands for a tensor, which makes another one, and run methods of the program's unseen.
_IN_PLACE = {
    **{"iadd": "+", "isub": "-", "imul": "*", "itruediv": "/", "ifloordiv": "//", "imod": "%", "ipow": "**", "imatmul": "@"},
    **{"iand": "&", "ior": "|", "ixor": "^", "ilshift": "<<", "irshift": ">>"},
}


def _register(name: str, body: str) -> None:
    made: dict[str, Any] = {"__name__": __name__}
    exec(f"def {name}(a, b, /):\n    {body}", made)  # noqa: S102 - of a name and a sign
    instead_of(getattr(operator, name))(lambda *args, **kwargs: thunders._interpret_call(made[name], *args, **kwargs))


_OUT_OF_PLACE = {
    **{name.removeprefix("i") + "_" * (name in ("iand", "ior")): sign for name, sign in _IN_PLACE.items()},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}
for _name, _sign in _IN_PLACE.items():
    _register(_name, f"a {_sign}= b; return a")
for _name, _sign in _OUT_OF_PLACE.items():
    _register(_name, f"return a {_sign} b")


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


if hasattr(operator, "call"):  # from Python 3.11 on

    @instead_of(operator.call)
    def _called(function: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        return thunders._interpret_call(function, *args, **kwargs)


def _users_location(runtime: InterpreterRuntimeCtx) -> tuple[str, Any] | tuple[None, None]:
    """Where the program is: functions of ours that are interpreted in place of others are none of its."""
    for frame in reversed(runtime.frame_stack):
        module = unwrap(frame.globals).get("__name__", "")
        if not module.startswith(_NOT_OF_PROGRAMS):
            return frame.code.co_filename, frame.positions
    return _thunders_location(runtime)


_thunders_location = InterpreterRuntimeCtx.get_current_user_source_location
_NOT_OF_PROGRAMS = ("thunder.core.interpreter", "thunder.core.jit_ext", "thunder.torch", "thunder_norm.")


REPLACEMENTS = (
    Replacement(
        InterpreterRuntimeCtx,
        "get_current_user_source_location",
        _users_location,
        'get_current_user_source_location: if modname not in ("thunder.core.interpreter", ...)',
    ),
    Replacement(thunders, "_binary_op_helper", _binary_op, "outofplace_impl in _binary_op, which asks the left operand first"),
)
