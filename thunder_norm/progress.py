"""A progress bar for what takes minutes: on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from thunder_norm.errors import NormMismatchError

T = TypeVar("T")


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


def _track(iterable: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    is_terminal = getattr(sys.stderr, "isatty", lambda: False)
    if not is_terminal():
        yield from iterable
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total)
        for item in iterable:
            yield item
            progress.advance(task)
