"""What a few operations in a row make of an ellipsoid, with all that they compute kept together.

Vectors in an ellipsoid pass linear maps and *bends*: functions of each entry whose slopes are between two numbers, ``y = D x`` with
a diagonal D, of which nothing else is known and which is the same in no two entries.  In terms of the middle m and half the width h of
the slopes ``y = m x + h e`` with ``|e_i| <= |x_i|``.  So for every diagonal T > 0

    sum_i T_i (x_i^2 - e_i^2) >= 0,

and with ``x = C z``, z in the ellipsoid of P, ``(z, e)`` is in that of the block diagonal of

    X = (P^-1 - C^T T C)^-1 = P + P C^T T^1/2 (I - H)^-1 T^1/2 C P    and    T^-1,        H = T^1/2 C P C^T T^1/2 < I.

Everything made of z and e is a linear map of both, so that what belongs together (a residual and its branch) is added as it is.  Any T
with H < I is sound; which is best depends on what the vectors are wanted for, and `smallest` looks for it.

Source: Xu and Sivaranjani, "ECLipsE: Efficient Compositional Lipschitz Constant Estimation for Deep Neural Networks", NeurIPS 2024
(without C's pairs: ``(L - L P L / 4)^-1`` with ``L = 4 T``, m = h = 1/2; ECLipsE-Fast takes ``T = I / (2 lambda_max(P))``); Fazlyab et al.,
"Efficient and Accurate Estimation of Lipschitz Constants for Deep Neural Networks", NeurIPS 2019, for the inequality.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from thunder_norm.core import columns as columns_of
from thunder_norm.core.context import current_search_steps
from thunder_norm.core.ellipsoids import Ellipsoid
from thunder_norm.core.kept import GUARD, Begun, Bend, Run, Step, Sum, Vector, begin
from thunder_norm.core.one_bend import TOP, OneBend, Start, Tried

# Of the search for T of several bends: its steps for each one of Newton's method, and how far one goes.
_TIMES, _RATE = 2, 0.15


def smallest(base: Ellipsoid, steps: Sequence[Step]) -> Ellipsoid:
    """An ellipsoid that holds the last vector of some steps, made as small as a few steps of a search make it.

    It begins with the multipliers of ECLipsE-Fast, bend after bend, and makes ``tr Q^4`` smaller, Q the covariance of the last vector:
    with one bend by Newton's method (`one_bend`); with several each T_i goes some way to where the two terms of the gradient would
    balance.  Of the first and the best the one with the shorter longest vector is taken.  Differentiable in what the linear maps and
    `base` are made of, T held fixed.

    Args:
        base: holds vector number 0.
        steps: vectors number 1, 2 and so on.
    """
    if base.scale == 0:
        size = _size(steps[-1])
        return Ellipsoid(base.cov.new_zeros(size, size), 0.0)
    if len(steps) == 1 and isinstance(steps[0], Sum) and len(steps[0].terms) == 1:
        return base.image(steps[0].terms[0][1])
    if sum(isinstance(s, Bend) for s in steps) == 1 and (of_one := _smallest_of_one(base, steps)) is not None:
        return of_one
    with torch.no_grad():
        begun = begin(base, steps)
        found = [r for r in (_run(begun, steps, start) for start in _starts(steps)) if r is not None]
        if not found:  # no number is as large as what these steps make
            return Ellipsoid.ball(_size(steps[-1]), math.inf)
        first = min(found, key=Run.value)
        best = _searched(begun, steps, first) or first
        best = best if best is found[0] else min(found[0], best, key=lambda r: r.length)
    if not _requires_grad(base, steps):
        return best.ellipsoid(base)
    again = _run(begin(base, steps), steps, best.multipliers)
    assert again is not None, "they have fitted before"
    return again.ellipsoid(base)


def _size(step: Step) -> int:
    return len(step.slopes) if isinstance(step, Bend) else step.terms[0][1].size


def _requires_grad(base: Ellipsoid, steps: Sequence[Step]) -> bool:
    bends = [t for s in steps if isinstance(s, Bend) for t in (s.slopes.low, s.slopes.high)]
    return any(
        t.requires_grad
        for t in (base.cov, *bends, *(t for s in steps if isinstance(s, Sum) for _, c in s.terms for t in c.tensors))
    )


def _run(begun: Begun, steps: Sequence[Step], multipliers: Sequence[torch.Tensor] | Start) -> Run | None:
    """All steps with these multipliers, or with first ones; None where some H is not below 1."""
    run, vectors = Run(begun.base.cov, [len(begun.base.cov)]), list(begun.vectors)
    for step in steps[len(vectors) - 1 :]:
        if isinstance(step, Sum):
            made: Vector | None = run.add(vectors, step)
        else:
            given = multipliers if isinstance(multipliers, Start) else multipliers[len(run.bent)]
            made = run.bend(vectors[step.of], step, given, None if run.bent else (begun.to_bend, begun.with_kept))
        if made is None or not math.isfinite(made.scale):
            return None
        vectors.append(made)
    run.last = vectors[-1]
    run.result = run.covariance(run.last)
    return run


def _smallest_of_one(base: Ellipsoid, steps: Sequence[Step]) -> Ellipsoid | None:
    """`smallest` of steps with one bend; None if the last vector is not made of it, or numbers fail."""
    with torch.no_grad():
        alone = _alone(base, steps)
        best = None if alone is None else alone[0].best(current_search_steps())
    if alone is None or best is None:
        return None
    again = _alone(base, steps) if _requires_grad(base, steps) else alone
    assert again is not None, "it was there before"
    chosen = _ellipsoid(base, steps, *again, best.multipliers, best)
    if chosen is None:
        return None
    scale = base.scale * alone[1].scale
    relative = chosen.length.item() / scale if scale else 0.0  # its square may be no number otherwise
    with torch.no_grad():
        if best.multipliers is alone[0].first or alone[0].is_no_longer_by_first(best, relative * relative):
            return chosen
    first = _ellipsoid(base, steps, *again, alone[0].first)
    return first if first is not None and first.length.item() < chosen.length.item() else chosen


def _ellipsoid(
    base: Ellipsoid, steps: Sequence[Step], of: OneBend, last: Vector, multipliers: torch.Tensor, known: Tried | None = None
) -> Ellipsoid | None:
    is_constant = known is not None and not any(t.requires_grad for t in (of.bent, of.own, of.across) if t is not None)
    at = known if is_constant else of.at(multipliers)
    cov = None if at is None else of.covariance(at, _terms(base, steps, multipliers))
    return None if cov is None else Ellipsoid.of(cov, base.scale * last.scale)


def _alone(base: Ellipsoid, steps: Sequence[Step]) -> tuple[OneBend, Vector] | None:
    """The one bend of some steps, and the last vector, by columns, its magnitudes those of its part that the bend's e has not."""
    begun = begin(base, steps)
    run, vectors = Run(base.cov, [len(base.cov)]), list(begun.vectors)
    bend, x = None, vectors[0]
    for step in steps[len(vectors) - 1 :]:
        if isinstance(step, Sum):
            vectors.append(run.add(vectors, step))
            continue
        bend, x = step, vectors[step.of]
        (k,) = x.columns
        assert k is not None, "of z there is something in every vector"
        of_z = step.slopes.middle * k if k.ndim == 1 else step.slopes.middle[:, None] * k
        scale = max(x.scale * step.slopes.scale, 1e-300) if x.scale else 0.0
        vectors.append(Vector((of_z, step.slopes.half), step.slopes.middle.detach().abs() * x.magnitudes, scale, 1.0))
    last = vectors[-1]
    assert bend is not None
    f, own = (*last.columns, None)[:2]
    if own is None or not math.isfinite(last.scale) or f is None:
        return None
    known = _eigenvalues(base, x, bend)
    straight = across = None
    if known is None or own.ndim == 1 or not _is_between_matrices(steps, bend):
        across = columns_of.times((f,), begun.with_kept.mT, run.sizes)
        straight = columns_of.conjugated((f,), base.cov, run.sizes)
    of = OneBend(straight, across, begun.to_bend, own, bend.slopes, last.magnitudes, x.magnitudes, len(base.cov), known)
    return of, last


