"""What a first call is at: a line on the terminal from two seconds on, for what is done once and may take long.

The call itself only says what it begins and how to find out where it is.  A thread looks now and then, so that seconds go on while
nothing is reported, and no step of the call costs anything.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from thunder_norm import progress

DELAY = 2.0  # seconds before anything is shown
INTERVAL = 0.1  # seconds between two looks


@dataclass(eq=False)
class _Stage:
    what: str
    where: Callable[[], str]

    def text(self) -> str:
        try:
            return f"{self.what} {self.where()}".strip()
        except Exception:  # noqa: BLE001 - what it looks at goes on meanwhile
            return self.what


@dataclass(eq=False)
class _Call:
    """A first call under way: it began at a time and is in stages, one inside the other."""

    begun: float
    stages: list[_Stage] = field(default_factory=list)

    def text(self, now: float) -> str:
        """One line: ``tracing h.0.attn, 3 s``."""
        return f"{' > '.join(stage.text() for stage in tuple(self.stages))}, {now - self.begun:.0f} s"


class Display:
    """All first calls under way in this process, a line for each that has taken long enough."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, looks: bool = True):
        self.clock = clock
        self._looks = looks  # whether a thread of its own does
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._live: Any = None
        self._done: threading.Event | None = None

    def begin(self, call: _Call) -> None:
        """Show a call from now on."""
        with self._lock:
            self._calls.append(call)
            if self._done is None and self._looks:
                self._done = threading.Event()
                threading.Thread(target=self._look, args=(self._done,), name="thunder_norm first calls", daemon=True).start()

    def end(self, call: _Call) -> None:
        """Forget a call, and erase what stands on the terminal with the last one."""
        with self._lock:
            self._calls.remove(call)
            if not self._calls:
                if self._done is not None:
                    self._done.set()
                    self._done = None
                self._erase()

    def look(self) -> None:
        """Show what there is to show now."""
        with self._lock:
            now = self.clock()
            late = [call for call in self._calls if now - call.begun >= DELAY]
            if late and not progress.has_bar():
                self._draw("\n".join(call.text(now) for call in late))
            else:
                self._erase()

    def _look(self, done: threading.Event) -> None:
        while not done.wait(INTERVAL):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - a terminal that cannot be written to is left alone
                return

    def _draw(self, text: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        line = Text(text, no_wrap=True, overflow="ellipsis", style="dim")
        if self._live is None:
            console = Console(stderr=True)
            if not console.is_terminal or console.is_dumb_terminal:
                return
            # standard output and error stay whose they are: they may go elsewhere
            live = Live(line, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live = live
            live.start()
        self._live.update(line, refresh=True)

    def _erase(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):
                live.stop()

    def forget(self) -> None:
        """Begin anew: in a process that was forked, there is no thread, and whoever held the lock is not there."""
        self.__init__(self.clock, looks=self._looks)


display = Display()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: display.forget())

_call: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("thunder_norm_first_call", default=None)


def _nowhere() -> str:
    return ""


@contextlib.contextmanager
def shown(what: str, where: Callable[[], str] = _nowhere) -> Iterator[None]:
    """Say what the block is at, if it takes long, on a terminal; nothing else comes of it, whatever happens.

    Args:
        what: the work, such as "tracing".
        where: how far it is, now; called by another thread.
    """
    if not progress.is_shown():
        yield
        return
    outer = _call.get()
    stage, on = _Stage(what, where), display
    if outer is not None:
        outer.stages.append(stage)
        try:
            yield
        finally:
            outer.stages.remove(stage)
        return
    call = _Call(on.clock(), [stage])
    token = _call.set(call)
    on.begin(call)
    try:
        yield
    finally:
        _call.reset(token)
        with contextlib.suppress(ValueError):  # begun before the process was forked
            on.end(call)
