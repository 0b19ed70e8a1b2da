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
from typing import Literal, NamedTuple

from thunder_norm.errors import NormMismatchError

Dims = tuple[int, ...]
# What becomes of a group of dimensions of which a norm runs over some only, once a reshape merges it.
Policy = Literal["coarsen", "refine", "refuse"]


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
    if type(dims) is tuple and len(dims) == 1 and type(dims[0]) is int and -ndim <= dims[0] < 0:
        return dims  # as most are, in each operation
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


# -- dimensions that move, go and come ------------------------------------------------------------------------------------


def place(dims: Iterable[int], layout: Sequence[int | None]) -> Dims:
    """Where `dims` are in an output whose dimensions are those of `layout`, in the order given; those it lacks are dropped.

    Args:
        dims: dimensions of the input, negative.
        layout: for each dimension of the output the negative dimension of the input that it is, None for a new one.

    >>> place((-3, -1), (-1, None, -3))
    (-1, -3)
    """
    at = {d: i - len(layout) for i, d in enumerate(layout) if d is not None}
    return tuple(at[d] for d in dims if d in at)


def every(ndim: int) -> Dims:
    """All dimensions: the layout of an output that is as the input."""
    return tuple(range(-ndim, 0))


def permute(dims: Iterable[int], permutation: Sequence[int]) -> Dims:
    """Where `dims` are after ``tensor.permute(permutation)``, in the given order.

    >>> permute((-1,), (0, 2, 1))
    (-2,)
    """
    ndim = len(permutation)
    return place([d % ndim - ndim for d in dims], [d % ndim - ndim for d in permutation])


def swapped(ndim: int, first: int, second: int) -> list[int]:
    """The permutation that exchanges two dimensions; a scalar has none."""
    order = list(range(ndim))
    if order:
        order[first], order[second] = order[second], order[first]
    return order


def moved(ndim: int, source: int | Sequence[int], destination: int | Sequence[int]) -> list[int]:
    """The permutation that brings dimensions to other places and leaves the rest in order.

    >>> moved(4, 0, -1)
    [1, 2, 3, 0]
    """
    if not ndim:
        return []
    sources = [d % ndim for d in ((source,) if isinstance(source, int) else source)]
    targets = [d % ndim for d in ((destination,) if isinstance(destination, int) else destination)]
    placed = dict(zip(targets, sources, strict=True))
    others = iter(d for d in range(ndim) if d not in sources)
    return [placed[i] if i in placed else next(others) for i in range(ndim)]


def without(ndim: int, gone: Iterable[int]) -> list[int]:
    """The layout of an output that lacks some dimensions."""
    lost = {d % ndim for d in gone} if ndim else set()
    return [d - ndim for d in range(ndim) if d not in lost]


def with_new(ndim: int, at: int) -> list[int | None]:
    """The layout of an output with a new dimension at position `at`."""
    layout: list[int | None] = list(every(ndim))
    layout.insert(at % (ndim + 1), None)
    return layout


def reduce(dims: Iterable[int], reduced: Iterable[int], ndim: int, keepdim: bool) -> Dims:
    """What remains of `dims` once the dimensions `reduced` are gone (or of size 1, with `keepdim`), sorted."""
    left = without(ndim, reduced)
    named = sorted(d % ndim - ndim for d in dims) if ndim else []
    return tuple(d for d in named if d in left) if keepdim else place(named, left)


def insert(dims: Iterable[int], at: int, ndim: int) -> Dims:
    """`dims` after a new dimension was inserted at position `at` (unsqueeze, stack), sorted; the new one is not in it."""
    return tuple(sorted(place([d % ndim - ndim for d in dims], with_new(ndim, at))))


def copies(old: Sequence[int], new: Sequence[int]) -> Dims:
    """The dimensions along which a tensor broadcast from the shape `old` to `new` is constant, and not of size 1.

    Whether a norm (a mean, or the maximum) runs over them makes no difference; a sum does.

    Raises:
        NormMismatchError: the shapes do not broadcast that way.
    """
    if len(old) > len(new) or any(n not in (1, m) for n, m in zip(old, new[len(new) - len(old) :], strict=True)):
        raise NormMismatchError(f"a tensor of shape {tuple(old)} does not broadcast to {tuple(new)}")
    return tuple(d for d in every(len(new)) if (-d > len(old) or old[d] == 1) and new[d] != 1)


def expand(dims: Iterable[int], old: Sequence[int], new: Sequence[int]) -> Dims:
    """elem_dims after broadcasting to `new`: of all that give the same norm, those that name no copies.

    >>> expand((-2, -1), (1, 4), (2, 5, 4))
    (-1,)
    """
    constant = set(copies(old, new))
    return tuple(d for d in dims if d not in constant)


# -- several operands -----------------------------------------------------------------------------------------------------


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


# -- reshape --------------------------------------------------------------------------------------------------------------


class Reshaped(NamedTuple):
    """elem_dims after a reshape, what the norm over them may cost, and whether it is the same norm."""

    dims: Dims
    factor: float
    is_exact: bool


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split two shapes of equal numel into minimal groups (old dims, new dims) of equal product.

    >>> reshape_groups((2, 12, 5), (2, 3, 20))
    [([0], [0]), ([1, 2], [1, 2])]

    Raises:
        NormMismatchError: the products differ, or are 0: then any grouping would do.
    """
    if math.prod(old) != math.prod(new) or math.prod(old) == 0:
        raise NormMismatchError(f"no groups of equal size in the shapes {tuple(old)} and {tuple(new)}")
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


def reshape(dims: Iterable[int], old: Sequence[int], new: Sequence[int], policy: Policy = "coarsen") -> Reshaped:
    """elem_dims after ``tensor.reshape(new)``: ``rms_new <= factor rms_old``.

    A group of dimensions that lies wholly inside (or outside) elem_dims stays so and the norm is exact.  A mixed group is
    *coarsened* (all its new dimensions join, which is sound at factor 1: a mean over more entries is at most the maximum) or
    *refined* (none of them does, at the factor sqrt of the elements that leave the mean; free for a sum) or refused.
    A tensor without elements has norm 0 whatever the dimensions: all of them, exactly.

    >>> reshape((1,), (2, 12, 5), (2, 3, 20))
    Reshaped(dims=(-2, -1), factor=1.0, is_exact=False)

    Raises:
        NormMismatchError: there is a mixed group and `policy` is "refuse", or the shapes have unlike numbers of elements.
    """
    if math.prod(old) == math.prod(new) == 0:
        return Reshaped(every(len(new)), 1.0, True)
    inside = {d % len(old) for d in dims}
    result: list[int] = []
    leaving = 1
    is_exact = True
    for old_dims, new_dims in reshape_groups(old, new):
        sized = [d for d in old_dims if old[d] != 1]
        taken = [d for d in sized if d in inside]
        is_mixed = 0 < len(taken) < len(sized)
        if is_mixed and policy == "refuse":
            raise NormMismatchError(
                f"a reshape from {tuple(old)} to {tuple(new)} merges dimensions of elem_dims {tuple(dims)} with others"
            )
        is_exact = is_exact and not is_mixed
        if is_mixed and policy == "refine":
            leaving *= numel(old, taken)
        elif taken:
            result.extend(d - len(new) for d in new_dims if new[d] != 1)
    return Reshaped(tuple(result), math.sqrt(leaving), is_exact)
