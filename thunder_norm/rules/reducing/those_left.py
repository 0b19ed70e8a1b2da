"""Norm rules for entries by their order, of a tensor some entries of which were set aside: those of the others, where there are enough.

x.masked_fill(is_padding, -1e9).topk(k, 1)
F.adaptive_max_pool1d(x - 1e9 * is_padding, 1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Lowered, Raised, fact
from thunder_norm.rules._set_aside import of_those_left


def _knows(kind: type[Lowered | Raised]) -> Callable[[dict[str, Any]], bool]:
    return lambda args: fact(args["input"], kind) is not None


def _is_raised(args: dict[str, Any]) -> bool:
    return args["dim"] is not None and fact(args["input"], Raised) is not None


@normed_op(torch.amin).register_norm(when=_is_raised)
def amin(input: RMSTensor, dim: int | Sequence[int], keepdim: bool = False) -> NormedTensor:
    """The least entry: as ever, of those that were not raised, if there are some in each group."""
    return of_those_left(torch.amin, input, Raised, dim, keepdim)


@normed_op(torch.min).register_norm(when=lambda args: isinstance(args["dim"], int) and _is_raised(args))
def min_along(input: RMSTensor, dim: int, keepdim: bool = False) -> tuple:
    """The least entry: as ever, of those that were not raised, if there are some in each group."""
    return of_those_left(torch.min, input, Raised, dim, keepdim)


@normed_op(torch.max).register_norm(when=_knows(Lowered))
def max_of_all(input: RMSTensor) -> NormedTensor:
    """The largest of all entries: as ever, of those that were not lowered, if there are some."""
    return of_those_left(torch.max, input, Lowered)


@normed_op(torch.min).register_norm(when=_knows(Raised))
def min_of_all(input: RMSTensor) -> NormedTensor:
    """The least of all entries: as ever, of those that were not raised, if there are some."""
    return of_those_left(torch.min, input, Raised)


@normed_op(torch.topk).register_norm(when=lambda args: _knows(Lowered if args["largest"] else Raised)(args))
def topk(input: RMSTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple:
    """The k largest (smallest) entries: as ever, of those that were not lowered (raised), if there are k.

    Source: what is positive of the i-th largest is at most x's i-th largest, what is negative at least that of those left, in modulus no
        larger: together at most the energy of x
    """
    return of_those_left(torch.topk, input, Lowered if largest else Raised, k, dim, largest)


@normed_op(torch.kthvalue).register_norm(when=_knows(Raised))
def kthvalue(input: RMSTensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple:
    """The k-th smallest entry: as ever, of those that were not raised, if there are k."""
    return of_those_left(torch.kthvalue, input, Raised, k, dim, keepdim)


def _register_windows(op: Callable, by: Callable) -> None:
    @normed_op(op).register_norm(when=_knows(Lowered))
    def largest_of_windows(input: RMSTensor, *args: Any, **kwargs: Any) -> Any:
        """The largest entries of windows: as ever, of those that were not lowered, if there are some in each."""
        return of_those_left(op, input, Lowered, *args, by=by, **kwargs)


for _dims in (1, 2, 3):
    _sliding, _adaptive = getattr(F, f"max_pool{_dims}d"), getattr(F, f"adaptive_max_pool{_dims}d")
    for _op in (getattr(torch, f"max_pool{_dims}d"), getattr(F, f"max_pool{_dims}d_with_indices")):
        _register_windows(_op, _sliding)
    for _op in (
        getattr(torch.ops.aten, f"adaptive_max_pool{_dims}d").default,
        getattr(F, f"adaptive_max_pool{_dims}d_with_indices"),
    ):
        _register_windows(_op, _adaptive)
