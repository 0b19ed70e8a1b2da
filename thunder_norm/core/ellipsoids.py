"""Ellipsoids: sets that hold all a vector may move by, and the linear maps that operations are on them.

An ellipsoid is ``{R u: |u|_2 <= 1}``, known by its *covariance* ``P = R R^T``; the image under a linear map C is that of ``C P C^T``,
the longest vector in it has length ``sqrt(lambda_max(P))``.  All numbers are float64 and scaled to about 1, so that nothing vanishes
or overflows however deep a program is, and what rounding may do is added to the diagonal: a computed ellipsoid holds the exact one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from thunder_norm.core.spectral import largest_eigenvalue

EPSILON = 2.0**-52
# Relative to the largest entry of 1: below it squares of entries vanish.
FLOOR = 1e-280


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """``{scale R u: |u|_2 <= 1}`` with ``R R^T = cov``.

    Attributes:
        cov: [n, n] float64, symmetric, its largest diagonal entry 1, or all 0; may require grad.
        scale: a number > 0, or 0 where nothing moves.
    """

    cov: torch.Tensor
    scale: float

    @classmethod
    def of(cls, cov: torch.Tensor, scale: float = 1.0) -> Ellipsoid:
        """The ellipsoid of covariance ``scale^2 cov``."""
        size = cov.detach().diagonal().max().item() if len(cov) else 0.0
        if size <= 0 or scale == 0:
            return cls(torch.zeros_like(cov), 0.0)
        return cls(cov / size, max(scale * math.sqrt(size), 1e-300))

    @classmethod
    def ball(cls, size: int, radius: float) -> Ellipsoid:
        """All vectors of that many entries and at most that length."""
        return cls(torch.eye(size, dtype=torch.float64), radius)

    @cached_property
    def eigenvalues(self) -> torch.Tensor:
        """Of `cov`, ascending, constants."""
        return torch.linalg.eigvalsh(self.cov.detach())

    @cached_property
    def length(self) -> torch.Tensor:
        """The length of its longest vector, differentiable in `cov`: at the vector's direction."""
        if self.scale == 0:
            return torch.zeros((), dtype=torch.float64)
        return self._length_of(self.cov, self._largest)

    @cached_property
    def _largest(self) -> torch.Tensor:
        """The largest eigenvalue, at most a little more: where all are not known it takes a fraction of their time."""
        if "eigenvalues" in self.__dict__:
            return self.eigenvalues[-1]
        return self.cov.new_tensor(largest_eigenvalue(self.cov.detach()))

    def _length_of(self, block: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Of a block of `cov` and its largest eigenvalue, a constant."""
        if block.requires_grad:
            largest = _Largest.apply(block, largest)
        return self.scale * (largest * (1 + 64 * len(self.cov) * EPSILON)).sqrt()

    @cached_property
    def entry(self) -> torch.Tensor:
        """The largest entry of its vectors."""
        return self.scale * self.cov.diagonal().amax().sqrt() if self.scale else torch.zeros((), dtype=torch.float64)

    @property
    def entries(self) -> torch.Tensor:
        """The largest that each entry of its vectors is, a constant."""
        return self.scale * self.cov.detach().diagonal().sqrt()

    def part(self, groups: torch.Tensor) -> torch.Tensor:
        """The length of the longest part of one of its vectors, the entries of each part given by their numbers [parts, size]."""
        if self.scale == 0:
            return torch.zeros((), dtype=torch.float64)
        blocks = self.cov.detach()[groups[:, :, None], groups[:, None, :]]
        # an eigenvalue is at most sqrt(sum of squares), the largest at least the sum of squares over the sum
        squares, sums = blocks.square().sum((1, 2)), blocks.diagonal(dim1=1, dim2=2).sum(1)
        is_short = squares.sqrt() * (1 + 1e-9) < (squares / sums.clamp(min=1e-300)).amax()
        largest, at = torch.linalg.eigvalsh(blocks[~is_short])[:, -1].max(0)
        longest = groups[~is_short][at]
        return self._length_of(self.cov[longest[:, None], longest], largest)

    def parts(self, groups: torch.Tensor) -> torch.Tensor:
        """The same of each part, [parts], constants."""
        if self.scale == 0:
            return torch.zeros(len(groups), dtype=torch.float64)
        blocks = self.cov.detach()[groups[:, :, None], groups[:, None, :]]
        largest = torch.linalg.eigvalsh(blocks)[:, -1]
        return self.scale * (largest * (1 + 64 * len(self.cov) * EPSILON)).sqrt()

    def times(self, factor: float) -> Ellipsoid:
        """That many times as large."""
        return self._turned(self.cov, self.scale * factor) if self.scale and factor else Ellipsoid.of(self.cov * 0)

    def in_order(self, index: torch.Tensor) -> Ellipsoid:
        """The same with entries in another order."""
        return self._turned(self.cov[index[:, None], index], self.scale)

    def _turned(self, cov: torch.Tensor, scale: float) -> Ellipsoid:
        """Of a covariance that has the same eigenvalues: where they are known they are not looked for again."""
        out = Ellipsoid(cov, max(scale, 1e-300) if scale else 0.0)
        for name in ("eigenvalues", "_largest"):
            if name in self.__dict__:
                out.__dict__[name] = getattr(self, name)
        return out

    def image(self, c: LinearMap) -> Ellipsoid:
        """What a linear map makes of it."""
        if c.is_turn and c.size == len(self.cov):
            return c.turned(self)
        sizes = self.cov.diagonal().sqrt()
        rows = c.times(self.cov)
        out = c.times(rows.T)
        return Ellipsoid.of(above((out + out.T) / 2, c.magnitudes(sizes), len(sizes)), self.scale * c.scale)


class _Largest(torch.autograd.Function):
    """The largest eigenvalue of a symmetric matrix, where it is known: the vector that its derivative needs is looked for when it is."""

    @staticmethod
    def forward(cov: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        return largest.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (cov,) = ctx.saved_tensors
        v = torch.linalg.eigh(cov.detach())[1][:, -1]
        return grads[0] * torch.outer(v, v), None


def above(cov: torch.Tensor, magnitudes: torch.Tensor, inner: int) -> torch.Tensor:
    """A covariance that is computed as ``C P C^T``, and above the exact one whatever was rounded.

    An entry is off by at most ``8 k eps m_i m_j`` with k terms in a sum and `magnitudes` m, ``m_i >= sum_k |C_ik| sqrt(P_kk)``; a
    matrix of such entries is below n times its diagonal.
    """
    if not magnitudes.any():
        return cov
    cov = cov.clone()
    cov.diagonal().add_(margin_of(inner, cov.shape[0]) * magnitudes.detach().square() + FLOOR)
    return cov


def margin_of(inner: int, size: int) -> float:
    """What `above` adds to the diagonal of so many rows, sums having so many terms, for magnitudes of 1."""
    return 16 * EPSILON * (inner + 4) * size


def sum_of(a: Ellipsoid, b: Ellipsoid) -> Ellipsoid:
    """An ellipsoid that holds ``x + y`` for all x in one and y in the other, whatever one has to do with the other.

    ``(1 + 1/t) P_a + (1 + t) P_b`` does for each t > 0; at the ratio t of their lengths it is no longer than both lengths together.
    """
    if not a.scale or not b.scale:
        return a if a.scale else b
    scale = max(a.scale, b.scale)
    p, q = ((e.scale / scale) ** 2 * e.cov for e in (a, b))
    t = min(max(a.length.item() / b.length.item(), 1e-100), 1e100)
    return Ellipsoid.of(((1 + 1 / t) * p + (1 + t) * q) * (1 + 16 * EPSILON), scale)


class LinearMap:
    """A linear map ``scale * C`` of vectors, C with entries of at most about 1.

    Attributes:
        scale: a number >= 0.
        size: how many entries the result has.
        tensors: what C is made of, which may require grad.
    """

    scale: float
    size: int
    tensors: tuple[torch.Tensor, ...] = ()

    def times(self, t: torch.Tensor) -> torch.Tensor:
        """``C t`` for a matrix of columns."""
        raise NotImplementedError

    def columns(self, factors: torch.Tensor) -> torch.Tensor:
        """``C diag(factors)``, as a matrix, or as its diagonal if it has no other entries."""
        return self.times(torch.diag(factors))

    @property
    def is_turn(self) -> bool:
        """Whether it is a number times the vector with its entries in another order, given one of as many entries as the result has."""
        return False

    def turned(self, e: Ellipsoid) -> Ellipsoid:
        """What it makes of an ellipsoid, if it is a turn: nothing is rounded, and eigenvalues stay what they are."""
        raise NotImplementedError

    def magnitudes(self, sizes: torch.Tensor) -> torch.Tensor:
        """``|C| sizes``: how large a result's terms are together, given how large the entries of the vector are."""
        raise NotImplementedError


class Dense(LinearMap):
    """A matrix [out, in]."""

    def __init__(self, matrix: torch.Tensor):
        largest = matrix.detach().abs().max().item() if matrix.numel() else 0.0
        self.scale, self.size = largest, len(matrix)
        self._matrix = matrix / largest if largest else matrix
        self.tensors = (self._matrix,)

    def times(self, t: torch.Tensor) -> torch.Tensor:
        """``C t``."""
        return self._matrix @ t

    def columns(self, factors: torch.Tensor) -> torch.Tensor:
        """``C diag(factors)``."""
        return self._matrix * factors

    def magnitudes(self, sizes: torch.Tensor) -> torch.Tensor:
        """``|C| sizes``."""
        return self._absolute @ sizes.detach()

    @cached_property
    def _absolute(self) -> torch.Tensor:
        return self._matrix.detach().abs()


class Repeated(LinearMap):
    """A matrix [out, in] of each of so many parts of a vector, one after the other: of tokens, say."""

    def __init__(self, matrix: torch.Tensor, count: int):
        self._one, self._count = Dense(matrix), count
        self.scale, self.size, self.tensors = self._one.scale, self._one.size * count, self._one.tensors

    def times(self, t: torch.Tensor) -> torch.Tensor:
        """``C t``."""
        (matrix,) = self.tensors
        return (matrix @ t.reshape(self._count, -1, t.shape[1])).reshape(self.size, t.shape[1])

    def columns(self, factors: torch.Tensor) -> torch.Tensor:
        """``C diag(factors)``."""
        (matrix,) = self.tensors
        return torch.block_diag(*(matrix * factors.reshape(self._count, 1, -1)))

    def magnitudes(self, sizes: torch.Tensor) -> torch.Tensor:
        """``|C| sizes``."""
        return self._one.magnitudes(sizes.reshape(self._count, -1).mT).mT.reshape(-1)


class Scaled(LinearMap):
    """Each entry times a factor of its own [n], or all times one."""

    def __init__(self, factors: torch.Tensor, size: int):
        largest = factors.detach().abs().max().item() if factors.numel() else 0.0
        self.scale, self.size = largest, size
        self._factors = (factors / largest if largest else factors).expand(size)
        self._is_one = factors.numel() == 1 and not factors.requires_grad
        self.tensors = (self._factors,)

    def times(self, t: torch.Tensor) -> torch.Tensor:
        """``C t``."""
        return self._factors[:, None] * t

    def columns(self, factors: torch.Tensor) -> torch.Tensor:
        """The diagonal of ``C diag(factors)``."""
        return self._factors * factors

    @property
    def is_turn(self) -> bool:
        """All factors are one number."""
        return self._is_one

    def turned(self, e: Ellipsoid) -> Ellipsoid:
        """As large as that number."""
        return e if self.scale == 1 else e.times(self.scale)

    def magnitudes(self, sizes: torch.Tensor) -> torch.Tensor:
        """``|C| sizes``."""
        return self._factors.detach().abs() * sizes.detach()


@lru_cache(maxsize=64)
def identity(size: int) -> LinearMap:
    """The map that changes nothing."""
    return Scaled(torch.ones(1, dtype=torch.float64), size)


class Picked(LinearMap):
    """Entries taken from the vector by number; where the number is negative there is a 0."""

    def __init__(self, index: torch.Tensor):
        self.scale, self.size = 1.0, len(index)
        self._index, self._is_there = index.clamp(min=0), (index >= 0).to(torch.float64)

    def times(self, t: torch.Tensor) -> torch.Tensor:
        """``C t``."""
        return t[self._index] * self._is_there[:, None]

    @cached_property
    def is_turn(self) -> bool:
        """All entries are taken, each once."""
        return torch.equal(self._index.sort()[0], torch.arange(self.size)) and bool(self._is_there.all())

    def turned(self, e: Ellipsoid) -> Ellipsoid:
        """In that order."""
        return e.in_order(self._index)

    def magnitudes(self, sizes: torch.Tensor) -> torch.Tensor:
        """``|C| sizes``."""
        return sizes.detach()[self._index] * self._is_there


class Multiple(LinearMap):
    """A map, or the identity of `size` entries, times a number."""

    def __init__(self, c: LinearMap | None, factor: float, size: int):
        self.scale, self.size = abs(factor) * (1.0 if c is None else c.scale), size
        self._c, self._sign = c, math.copysign(1.0, factor)

    def times(self, t: torch.Tensor) -> torch.Tensor:
        """``C t``."""
        return self._sign * (t if self._c is None else self._c.times(t))

    def magnitudes(self, sizes: torch.Tensor) -> torch.Tensor:
        """``|C| sizes``."""
        return sizes.detach() if self._c is None else self._c.magnitudes(sizes)
