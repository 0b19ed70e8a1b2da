"""Frames that a program asks Python for: who called a function, from which line, with which globals.

``sys._getframe()`` would give the frame of Thunder's interpreter, and what goes by it (`logging`, `inspect`, ``warnings.warn``,
``namedtuple``) would name a function and a line of Thunder's.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.lookasides import instead_of
from thunder_norm.tracing.python.local_variables import locals_of
from thunder_norm.user_code import is_of_tracing
from thunder.core.interpreter import (
    InterpreterFrame,
    WrappedValue,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    unwrap,
)
from thunder.core.module import ThunderModule

_OF_IMPORTS = ("importlib", "_bootstrap")


class _Frame:
    """What a frame of the interpreter's is to the program: one of Python's, to ``isinstance`` too."""

    f_trace = None

    def __init__(self, frame: InterpreterFrame, outer: tuple[InterpreterFrame, ...]):
        self._frame, self._outer = frame, outer

    @property
    def __class__(self) -> type:
        return FrameType

    @property
    def f_code(self) -> CodeType:
        return self._frame.code

    @property
    def f_lineno(self) -> int:
        positions = self._frame.positions
        return self.f_code.co_firstlineno if positions is None or positions.lineno is None else positions.lineno

    @property
    def f_lasti(self) -> int:
        return self._frame.lasti * 2

    @property
    def f_globals(self) -> dict[str, Any]:
        return unwrap(self._frame.globals)

    @property
    def f_builtins(self) -> dict[str, Any]:
        return unwrap(self._frame.globals)["__builtins__"]

    @property
    def f_locals(self) -> Any:
        return unwrap(locals_of(self._frame))

    @property
    def f_back(self) -> Any:
        return _frame_of(self._outer)


_Frame.__module__, _Frame.__qualname__ = FrameType.__module__, FrameType.__qualname__


@instead_of(_Frame.f_globals.fget)
def _f_globals(frame: WrappedValue) -> Any:
    return frame.value._frame.globals  # what is read there is guarded


@instead_of(_Frame.f_locals.fget)
def _f_locals(frame: WrappedValue) -> Any:
    return locals_of(frame.value._frame)


for _fget in (_Frame.__dict__[name].fget for name in ("f_code", "f_lineno", "f_lasti", "f_builtins", "f_back")):
    instead_of(_fget)(interpreter_needs_wrap(_fget))


def _frame_of(frames: tuple[InterpreterFrame, ...]) -> Any:
    """The innermost of some frames; below the program's own, the one that called the jitted function, or None."""
    if frames:
        return _Frame(frames[-1], frames[:-1])
    guards.callers_asked()
    return _calling()


def _calling() -> FrameType | None:
    """The frame of Python's that called the jitted function."""
    between: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_of_tracing(frame.f_code.co_filename) or _is_library(frame)):
        between.append(frame)
        frame = frame.f_back
    while between and not is_of_tracing(between[-1].f_code.co_filename) and not _calls_jitted(between[-1]):
        frame = between.pop()
    return frame


def _is_library(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__") or ""
    return name != "__main__" and name.partition(".")[0] in sys.stdlib_module_names | {"torch"}


def _calls_jitted(frame: FrameType) -> bool:
    """Whether a frame is that of a method of the jitted module's, which the program's own stands for."""
    return isinstance(frame.f_locals.get("self"), ThunderModule)


def _frames() -> tuple[InterpreterFrame, ...]:
    """The program's frames, without functions by which the interpreter does a step."""
    return tuple(f for f in get_interpreterruntimectx().frame_stack if not is_of_tracing(f.code.co_filename))


def _out_of(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _at(depth: int) -> Any:
    return next((f for n, f in enumerate(_out_of(_frame_of(_frames()))) if n >= depth), None)


def _getframe(depth: int = 0) -> Any:
    found = _at(depth)
    if found is None:
        raise ValueError("call stack is not deep enough")
    return found


def _getframemodulename(depth: int = 0) -> Any:
    found = _at(depth)
    return None if found is None else found.f_globals.get("__name__")


def _warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **options: Any) -> None:
    """``warnings.warn``, which is C and looks for the line in Python's own frames."""
    kind = type(message) if isinstance(message, Warning) else UserWarning if category is None else category
    if not (isinstance(kind, type) and issubclass(kind, Warning)):
        warnings.warn(message, category, stacklevel, source, **options)  # a TypeError
    frame = _warned_of(stacklevel, options.get("skip_file_prefixes", ()))
    names: dict[str, Any] = sys.__dict__ if frame is None else frame.f_globals
    warnings.warn_explicit(
        message,
        kind,
        "sys" if frame is None else frame.f_code.co_filename,
        1 if frame is None else frame.f_lineno,
        module=names.get("__name__", "<string>"),
        registry=names.setdefault("__warningregistry__", {}),
        source=source,
    )


def _warned_of(stacklevel: int, skipped: tuple[str, ...]) -> Any:
    """The frame that a warning is of.  It decides nothing that a later call could show: what warns does it while a trace is acquired."""
    inner = [_Frame(f, ()) for f in reversed(_frames())]
    frames = [*inner, *_out_of(_calling())]
    if skipped:
        stacklevel = max(stacklevel, 2)
    elif stacklevel <= 1 or _is_of_imports(frames[0]):
        return next(iter(frames[max(stacklevel, 1) - 1 :]), None)
    outer = [f for f in frames[1:] if not _is_of_imports(f) and not f.f_code.co_filename.startswith(skipped)]
    return next(iter(outer[stacklevel - 2 :]), None)


def _is_of_imports(frame: Any) -> bool:
    return all(part in frame.f_code.co_filename for part in _OF_IMPORTS)


for _function, _own in (
    (sys._getframe, _getframe),
    (getattr(sys, "_getframemodulename", None), _getframemodulename),  # from Python 3.12 on
    (warnings.warn, _warn),
    *((f, f) for f in (inspect.getframeinfo, linecache.getline, linecache.checkcache, linecache.lazycache)),
    *((f, f) for f in (traceback._get_code_position, traceback._walk_tb_with_full_positions)),  # type: ignore[attr-defined]
):
    if _function is not None:
        instead_of(_function)(interpreter_needs_wrap(_own))
