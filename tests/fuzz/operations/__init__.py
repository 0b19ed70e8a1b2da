"""The operations of random programs: a line of text for each, its spellings separated by ``;;``.

A spelling is an expression of the value so far, ``{x}``, or statements separated by ``//`` that assign to ``{t}``; `writing.Writer`
says what else may stand in braces. A spelling that does not fit the shape at hand raises in eager mode and another one is drawn, so
that nothing here says where an operation is defined.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import complexes, contractions, elementwise, indexing, linear_algebra, networks, reductions, shapes


@dataclass(frozen=True)
class Operation:
    """An operation with its spellings."""

    label: str
    spellings: tuple[str, ...]


def _parsed(table: str) -> tuple[Operation, ...]:
    operations = []
    for line in table.strip().splitlines():
        label, _, text = line.partition(": ")
        operations.append(Operation(label.strip(), tuple(part.strip() for part in text.split(";;"))))
    return tuple(operations)


REAL: tuple[tuple[Operation, ...], ...] = tuple(
    _parsed(table)
    for table in (
        elementwise.TABLE,
        elementwise.BINARY,
        elementwise.IN_PLACE,
        reductions.TABLE,
        reductions.SORTING,
        shapes.TABLE,
        indexing.TABLE,
        contractions.TABLE,
        linear_algebra.TABLE,
        networks.LOSSES,
        networks.TABLE,
        networks.CONVOLUTIONS,
        complexes.FFT,
        complexes.ENTERING,
    )
)
COMPLEX: tuple[tuple[Operation, ...], ...] = (_parsed(complexes.TABLE), _parsed(complexes.LEAVING))
LEAVING = COMPLEX[1]
LABELS = frozenset(o.label for family in REAL + COMPLEX for o in family)
