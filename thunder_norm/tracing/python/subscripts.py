"""``C[i]`` of a class: its metaclass is asked first (``Color["RED"]`` of an enum), whose method Thunder does not look for."""

from __future__ import annotations

import dis
from types import GenericAlias
from typing import Any

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import in_classes
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, wrap_const

_thunders_subscript = thunders._default_opcode_handler_map["BINARY_SUBSCR"]


def subscript(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    """The handler of ``owner[key]``."""
    key, owner = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    if type(owner.value) is GenericAlias:  # which answers for its class: ``NDArray[np.float64]``
        stack.pop_wrapped()
        stack.pop_wrapped()
        return stack.append(wrap_const(owner.value[key.value]))
    if not isinstance(owner.value, type):
        return _thunders_subscript(inst, stack=stack, **state)
    method = in_classes(type(owner.value).__mro__, "__getitem__", None)
    if method is None and hasattr(owner.value, "__class_getitem__"):
        return _thunders_subscript(inst, stack=stack, **state)
    stack.pop_wrapped()
    stack.pop_wrapped()
    if owner.value is type:  # which has neither of them
        return stack.append(wrap_const(type[key.value]))
    if method is None:
        return thunders.do_raise(TypeError(f"type {owner.value.__name__!r} is not subscriptable"))
    guards.note_attribute(owner, "__getitem__")
    result = thunders._interpret_call(wrap_const(method), owner, key)
    return result if result is thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED else stack.append(result)
