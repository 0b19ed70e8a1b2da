"""A progress bar for what takes minutes: on a terminal only, and not where it is switched off."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from thunder_norm.context_variables import setting
from thunder_norm.errors import NormMismatchError

T = TypeVar("T")

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("thunder_norm_progress_wanted", default=True)
_OFF = ("0", "false", "no", "off")
_bars = 0  # how many are on the terminal


@contextlib.contextmanager
def show_progress(wanted: bool = True) -> Iterator[None]:
    """Whether progress is shown inside the block: bars, and what a first call is at.

    It is only ever shown on a terminal.  The environment variable ``THUNDER_NORM_PROGRESS=0`` is the same for a whole process, threads
    included, and goes before.

    >>> with show_progress(False):
    ...     print(is_shown())
    False

    Args:
        wanted: whether it is shown.
    """
    with setting(_wanted, bool(wanted)):
        yield


def has_bar() -> bool:
    """Whether a progress bar of ours is on the terminal now."""
    return _bars > 0


def track(iterable: Iterable[T], description: str = "", total: int | None = None) -> Iterator[T]:
    """The same items, with a progress bar on standard error; silent when that is no terminal.

    >>> list(track([1, 2, 3], "counting"))
    [1, 2, 3]

    Args:
        iterable: what to go through.
        description: stands before the bar.
        total: the number of items, if `iterable` does not know its length.

    Raises:
        NormMismatchError: total is negative.
    """
    if total is not None and total < 0:
        raise NormMismatchError(f"total must be >= 0, got {total}")
    return _track(iterable, description, len(iterable) if total is None and isinstance(iterable, Sized) else total)


def is_shown() -> bool:
    """Whether progress is shown: standard error is a terminal, and nobody switched it off."""
    if not _wanted.get() or os.environ.get("THUNDER_NORM_PROGRESS", "").strip().lower() in _OFF:
        return False
    is_terminal = getattr(sys.stderr, "isatty", lambda: False)
    try:
        return bool(is_terminal())
    except ValueError:  # closed
        return False


@contextlib.contextmanager
def counting(description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar for a block that calls what it is given at each step; silent when standard error is no terminal.

    >>> with counting("walking", total=2) as step:
    ...     step()
    ...     step()

    Args:
        description: stands before the bar.
        total: how many steps there will be, if that is known.
    """
    if not is_shown():
        yield _ignore
        return
    global _bars
    _bars += 1
    try:
        with _bar() as bar:
            task = bar.add_task(description, total=total)
            yield lambda: bar.advance(task)
    finally:
        _bars -= 1


def _ignore() -> None:
    """What a step does where nothing is shown."""


def _track(iterable: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    with counting(description, total) as step:
        for item in iterable:
            yield item
            step()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
