"""Whether tensors look like those of an earlier call, asked of C++ in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch._C._dynamo.guards import TensorGuards

Check = Callable[..., bool]
Sizes = Sequence[Sequence[int | None]]


def check_like(tensors: Sequence[torch.Tensor], sizes: Sizes, strides: Sizes) -> Check:
    """A check that tensors have the classes, dtypes, devices, dispatch keys and gradients of these, and of sizes and strides those that are given.

    ``TensorGuards`` says no wherever a tensor is there twice, as a parameter that two modules share is.  Then the check is that the same
    places hold the same tensor.
    """
    first_at: dict[int, int] = {}
    for i, t in enumerate(tensors):
        first_at.setdefault(id(t), i)
    once = list(first_at.values())
    check = TensorGuards(
        *(tensors[i] for i in once),
        dynamic_dims_sizes=[list(sizes[i]) for i in once],
        dynamic_dims_strides=[list(strides[i]) for i in once],
    ).check
    if len(once) == len(tensors):
        return check
    again = [(i, first_at[id(t)]) for i, t in enumerate(tensors) if first_at[id(t)] != i]
    chosen = itemgetter(*once) if len(once) > 1 else lambda given: (given[once[0]],)

    def check_once(*given: torch.Tensor) -> bool:
        for i, k in again:  # noqa: SIM110 - a generator takes twice as long
            if given[i] is not given[k]:
                return False
        return check(*chosen(given))

    return check_once
