"""What ``copy`` and ``pickle`` ask an object for, where its class leaves it to Python: its attributes.

``object.__reduce_ex__`` and ``object.__getstate__`` are functions in C that Thunder calls natively: what a copy has of the object would be
constants of the trace, guarded by nothing, its tensors among them.
"""

from __future__ import annotations

import copyreg
from typing import Any

from thunder_norm.tracing.guarding.classes import in_classes
from thunder_norm.tracing.lookasides import instead_of
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, interpreter_needs_wrap, wrap_const

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of a class written in Python
_OWN = ("__getnewargs_ex__", "__getnewargs__", "__reduce__", "__reduce_ex__", "__new__")


@instead_of(object.__getstate__)
def _getstate(obj: WrappedValue) -> Any:
    if not _is_plain(type(obj.value)):
        return interpreter_needs_wrap(object.__getstate__)(obj)
    return thunders._interpret_call(_state, obj, wrap_const(tuple(copyreg._slotnames(type(obj.value)))))  # pyright: ignore[reportAttributeAccessIssue]


@instead_of(object.__reduce_ex__)
def _reduce_ex(obj: WrappedValue, protocol: WrappedValue) -> Any:
    kind = type(obj.value)
    if protocol.value < 2 or not _is_plain(kind) or any(in_classes(kind.__mro__[:-1], name, None) is not None for name in _OWN):
        return interpreter_needs_wrap(object.__reduce_ex__)(obj, protocol)
    return thunders._interpret_call(_reduced, obj)


def _is_plain(kind: type) -> bool:
    """Whether all that objects of a class have is in their ``__dict__`` and slots: no class in C stores something of them."""
    return all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1])


def _state(obj: Any, slots: tuple[str, ...]) -> Any:
    own = obj.__dict__ if hasattr(obj, "__dict__") else {}
    attributes = {name: getattr(obj, name) if _is_read_from_own(type(obj), name) else own[name] for name in own} or None
    in_slots = {name: getattr(obj, name) for name in slots if hasattr(obj, name)}
    return (attributes, in_slots) if in_slots else attributes


def _is_read_from_own(kind: type, name: str) -> bool:
    """Whether an attribute of a class's objects is what is in their ``__dict__``, and no code runs: no property, nor ``__getattribute__``."""
    is_property = hasattr(type(in_classes(kind.__mro__, name, None)), "__set__")
    return kind.__getattribute__ is object.__getattribute__ and not is_property


def _reduced(obj: Any) -> tuple:
    return copyreg.__newobj__, (type(obj),), obj.__getstate__(), None, None  # pyright: ignore[reportAttributeAccessIssue]
