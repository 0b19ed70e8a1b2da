"""What a first call is at: on a terminal, from two seconds on, gone afterwards, and never in the way."""

from __future__ import annotations

import functools
import io
import os
import re
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from thunder_norm import RMSTensor, build_norm_map, first_calls, norm_report, progress, show_progress
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder


class Terminal(io.StringIO):
    """Takes itself for a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What was drawn, in order; rich draws once more before it erases."""
        drawn = re.findall(r"\x1b\[2m([^\x1b]*)", self.getvalue())
        return [line for i, line in enumerate(drawn) if i == 0 or line != drawn[i - 1]]


class Shown:
    """A terminal, and a display on it with a clock of its own, that looks when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        self.terminal = Terminal()
        self.display = first_calls.Display(lambda: self.now, looks=False)
        monkeypatch.setattr(first_calls, "display", self.display)
        monkeypatch.setattr(sys, "stderr", self.terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.delenv("THUNDER_NORM_PROGRESS", raising=False)

    def look(self, now: float) -> list[str]:
        """What is on the terminal at a time."""
        self.now = now
        before = len(self.terminal.lines())
        self.display.look()
        return self.terminal.lines()[before:]

    def is_clean(self) -> bool:
        """Whether nothing is left: the last line was erased, and the cursor can be seen."""
        return is_clean(self.terminal.getvalue())


def is_clean(written: str) -> bool:
    if not written:
        return True
    end = written.rindex("\x1b[2K")
    hidden, visible = written.rfind("\x1b[?25l"), written.rfind("\x1b[?25h")
    return written[end + len("\x1b[2K") :] == "" and hidden < visible


@pytest.fixture
def with_looks() -> Callable[[Shown, float], Callable]:
    """A model of two blocks, each of which looks at the display; Thunder runs cached functions as they are."""

    def make(shown: Shown, seconds: float) -> nn.Module:
        @functools.cache
        def look(n: int) -> None:
            shown.now += seconds
            shown.display.look()

        class Block(nn.Module):
            def __init__(self, n: int):
                super().__init__()
                self.n, self.linear = n, nn.Linear(4, 4)

            def forward(self, x):
                look(self.n)
                return self.linear(x)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block(0), Block(1)])

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        return Model()

    return make


def test_a_trace_shows_the_module_it_has_reached_and_the_seconds(monkeypatch, with_looks):
    shown = Shown(monkeypatch)
    jm = thunder.jit(with_looks(shown, 3), transforms=[NormTransform()])
    jm(torch.ones(2, 4))
    assert shown.terminal.lines() == ["tracing blocks.0, 3 s", "tracing blocks.1, 6 s"] and shown.is_clean()
    before = shown.terminal.getvalue()
    jm(torch.ones(2, 4))  # not a first call
    assert shown.terminal.getvalue() == before


def test_a_program_without_modules_shows_its_function(monkeypatch):
    shown = Shown(monkeypatch)
    look = functools.cache(lambda n: shown.look(n))

    def program(x):
        look(7)
        return x + 1

    thunder.jit(program, transforms=[NormTransform()])(torch.ones(2))
    (line,) = shown.terminal.lines()
    assert line.startswith("tracing ") and line.endswith("program, 7 s")


def test_nothing_is_shown_before_two_seconds(monkeypatch):
    shown = Shown(monkeypatch)
    with first_calls.shown("working"):
        assert shown.look(1.9) == [] and shown.terminal.getvalue() == ""
        assert shown.look(2.0) == ["working, 2 s"]
    assert shown.is_clean()
    shown.look(10)
    assert shown.is_clean() and len(shown.terminal.lines()) == 1


@pytest.mark.parametrize(
    "run, expected",
    [
        (lambda m: build_norm_map(m, torch.ones(2, 4))(RMSTensor(1.0)), "norm map > tracing blocks.0, 3 s"),
        (lambda m: ModularNorm(m, RMSTensor.of(torch.ones(2, 4))), "modular norm > running blocks.0, 3 s"),
        (
            lambda m: norm_report(thunder.jit(m, transforms=[NormTransform()]), torch.ones(2, 4)),
            "norm report > running blocks.0, 3 s",
        ),
    ],
)
def test_what_a_call_is_for(monkeypatch, with_looks, run, expected):
    shown = Shown(monkeypatch)
    run(with_looks(shown, 3))
    assert expected in shown.terminal.lines() and shown.is_clean()


def test_calls_nest(monkeypatch):
    shown = Shown(monkeypatch)
    with first_calls.shown("tracing", lambda: "h.0"):
        with first_calls.shown("norm report"), first_calls.shown("running", lambda: "h.1"):
            assert shown.look(4) == ["tracing h.0 > norm report > running h.1, 4 s"]
        assert shown.look(5) == ["tracing h.0, 5 s"]
    assert shown.is_clean()


def test_an_error_leaves_the_terminal_clean(monkeypatch):
    shown = Shown(monkeypatch)
    look = functools.cache(lambda n: shown.look(n))

    def program(x):
        look(7)
        raise ZeroDivisionError("the program's own")

    with pytest.raises(Exception, match="the program's own"):
        thunder.jit(program, transforms=[NormTransform()])(torch.ones(2))
    assert len(shown.terminal.lines()) == 1 and shown.is_clean()
    with pytest.raises(KeyboardInterrupt):
        with first_calls.shown("one"), first_calls.shown("two"):
            shown.look(9)
            raise KeyboardInterrupt
    assert shown.is_clean() and not shown.display._calls


@pytest.mark.parametrize("value", ["0", "false", "No", " off "])
def test_it_is_off_by_the_environment(monkeypatch, value):
    shown = Shown(monkeypatch)
    monkeypatch.setenv("THUNDER_NORM_PROGRESS", value)
    with show_progress(), first_calls.shown("working"):
        assert shown.look(5) == [] and not progress.is_shown()


def test_it_is_off_in_a_context(monkeypatch):
    shown = Shown(monkeypatch)
    with show_progress(False):
        with first_calls.shown("working"):
            assert shown.look(5) == []
        assert list(progress.track([1, 2])) == [1, 2]
        with show_progress(), first_calls.shown("working"):
            assert shown.look(8) == ["working, 3 s"]
    assert progress.is_shown()
    with pytest.raises(ZeroDivisionError), show_progress(False):
        raise ZeroDivisionError
    assert progress.is_shown()


@pytest.mark.parametrize("closed", [False, True])
def test_it_is_silent_without_a_terminal(monkeypatch, closed):
    shown = Shown(monkeypatch)
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stderr", captured)
    if closed:
        captured.close()
    with first_calls.shown("working"):
        shown.look(5)
    assert closed or captured.getvalue() == ""


def test_a_terminal_that_knows_no_cursor_is_left_alone(monkeypatch):
    shown = Shown(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with first_calls.shown("working"):
        assert shown.look(5) == [] and shown.terminal.getvalue() == ""


def test_a_progress_bar_has_the_terminal_for_itself(monkeypatch):
    shown = Shown(monkeypatch)
    with first_calls.shown("working"):
        assert shown.look(5) == ["working, 5 s"]
        with progress.counting("counting", 2):
            shown.look(6)
            assert "6 s" not in shown.terminal.getvalue()
        assert shown.look(7) == ["working, 7 s"]
    assert shown.is_clean()


def test_a_place_that_cannot_be_told_is_left_out(monkeypatch):
    shown = Shown(monkeypatch)
    with first_calls.shown("working", lambda: 1 / 0):  # type: ignore[arg-type,return-value]
        assert shown.look(5) == ["working, 5 s"]


def test_calls_of_several_threads_have_a_line_each(monkeypatch):
    shown = Shown(monkeypatch)
    begun, seen = threading.Barrier(3), threading.Barrier(3)

    def work(name: str) -> None:
        with first_calls.shown(name):
            begun.wait(60)
            seen.wait(60)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for t in threads:
        t.start()
    begun.wait(60)
    shown.look(5)
    drawn = shown.terminal.getvalue()
    seen.wait(60)
    for t in threads:
        t.join(60)
    assert "one, 5 s" in drawn and "two, 5 s" in drawn and shown.is_clean()


def test_another_thread_looks_by_itself_and_ends_with_the_call(monkeypatch):
    shown = Shown(monkeypatch)
    display = first_calls.Display(lambda: 100.0 if drawn.is_set() else 0.0)
    drawn, looked = threading.Event(), threading.Event()
    monkeypatch.setattr(first_calls, "display", display)
    monkeypatch.setattr(first_calls, "INTERVAL", 0.001)
    monkeypatch.setattr(display, "_draw", lambda text: looked.set())
    with first_calls.shown("working"):
        (thread,) = [t for t in threading.enumerate() if t.name == "thunder_norm first calls"]
        drawn.set()
        assert looked.wait(60)
    thread.join(60)
    assert not thread.is_alive() and shown.terminal.getvalue() == ""


def test_a_terminal_that_cannot_be_written_to_disturbs_nobody(monkeypatch):
    Shown(monkeypatch)
    failed = threading.Event()

    class Broken(Terminal):
        def write(self, text: str) -> int:
            failed.set()
            raise OSError("no space left")

    monkeypatch.setattr(sys, "stderr", Broken())
    monkeypatch.setattr(first_calls, "display", first_calls.Display())
    monkeypatch.setattr(first_calls, "INTERVAL", 0.001)
    monkeypatch.setattr(first_calls, "DELAY", 0.0)
    with first_calls.shown("working"):
        assert failed.wait(60)


def all_that_is_read(master: int) -> str:
    """What was written into a pseudo terminal before its other end was closed, which comes in pieces."""
    pieces = []
    while True:
        try:
            pieces.append(os.read(master, 1 << 16))
        except OSError:  # what Linux says where there is no more
            break
        if not pieces[-1]:
            break
    return b"".join(pieces).decode()


def test_a_pseudo_terminal(monkeypatch, with_looks):
    pty = pytest.importorskip("pty")
    shown = Shown(monkeypatch)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        thunder.jit(with_looks(shown, 3), transforms=[NormTransform()])(torch.ones(2, 4))
    written = all_that_is_read(master)
    os.close(master)
    assert "tracing blocks.1, 6 s" in written and is_clean(written)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_process_begins_anew(monkeypatch):
    shown = Shown(monkeypatch)
    with first_calls.shown("working"):
        assert shown.look(3)
        shown.display.forget()  # what is called after a fork
    assert not shown.display._calls
    with first_calls.shown("again"):
        assert shown.look(9) == ["again, 6 s"]
