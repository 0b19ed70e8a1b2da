"""Balls of norms, written down once more: nothing here uses the library's own norms, which it is there to check.

A `Ball` is one normed input of an operation, as the set of all tensors it may be.  For each kind of norm there are its value,
the point of the ball furthest along a direction (the linear maximisation oracle), a projection, and starting points.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.tensors import NormedTensor

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Ball:
    """One normed input: all float64 tensors of `shape` whose `kind` norm over `elem_dims` is at most `norm_size`.

    `domain` optionally restricts it further: a total map from tensors to allowed tensors that does not increase the norm.
    """

    name: str
    kind: type[NormedTensor]
    shape: tuple[int, ...]
    norm_size: float = 1.0
    elem_dims: Dims | None = None
    domain: Callable[[torch.Tensor], torch.Tensor] | None = None

    @functools.cached_property
    def dims(self) -> Dims:
        """Canonical elem_dims."""
        return self.kind._wrap(torch.empty(self.shape, device="meta"), torch.ones(()), None, self.elem_dims).elem_dims

    def normed(self, backing: torch.Tensor, perturbation: float | None = None) -> NormedTensor:
        """The library's tensor for this ball."""
        return self.kind(self.norm_size, backing=backing, elem_dims=self.elem_dims, perturbation_size=perturbation)

    def norm(self, t: torch.Tensor) -> torch.Tensor:
        """The norm of `t`."""
        return norm(self.kind, t, self.dims)

    def point(self, t: torch.Tensor, radius: float | torch.Tensor, stacked: bool = False) -> torch.Tensor:
        """The nearest we care to go: `t` inside the ball of `radius`, in the domain; `stacked` as for `allowed`."""
        return self.allowed(project(self.kind, t, self.dims, radius, stacked), stacked)

    def allowed(self, t: torch.Tensor, stacked: bool = False) -> torch.Tensor:
        """The tensor of the domain for `t`; for each of them where several are `stacked` in one more dimension in front."""
        if self.domain is None:
            return t
        return torch.stack([self.domain(one) for one in t.unbind()]) if stacked else self.domain(t)


def norm(kind: type[NormedTensor], t: torch.Tensor, dims: Dims) -> torch.Tensor:
    """The norm of a plain tensor, differentiable, 0-dim.

    Args:
        kind: which norm.
        t: a floating-point tensor.
        dims: canonical elem_dims, negative.
    """
    return norms(kind, t.unsqueeze(0), dims).squeeze(0)


def norms(kind: type[NormedTensor], t: torch.Tensor, dims: Dims) -> torch.Tensor:
    """The norms of plain tensors stacked in the first dimension, differentiable, 1-dim."""
    if t.numel() == 0:
        return t.abs().new_zeros(len(t))
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, t, dims, stacked=True)
        finite = m.isfinite().reshape(len(t), -1).all(1)  # of others a decomposition fails
        known = m if finite.all() else torch.where(finite.reshape(-1, *[1] * (m.ndim - 1)), m, 0.0)
        spectral = torch.linalg.matrix_norm(known, 2).reshape(len(t), -1).amax(1)
        return torch.where(finite, spectral, m.abs().reshape(len(t), -1).amax(1)) * scale
    return _group_norm(kind, t, dims).reshape(len(t), -1).amax(1)


def _group_norm(kind: type[NormedTensor], t: torch.Tensor, dims: Dims) -> torch.Tensor:
    if issubclass(kind, LinfTensor) or not dims:
        return t.abs()
    if issubclass(kind, L1Tensor):
        return t.abs().sum(dims, keepdim=True)
    if not issubclass(kind, RMSTensor | L2Tensor):
        raise TypeError(f"the oracle knows no norm for {kind.__name__}")
    length = torch.linalg.vector_norm(t, 2, dims, keepdim=True)
    return length / math.sqrt(math.prod(t.shape[d] for d in dims)) if issubclass(kind, RMSTensor) else length


