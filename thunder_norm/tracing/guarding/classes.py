"""What stands in the classes of an object, as it stands there."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import torch

MISSING = object()
# What these have written is taken to stay as it is.
LIBRARIES = frozenset({"thunder_norm", "thunder", "torch", *sys.stdlib_module_names} - {"__main__"})


def in_classes(mro: Sequence[type], name: str, default: Any = MISSING) -> Any:
    """What the first of some classes that has `name` has under it, unbound."""
    for base in mro:
        if name in base.__dict__:
            return base.__dict__[name]
    return default


def saying_themselves(classes: Any, check: str) -> Iterator[type]:
    """Of what ``isinstance`` or ``issubclass`` is given, classes of a user's that say it themselves: later, or of others of the same type, another thing.

    Args:
        classes: a class, or a tuple or union of some.
        check: the method that says it, ``__instancecheck__`` or ``__subclasscheck__``.
    """
    is_union = typing.get_origin(classes) in (typing.Union, types.UnionType)
    if type(classes) is tuple or is_union:
        for cls in classes.__args__ if is_union else classes:
            yield from saying_themselves(cls, check)
    elif (
        isinstance(classes, type)
        and getattr(type(classes), check) is not getattr(type, check)
        and not asks_program(classes, check)
    ):
        if classes is torch.nn.Buffer or classes.__module__.partition(".")[0] not in LIBRARIES:
            yield classes


def is_of_program(kind: type, name: str) -> bool:
    """Whether what a class has under a name is a program's function, which is interpreted like any other."""
    found = in_classes(kind.__mro__, name)
    found = found.__func__ if isinstance(found, classmethod) else found
    return isinstance(found, types.FunctionType) and (found.__module__ or "").partition(".")[0] not in LIBRARIES


def is_answered_by_code(value: Any, name: str) -> bool:
    """Whether a program's code says if an object has an attribute: whoever asks the object runs that code, with all that it does."""
    if isinstance(value, (type, types.ModuleType)):
        return False
    found = in_classes(type(value).__mro__, name)
    if isinstance(found, property):
        return isinstance(found.fget, types.FunctionType)
    if isinstance(getattr(type(found), "__get__", None), types.FunctionType):
        return True
    return found is MISSING and name not in getattr(value, "__dict__", ()) and is_of_program(type(value), "__getattr__")


def asks_program(cls: Any, check: str) -> bool:
    """Whether a program's function says what ``isinstance`` or ``issubclass`` says of a class."""
    return isinstance(cls, type) and is_of_program(type(cls), check)
