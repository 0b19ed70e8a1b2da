"""Unit balls of the kinds: steepest steps, projections, and tensors to start from.

For a gradient G the linear minimization oracle gives ``lmo(G) = argmax <G, D> over ||D|| <= 1``; a step of ``-t lmo(G)`` lowers
the loss most, to first order, among all steps of norm t, by t times the dual norm ``<G, lmo(G)>``.  Where G is 0 (a row no token
selected, directions a matrix does not move) so is ``lmo(G)``.

Each ball acts on its own dimensions, named from the end, and on every index of the others alike: tensors of one shape may be
stacked along new leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from thunder_norm.errors import NormMismatchError
from thunder_norm.tensors import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
)

Method = Literal["newton_schulz", "svd"]

# Quintic steps x (a + b x^2 + c x^4) for singular values in (0, 1]: after all six, those above 0.003 are within 0.45 % of 1, and none
# exceeds 0.99934.  The steps and their coefficients are those of Modula's `orthogonalize`.
_QUINTICS = tuple(
    (a / 1024, b / 1024, c / 1024)
    for a, b, c in (
        (3955, -8306, 5008),
        (3735, -6681, 3463),
        (3799, -6499, 3211),
        (4019, -6385, 2906),
        (2677, -3029, 1162),
        (2172, -1833, 682),
    )
)


@dataclass(frozen=True)
class Ball:
    """The tensors of norm at most 1 in one kind.

    Attributes:
        kind: the kind.
        elem_dims: its elem_dims, from the end.
    """

    kind: type[NormedTensor]
    elem_dims: tuple[int, ...]

    def norm(self, t: torch.Tensor) -> torch.Tensor:
        """The norm of one tensor, 0-dim, differentiable."""
        return self.kind.of(t, self.elem_dims).norm_size

    def lmo(self, g: torch.Tensor, method: Method = "newton_schulz") -> torch.Tensor:
        """The tensor D of norm 1 with the largest ``<g, D>``, zero where g is.

        Args:
            g: the gradient, leading dimensions stacked.
            method: for operators: "newton_schulz" (matrix products alone, singular values up to 0.5 % below 1, less for those of g
                below 0.003 of its Frobenius norm; differentiable) or "svd" (exact).
        """
        raise NotImplementedError

    def project(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor of the ball that is nearest to t, in the Euclidean distance."""
        raise NotImplementedError

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> torch.Tensor:
        """A tensor of norm exactly 1 to start a parameter from, in float64 on the generator's device."""
        raise NotImplementedError


class _VectorBall(Ball):
    """Norms of the entries along elem_dims; the same for every index of the other dimensions."""

    def _along(self, f: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor) -> torch.Tensor:
        """`f` on t with elem_dims flattened into a last dimension."""
        if not t.numel():
            return t.clone()
        dims = self.elem_dims
        if not dims:
            return f(t.unsqueeze(-1)).squeeze(-1)
        last = tuple(range(-len(dims), 0))
        moved = t.movedim(dims, last)
        return f(moved.flatten(-len(dims))).reshape(moved.shape).movedim(last, dims)

    def lmo(self, g: torch.Tensor, method: Method = "newton_schulz") -> torch.Tensor:
        return self._along(self._steepest, _at_least_float32(g)).to(g.dtype)

    def project(self, t: torch.Tensor) -> torch.Tensor:
        return self._along(self._nearest, _at_least_float32(t)).to(t.dtype)

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> torch.Tensor:
        return self._along(self._on_sphere, _normal(shape, generator))

    def _steepest(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _on_sphere(self, rows: torch.Tensor) -> torch.Tensor:
        return self._steepest(rows)


class L2Ball(_VectorBall):
    """Euclidean length: g / |g|; a longer row is shortened to 1."""

    def _radius(self, rows: torch.Tensor) -> float:
        return 1.0

    def _steepest(self, rows: torch.Tensor) -> torch.Tensor:
        # in float64 squares of float32 neither overflow nor vanish; what is too small to divide by counts as zero
        size = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64) / self._radius(rows)
        tiny = torch.finfo(rows.dtype).tiny ** (0.5 if rows.dtype == torch.float64 else 1)
        return rows / torch.where(size > tiny, size, math.inf).to(rows.dtype)

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        size = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64) / self._radius(rows)
        return rows / size.clamp(min=1).to(rows.dtype)


