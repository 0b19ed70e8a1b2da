"""What became of a column: figures, or one line with the error's class and cause."""

from __future__ import annotations

import re
import time
from typing import Any

from thunder.core.interpreter import InterpreterError

from .case import Model
from .columns import COLUMNS

LONGEST = 150


def one_line(error: BaseException, longest: int = LONGEST) -> str:
    """``Class: first line``, of what the interpreter of Thunder met if it was that which raised; without addresses and paths."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"0x[0-9a-f]+", "0x...", lines[0] if lines else "")
    text = re.sub(r"(/[\w.+-]+)+/", "", text).replace("|", "/").replace("`", "'")
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= longest else text[: longest - 3] + "..."


def outcome(model: Model, column: str) -> dict[str, Any]:
    """``{"seconds": ..., **figures}``, or with ``error``."""
    start = time.perf_counter()
    try:
        figures = COLUMNS[column](model)
    except Exception as e:  # noqa: BLE001 - that is what the table says
        figures = {"error": one_line(e)}
    return {"took": round(time.perf_counter() - start, 2), **figures}
