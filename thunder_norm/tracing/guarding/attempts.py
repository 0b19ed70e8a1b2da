"""Compiling a program for more calls than the one at hand: it is tried, and where that fails, it is compiled for less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder.core.compile_data import get_compile_data

_TRIED = "_thunder_norm_tried_for_more"


def begin(failed: Callable[[], None]) -> None:
    """The program is compiled for more calls; `failed` is called before it is compiled once more, if that cannot be."""
    vars(get_compile_data()).setdefault(_TRIED, []).append(failed)


def give_up(cd: Any = None) -> bool:
    """Whether something was tried."""
    tried = vars(get_compile_data() if cd is None else cd).pop(_TRIED, ())
    for failed in tried:
        failed()
    return bool(tried)


def end(cd: Any) -> None:
    """The program has been compiled."""
    vars(cd).pop(_TRIED, None)
