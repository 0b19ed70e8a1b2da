"""Functions of Python's standard library that run as they are: what looks at code and at no tensor, and what keeps a list in order.

The former are Python that Thunder's interpreter fails at, or keep what they have made for later calls, from which others' patterns and caches
would be guarded.  The latter are C, and move elements of a list: what stands for these moves with them.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import inspect
import re
from collections.abc import Callable
from typing import Any

from thunder_norm.tracing.lookasides import instead_of
from thunder.core.interpreter import WrappedValue, interpreter_needs_wrap, wrap_const

for _function in (inspect.signature, dataclasses._process_class, re._compile):  # type: ignore[attr-defined]
    instead_of(_function)(interpreter_needs_wrap(_function))


def _moving(fn: Callable) -> Callable:
    native = interpreter_needs_wrap(fn)

    def call(seq: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        seq.track_items()
        known = {id(w.value): w for w in (*args, *kwargs.values(), *seq.item_wrappers)}
        result = native(seq, *args, **kwargs)
        seq.item_wrappers[:] = [known.get(id(v)) or wrap_const(v) for v in seq.value]
        return known.get(id(result.value), result) if isinstance(result, WrappedValue) else result

    return call


_OF_HEAPS = ("heapify", "heappush", "heappop", "heapreplace", "heappushpop")
_OF_LARGEST_FIRST = ("_heapify_max", "_heappop_max", "_heapreplace_max")
_KEEP_ORDER = (
    *(getattr(heapq, name) for name in (*_OF_HEAPS, *_OF_LARGEST_FIRST) if hasattr(heapq, name)),
    *(bisect.insort_left, bisect.insort_right),
)
for _function in _KEEP_ORDER:
    instead_of(_function)(_moving(_function))
