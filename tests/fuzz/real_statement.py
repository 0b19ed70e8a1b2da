"""A statement of a program in real mode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """Lines of a forward: ``x`` has three rows and four columns before and after them, ``r`` is a list of other results."""

    text: str

    @property
    def name(self) -> str:
        """By which it is counted."""
        return " / ".join(line.strip() for line in self.text.splitlines())


def statements(*texts: str) -> tuple[Statement, ...]:
    """Each a statement."""
    return tuple(Statement(t) for t in texts)


def results(*expressions: str) -> tuple[Statement, ...]:
    """Statements that append an expression to the results."""
    return tuple(Statement(f"r.append({e})") for e in expressions)
