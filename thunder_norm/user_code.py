"""Which code is the user's: errors and reports speak of its lines."""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any


def _folders(*packages: str) -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in packages)
    own = Path(__file__).parent
    folders = [own, own.parent / "transforms", *(Path(s.origin).parent for s in specs if s is not None and s.origin)]
    return tuple(f"{folder}{os.sep}" for folder in folders)


_LIBRARIES = _folders("torch", "thunder")
_TORCHS = _LIBRARIES[2]
_PYTHONS = f"{Path(os.__file__).parent}{os.sep}"
_OF_TRACES = "thunder."  # how files begin that Thunder makes up
_COMMENT = re.compile(r" {2,}# ([^ ].*?:\d+):\s+(.*)")


def is_users(file: str) -> bool:
    """Whether code of this file is the user's: not torch's, Thunder's or ours, nor made while the program runs."""
    return not file.startswith(_LIBRARIES) and not file.startswith("<")


def is_of_tracing(file: str) -> bool:
    """Whether code of this file is Thunder's or ours."""
    return file.startswith(_LIBRARIES) and not file.startswith(_TORCHS)


def is_installed(file: str | None) -> bool:
    """Whether code of this file came with a package: where pip puts packages, or Debian does."""
    return file is not None and ("site-packages" in file or "dist-packages" in file)


def shown_line(file: str, line: int | None, names: dict[str, Any] | None = None) -> str:
    """``file.py:line:  text``; `names` are the globals of its module, for those that no file holds."""
    return f"{file}:{line}:  {linecache.getline(file, line or 0, names).strip()}"


def user_line() -> str | None:
    """The line of the innermost Python frame that is the user's."""
    frame = sys._getframe(1)  # from here outwards: the whole stack, with its lines, is long
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return shown_line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
        frame = frame.f_back
    return None


def _written_above(file: str, line: int) -> str | None:
    """The line of a program that a line of a trace comes from: ``# file.py:line: text`` stands above its operations."""
    above = (_COMMENT.fullmatch(linecache.getline(file, n).rstrip()) for n in range(line, 0, -1))
    found = next(filter(None, above), None)
    return f"{found[1]}:  {found[2].strip()}" if found is not None and not found[1].startswith(_LIBRARIES[0]) else None


def user_line_of(error: BaseException) -> str | None:
    """The innermost line of the user's that an exception came through."""
    found, traceback = None, error.__traceback__
    while isinstance(traceback, TracebackType):
        file = traceback.tb_frame.f_code.co_filename
        if file.startswith(_OF_TRACES):
            found = _written_above(file, traceback.tb_lineno) or found
        elif is_users(file) and (is_installed(file) or not file.startswith(_PYTHONS)):  # not ``contextlib.py``, between torch's
            found = shown_line(file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found
