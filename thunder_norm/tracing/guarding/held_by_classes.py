"""What classes of tensors hold: lists, dicts, tensors and objects that a program finds by a tensor of the class, and may write into."""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from thunder_norm.context_variables import setting
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import in_classes
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, _interpret_call, wrap, wrap_const

_CONTAINERS = (list, dict, set, deque)
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)
_told: contextvars.ContextVar[Callable[[Any], None] | None] = contextvars.ContextVar("thunder_norm_held_by_classes", default=None)


def telling(told: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Have `told` told each of these before the program has it: what becomes of it there becomes of it in each call."""
    return setting(_told, told)


def note(held: Any) -> None:
    """Note what a class of tensors holds, or a class that the program is about to change."""
    if (told := _told.get()) is not None:
        told(held)


def is_held(found: Any) -> bool:
    """Whether what a class has under a name is one of these, and no data, code or descriptor."""
    if isinstance(found, (*_CONTAINERS, torch.Tensor)):
        return True
    own = getattr(found, "__dict__", None)
    return type(own) is dict and not isinstance(found, _CODE) and not callable(found) and not hasattr(type(found), "__get__")


def read(cls: type, name: WrappedValue, at: ProvenanceRecord | None) -> Any:
    """``cls.name`` of a class that an input has.

    Args:
        cls: the class.
        name: of its attribute.
        at: where an input of the class is; None if there is none.
    """
    found = in_classes(cls.__mro__, name.value)
    if is_held(found) and not isinstance(found, torch.Tensor):
        note(found)
    if (surroundings := guards.surroundings()) is not None:
        surroundings.note_attribute(cls, name.value)
    if at is None:
        return _interpret_call(getattr, wrap_const(cls), name)
    of_class = ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[at, wrap_const("__class__").provenance])
    return _interpret_call(getattr, wrap(cls, provenance=of_class), name)
