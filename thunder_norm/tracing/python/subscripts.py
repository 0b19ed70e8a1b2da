"""``x[i]``, ``x[i] = v`` and ``del x[i]``: what has no such method is refused by a TypeError, as Python does it.

Thunder calls the method, so that programs which try (``try: skip = skip[:, -n:] except TypeError: ...``) met an AttributeError. Of a class
its metaclass is asked first (``Color["RED"]`` of an enum), whose method Thunder does not look for.
"""

from __future__ import annotations

import dis
from types import GenericAlias
from typing import Any

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.guarding.value_kinds import is_number_of_tensors
from thunder_norm.tracing.replacement import Replacement
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, WrappedValue, wrap_const
from thunder.core.proxies import Proxy

_handlers = thunders._default_opcode_handler_map
_thunders_subscript = _handlers["BINARY_SUBSCR"]
_READING = "__getitem__", "is not subscriptable"
WRITING = "__setitem__", "does not support item assignment"
_DELETING = "__delitem__", "doesn't support item deletion"


def lack(owner: WrappedValue, method: str, says: str) -> TypeError | None:
    """The error of an object whose class has no such method."""
    is_number = is_number_of_tensors(owner.value)
    kind = owner.value.python_type if is_number else type(owner.value)
    if (isinstance(owner.value, Proxy) and not is_number) or in_classes(kind.__mro__, method, None) is not None:
        return None
    return TypeError(f"{kind.__name__!r} object {says}")


def subscript(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    """The handler of ``owner[key]``."""
    key, owner = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    if type(owner.value) is GenericAlias:  # which answers for its class: ``NDArray[np.float64]``
        stack.pop_wrapped()
        stack.pop_wrapped()
        return stack.append(wrap_const(owner.value[key.value]))
    if not isinstance(owner.value, type):
        error = lack(owner, *_READING)
        return _thunders_subscript(inst, stack=stack, **state) if error is None else thunders.do_raise(error)
    method = in_classes(type(owner.value).__mro__, "__getitem__", None)
    if method is None and hasattr(owner.value, "__class_getitem__"):
        return _thunders_subscript(inst, stack=stack, **state)
    stack.pop_wrapped()
    stack.pop_wrapped()
    if owner.value is type:  # which has neither of them
        return stack.append(wrap_const(type[key.value]))
    if method is None:
        return thunders.do_raise(TypeError(f"type {owner.value.__name__!r} is not subscriptable"))
    if (met := guards.surroundings()) is not None:
        met.note_attribute(type(owner.value), "__getitem__")
    result = thunders._interpret_call(wrap_const(method), owner, key)
    return result if result is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED else stack.append(result)


def _refusing(opname: str, place: int, method: str, says: str) -> Replacement:
    """The handler of an operation that calls `method` of what lies at a place of the stack, counted from its top."""
    calls = _handlers[opname]

    def handler(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
        error = lack(stack.getitem_wrapped(-place), method, says)
        return calls(inst, stack=stack, **state) if error is None else thunders.do_raise(error)

    return Replacement(_handlers, opname, handler, f"impl in _{opname.lower()}_handler: container.{method}(...)")


# the slices are operations of their own from Python 3.12 on
_REFUSING = {"DELETE_SUBSCR": (2, *_DELETING), "BINARY_SLICE": (3, *_READING), "STORE_SLICE": (3, *WRITING)}
REPLACEMENTS = tuple(_refusing(opname, *asked) for opname, asked in _REFUSING.items() if opname in _handlers)
