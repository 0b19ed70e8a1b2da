"""Programs whose results jump with their inputs: what a comparison decides is no Lipschitz function of what was compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from thunder_norm.core import registry
from thunder_norm.core.composed import moves
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.op_names import op_name
from thunder_norm.trees import flat_tensors
from thunder_norm.user_code import user_line


class NoDecisions(TorchFunctionMode):
    """Refuses what uses plain tensors or numbers that were made of moving ones: masks, indices, conditions, and casts of these.

    A rule's sensitivity holds while these stay as they are, and nobody says for how long that is.  What is made and not used
    (the indices of a maximum) is no harm.
    """

    def __init__(self) -> None:
        super().__init__()
        self._decided: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if registry.is_metadata(func):
            return func(*args, **kwargs)
        given = flat_tensors((args, kwargs))
        if any(id(t) in self._decided for t in given):
            raise _refused(func)
        result = func(*args, **kwargs)
        if any(moves(t) for t in given):
            if isinstance(result, bool | int | float | list):
                raise _refused(func)
            plain = [y for y in flat_tensors(result) if not isinstance(y, NormedTensor)]
            self._decided.update({id(y): y for y in plain})
        return result


def _refused(func: Callable) -> NormMismatchError:
    return NormMismatchError(
        with_details(
            f"{op_name(func)} of values that the program decides by",
            at=user_line(),
            why="a comparison, an index or a condition may turn out another way for inputs nearby, and results jump there",
            instead="functions that are continuous by themselves: relu, clamp, maximum, max_pool, softmax",
        )
    )
