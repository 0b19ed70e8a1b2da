"""Objects of classes in C that a program makes and hands out: iterators over lists and tuples, and exceptions, are made anew in each call.

What stands for other iterators while a trace is acquired (``zip``, generators, views of a dict) means nothing afterwards.
"""

from __future__ import annotations

import types
from typing import Any

from thunder_norm.user_code import is_of_tracing
from thunder.core.interpreter import SequenceIter

_ITERATORS = (type(iter(())), type(iter([])), type(reversed([])))
_OF_MORE = (  # exceptions that hold more than their arguments
    AttributeError,
    BaseExceptionGroup,
    ImportError,
    NameError,
    OSError,
    SyntaxError,
    UnicodeError,
)
_OF_OURS = ("thunder.core.", "thunder_norm.tracing.")


def iterator_parts(value: Any) -> tuple[Any, Any, int] | None:
    """What makes an iterator, of what, and where it stands; None if it is no iterator over a list or tuple."""
    if type(value) is SequenceIter and type(value.s) in (list, tuple):
        return (reversed if value.is_reversed else iter), value.s, value.next_pos
    if type(value) in _ITERATORS:
        make, (sequence,), *place = value.__reduce__()
        return make, sequence, place[0] if place else 0
    return None


def iterated(make: Any, sequence: Any, place: int) -> Any:
    """An iterator that stands at a place."""
    made = make(sequence)
    made.__setstate__(place)
    return made


def is_exception(value: Any) -> bool:
    """Whether a value is an exception that is its class, its arguments and attributes."""
    return isinstance(value, BaseException) and not isinstance(value, _OF_MORE)


def exception(value: BaseException, args: tuple, attributes: dict[str, Any], others: tuple) -> BaseException:
    """An exception like `value`, with these arguments, attributes, and cause and context."""
    cls = type(value)
    made = cls.__new__(cls, *args)
    in_c = next(c for c in cls.__mro__ if c.__module__ == "builtins")
    in_c.__init__(made, *args)
    vars(made).update(attributes)
    made.__cause__, made.__context__ = others
    made.__suppress_context__ = value.__suppress_context__
    return made.with_traceback(value.__traceback__)


def is_standing_in(value: Any) -> bool:
    """Whether a value stands for an iterator or a view of a dict while a trace is acquired."""
    if isinstance(value, types.GeneratorType | types.CoroutineType):
        code = value.gi_code if isinstance(value, types.GeneratorType) else value.cr_code
        return is_of_tracing(code.co_filename)
    return type(value).__module__.startswith(_OF_OURS)
