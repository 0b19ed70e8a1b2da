"""The multipliers of one bend, chosen for what is made of it: a convex problem, a few steps of Newton's method from a good guess.

With ``x = C z`` bent and ``y = F z + G e`` wanted, z in the ellipsoid of P, all that y depends on is found once:

    Q(T) = F P F^T + V^T V + G T^-1 G^T,    V = R^-1 T^1/2 (C P F^T),    R R^T = I - H,    H = T^1/2 (C P C^T) T^1/2 < I

(`joint` has the theorem).  Q is a convex function of T in the order of matrices, hence so is ``tr Q^4``, which is near the largest
eigenvalue and smooth.  With ``A = Q^3`` its gradient in log T_i is four times

    T_i (X A' X)_ii - (G^T A G)_ii / T_i,    the first of them y^T A y for y = R^-T V,

and the second derivative with A held fixed the diagonal matrix of both terms' sum and ``2 (Y A Y^T) o ((I - H)^-1 - I)``, o entry by entry.

The first guesses have one shape, ``tau / lambda_max`` (`first_multipliers`): ECLipsE-Fast's for relu, and f times as much for the f that
makes a power of the eigenvalues of ``m T^-1/2 (I - H)^-1 T^-1/2 m + (h^2 - m^2) T^-1`` small, which the eigenvalues of H tell for every f.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from thunder_norm.core.ellipsoids import EPSILON, FLOOR, margin_of
from thunder_norm.core.slopes import Slopes

# H stays below it, so that I - H can be inverted.
TOP = 1 - 1e-4
# Steps of Newton's method, shorter than whole ones as A is not fixed, and parts of one that are tried until one leads somewhere better.
_STEPS = (0.6, 0.8)
_PARTS = (1.0, 1 / 3, 0.08, 0.016)
# Powers of H whose sum is below (I - H)^-1, and after how many of them it is looked at.
_POWERS, _COMPARED = 5, (2, 5)
# How many multiples of the first multipliers are tried, up to this eigenvalue of H.
_TRIED, _MOST = 9, 0.9
# Of squares of the sizes of a bend's entries: beyond that they are scaled to equal sizes as well.
_UNEVEN = 1e4


# By how much the largest eigenvalue of H is found to be below 1, at least.
_GAPS = (0.25, 0.02, 0.002, 1 - TOP)


def gap(h: torch.Tensor, most: float = _GAPS[0]) -> float | None:
    """A number that 1 is above the largest eigenvalue of a symmetric matrix by, one of a few up to `most`; None if it is not below `TOP`."""
    for found in (g for g in _GAPS if g <= most):
        free = -h
        free.diagonal().add_(1 - found)
        if not torch.linalg.cholesky_ex(free)[1].item():
            return found
    return None


@lru_cache(maxsize=64)
def _eye(size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64)


@dataclass(frozen=True)
class Start:
    """How the first multipliers are chosen: H at most `most`, for entries as they are or scaled to equal sizes."""

    most: float
    is_scaled: bool


# Multipliers that are those of the norm of H, and are not rounded to more.
_BELOW = 1 - 1e-9
_PLAIN = Start(TOP * _BELOW, False)


def first_multipliers(q: torch.Tensor, slopes: Slopes, start: Start, largest: float | None = None) -> torch.Tensor:
    """`first_of`, the multipliers alone."""
    return first_of(q, slopes, start, largest)[0]


def first_of(
    q: torch.Tensor, slopes: Slopes, start: Start, largest: float | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``T = tau / lambda_max(q)``: with ``tau = h / (|m| + h)`` the longest vector becomes as long as the steepest slope says.

    Of entries with one slope tau is next to nothing, and q is that of the others.

    Args:
        q: of the vector that is bent.
        slopes: of the bend.
        start: how.
        largest: the largest eigenvalue of q, where it is known and all tau are the same.

    Returns:
        T, and the eigenvalues of its H, ascending, if they had to be found.
    """
    tau = slopes.tau.clamp(max=start.most)
    if largest is not None:
        return tau / (largest * (1 + 1e-10)), None
    sizes = q.diagonal().clamp(min=q.diagonal().max() * 1e-24).clamp(min=1e-250)
    weights = sizes if start.is_scaled else torch.full_like(sizes, sizes.max().item())
    root = (tau / (tau.max() * weights)).sqrt()
    eigenvalues = torch.linalg.eigvalsh(root[:, None] * q * root)
    scale = tau.max() / (eigenvalues[-1].clamp(min=1e-12) * (1 + 1e-10))
    return root.square() * scale, eigenvalues * scale