def _matrices(kind: type[RMSToRMSTensor], t: torch.Tensor, dims: Dims, stacked: bool = False) -> tuple[torch.Tensor, float]:
    """A stack of matrices [out, in] and the factor that turns a spectral norm into the kind's norm."""
    m = t.movedim(dims, (-2, -1))
    scale = math.sqrt(m.shape[-1] / m.shape[-2])
    if issubclass(kind, RMSToRMSConvTensor):
        taps = math.prod(m.shape[stacked:-2])
        m = m.unflatten(-2, (kind.groups, m.shape[-2] // kind.groups))
        return m, taps * math.sqrt(m.shape[-1] / m.shape[-2])
    return m, scale


def _unmatrices(kind: type[RMSToRMSTensor], m: torch.Tensor, dims: Dims) -> torch.Tensor:
    if issubclass(kind, RMSToRMSConvTensor):
        m = m.flatten(-3, -2)
    return m.movedim((-2, -1), dims)


def lmo(kind: type[NormedTensor], g: torch.Tensor, dims: Dims, stacked: bool = False) -> torch.Tensor:
    """The tensor of norm 1 with the largest inner product with `g`; several where they are `stacked` in the first dimension.

    `kind` and `dims` are as for `norm`.
    """
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, g, dims, stacked)
        u, _, v = torch.linalg.svd(m, full_matrices=False)
        return _unmatrices(kind, u @ v / scale, dims)
    if issubclass(kind, LinfTensor) or not dims:
        return torch.where(g >= 0, 1.0, -1.0).to(g.dtype)
    if issubclass(kind, L1Tensor):
        flat, restore = _flatten_dims(g, dims)
        best = flat.abs().argmax(-1, keepdim=True)
        return restore(torch.zeros_like(flat).scatter(-1, best, flat.gather(-1, best).sign()))
    return g / _group_norm(kind, g, dims).clamp(min=1e-30)


def _flatten_dims(t: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    last = tuple(range(-len(dims), 0))
    moved = t.movedim(dims, last)
    return moved.flatten(-len(dims)), lambda flat: flat.reshape(moved.shape).movedim(last, dims)


def project(
    kind: type[NormedTensor], t: torch.Tensor, dims: Dims, radius: float | torch.Tensor, stacked: bool = False
) -> torch.Tensor:
    """`t` moved into the ball, one group at a time (a matrix: singular values clipped).

    Of several tensors, `stacked` in the first dimension, each has its own radius: a tensor of the same number of dimensions.  `kind`
    and `dims` are as for `norm`.
    """
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, t, dims, stacked)
        u, s, v = torch.linalg.svd(m, full_matrices=False)
        radius = radius.reshape(-1, *[1] * (s.ndim - 1)) if stacked else radius
        return _unmatrices(kind, u * s.clamp(max=radius / scale).unsqueeze(-2) @ v, dims)
    if issubclass(kind, LinfTensor) or not dims:
        return t.clamp(-radius, radius)
    size = _group_norm(kind, t, dims)
    return torch.where(size > radius, t * (radius / size.clamp(min=1e-30)), t)


def fill(kind: type[NormedTensor], t: torch.Tensor, dims: Dims, radius: float) -> torch.Tensor:
    """`t` scaled so that every group (matrix) has exactly this norm."""
    if issubclass(kind, RMSToRMSTensor):
        m, scale = _matrices(kind, t, dims)
        largest = torch.linalg.matrix_norm(m, 2)[..., None, None].clamp(min=1e-30)
        return _unmatrices(kind, m / largest * (radius / scale), dims)
    return t * (radius / _group_norm(kind, t, dims).clamp(min=1e-30))


def start(ball: Ball, which: int, generator: torch.Generator) -> torch.Tensor:
    """A starting point of norm 1 in a ball, of the sort number ``which % 8``, drawn with `generator` where that is random; float64."""
    t = torch.randn(ball.shape, generator=generator, dtype=torch.float64)
    made = (_matrix_start if issubclass(ball.kind, RMSToRMSTensor) else _vector_start)(ball, t, which % 8, generator)
    return fill(ball.kind, made, ball.dims, 1.0)


def _matrix_start(ball: Ball, t: torch.Tensor, which: int, generator: torch.Generator) -> torch.Tensor:
    m, _ = _matrices(ball.kind, t, ball.dims)
    if which in (1, 6):
        m = m[..., :1] * m[..., :1, :]
    elif which == 2:
        m = torch.ones_like(m)
    elif which == 3:
        m = m[..., :1].sign() * m[..., :1, :].sign()
    elif which in (4, 7):
        u, _, v = torch.linalg.svd(m, full_matrices=False)
        m = u @ v
    elif which == 5:
        m = torch.eye(*m.shape[-2:], dtype=m.dtype).expand_as(m)
    return _unmatrices(ball.kind, m, ball.dims)


def _vector_start(ball: Ball, t: torch.Tensor, which: int, generator: torch.Generator) -> torch.Tensor:
    if t.numel():
        zeros = torch.zeros_like(t)
        flat, restore = _flatten_dims(zeros, ball.dims) if ball.dims else (zeros.unsqueeze(-1), lambda f: f.squeeze(-1))
        # drawn whatever the sort, so that what is drawn next does not depend on it
        at = torch.randint(flat.shape[-1], (*flat.shape[:-1], 1), generator=generator)
        if which in (2, 6):
            spike = restore(flat.scatter(-1, at, 1.0))
            return spike if which == 6 else spike * torch.where(t >= 0, 1.0, -1.0)
    ones = torch.ones_like(t)
    return [t, t.sign(), t, ones, t.abs(), -ones, t, t + 2][which]


def corners(ball: Ball) -> list[torch.Tensor]:
    """Points of norm 1 that formulas give, the same on every machine: what most bounds are attained by.  The last one is 0.

    Constants, alternating signs, and for each group one entry (the first, the first with alternating signs, the last, another one
    each) or one half of the entries.  Of largest entries the first of each dimension against the others.  Of matrices those of rank
    one, and as much of a permutation as fits.
    """
    flat = torch.arange(math.prod(ball.shape), dtype=torch.float64).reshape(ball.shape)
    ones, signs = torch.ones_like(flat), 1 - 2 * (flat % 2)
    if issubclass(ball.kind, RMSToRMSTensor):
        m, _ = _matrices(ball.kind, ones, ball.dims)
        rows, columns = (torch.arange(n, dtype=torch.float64) for n in m.shape[-2:])
        row_signs, column_signs = 1 - 2 * (rows % 2), 1 - 2 * (columns % 2)
        several = [
            torch.ones_like(m),
            row_signs[:, None] * column_signs * torch.ones_like(m),
            row_signs[:, None] * torch.ones_like(m),
            column_signs * torch.ones_like(m),
            ((rows == 0)[:, None] & (columns == 0)) * m,
            (rows == 0)[:, None] * m,
            (columns == 0) * m,
            torch.eye(*m.shape[-2:], dtype=m.dtype) * m,
            torch.zeros_like(m),
        ]
        return [fill(ball.kind, _unmatrices(ball.kind, c, ball.dims), ball.dims, 1.0) for c in several]
    if not ball.dims or not ones.numel():
        against = [
            2.0 * (torch.arange(n).reshape(-1, *[1] * (ones.ndim - 1 - d)) == 0) * ones - ones for d, n in enumerate(ball.shape)
        ]
        return [ones, signs, *against, torch.zeros_like(ones)]
    groups, restore = _flatten_dims(ones, ball.dims)
    count, place = groups.shape[-1], torch.arange(groups.shape[-1])
    number = torch.arange(groups[..., 0].numel()).reshape(groups.shape[:-1])[..., None]
    group_signs = (1 - 2 * (number % 2)).to(ones.dtype)
    first = (place == 0) * groups
    several = [
        first,
        first * group_signs,
        (place == count - 1) * groups,
        (place == number % count) * groups,
        groups * group_signs,
        (place < (count + 1) // 2) * groups,
        (place >= (count + 1) // 2) * groups,
        groups * 0,
    ]
    return [fill(ball.kind, t, ball.dims, 1.0) for t in (ones, signs, *map(restore, several))]
