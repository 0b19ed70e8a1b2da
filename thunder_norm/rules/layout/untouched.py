"""Entries of a tensor that a program has not written yet, where it writes others: they have the norm that they had before.

    for i in range(1, n):
        a[..., i, :i] = a[..., i, :i] + (a[..., i, :i, None] * a[..., :i, :i]).sum(-2)

The norm of the whole is that of all rows, the long sums among them too; row i is read before it is written, and is none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.context import current_sensitivity
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, fact, ruled, with_fact

Region = tuple[range, ...]  # positions along each dimension
_MOST_REGIONS = 4  # beyond, the last ones are one that holds them


@dataclass(frozen=True, eq=False)
class Untouched:
    """All entries but those in some regions are what they were in another tensor."""

    before: Source
    written: tuple[Region, ...]

    def is_apart(self, region: Region) -> bool:
        """Whether no entry of a region was written."""
        return all(any(map(_are_apart, region, other)) for other in self.written)


def region_of(shape: Sequence[int], items: Sequence[int | slice]) -> Region:
    """The positions that a number or a slice for each dimension names."""
    return tuple(
        range(*item.indices(n)) if isinstance(item, slice) else range(item % n, item % n + 1)
        for item, n in zip(items, shape, strict=True)
    )


def _are_apart(a: range, b: range) -> bool:
    if not a or not b or a[-1] < b[0] or b[-1] < a[0]:
        return True
    return (a[0] - b[0]) % math.gcd(a.step, b.step) != 0


def _holding(a: Region, b: Region) -> Region:
    """A region with the entries of both."""
    return tuple(
        p if p == q or not q else q if not p else range(min(p[0], q[0]), max(p[-1], q[-1]) + 1) for p, q in zip(a, b, strict=True)
    )


def with_region_written(result: RMSTensor, input: RMSTensor, region: Region) -> NormedTensor:
    """What is known of a tensor in which a region was written."""
    known = fact(input, Untouched)
    if known is None:
        found = Untouched(Source.of(input), (region,))
    elif len(known.written) < _MOST_REGIONS:
        found = Untouched(known.before, (*known.written, region))
    else:
        *others, last = known.written
        found = Untouched(known.before, (*others, _holding(last, region)))
    return with_fact(result, Alternatives((found,)))


def _claim_before(input: Any, index: Any) -> tuple[NormedTensor, torch.Tensor | None] | None:
    """The norm that a part which was not written had before, and how far it moves."""
    known = fact(input, Untouched)
    if known is None or current_sensitivity() != "global":
        return None
    items = _one_for_each(input.ndim, index if isinstance(index, tuple) else (index,))
    if items is None or not known.is_apart(region_of(input.shape, items)):
        return None
    return ruled(torch.Tensor.__getitem__, (known.before.moving(), index), {})


def _one_for_each(ndim: int, index: tuple) -> list[int | slice] | None:
    """An index of numbers, slices and an ellipsis as one for each dimension; None for any other."""
    given = list(index)
    if any(not (item is Ellipsis or isinstance(item, slice) or type(item) is int) for item in given):
        return None
    dots = next((i for i, item in enumerate(given) if item is Ellipsis), len(given))
    given[dots : dots + 1] = [slice(None)] * (ndim - sum(item is not Ellipsis for item in given))
    return given


@normed_op(torch.Tensor.__getitem__).register_norm(when=lambda args: _claim_before(args["input"], args["index"]) is not None)
def part_before(input: RMSTensor, index: Any) -> NormedTensor:
    """A part of x in which nothing was written.  Value and sensitivity: those of the part before anything was."""
    claim = _claim_before(input, index)
    assert claim is not None, "the rule's condition has been checked"
    before, moved = claim
    result = type(before)._wrap(None, before.norm_size, moved, before.elem_dims)  # type: ignore[arg-type]
    result._sensitivity = {"input": 0}
    return result
