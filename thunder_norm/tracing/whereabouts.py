"""How far the interpretation of a program is: the module whose forward runs, read from the interpreter's frames by whoever wants to know."""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from thunder_norm import first_calls
from thunder_norm.context_variables import setting
from thunder_norm.user_code import is_users
from thunder.core.interpreter import get_interpreterruntimectx, unwrap


def modules_in(frames: Iterable[Any]) -> Iterator[torch.nn.Module]:
    """The modules whose methods run in frames of the interpreter, the innermost first if the frames are."""
    for frame in frames:
        if frame.code.co_varnames[:1] == ("self",) and frame.localsplus:
            owner = _value(frame.localsplus[0])
            if isinstance(owner, torch.nn.Module):
                yield owner


def _value(slot: Any) -> Any:
    value = unwrap(slot)
    return unwrap(value.cell_contents) if isinstance(value, types.CellType) else value


class Names:
    """The dotted names of the modules in the outermost one."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._root: torch.nn.Module | None = None

    def of(self, module: torch.nn.Module, root: torch.nn.Module) -> str:
        """That of `module` in `root`, which has none itself."""
        if root is not self._root:
            self._root = root
            self._names = {id(m): name for name, m in root.named_modules()}
        return self._names.get(id(module), "")


class Whereabouts:
    """Where an acquisition is, for another thread to ask."""

    def __init__(self) -> None:
        self._frames: list[Any] = []
        self._names = Names()

    def follow(self) -> None:
        """Called where the interpreter runs: these are the frames to look at."""
        self._frames = get_interpreterruntimectx().frame_stack

    def __call__(self) -> str:
        """The dotted name of the innermost module, or of its class for the outermost one; the innermost function without modules."""
        frames = self._frames[::-1]
        modules = list(modules_in(frames))
        if modules:
            return self._names.of(modules[0], modules[-1]) or type(modules[-1]).__name__
        return next((f.code.co_qualname for f in frames if is_users(f.code.co_filename)), "")


_current: contextvars.ContextVar[Whereabouts | None] = contextvars.ContextVar("thunder_norm_whereabouts", default=None)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """An acquisition: where it is shows on the terminal if it takes long."""
    where = Whereabouts()
    with setting(_current, where), first_calls.shown("tracing", where):
        yield


def follow() -> None:
    """Called once the interpreter of the acquisition at hand runs."""
    where = _current.get()
    if where is not None:
        where.follow()
