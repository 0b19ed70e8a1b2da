"""Unit balls of the kinds: steepest steps, projections, and tensors to start from.

For a gradient G the linear minimization oracle gives ``lmo(G) = argmax <G, D> over ||D|| <= 1``; a step of ``-t lmo(G)`` lowers
the loss most, to first order, among all steps of norm t, by t times the dual norm ``<G, lmo(G)>``.  Where G is 0 (a row no token
selected, directions a matrix does not move) so is ``lmo(G)``.

The inner product of complex tensors is the real part of ``sum conj(G) D``, as in torch's gradients.

Each ball acts on its own dimensions, named from the end, and on every index of the others alike: tensors of one shape may be
stacked along new leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thunder_norm.core import spectral
from thunder_norm.core.initializing import initialize
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular.orthogonal import (
    SAFE,
    Method,
    are_between,
    at_least_float32,
    goes_alone,
    in_dtype,
    is_transformed,
    orthogonalize,
    scaled,
    unrounded,
)

_LARGE = 2**16  # entries: more than these gain nothing from company
_SMALL = 2**14  # entries up to which a call takes longer than what it does
_PIECE = 2**17  # entries that a CPU's cache holds while several operations go over them


@dataclass(frozen=True)
class Ball:
    """The tensors of norm at most 1 in one kind.

    Attributes:
        kind: the kind.
        elem_dims: its elem_dims, from the end.
    """

    kind: type[NormedTensor]
    elem_dims: tuple[int, ...]

    @property
    def single(self) -> Ball:
        """The ball of one of the matrices that a tensor consists of: here the ball itself."""
        return self

    def norm(self, t: torch.Tensor) -> torch.Tensor:
        """The norm of one tensor, 0-dim, differentiable."""
        return self.kind.of(t, self.elem_dims).norm_size

    def lmo(self, g: torch.Tensor, method: Method = "newton_schulz", size: float = 1.0) -> torch.Tensor:
        """The tensor D of norm `size` with the largest ``<g, D>``, zero where g is; differentiable.

        Args:
            g: the gradient, leading dimensions stacked.
            method: for operators: see `orthogonalize`.
            size: of the result.
        """
        raise NotImplementedError

    def goes_alone(self, t: torch.Tensor, method: Method = "newton_schulz") -> bool:
        """Whether one such tensor is mapped as fast as one of a stack of them, and need not be copied into a stack."""
        return t.numel() > _LARGE

    def pieces(self, t: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of t on which the ball acts one by one, and which a cache holds: all of t if there is no use in it."""
        return (t,)

    def project(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor of the ball that is nearest to t, in the Euclidean distance."""
        raise NotImplementedError

    def draw(self, shape: torch.Size, generator: torch.Generator | None = None, is_complex: bool = False) -> torch.Tensor:
        """A tensor of norm exactly 1 to start a parameter from, in float64 on the generator's device: see `initialize`.

        A complex one is that with random phases, which change no norm.
        """
        device = "cpu" if generator is None else generator.device
        t = initialize(self.kind, shape, generator=generator, elem_dims=self.elem_dims, dtype=torch.float64, device=device)
        for sizes in self._phases(shape) if is_complex else ():
            angles = torch.rand(sizes, generator=generator, dtype=torch.float64, device=device) * (2 * math.pi)
            t = t * torch.polar(torch.ones_like(angles), angles)
        return t

    def _phases(self, shape: torch.Size) -> list[list[int]]:
        """The shapes of the phases, tensors of modulus 1, by which a start may be multiplied."""
        return [list(shape)]


class _VectorBall(Ball):
    """Norms of the entries along elem_dims; the same for every index of the other dimensions."""

    def _along(self, f: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor) -> torch.Tensor:
        """`f` on t with elem_dims flattened into a last dimension."""
        if not t.numel():
            return t.clone()
        dims = self.elem_dims
        if dims == (-1,):
            return f(t)
        if not dims:
            return f(t.unsqueeze(-1)).squeeze(-1)
        last = tuple(range(-len(dims), 0))
        moved = t.movedim(dims, last)
        return f(moved.flatten(-len(dims))).reshape(moved.shape).movedim(last, dims)

    def lmo(self, g: torch.Tensor, method: Method = "newton_schulz", size: float = 1.0) -> torch.Tensor:
        if not (torch.is_grad_enabled() and g.requires_grad) and len(pieces := self.pieces(g)) > 1:
            found = torch.empty_like(g)
            for of_g, piece in zip(pieces, self.pieces(found), strict=True):
                piece.copy_(self.lmo(of_g, method, size))
            return found
        return in_dtype(self._along(lambda rows: self._steepest(rows, size), at_least_float32(g)), g.dtype)

    def pieces(self, t: torch.Tensor) -> Sequence[torch.Tensor]:
        if t.device.type != "cpu" or t.numel() < 2 * _PIECE or -t.ndim in self.elem_dims:
            return (t,)
        return t.split(max(1, _PIECE * len(t) // t.numel()))

    def project(self, t: torch.Tensor) -> torch.Tensor:
        return self._along(self._nearest, at_least_float32(t)).to(t.dtype)

    def _steepest(self, rows: torch.Tensor, size: float = 1.0) -> torch.Tensor:
        raise NotImplementedError

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class L2Ball(_VectorBall):
    """Euclidean length: g / |g|; a longer row is shortened to 1."""

    def _radius(self, rows: torch.Tensor) -> float:
        return 1.0

    def _steepest(self, rows: torch.Tensor, size: float = 1.0) -> torch.Tensor:
        is_plain = type(rows) is torch.Tensor and not is_transformed(rows)  # others may have no numbers to look at
        is_read = is_plain and rows.device.type == "cpu" and not torch.is_grad_enabled()
        if is_read and 0 < rows.numel() <= _SMALL:  # where each call counts
            length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            if are_between(length, *SAFE):
                return rows * length.reciprocal_().mul_(size * self._radius(rows))
        rows = scaled(rows, -1)
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return rows * (size * self._radius(rows) / length.masked_fill(length == 0, math.inf))

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        size = torch.linalg.vector_norm(rows.abs(), dim=-1, keepdim=True, dtype=torch.float64) / self._radius(rows)
        return rows / size.clamp(min=1).to(rows.dtype)


class RMSBall(L2Ball):
    """Root mean square over N entries, ``|t| / sqrt(N)``: rows of length sqrt(N)."""

    def _radius(self, rows: torch.Tensor) -> float:
        return math.sqrt(rows.shape[-1])


class LinfBall(_VectorBall):
    """Largest entry: sign(g); entries are clamped.  A start is ones, which as gains or scales change nothing."""

    def _phases(self, shape: torch.Size) -> list[list[int]]:
        return []

    def _steepest(self, rows: torch.Tensor, size: float = 1.0) -> torch.Tensor:
        return rows.sgn() * size

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        return rows / rows.abs().clamp(min=1) if rows.is_complex() else rows.clamp(-1, 1)


class L1Ball(_VectorBall):
    """Sum of absolute values: the largest entry of g takes it all; a projection lowers all entries of a row by the same amount."""

    def _steepest(self, rows: torch.Tensor, size: float = 1.0) -> torch.Tensor:
        largest = rows.abs().argmax(-1, keepdim=True)
        return torch.zeros_like(rows).scatter(-1, largest, rows.gather(-1, largest).sgn() * size)

    def _nearest(self, rows: torch.Tensor) -> torch.Tensor:
        # |t_i| - theta where positive; theta makes the sum 1 with the k largest entries, for the largest k that leaves all k positive
        ordered, _ = rows.abs().sort(-1, descending=True)
        counts = torch.arange(1, rows.shape[-1] + 1, device=rows.device, dtype=ordered.dtype)
        thetas = (ordered.cumsum(-1) - 1) / counts
        last = (ordered > thetas).sum(-1, keepdim=True).clamp(min=1) - 1
        lowered = rows.sgn() * (rows.abs() - thetas.gather(-1, last)).clamp(min=0)
        return torch.where(rows.abs().sum(-1, keepdim=True) > 1, lowered, rows)


class OperatorBall(Ball):
    """Operator norm from RMS to RMS: all singular values at most ``sqrt(out / in)``.

    The steepest step has all of them there: ``U V^T sqrt(out / in)``.  A start is semi-orthogonal times that.
    """

    def _matrices(self, t: torch.Tensor) -> torch.Tensor:
        """A view [..., out, in] of the matrices in t."""
        return t if self.elem_dims == (-2, -1) else t.movedim(self.elem_dims, (-2, -1))

    def _back(self, matrices: torch.Tensor) -> torch.Tensor:
        return matrices if self.elem_dims == (-2, -1) else matrices.movedim((-2, -1), self.elem_dims)

    def _phases(self, shape: torch.Size) -> list[list[int]]:
        # of rows and of columns: what was semi-orthogonal is so in complex numbers
        of_rows, of_columns = (
            [1 if d - len(shape) == not_in else n for d, n in enumerate(shape)] for not_in in self.elem_dims[::-1]
        )
        return [of_rows, of_columns]

    def _largest(self, matrices: torch.Tensor) -> float:
        """The singular value of a matrix of norm 1."""
        return math.sqrt(matrices.shape[-2] / max(matrices.shape[-1], 1))

    def lmo(self, g: torch.Tensor, method: Method = "newton_schulz", size: float = 1.0) -> torch.Tensor:
        matrices = self._matrices(g)
        return self._back(orthogonalize(matrices, method, size * self._largest(matrices)))

    def goes_alone(self, t: torch.Tensor, method: Method = "newton_schulz") -> bool:
        return goes_alone(self._matrices(t), method)

    def dual(self, g: torch.Tensor) -> float | None:
        """The dual norm of g, ``max <g, d> over |d| <= 1``, by the singular values; None where `lmo` is the faster way to it."""
        matrices = self._matrices(g)
        if g.is_complex() or g.dtype.itemsize > 4 or not g.numel() or not spectral.has_fast_spectrum(matrices):
            return None
        return self._largest(matrices) * spectral.sum_of_singular_values(matrices.reshape(-1, *matrices.shape[-2:]))

    def project(self, t: torch.Tensor) -> torch.Tensor:
        matrices = self._matrices(at_least_float32(t))
        if not matrices.numel():
            return t.clone()
        u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
        limit = self._largest(matrices)
        with unrounded(u):
            clipped = (u * s.clamp(max=limit).unsqueeze(-2)) @ vh
        return self._back(torch.where((s > limit).any(-1)[..., None, None], clipped, matrices)).to(t.dtype)


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
        NormMismatchError: no kind, or one with a norm of its own, whose ball is not known.
    """
    if not (isinstance(kind, type) and issubclass(kind, NormedTensor)):
        raise NormMismatchError(f"a ball is of a kind of NormedTensor, got {kind!r}")
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