def _eigenvalues(base: Ellipsoid, x: Vector, bend: Bend) -> torch.Tensor | None:
    """Of the covariance of the vector that is bent, at least, where it is the first one or a multiple and all slopes are the same."""
    (k,) = x.columns
    if k is None or k.ndim == 2 or not bend.slopes.is_uniform:
        return None
    least, most = (1.0, 1.0) if bend.of == 0 else (k.amin().item(), k.amax().item())
    return base.eigenvalues * most**2 + 2 * GUARD * x.magnitudes.amax().item() ** 2 if least == most else None


def _is_between_matrices(steps: Sequence[Step], bend: Bend) -> bool:
    """Whether the slopes are from 0 to a number, and all that comes after is made of the vector that is bent alone."""
    count = next(i for i, s in enumerate(steps) if s is bend)
    later = [i for s in steps[count + 1 :] if isinstance(s, Sum) for i, _ in s.terms]
    return all(i > count for i in later) and bend.slopes.is_from_zero


def _terms(base: Ellipsoid, steps: Sequence[Step], multipliers: torch.Tensor) -> torch.Tensor:
    """How large the terms of the last vector are together."""
    found, scales = [base.cov.detach().diagonal().sqrt()], [1.0]
    for step in steps:
        if isinstance(step, Bend):
            found.append(step.slopes.middle.detach().abs() * found[step.of] + step.slopes.half.detach() / multipliers.sqrt())
            scales.append(max(scales[step.of] * step.slopes.scale, 1e-300) if scales[step.of] else 0.0)
            continue
        scale = max(scales[i] * c.scale for i, c in step.terms)
        parts = (columns_of.scaled(c.magnitudes(found[i]), scales[i] * c.scale / scale if scale else 0.0) for i, c in step.terms)
        found.append(functools.reduce(torch.add, parts))
        scales.append(max(scale, 1e-300) if scale else 0.0)
    return found[-1]


