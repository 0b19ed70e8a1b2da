"""Room for deep calls: as many as eager mode has, and frames of Python's in one piece of memory, where pieces of 16 KiB would come and go.

CPython (``push_chunk`` in Python/pystate.c, from 3.11 on) keeps frames in chunks of 16 KiB, and maps a new one of the system where a call
needs more than is left, to give it back when that call returns.  An interpreter in Python is hundreds of frames deep, so that some loop of
it runs right at the end of a chunk: two system calls and fresh pages for each of its calls were a tenth of an acquisition.  A chunk is as
large as its first frame asks for, to the next power of two, so a frame that says it needs a high stack leaves room behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUM_SLOTS = (
    66_000  # of 8 bytes: more than 512 KiB with what a frame has besides, so that the chunk has 1 MiB and half of it is left
)


def with_room(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose frames of Python's, and those inside of it, lie in one chunk of memory up to 490 KiB."""
    return function(*args, **kwargs)


with_room.__code__ = with_room.__code__.replace(co_stacksize=_NUM_SLOTS)  # memory that nothing touches is not given by the system


_FRAMES_PER_CALL = 12  # of Python's, for a call of the program's: 8 to 10 are counted for functions and modules


@contextmanager
def as_deep_as_eager() -> Iterator[None]:
    """Where a program is interpreted: its calls may be nested as deeply as Python lets them be without us."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit * _FRAMES_PER_CALL)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
