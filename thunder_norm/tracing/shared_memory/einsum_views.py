"""``torch.einsum`` of one tensor that sums nothing: a view of it, as ``"ij->ji"`` or the diagonal of ``"ii->i"``.

Thunder's gives the tensor itself where nothing changes, and a diagonal in memory of its own, so that what is written there is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thunder.core.interpreter import WrappedValue, _interpret_call, wrap_const
from thunder.core.proxies import TensorProxy


def lookaside(args: Sequence[WrappedValue]) -> Callable | None:
    """What to call instead of `torch.einsum`, where it gives a view of its one operand."""
    if len(args) != 2 or not isinstance(args[0].value, str):
        return None
    operands = args[1].value
    operand = operands[0] if isinstance(operands, list | tuple) and len(operands) == 1 else operands
    order = _order(args[0].value.replace(" ", ""), operand.ndim) if isinstance(operand, TensorProxy) else None
    if order is None:
        return None
    return lambda _, given: _interpret_call(_viewed, given, *(wrap_const(found) for found in order))


def _order(equation: str, ndim: int) -> tuple[list[tuple[int, int]], list[int]] | None:
    """The pairs of dimensions to take diagonals of, one after the other, and the order of what is left then; None if something is summed.

    A diagonal takes the place of the last dimension.
    """
    given, arrow, wanted = equation.partition("->")
    if "," in given or not set(given.replace("...", "")) >= set(wanted.replace("...", "")) or given.count("...") > 1:
        return None
    rest = [f"...{n}" for n in range(ndim - len(given.replace("...", "")))]
    if not arrow:
        once = sorted(label for label in set(given.replace("...", "")) if given.count(label) == 1)
        wanted = "..." + "".join(once)
    labels, named = _labels(given, rest), _labels(wanted, rest)
    if len(labels) != ndim or len(named) != len(set(named)) or set(named) != set(labels):
        return None
    diagonals = []
    while repeated := next((label for label in labels if labels.count(label) > 1), None):
        first = labels.index(repeated)
        second = labels.index(repeated, first + 1)
        diagonals.append((first, second))
        labels = [*labels[:first], *labels[first + 1 : second], *labels[second + 1 :], repeated]
    return diagonals, [labels.index(label) for label in named]


def _labels(part: str, rest: list[str]) -> list[str]:
    before, ellipsis, after = part.partition("...")
    return [*before, *(rest if ellipsis else ()), *after]


def _viewed(given: torch.Tensor | Sequence[torch.Tensor], diagonals: list[tuple[int, int]], order: list[int]) -> torch.Tensor:
    x = given if isinstance(given, torch.Tensor) else given[0]
    for first, second in diagonals:
        x = x.diagonal(0, first, second)
    return x.permute(order)