@dataclass(frozen=True, eq=False)
class OneBend:
    """What y is made of, [m] entries, x having [n].

    Attributes:
        straight: ``F P F^T``, [m, m]; None where ``F = G C``, as of relu between matrices: then Q is ``G T^-1/2 (I - H)^-1 T^-1/2 G^T``.
        across: ``F P C^T``, [m, n], or None.
        bent: ``C P C^T``, with what rounding may be, [n, n].
        own: G by columns, a matrix or its diagonal.
        slopes: of the bend, [n].
        sizes: ``|F| sqrt(diag P)``, or more, [m].
        given: ``|C| sqrt(diag P)``, [n].
        inner: how many entries z has.
        eigenvalues: of `bent`, ascending, where they are known.
    """

    straight: torch.Tensor | None
    across: torch.Tensor | None
    bent: torch.Tensor
    own: torch.Tensor
    slopes: Slopes
    sizes: torch.Tensor
    given: torch.Tensor
    inner: int
    eigenvalues: torch.Tensor | None = None

    def at(self, multipliers: torch.Tensor) -> Tried | None:
        """With these multipliers; None if H is not below 1."""
        root = multipliers.sqrt()
        free = torch.addcmul(_eye(len(root)), self.bent, torch.outer(root, root), value=-1)  # I - H
        factor, info = torch.linalg.cholesky_ex(free)
        if info.item():
            return None
        own = self.own / root
        if self.straight is None or self.across is None:
            v = torch.linalg.solve_triangular(factor, own.mT, upper=False)
            return Tried(multipliers, own, factor, v, v.mT @ v)
        v = torch.linalg.solve_triangular(factor, root[:, None] * self.across.mT, upper=False)
        cov = self.straight + v.mT @ v
        cov = cov + (torch.diag(own.square()) if own.ndim == 1 else own @ own.mT)
        return Tried(multipliers, own, factor, v, cov)

    def covariance(self, tried: Tried, terms: torch.Tensor) -> torch.Tensor | None:
        """Of y, above the exact one, its terms being of the sizes `terms` [m] together; None if H is too near 1 for that.

        The exact V is off the computed one by a matrix of columns of at most d_i (below), and ``V^T V <= (1 + 1/t) V'^T V' + (1 + t) D``
        for the difference's square D, which is at most n times its diagonal.
        """
        t = tried.multipliers.detach()
        root, n = t.sqrt(), len(t)
        free = self._gap(t, root)
        if free is None:
            return None
        unit = 8 * EPSILON * (self.inner + n + 4)
        # what rounding does to C P F^T, or to G, and to the factor: of columns of V in units of their lengths
        given = terms if self.across is None else (root * self.given).amax().item() * self.sizes
        lengths = torch.linalg.vector_norm(tried.v.detach(), dim=0)
        off = (given + n * lengths).square() * (2e9 * len(lengths) * unit**2 * n / free)
        margin = off + (terms + lengths).square() * margin_of(self.inner + n, len(lengths)) + FLOOR
        cov = (tried.cov + tried.cov.mT) * ((1 + 1e-9 + unit * n / free) / 2)
        cov.diagonal().add_(margin)
        return cov

    def _gap(self, t: torch.Tensor, root: torch.Tensor) -> float | None:
        """`gap` of their H: it is at most the largest of them times what is bent."""
        if self.eigenvalues is not None:
            most = (t.amax() * self.eigenvalues[-1]).item() * (1 + 1e-10)
            if (free := next((g for g in _GAPS[:-1] if most <= 1 - g), None)) is not None:
                return free
        # where the largest is not known to be less, it rarely is
        return gap(self.bent.detach() * torch.outer(root, root), _GAPS[1])

    def best(self, steps: int) -> Tried | None:
        """The best of the multipliers that are tried, after at most that many steps from the first ones; None if there are none."""
        starts = list(self._starts())
        best = starts[0] if len(starts) == 1 else min(starts, key=lambda r: r.value, default=None)
        for step in _STEPS[:steps] + _STEPS[-1:] * (steps - len(_STEPS)):
            found = None if best is None else self._newton(best, step)
            if found is None:
                break
            best = found
        return best

    @property
    def first(self) -> torch.Tensor:
        """The first multipliers, those of ECLipsE-Fast for relu."""
        return self._first[0]

    @cached_property
    def _first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """They, and the eigenvalues of their H."""
        known = None if self.eigenvalues is None else self.eigenvalues[-1].item()
        first, h = first_of(self.bent, self.slopes, _PLAIN, known)
        if h is not None:
            return first, h
        assert self.eigenvalues is not None, "they are what is known"
        return first, self.eigenvalues * first[0]

    def _starts(self) -> Iterator[Tried]:
        first, h = self._first
        if (tried := self.at(first if (factor := self._larger(h)) == 1 else first * factor)) is not None:
            yield tried
        sizes = self.bent.diagonal()
        if (sizes.amax() > _UNEVEN * sizes.amin()).item():
            scaled = first_multipliers(self.bent, self.slopes, Start(TOP * _BELOW, True))
            if (tried := self.at(scaled)) is not None:
                yield tried
        if self.slopes.is_steep and (tried := self.at(first_multipliers(self.bent, self.slopes, Start(0.5, False)))) is not None:
            yield tried

    def is_no_longer_by_first(self, near: Tried, squared: float) -> bool:
        """Whether y's longest vector is known to be as long with the first multipliers, by its square: at a vector near that of others.

        ``(I - H)^-1`` is at least the sum of the first powers of H.
        """
        v, root = near.longest, self.first.sqrt()
        own = (self.own.mT @ v if self.own.ndim == 2 else self.own * v) / root
        g = own if self.across is None else root * (self.across.mT @ v)
        straight = torch.zeros((), dtype=v.dtype) if self.straight is None else v @ (self.straight @ v) + own @ own
        total = power = g
        for i in range(1, _POWERS + 1):
            power = root * (self.bent @ (root * power))
            total = total + power
            if i in _COMPARED and squared <= (straight + g @ total).item() * (1 - 1e-9):
                return True
        return False

    def _larger(self, h: torch.Tensor) -> float:
        """How many times the first multipliers there should be, given the eigenvalues of their H."""
        top = h[-1].item()
        if not 0 < top < _MOST:
            return 1.0
        ratio = self.slopes.ratio
        f = torch.linspace(1.0, _MOST / top, _TRIED, dtype=h.dtype)[:, None]
        sizes = (ratio / (1 - f * h.clamp(min=0.0)) + (1 - ratio)) / f
        return f[(sizes / sizes.amin()).pow(4).sum(1).argmin()].item()

    def _newton(self, at: Tried, step: float) -> Tried | None:
        """A step from there; None if it leads nowhere better."""
        if not math.isfinite(at.value):
            return None
        a, own = at.square @ at.scaled, at.own
        y = torch.linalg.solve_triangular(at.factor.mT, at.v, upper=True)
        if self.across is None:
            y = y - own.mT
        ya = y @ a
        growing = (ya * y).sum(1)
        shrinking = own.square() * a.diagonal() if own.ndim == 1 else ((a @ own) * own).sum(0)
        down = (shrinking - growing) / 2
        second = (ya @ y.mT).mul_(torch.cholesky_inverse(at.factor))
        # half of it: of inverse - I, and a diagonal that is not 0
        second.diagonal().add_(down + 5e-10 * (growing + shrinking).amax())
        factor, info = torch.linalg.cholesky_ex(second)
        if info.item():
            return None
        move = step * torch.cholesky_solve(down[:, None], factor)[:, 0].clamp_(-4, 4)
        for part in _PARTS:
            tried = self.at(at.multipliers * (move if part == 1 else part * move).exp())
            if tried is not None and tried.value < at.value:
                return tried
        return None


@dataclass(frozen=True, eq=False)
class Tried:
    """What some multipliers make: ``G T^-1/2``, the factor R of I - H, V and Q."""

    multipliers: torch.Tensor
    own: torch.Tensor
    factor: torch.Tensor
    v: torch.Tensor
    cov: torch.Tensor

    @cached_property
    def size(self) -> float:
        """The largest entry."""
        return self.cov.diagonal().amax().item()

    @cached_property
    def scaled(self) -> torch.Tensor:
        """Q over its largest entry."""
        return self.cov / self.size if self.size > 0 else self.cov

    @cached_property
    def square(self) -> torch.Tensor:
        """That, squared."""
        return self.scaled @ self.scaled

    @cached_property
    def value(self) -> float:
        """``tr Q^4``, its logarithm."""
        found = self.square.norm().item()
        return 2 * math.log(found) + 4 * math.log(self.size) if self.size > 0 and found > 0 else -math.inf

    @property
    def longest(self) -> torch.Tensor:
        """A unit vector near that of the largest eigenvalue."""
        v = self.scaled[self.cov.diagonal().argmax()]
        for _ in range(4):  # products with vectors are a tenth of that of two matrices
            v = self.scaled @ v
        return v / v.norm().clamp(min=1e-300)