def _starts(steps: Sequence[Step]) -> list[Start]:
    """As the bends alone want it; and where that leaves nothing of z, which other vectors may be made of, half of it as well."""
    top = TOP * (1 - 1e-9)
    is_steep = any(s.slopes.is_steep for s in steps if isinstance(s, Bend))
    has_bends = any(isinstance(s, Bend) for s in steps)
    return [Start(top, False), *[Start(top, True)] * has_bends, *[Start(0.5, False)] * is_steep]


def _searched(begun: Begun, steps: Sequence[Step], first: Run) -> Run | None:
    """The best of the multipliers that the search comes by; None if it finds none better or there are none."""
    if not first.bent or first.result is None or not first.result.any():
        return None
    best, value, rate = first, first.value(), _RATE
    directions = _directions(best)
    for left in reversed(range(_TIMES * current_search_steps())):
        tried = [t * (rate * d).exp() for t, d in zip(best.multipliers, directions, strict=True)]
        run = _run(begun, steps, tried)
        if run is None or (found := run.value()) >= value:
            rate /= 3
        else:
            best, value, directions = run, found, _directions(run) if left else []
    return None if best is first else best


def _directions(run: Run) -> list[torch.Tensor]:
    """For the logarithm of each bend's multipliers: the logarithm of the ratio of the two terms of the gradient.

    ``d tr(A P) / d log T_i = T_i (C X A X C^T)_ii - A_ee / T_i`` with A the weight of what is kept; before the bend it is that of z, times
    ``I + X C^T T C`` from both sides.
    """
    assert run.last is not None
    _, q, square = run.powers
    cube, columns = square @ q, run.last.columns
    *full, last = run.sizes
    own = torch.zeros(last, dtype=q.dtype)
    if len(columns) > len(full) and (k := columns[len(full)]) is not None:
        own = k.square() * cube.diagonal() if k.ndim == 1 else ((cube @ k) * k).sum(0)
    a = columns_of.weights(columns[: len(full)], cube, full)
    found = []
    for i, bent in reversed(list(enumerate(run.bent))):
        t, sizes = bent.multipliers, run.sizes[: i + 1]
        y = columns_of.times(bent.x.columns, bent.after, sizes)
        shrinking, growing = own / t, ((y @ a) * y).sum(1) * t
        tiny = 1e-30 * (shrinking.max() + growing.max()) + 1e-300
        found.append(((shrinking + tiny) / (growing + tiny)).log().clamp(-8, 8))
        if i:
            # E^T A E for E = I + Y^T T C, which differs from I by as many rows as are bent: those parts alone are multiplied
            x = t[:, None] * columns_of.dense(bent.x.columns, sizes)
            ya = y @ a
            a = a.clone()
            a[:, : x.shape[1]] += ya.T @ x
            ya = torch.cat([ya[:, : x.shape[1]] + (ya @ y.T) @ x, ya[:, x.shape[1] :]], 1)
            a[: x.shape[1]] += x.T @ ya
            own, a = a.diagonal()[-sizes[-1] :], a[: -sizes[-1], : -sizes[-1]]
    return found[::-1]
