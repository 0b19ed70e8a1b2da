"""The values that a program of a norm map asks for: it serves the calls in which they are what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.norms.maps.refused_maps import depends_on_data
from thunder_norm.norms.maps.sources import Source
from thunder_norm.tracing.guarding.conditions import GuardError


@dataclass
class ValuesOfCall:
    """The plain arguments that stand for themselves while a program is acquired, and whether it may ask for their values."""

    arguments: Sequence[torch.Tensor]
    may_be_read: bool
    were_asked_for: bool = False  # in vain

    def hindrance(self) -> str | None:
        """Why a value is not known; None if it is."""
        self.were_asked_for = self.were_asked_for or not self.may_be_read
        return None if self.may_be_read else "a norm map is of all values of its arguments, as long as it can be"


@dataclass(frozen=True, eq=False)
class Conditions:
    """What a program has asked of the values of arguments and buffers, and what they were."""

    sources: list[Source]
    acquired: list[torch.Tensor]  # their values
    ask_again: Callable[..., None] | None  # raises a GuardError where an answer is another; None in a program from a file

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether the program serves a call with these arguments.

        Raises:
            NormMismatchError: one of those that it asks for has no data.
        """
        given = [source(leaves) for source in self.sources]
        for t in given:
            if t.is_meta:
                raise depends_on_data("the values of a tensor that the program reads", f"{t.dtype} of {tuple(t.shape)} on meta")
        if all(map(torch.equal, given, self.acquired)):
            return True
        if self.ask_again is None:
            return False
        try:
            self.ask_again(*given)
        except GuardError:
            return False
        return True

    def copied(self, memo: dict[int, Any]) -> Conditions:
        """The same on the copies of the tensors that it reads."""
        return replace(self, sources=copy.deepcopy(self.sources, memo))
