"""The largest singular value of matrices coarser than float64, with a proof that there is none above it.

The eigenvalues of the Gram matrix G of the smaller side, in float64, are the squares of the singular values; the products of numbers
of a coarser dtype are exact there, and neither overflow nor vanish.  Lanczos' method finds an eigenvalue ``theta`` of G, but may miss a
larger one whose eigenvector its start hardly contains.  So ``theta (1 + SLACK) I - G`` is then factorized by Cholesky: that
succeeds only if it is positive, which is to say that no eigenvalue of G is above ``theta (1 + SLACK)``.  The factors then solve for a
better eigenvector (inverse iteration), whose Rayleigh quotient is the result.

Source: Golub and Van Loan, "Matrix Computations", sections 8.2 and 10.1; Rump, "Verification of positive definiteness", 2006.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

# The result is below the largest singular value by a factor of 1 + SLACK / 2 at most: a quarter of float32's resolution.  Rounding
# adds at most m n 2^-53 for the Gram matrix of an m x n matrix, and m^2 2^-53 for the factorization (the bounds for the product and
# for Cholesky are in terms of the trace): a sixteenth of SLACK at 4096 x 4096.  In practice it is m times less.
SLACK = 2.0**-25

_SMALL = 64  # sides up to which all eigenvalues are computed, of many matrices at once
_WHOLE = 1024  # sides up to which all eigenvalues of a Gram matrix take a CPU no longer than its extreme ones, found one after the other
_MAX_STEPS = 320  # of Lanczos' method; then all eigenvalues are computed
_CHECKED_EVERY = 8
_LEAF = 96  # sides of blocks on the diagonal that are computed whole
_CHUNK = 1 << 19  # numbers that are converted to float64 at once: few enough for the cache


class Top(NamedTuple):
    """The largest singular value of several matrices.

    Attributes:
        value: it.
        index: which matrix has it.
        vector: its singular vector on the smaller side (the left one of a square matrix), float64, of length 1.
    """

    value: float
    index: int
    vector: torch.Tensor


def largest_singular_value(matrices: torch.Tensor, start: torch.Tensor | None = None) -> Top:
    """The largest singular value of finite `matrices` [number, m, n] of a floating dtype below float64.

    Args:
        matrices: at least one, none of them empty.
        start: a guess of the singular vector on the smaller side, of the same length as it.  It decides how long it takes only.
    """
    flat = _smaller_first(matrices)
    return _of_small(flat) if flat.shape[-2] <= _SMALL else _of_large(flat, start)


def smallest_singular_value(matrices: torch.Tensor) -> float:
    """The smallest of all singular values of finite `matrices` [number, m, n] of a floating dtype below float64.

    Of each there are min(m, n).  It is off by at most about ``1e-8`` of the largest one: below that the Gram matrix is rounding.

    Args:
        matrices: at least one, none of them empty.
    """
    flat = _smaller_first(matrices)
    if flat.shape[-2] > _SMALL:
        return math.sqrt(min(_smallest_eigenvalue(_gram(matrix)) for matrix in flat))
    count = max(1, _CHUNK // (flat.shape[-1] * flat.shape[-2]))
    return min(torch.linalg.svdvals(part.double()).amin().item() for part in flat.split(count))


def extreme_singular_values(matrices: torch.Tensor, start: torch.Tensor | None = None) -> tuple[Top | None, float, float]:
    """The largest and the smallest of all singular values of finite `matrices`, of one Gram matrix where that takes less time.

    What is known of the largest one besides comes first, if anything is.
    """
    flat = _smaller_first(matrices)
    if not has_fast_spectrum(flat):
        top = largest_singular_value(matrices, start)
        return top, top.value, smallest_singular_value(matrices)
    values = _spectra(flat)
    return None, values.amax().item(), values.amin().item()


def has_fast_spectrum(matrices: torch.Tensor) -> bool:
    """Whether all singular values take less time than what is known of them by products and factorizations."""
    return matrices.device.type == "cpu" and min(matrices.shape[-2:]) <= _WHOLE


def sum_of_singular_values(matrices: torch.Tensor) -> float:
    """The sum of all singular values of finite `matrices` [number, m, n] that have a fast spectrum, of a floating dtype below float64."""
    return _spectra(_smaller_first(matrices)).sum().item()


def _smaller_first(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices, or their transposes, with no more rows than columns."""
    return matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT


