"""Functions of torch whose arguments Thunder's operation of that name takes for others.

``F.nll_loss`` ignores the class -100 where none is named; Thunder's (`thunder/torch/__init__.py`, ``def nll_loss``) ignores -1, its
gradient fails without a number, and the places of its arguments are not torch's.  No other function that Thunder has differs in a
default (tests/test_torch_signatures.py compares them all).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.interpreter import _interpret_call


def lookaside(fn: Callable) -> Callable | None:
    """What to interpret instead of `fn`: a function with torch's arguments that calls Thunder's operation; None for most."""
    try:
        own = _WITH_TORCHS_ARGUMENTS.get(fn)
    except TypeError:  # not hashable
        return None
    return None if own is None else functools.partial(_interpret_call, own)


def _nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)
    return ltorch.nll_loss(input, target, weight, ignore_index, reduction)


_WITH_TORCHS_ARGUMENTS: dict[Callable, Callable] = {F.nll_loss: _nll_loss}
