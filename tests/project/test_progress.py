"""The progress bar: on a terminal only, and never in the way of the items."""

from __future__ import annotations

import io
import sys

import pytest

from thunder_norm.errors import NormMismatchError
from thunder_norm.progress import track


class Terminal(io.StringIO):
    """Takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal (not a fixture: pytest replaces standard error again before the test itself)."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    return found


def test_it_is_silent_where_there_is_no_terminal(capsys):
    assert list(track(range(3), "rules")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_it_says_what_and_how_much(monkeypatch):
    shown = terminal(monkeypatch)
    assert list(track(["a", "b", "c"], "rules [all]")) == ["a", "b", "c"]
    assert "rules [all]" in shown.getvalue() and "3/3" in shown.getvalue()


def test_a_total_may_be_given_or_unknown(monkeypatch):
    shown = terminal(monkeypatch)
    assert list(track(iter("ab"), "generator", total=2)) == ["a", "b"]
    assert "2/2" in shown.getvalue()
    assert list(track(iter("ab"))) == ["a", "b"] and "2/?" in shown.getvalue()


def test_items_are_fetched_one_by_one_and_errors_pass_through(monkeypatch):
    terminal(monkeypatch)
    seen = []

    def items():
        for i in range(3):
            seen.append(i)
            yield i

    for i in track(items(), "one", total=3):
        assert seen == list(range(i + 1))
    with pytest.raises(ZeroDivisionError):
        for i in track([0], "two"):
            1 / i


def test_without_a_standard_error_it_is_silent(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(track([1])) == [1]


def test_a_negative_total_is_refused_at_once():
    with pytest.raises(NormMismatchError, match="total must be >= 0, got -1"):
        track([], total=-1)