class RMSBall(L2Ball):
    """Root mean square over N entries, ``|t| / sqrt(N)``: rows of length sqrt(N)."""

    def _radius(self, rows: torch.Tensor) -> float:
        return math.sqrt(rows.shape[-1])


class LinfBall(_VectorBall):
    """Largest entry: sign(g); entries are clamped.  A start is ones, which as gains or scales change nothing."""

    def _steepest(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sign()

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clamp(-1, 1)

    def _on_sphere(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(rows)


class L1Ball(_VectorBall):
    """Sum of absolute values: the largest entry of g takes it all; a projection lowers all entries of a row by the same amount."""

    def _steepest(self, rows: torch.Tensor) -> torch.Tensor:
        largest = rows.abs().argmax(-1, keepdim=True)
        return torch.zeros_like(rows).scatter(-1, largest, rows.gather(-1, largest).sign())

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        # |t_i| - theta where positive; theta makes the sum 1 with the k largest entries, for the largest k that leaves all k positive
        ordered, _ = rows.abs().sort(-1, descending=True)
        counts = torch.arange(1, rows.shape[-1] + 1, device=rows.device, dtype=rows.dtype)
        thetas = (ordered.cumsum(-1) - 1) / counts
        last = (ordered > thetas).sum(-1, keepdim=True).clamp(min=1) - 1
        lowered = rows.sign() * (rows.abs() - thetas.gather(-1, last)).clamp(min=0)
        return torch.where(rows.abs().sum(-1, keepdim=True) > 1, lowered, rows)

    def _on_sphere(self, rows: torch.Tensor) -> torch.Tensor:
        return rows / rows.abs().sum(-1, keepdim=True)


class OperatorBall(Ball):
    """Operator norm from RMS to RMS: all singular values at most ``sqrt(out / in)``.

    The steepest step has all of them there: ``U V^T sqrt(out / in)``.  A start is semi-orthogonal times that.
    """

    def _matrices(self, t: torch.Tensor) -> torch.Tensor:
        """A view [..., out, in] of the matrices in t."""
        return t.movedim(self.elem_dims, (-2, -1))

    def _back(self, matrices: torch.Tensor) -> torch.Tensor:
        return matrices.movedim((-2, -1), self.elem_dims)

    def _largest(self, matrices: torch.Tensor) -> float:
        """The singular value of a matrix of norm 1."""
        return math.sqrt(matrices.shape[-2] / max(matrices.shape[-1], 1))

    def lmo(self, g: torch.Tensor, method: Method = "newton_schulz") -> torch.Tensor:
        matrices = self._matrices(g)
        return self._back(orthogonalize(matrices, method) * self._largest(matrices))

    def project(self, t: torch.Tensor) -> torch.Tensor:
        matrices = self._matrices(_at_least_float32(t))
        if not matrices.numel():
            return t.clone()
        u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
        limit = self._largest(matrices)
        clipped = (u * s.clamp(max=limit).unsqueeze(-2)) @ vh
        return self._back(torch.where((s > limit).any(-1)[..., None, None], clipped, matrices)).to(t.dtype)

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None) -> torch.Tensor:
        matrices = self._matrices(_normal(shape, generator))
        return self._back(_semi_orthogonal(matrices) * self._largest(matrices))


@dataclass(frozen=True)
class ConvBall(OperatorBall):
    """A kernel's norm, K times that of its largest tap: every tap, and every group of channels, is an operator of norm 1/K.

    Attributes:
        taps: K, the number of kernel positions.
        groups: of channels.
    """

    taps: int = 1
    groups: int = 1

    def _matrices(self, t: torch.Tensor) -> torch.Tensor:
        per_tap = t.movedim(self.elem_dims, (-2, -1))
        return per_tap.unflatten(-2, (self.groups, per_tap.shape[-2] // self.groups))

    def _back(self, matrices: torch.Tensor) -> torch.Tensor:
        return matrices.flatten(-3, -2).movedim((-2, -1), self.elem_dims)

    def _largest(self, matrices: torch.Tensor) -> float:
        return super()._largest(matrices) / self.taps


def ball(kind: type[NormedTensor], elem_dims: tuple[int, ...], shape: torch.Size) -> Ball:
    """The unit ball for tensors of `shape`, in a kind over canonical elem_dims.

    Raises:
        NormMismatchError: a kind with a norm of its own, whose ball is not known.
    """
    if issubclass(kind, RMSToRMSConvTensor):
        taps = math.prod(s for d, s in enumerate(shape, -len(shape)) if d not in elem_dims)
        return ConvBall(kind, elem_dims, taps, kind.groups)
    for known, made in _BALLS.items():
        if issubclass(kind, known):
            return made(kind, elem_dims)
    raise NormMismatchError(
        f"{kind.__name__} has no duality map: derive it from one of {', '.join(k.__name__ for k in _BALLS)}, or annotate the "
        "parameter with one of them"
    )


_BALLS: dict[type[NormedTensor], type[Ball]] = {
    RMSToRMSTensor: OperatorBall,
    LinfTensor: LinfBall,  # before RMSTensor, its base class
    RMSTensor: RMSBall,
    L2Tensor: L2Ball,
    L1Tensor: L1Ball,
}


def orthogonalize(matrices: torch.Tensor, method: Method = "newton_schulz") -> torch.Tensor:
    """The matrices [..., m, n] with all singular values (those that are 0 excepted) moved to 1: ``U V^T`` of ``U S V^T``.

    Args:
        matrices: any number of them; computed in float32 at least, returned in their own dtype.
        method: as for `Ball.lmo`.

    Raises:
        NormMismatchError: an unknown method.
    """
    if method not in ("newton_schulz", "svd"):
        raise NormMismatchError(f"method must be 'newton_schulz' or 'svd', got {method!r}")
    if not matrices.numel():
        return matrices.clone()
    x = _scaled(_at_least_float32(matrices), (-2, -1))
    return (_newton_schulz(x) if method == "newton_schulz" else _polar(x)).to(matrices.dtype)


def _newton_schulz(x: torch.Tensor) -> torch.Tensor:
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x  # the Gram matrix is the smaller one
    x = x / _positive(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True))
    shape, x = x.shape, x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
    for a, b, c in _QUINTICS:  # the sums are part of the products
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if is_tall else x


def _polar(x: torch.Tensor) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    # below it a singular value is rounding: its vectors are arbitrary
    threshold = s[..., :1] * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    return (u * (s > threshold).to(x.dtype).unsqueeze(-2)) @ vh


def _semi_orthogonal(gaussian: torch.Tensor) -> torch.Tensor:
    """Uniformly distributed semi-orthogonal matrices from Gaussian ones."""
    if not gaussian.numel():
        return gaussian
    is_wide = gaussian.shape[-2] < gaussian.shape[-1]
    q, r = torch.linalg.qr(gaussian.mT if is_wide else gaussian)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    q = q * torch.where(signs == 0, torch.ones_like(signs), signs).unsqueeze(-2)
    return q.mT if is_wide else q


def _normal(shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
    device = "cpu" if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)


def _scaled(t: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    """`t` with largest entry 1 along dims (or all zero): squares neither overflow nor vanish."""
    if not t.numel():
        return t
    largest = t.detach().abs().amax(dims, keepdim=True)
    return torch.where(largest > 0, t / _positive(largest), torch.zeros_like(t))


def _positive(size: torch.Tensor) -> torch.Tensor:
    return torch.where(size > 0, size, torch.ones_like(size))


def _at_least_float32(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.dtype.itemsize < 4 else t
