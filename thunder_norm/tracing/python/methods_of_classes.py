"""Special methods, which Python looks for in the class of an object: ``len(o)``, ``if o``, ``for v in o``, ``v in o``, ``-o``.

Thunder asks the object, and has another method, or one where there is none, of what is a class itself (``if nn.Sequential``,
``for member in Flags``), keeps something under the name, or answers for any name by its ``__getattr__``.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, WrappedValue, do_raise, wrap_const
from thunder.core.proxies import Proxy

_handlers = thunders._default_opcode_handler_map
_KNOWN = (str, list, tuple, dict, set)
_METHODS = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
_nothing = object()


def has(value: Any, name: str) -> bool:
    """Whether the class of an object has a special method."""
    return in_classes(type(value).__mro__, name, None) is not None


def is_asked_otherwise(value: Any, *names: str) -> bool:
    """Whether the object, asked for one of some special methods, may have another than its class has."""
    if type(value) in _KNOWN or isinstance(value, Proxy):
        return False
    own = getattr(value, "__dict__", None) or ()
    return isinstance(value, type) or any(name in own or not has(value, name) for name in names)


def asked(obj: WrappedValue, name: str, *args: WrappedValue) -> Any:
    """What the method in the class of an object says; None where only Thunder knows what the method is."""
    found = in_classes(type(obj.value).__mro__, name, None)
    if not isinstance(found, _METHODS):
        return None
    surroundings = guards.surroundings()
    if surroundings is not None:
        surroundings.note_attribute(type(obj.value), name)
    return thunders._interpret_call(wrap_const(found), obj, *args)


def length(obj: WrappedValue) -> Any:
    """``len(o)``; None where Thunder's is right."""
    if not is_asked_otherwise(obj.value, "__len__"):
        return None
    if not has(obj.value, "__len__"):
        return do_raise(TypeError(f"object of type {type(obj.value).__name__!r} has no len()"))
    said = asked(obj, "__len__")
    return said if said is None or said is _EXCEPTION_RAISED else thunders._interpret_call(_as_length, said)


def truth(obj: WrappedValue) -> Any:
    """``bool(o)`` of what has no method for it in its class, and so is true unless it has a length of 0; None where Thunder's is right."""
    if has(obj.value, "__bool__") or not is_asked_otherwise(obj.value, "__len__"):
        return None
    if not has(obj.value, "__len__"):
        return wrap_const(True)
    said = length(obj)
    return said if said is None or said is _EXCEPTION_RAISED else thunders._interpret_call(_is_not_zero, said)


def iterator(obj: WrappedValue) -> Any:
    """``iter(o)``; None where Thunder's is right."""
    if not is_asked_otherwise(obj.value, "__iter__"):
        return None
    if has(obj.value, "__iter__"):
        return asked(obj, "__iter__")
    if has(obj.value, "__getitem__"):
        return None
    return do_raise(TypeError(f"{type(obj.value).__name__!r} object is not iterable"))


def membership(container: WrappedValue, value: WrappedValue) -> Any:
    """``value in o``; None where Thunder's is right, which takes what a method of Python's returns for the answer."""
    if isinstance(in_classes(type(container.value).__mro__, "__contains__"), FunctionType):
        said = asked(container, "__contains__", value)
        return said if said is None or said is _EXCEPTION_RAISED else thunders._interpret_call(bool, said)
    if not is_asked_otherwise(container.value, "__contains__"):
        return None
    if in_classes(type(container.value).__mro__, "__contains__", _nothing) is not _nothing:
        said = asked(container, "__contains__", value)
        return said if said is None or said is _EXCEPTION_RAISED else thunders._interpret_call(bool, said)
    if not has(container.value, "__iter__") and not has(container.value, "__getitem__"):
        return do_raise(TypeError(f"argument of type {type(container.value).__name__!r} is not iterable"))
    return thunders._interpret_call(_is_among, container, value)


def _unary(opname: str, method: str, symbol: str) -> Callable:
    thunders_own = _handlers[opname]

    def handler(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
        operand = stack.getitem_wrapped(-1)
        if not is_asked_otherwise(operand.value, method):
            return thunders_own(inst, stack=stack, **state)
        if not has(operand.value, method):
            return do_raise(TypeError(f"bad operand type for unary {symbol}: {type(operand.value).__name__!r}"))
        said = asked(operand, method)
        if said is None:
            return thunders_own(inst, stack=stack, **state)
        stack.pop_wrapped()
        return said if said is _EXCEPTION_RAISED else stack.append(said)

    return handler


# -- interpreted --------------------------------------------------------------------------------------------------------------


def _as_length(said: Any) -> int:
    if not isinstance(said, int):
        raise TypeError(f"{type(said).__name__!r} object cannot be interpreted as an integer")
    if said < 0:
        raise ValueError("__len__() should return >= 0")
    return said


def _is_not_zero(length: int) -> bool:
    return length != 0


def _is_among(container: Any, value: Any) -> bool:
    for v in container:
        if v is value or v == value:
            return True
    return False


REPLACEMENTS = (
    Replacement(_handlers, "UNARY_NEGATIVE", _unary("UNARY_NEGATIVE", "__neg__", "-"), 'hasattr(tos, "__neg__")'),
    Replacement(_handlers, "UNARY_INVERT", _unary("UNARY_INVERT", "__invert__", "~"), 'hasattr(tos, "__invert__")'),
)
