"""The algebra of elem_dims: which dimensions a norm runs over, and what moving between two choices costs.

A norm of the family ``M(p, E)`` takes the p-mean over the dimensions E (the *elem_dims*) and the maximum over all others.
Dimensions are written as negative integers, counted from the end and sorted: ``(-2, -1)``.  Leading batch dimensions that
come and go then leave the elem_dims of a tensor as they are.

All functions are total on valid inputs and raise `NormMismatchError` on invalid ones.
Mathematics: the energy of a block splits over its sub-blocks, hence ``rms_E' <= sqrt(numel(E - E')) rms_E`` (attained by
a spike) and ``rms_(E + D) <= rms_E`` (a mean is at most a maximum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from thunder_norm.errors import NormMismatchError

Dims = tuple[int, ...]


def canonical(dims: int | Iterable[int], ndim: int) -> Dims:
    """Negative, sorted, unique form of `dims` for a tensor of `ndim` dimensions.

    >>> canonical([0, -1], 3)
    (-3, -1)

    Raises:
        NormMismatchError: a dimension is out of range or named twice.
    """
    return tuple(sorted(canonical_ordered(dims, ndim)))


def canonical_ordered(dims: int | Iterable[int], ndim: int) -> Dims:
    """As `canonical`, in the order given: operator kinds name (output dim, input dim)."""
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    for d in dims:
        if not isinstance(d, int) or not -ndim <= d < ndim:
            raise NormMismatchError(f"elem_dims {dims} do not fit a tensor of {ndim} dimensions: {d!r} is out of range")
    negative = tuple(d if d < 0 else d - ndim for d in dims)
    if len(set(negative)) != len(negative):
        raise NormMismatchError(f"elem_dims {dims} name a dimension twice for a tensor of {ndim} dimensions")
    return negative


def numel(shape: Sequence[int], dims: Iterable[int]) -> int:
    """Number of elements the norm runs over: the product of the sizes of `dims`."""
    return math.prod(shape[d] for d in dims)


def nontrivial(shape: Sequence[int], dims: Iterable[int]) -> Dims:
    """`dims` without dimensions of size 1, whose membership does not change a norm."""
    return tuple(d for d in dims if shape[d] != 1)


def is_same(shape: Sequence[int], a: Iterable[int], b: Iterable[int]) -> bool:
    """Whether a and b give the same norm on this shape (they differ at most in dimensions of size 1)."""
    return set(nontrivial(shape, a)) == set(nontrivial(shape, b))


def rms_factor(shape: Sequence[int], source: Iterable[int], target: Iterable[int]) -> float:
    """Smallest c with ``rms_target <= c rms_source``: sqrt of the number of elements leaving the mean.

    1.0 when `target` contains `source` (coarsening is free).  Attained by a spike.

    >>> rms_factor((2, 12, 5), (-2,), ())
    3.4641016151377544
    """
    kept = set(target)
    return math.sqrt(numel(shape, [d for d in source if d not in kept]))


def permute(dims: Sequence[int], permutation: Sequence[int]) -> Dims:
    """Where `dims` are after ``tensor.permute(permutation)``, in the given order.

    >>> permute((-1,), (0, 2, 1))
    (-2,)
    """
    ndim = len(permutation)
    position = {d % ndim: i for i, d in enumerate(permutation)}
    return tuple(position[d % ndim] - ndim for d in dims)


def reduce(dims: Iterable[int], reduced: Iterable[int], ndim: int, keepdim: bool) -> Dims:
    """What remains of `dims` once the dimensions `reduced` are gone (or of size 1, with `keepdim`)."""
    gone = {d % ndim for d in reduced}
    kept = [d % ndim for d in dims if d % ndim not in gone]
    if keepdim:
        return tuple(d - ndim for d in sorted(kept))
    left = [d for d in range(ndim) if d not in gone]
    return tuple(left.index(d) - len(left) for d in sorted(kept))


def insert(dims: Iterable[int], at: int, ndim: int) -> Dims:
    """`dims` after a new dimension was inserted at position `at` (unsqueeze, stack); the new one is not in it."""
    at %= ndim + 1
    return tuple(sorted((d % ndim) + (d % ndim >= at) - (ndim + 1) for d in dims))


def align(shape: Sequence[int], *candidates: Dims) -> tuple[Dims, tuple[float, ...]]:
    """A common elem_dims for several RMS operands broadcast to `shape`, and each operand's conversion factor.

    Every candidate and their union is tried; the cheapest product of factors wins, the finest elem_dims on a tie, so that
    precision is not given away for nothing.
    """
    union = tuple(sorted({d for dims in candidates for d in dims}))
    best: tuple[tuple[float, int], Dims, tuple[float, ...]] | None = None
    for target in {*candidates, union}:
        factors = tuple(rms_factor(shape, dims, target) for dims in candidates)
        key = (math.prod(factors), numel(shape, target))
        if best is None or key < best[0]:
            best = (key, target, factors)
    assert best is not None
    return best[1], best[2]


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split two shapes of equal numel into minimal groups (old dims, new dims) of equal product.

    >>> reshape_groups((2, 12, 5), (2, 3, 20))
    [([0], [0]), ([1, 2], [1, 2])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        group: tuple[list[int], list[int]] = ([], [])
        left = right = 1
        while True:
            if left == right and (group[0] or group[1]):
                break
            if left <= right and i < len(old) or j >= len(new):
                left *= old[i]
                group[0].append(i)
                i += 1
            else:
                right *= new[j]
                group[1].append(j)
                j += 1
        groups.append(group)
    return groups


def reshape(dims: Iterable[int], old: Sequence[int], new: Sequence[int]) -> tuple[Dims, bool]:
    """elem_dims after ``tensor.reshape(new)``, and whether they give exactly the same norm.

    A group of dimensions that lies wholly inside (or outside) elem_dims stays so and the norm is exact.  A mixed group is
    *coarsened*: all its new dimensions join, which is sound (a mean over more entries is at most the maximum) at factor 1.
    A tensor without elements has norm 0 whatever the dimensions: all of them, exactly.
    """
    inside = {d % len(old) for d in dims}
    if math.prod(old) == 0:
        return tuple(range(-len(new), 0)), True
    result: list[int] = []
    exact = True
    for old_dims, new_dims in reshape_groups(old, new):
        sized = [d for d in old_dims if old[d] != 1]
        taken = [d for d in sized if d in inside]
        if not taken:
            continue
        exact = exact and len(taken) == len(sized)
        result.extend(d - len(new) for d in new_dims if new[d] != 1)
    return tuple(result), exact
