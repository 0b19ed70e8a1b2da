"""Integers that a program is given: which token stands where, which class a row has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder_norm.op_names import op_key
from thunder_norm.trees import flat_tensors

# They make positions of what they get.
_COUNTING = ("cumsum", "argsort", "cummax", "arange")


class GivenIntegers:
    """The integers among a program's arguments, and those that it computes of them.

    Not followed are conditions (``ids != 0``), and what counts along a mask: its results are positions, whatever the mask says.
    """

    def __init__(self, arguments: Iterable[torch.Tensor] = ()):
        self._known = {id(t): t for t in arguments if _is_integer(t)}

    def __contains__(self, t: torch.Tensor) -> bool:
        return id(t) in self._known

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Remember what an operation has made of them."""
        if not self._known or not any(t in self for t in flat_tensors((args, kwargs))):
            return
        key = op_key(func)
        if not (isinstance(key, str) and key.startswith(_COUNTING)):
            self._known |= {id(t): t for t in flat_tensors(result) if _is_integer(t)}


def _is_integer(t: torch.Tensor) -> bool:
    return t.dtype != torch.bool and not t.dtype.is_floating_point and not t.dtype.is_complex
