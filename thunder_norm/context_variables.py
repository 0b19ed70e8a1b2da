"""Context variables that have a value inside a block."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """`variable` has `value` inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