def _spectra(flat: torch.Tensor) -> torch.Tensor:
    """All singular values, the smaller side first: off by at most about ``1e-8`` of the largest one, which what is smaller may be."""
    if flat.shape[-2] > _SMALL:
        return torch.stack([torch.linalg.eigvalsh(_gram(matrix)) for matrix in flat]).clamp(min=0).sqrt()
    count = max(1, _CHUNK // (flat.shape[-1] * flat.shape[-2]))
    squares = [torch.linalg.eigvalsh(part @ part.mT) for part in map(torch.Tensor.double, flat.split(count))]
    return torch.cat(squares).clamp(min=0).sqrt()


def _smallest_eigenvalue(gram: torch.Tensor) -> float:
    """Of a positive semidefinite matrix: one over the largest of its inverse, if it has one."""
    factor, info = torch.linalg.cholesky_ex(gram)
    if info.item() == 0:
        inverse = torch.cholesky_inverse(factor)
        scale = inverse.diagonal().amax().item()  # of another matrix that is nearly singular it may be near overflow
        if math.isfinite(scale) and scale > 0:
            return 1 / (scale * _top_eigenpair(inverse / scale, None)[0])
    return max(0.0, torch.linalg.eigvalsh(gram)[0].item())


# The same of a matrix in float64, whose eigenvalue is wanted to less: what rounding does to the factorization, up to 1024 rows, is a quarter of it.
_TIGHT = 2.0**-31


def largest_eigenvalue(gram: torch.Tensor) -> float:
    """A number that no eigenvalue of a positive semidefinite float64 matrix [n, n], of at most 1024 rows, is above, and one is next to."""
    if len(gram) > _LEAF:
        theta, _ = _top_eigenpair(gram, None)
        shifted = gram.neg()
        shifted.diagonal().add_(theta * (1 + _TIGHT))
        if not torch.linalg.cholesky_ex(shifted)[1].item():
            return theta * (1 + 1.25 * _TIGHT)
    return max(0.0, torch.linalg.eigvalsh(gram)[-1].item())


def other_vector(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """``vector @ matrix`` in float64 for a coarser matrix [m, n], whose copy in float64 is not made at once."""
    return torch.cat([vector @ part for part in _doubled(matrix, 1)])


def _of_small(matrices: torch.Tensor) -> Top:
    best = None
    count = max(1, _CHUNK // (matrices.shape[-1] * matrices.shape[-2]))
    for first in range(0, len(matrices), count):
        doubled = matrices[first : first + count].double()
        grams = doubled @ doubled.mT
        values = torch.linalg.eigvalsh(grams)[:, -1]
        index = int(values.argmax())
        if best is None or values[index] > best[0]:
            best = values[index], first + index, grams[index]
    value, index, gram = best
    return Top(math.sqrt(max(0.0, value.item())), index, torch.linalg.eigh(gram).eigenvectors[:, -1])


def _of_large(matrices: torch.Tensor, start: torch.Tensor | None) -> Top:
    grams = map(_gram, matrices)
    index, (largest, vector) = 0, _top_eigenpair(next(grams), start)
    for i, gram in enumerate(grams, 1):
        if _factorized(gram, largest) is None:  # else it has no eigenvalue above the largest so far
            index, (largest, vector) = i, _top_eigenpair(gram, start)
    return Top(math.sqrt(largest), index, vector)


# -- the Gram matrix --------------------------------------------------------------------------------------------------


def _gram(matrix: torch.Tensor) -> torch.Tensor:
    """``A A^T`` in float64 of a coarser A [m, n]."""
    size = len(matrix)
    gram = torch.zeros(size, size, dtype=torch.float64, device=matrix.device)
    for part in _doubled(matrix, 1):
        _add_lower(gram, part)
    _mirror(gram)
    return gram


def _doubled(matrix: torch.Tensor, dim: int) -> Iterator[torch.Tensor]:
    """A matrix in float64, part by part."""
    for part in matrix.split(max(1, _CHUNK // matrix.shape[1 - dim]), dim):
        yield part.double()


def _add_lower(gram: torch.Tensor, rows: torch.Tensor, alpha: float = 1.0) -> None:
    """Add ``alpha rows rows^T`` to `gram`, in the blocks on and below its diagonal: half of the work."""
    half = len(rows) // 2
    if half < _LEAF:
        gram.addmm_(rows, rows.mT, alpha=alpha)
        return
    gram[half:, :half].addmm_(rows[half:], rows[:half].mT, alpha=alpha)
    _add_lower(gram[:half, :half], rows[:half], alpha)
    _add_lower(gram[half:, half:], rows[half:], alpha)


def _mirror(gram: torch.Tensor) -> None:
    """Fill the blocks above the diagonal, which `_add_lower` left out."""
    half = len(gram) // 2
    if half >= _LEAF:
        gram[:half, half:] = gram[half:, :half].mT
        _mirror(gram[:half, :half])
        _mirror(gram[half:, half:])


# -- its largest eigenvalue -------------------------------------------------------------------------------------------


def _top_eigenpair(gram: torch.Tensor, start: torch.Tensor | None) -> tuple[float, torch.Tensor]:
    """The largest eigenvalue of a positive semidefinite matrix, up to a factor of 1 + SLACK, and its eigenvector."""
    for theta, vector in _lanczos(gram, start):
        factor = _factorized(gram, theta)
        if factor is None:
            continue
        better = torch.cholesky_solve(vector[:, None], factor)[:, 0]
        better = better / torch.linalg.vector_norm(better)
        quotient = _quotient(gram, better)
        return (quotient, better) if quotient >= theta else (theta, vector)
    values, vectors = torch.linalg.eigh(gram)
    return max(0.0, values[-1].item()), vectors[:, -1]


def _quotient(gram: torch.Tensor, vector: torch.Tensor) -> float:
    """The Rayleigh quotient of a vector of length 1, which no vector has above the largest eigenvalue."""
    return torch.dot(vector, gram @ vector).item()


def _factorized(gram: torch.Tensor, theta: float) -> torch.Tensor | None:
    """The lower Cholesky factor of ``theta (1 + SLACK) I - gram``; None if there is none: an eigenvalue is above that."""
    shifted = gram.neg()
    shifted.diagonal().add_(theta * (1 + SLACK))
    return shifted if _factorize(shifted) else None


def _factorize(matrix: torch.Tensor) -> bool:
    """Write the Cholesky factor of a symmetric matrix over its lower triangle; whether it has one.

    By halves, so that most of the work is multiplying matrices: LAPACK's own takes almost twice as long.
    """
    half = len(matrix) // 2
    if half < _LEAF:
        factor, info = torch.linalg.cholesky_ex(matrix)
        matrix.copy_(factor)
        return info.item() == 0
    above, below, rest = matrix[:half, :half], matrix[half:, :half], matrix[half:, half:]
    if not _factorize(above):
        return False
    below.copy_(torch.linalg.solve_triangular(above, below.mT, upper=False).mT)
    _add_lower(rest, below, -1.0)
    return _factorize(rest)


def _lanczos(gram: torch.Tensor, start: torch.Tensor | None) -> Iterator[tuple[float, torch.Tensor]]:
    """Rayleigh quotients that seem to be the largest eigenvalue, with their vectors; each from more steps than the one before."""
    size = len(gram)
    steps = min(size, _MAX_STEPS)
    noise = _noise(size).to(gram.device)
    # some noise, in case the guess is orthogonal to the vector, or is another eigenvector
    first = noise if start is None else start.to(gram) + 1e-3 * noise / math.sqrt(size)
    basis = torch.empty(steps, size, dtype=torch.float64, device=gram.device)
    basis[0] = first / torch.linalg.vector_norm(first)
    diagonal: list[float] = []
    beside: list[float] = []
    for j in range(steps):
        so_far = basis[: j + 1]
        along = gram @ basis[j]
        diagonal.append(torch.dot(basis[j], along).item())
        along.sub_(basis[j], alpha=diagonal[-1])
        if j:
            along.sub_(basis[j - 1], alpha=beside[-1])
        # against all of them: without it rounding would find the same eigenvectors again and again
        along.addmv_(so_far.mT, so_far @ along, alpha=-1)
        beside.append(torch.linalg.vector_norm(along).item())
        is_last = j + 1 == steps
        if not is_last:
            torch.div(along, beside[-1] or 1.0, out=basis[j + 1])
        if (j + 1) % _CHECKED_EVERY and not is_last:
            continue
        found = _ritz(diagonal, beside)
        if found.is_settled or is_last:
            vector = found.vector.to(gram.device) @ so_far
            vector = vector / torch.linalg.vector_norm(vector)
            yield _quotient(gram, vector), vector
        if found.is_invariant:  # what follows would be rounding errors alone
            return


class _Ritz(NamedTuple):
    """The largest eigenvalue of the tridiagonal matrix, and what is known about its distance to one of the Gram matrix."""

    theta: float
    vector: torch.Tensor
    is_settled: bool
    is_invariant: bool


def _ritz(diagonal: list[float], beside: list[float]) -> _Ritz:
    entries, off = torch.tensor([diagonal, beside], dtype=torch.float64, device="cpu")
    values, vectors = torch.linalg.eigh(torch.diag(entries) + torch.diag(off[:-1], -1))  # looks at the lower triangle
    theta = values[-1].item()
    residual = beside[-1] * abs(vectors[-1, -1].item())
    gap = theta - values[-2].item() if len(values) > 1 else 0.0
    error = min(residual, residual * residual / gap) if gap > 0 else residual
    is_invariant = min(beside) <= theta * 2.0**-46
    return _Ritz(theta, vectors[:, -1], is_invariant or error <= theta * SLACK / 4, is_invariant)


@functools.lru_cache(maxsize=64)
def _noise(size: int) -> torch.Tensor:
    """A vector that has nothing to do with anybody's matrix, always the same, drawn without the user's generator."""
    generator = torch.Generator().manual_seed(0x5EED)
    return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
