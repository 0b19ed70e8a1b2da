"""What printed tables of operations share."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from thunder_norm.errors import NormMismatchError

Row = TypeVar("Row")


def shortened(rows: Sequence[Row], max_rows: int | None) -> Iterator[tuple[int, Row | None]]:
    """Rows with their numbers; (how many, None) in place of those that are left out in the middle."""
    if max_rows is not None and max_rows < 0:
        raise NormMismatchError(f"max_rows must be >= 0, got {max_rows}")
    numbered = list(enumerate(rows, 1))
    if max_rows is None or len(rows) <= max_rows:
        yield from numbered
        return
    first = (max_rows + 1) // 2
    last = max_rows - first
    yield from numbered[:first]
    yield len(rows) - max_rows, None
    yield from numbered[len(rows) - last :]


def short_location(location: str) -> str:
    """``model.py:41`` of ``/path/to/model.py:41:  text``."""
    path, _, rest = location.partition(":")
    return f"{Path(path).name}:{rest.partition(':')[0]}" if location else ""


def pandas_for(method: str) -> Any:
    """The module pandas, which the extra `dataframe` installs.

    Raises:
        ImportError: it is not installed, and `method` needs it.
    """
    try:
        return importlib.import_module("pandas")
    except ImportError as e:
        raise ImportError(f"{method} needs pandas: pip install 'thunder_norm[dataframe]'") from e
