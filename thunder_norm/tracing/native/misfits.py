"""A call with arguments that a function of Python's does not take, where something else is called instead of it.

``list(1, 2)`` and ``{}.get()`` ended in an error of the interpreter's own, about a method that the program has never heard of.
"""

from __future__ import annotations

import inspect
import re
from types import FunctionType
from typing import Any

from thunder.core import interpreter as thunders
from thunder.core.interpreter import unwrap

_CALLS = thunders._call_dispatch.__code__  # has the function and its arguments beside what is called
_SLICES = thunders.SequenceWrapperMethods.__getitem__.__code__
_MISFIT = re.compile(r"\(\) (takes|missing|got) .*argument|too many values to unpack \(expected 1\)")


def error_of(error: TypeError | ValueError) -> Exception:
    """What Python says of the call that ended in `error`, which a program can catch.

    Raises:
        Exception: `error` itself, if it is about something else than the arguments of such a call.
    """
    frames = []
    end = error.__traceback__
    while end is not None:
        frames.append(end.tb_frame)
        end = end.tb_next
    if frames[-1].f_code is _SLICES:  # with steps of zero
        return error
    call = next((f for f in reversed(frames) if f.f_code is _CALLS), None) if _MISFIT.search(str(error)) else None
    found = None if call is None or "lookaside_fn" not in call.f_locals else _said_of(call.f_locals)
    if found is None:
        raise error
    return found


def _said_of(given: dict[str, Any]) -> TypeError | None:
    return _said_by(given["fn"], tuple(map(unwrap, given["args"])), {k: unwrap(v) for k, v in given["kwargs"].items()})


def _said_by(fn: Any, args: tuple, kwargs: dict[str, Any]) -> TypeError | None:
    """What a function says of its arguments before it does anything; None if it takes them."""
    if isinstance(fn, FunctionType):
        try:
            inspect.signature(fn).bind(*args, **kwargs)
            return None
        except TypeError:
            pass  # which says it in other words than a call
    try:
        fn(*args, **kwargs)
    except TypeError as e:
        return e
    except Exception:  # noqa: BLE001 - it has got further than its arguments
        return None
    return None
