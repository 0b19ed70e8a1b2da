"""Which tensors of an acquisition hold the same values, whatever these are: a program may ask whether they do.

Values are numbered: what the same operation makes of values of the same numbers has the same number, and copies have that of what they
are copies of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten

_COPIES = frozenset(
    {aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
)
_COPIES_OF_THE_SAME_SHAPE = frozenset(
    {aten.expand.default, aten.expand_as.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default}
)
_EXACT = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
Pair = tuple[torch.Tensor, torch.Tensor]


class Equality:
    """What is known of the values of fakes; forgotten as soon as one is changed in place."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[torch.Tensor, int]] = {}  # by identity; alive, so that an id never comes back
        self._made: dict[Hashable, int] = {}
        self._compared: dict[int, tuple[torch.Tensor, Pair]] = {}  # results of comparing all entries of two tensors
        self._count = 0

    def forget(self) -> None:
        """Something was changed in place."""
        self._numbers, self._compared = {}, {}

    def compared(self, result: torch.Tensor) -> Pair | None:
        """The tensors whose equality a result says; None if it says anything else."""
        found = self._compared.get(id(result))
        return None if found is None else found[1]

    def are_same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two tensors have the same values, as far as is known; what is not equal to itself, as NaN, is not known to be."""
        return a.dtype in _EXACT and a.shape == b.shape and self._number(a) == self._number(b)

    def take_for_same(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Two tensors were compared: from now on they are known to be equal."""
        self._set(b, self._number(a))

    def note(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """An operation that draws no numbers, and writes into nothing, returned this."""
        outputs = [result] if isinstance(result, torch.Tensor) else [t for t in tree_flatten(result)[0] if _is_tensor(t)]
        given, spec = tree_flatten((args, kwargs))
        if not outputs or not _is_tensor(next(iter(args), None)) or any(t is v for t in outputs for v in given):
            return
        if func in _COPIES or _changes_nothing(func, args[0], result):
            self._set(result, self._number(args[0]))
        else:
            key = (func, str(spec), *(("number", self._number(v)) if _is_tensor(v) else (type(v), v) for v in given))
            try:
                hash(key)
            except TypeError:
                return
            for i, t in enumerate(outputs):
                self._set(t, self._made.setdefault((key, i), self._new()))
        self._note_comparison(func, args, result)

    def _note_comparison(self, func: Callable, args: tuple, result: Any) -> None:
        if func is aten.eq.Tensor and _is_tensor(args[1]) and args[0].shape == args[1].shape:
            self._compared[id(result)] = result, (args[0], args[1])
        elif func in (aten.all.default, *_COPIES) and id(args[0]) in self._compared:
            self._compared[id(result)] = result, self._compared[id(args[0])][1]

    def _new(self) -> int:
        self._count += 1
        return self._count

    def _set(self, t: torch.Tensor, number: int) -> None:
        self._numbers[id(t)] = t, number

    def _number(self, t: torch.Tensor) -> int:
        if id(t) not in self._numbers:
            self._set(t, self._new())
        return self._numbers[id(t)][1]


def _changes_nothing(func: Callable, given: torch.Tensor, result: torch.Tensor) -> bool:
    if func is aten._to_copy.default:
        return result.dtype == given.dtype
    return func in _COPIES_OF_THE_SAME_SHAPE and result.shape == given.shape


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
