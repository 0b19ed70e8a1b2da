"""Why a program cannot be traced: it is learnt in three ways, and said once."""

from __future__ import annotations

from thunder_norm.tracing.locations import with_users_line


class Refused:
    """The errors of one acquisition.  A program that catches one does not become right by it."""

    def __init__(self) -> None:
        self._first: Exception | None = None
        self._pending: Exception | None = None  # met where the interpreter cannot take one; raised at its next call
        self._value_read: Exception | None = None  # counts only if the program turns out to have wrappers

    def note(self, error: Exception) -> Exception:
        """Remember an error that is about to be raised, and return it, with the user's line if its message has none."""
        if self._first is None:
            self._first = error
        return with_users_line(error)

    def raise_later(self, error: Exception) -> None:
        """Remember an error that cannot be raised here."""
        self._pending = error

    def take_pending(self) -> Exception | None:
        """What could not be raised where it was met, handed over once."""
        found, self._pending = self._pending, None
        return found

    @property
    def has_read_value(self) -> bool:
        """Whether the value of a plain tensor was asked for."""
        return self._value_read is not None

    def note_value_read(self, error: Exception) -> None:
        """Remember that the value of a plain tensor was asked for."""
        self._value_read = error

    def check(self, has_wrappers: bool) -> None:
        """Raise what the program may have caught, or what the interpreter had no occasion to raise."""
        for error in (self._first, self._pending, self._value_read if has_wrappers else None):
            if error is not None:
                raise error
