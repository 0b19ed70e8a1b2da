"""Operations of a program that its prologue runs again, to see that sizes and answers are what they were; see `data_sizes`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.subclass.acquiring.sized import OtherSizesError
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.trees import flat_tensors


@contextlib.contextmanager
def as_recorded() -> Iterator[None]:
    """What was recorded is below autograd and autocast."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


class Place(NamedTuple):
    """Where a tensor is found when a trace is used: the operation that made it, 0 for the inputs, and which of its results it is."""

    number: int
    index: int


class Call(NamedTuple):
    """An operation that the prologue runs."""

    number: int
    func: Callable
    args: tuple
    kwargs: dict

    def places(self) -> list[Place]:
        """Where it finds what it takes."""
        return [v for v in tree_leaves((self.args, self.kwargs), is_leaf=_is_place) if _is_place(v)]


def _is_place(value: Any) -> bool:
    return isinstance(value, Place)


def checking(calls: Sequence[Call]) -> Callable[..., None]:
    """What the prologue calls with the inputs: it runs the operations and lets go of what they made as soon as it can.

    Raises:
        GuardError: (what is returned) a size is another.
    """
    last = {place.number: call.number for call in calls for place in call.places()}
    let_go = {call.number: [n for n, by in last.items() if by == call.number and n] for call in calls}

    def check(*tensors: torch.Tensor) -> None:
        made: dict[int, tuple[torch.Tensor, ...]] = {0: tensors}
        try:
            with as_recorded():
                for call in calls:
                    found = call.func(*_filled(call.args, made), **_filled(call.kwargs, made))
                    if call.number in last:
                        made[call.number] = flat_tensors(found)
                    for number in let_go[call.number]:
                        del made[number]
        except OtherSizesError as e:
            raise GuardError("a size that is a value is another than when the trace was acquired") from e

    return check


def _filled(tree: Any, made: Mapping[int, tuple[torch.Tensor, ...]]) -> Any:
    kind = type(tree)
    if kind is Place:
        return made[tree.number][tree.index]
    if kind is tuple or kind is list:
        return kind([_filled(v, made) for v in tree])
    return {k: _filled(v, made) for k, v in tree.items()} if kind is dict else tree
