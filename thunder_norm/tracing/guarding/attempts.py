"""Compiling a program for more calls than the one at hand: it is tried, and where that fails, the program is for one call's shapes, from then on."""

from __future__ import annotations

from typing import Any

from thunder.core.compile_data import get_compile_data

_TRIED, _FAILED = "_thunder_norm_is_tried_for_more", "_thunder_norm_is_not_for_more"


def may_begin() -> bool:
    """Whether it has not failed for the program that is being compiled."""
    return not vars(get_compile_data()).get(_FAILED)


def begin() -> None:
    """The program is compiled for more calls."""
    vars(get_compile_data())[_TRIED] = True


def give_up(cd: Any = None) -> bool:
    """Whether that is what was tried; it is not tried again."""
    found = vars(get_compile_data() if cd is None else cd)
    is_tried = found.pop(_TRIED, False)
    if is_tried:
        found[_FAILED] = True
    return is_tried


def end(cd: Any) -> None:
    """The program has been compiled."""
    vars(cd).pop(_TRIED, None)
