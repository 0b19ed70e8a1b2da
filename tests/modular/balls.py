"""Balls of all norms, with gradients to map."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.modular import ball

D = torch.float64


@dataclass(frozen=True)
class Case:
    """A kind over dims, and a shape; `groups` of channels for kernels."""

    kind: type[NormedTensor]
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    groups: int = 1

    @property
    def ball(self):
        return ball(self.kind, self.dims, torch.Size(self.shape))

    def blocks(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The vectors or matrices the norm is the largest over."""
        if not issubclass(self.kind, RMSToRMSTensor):
            dims = tuple(d % t.ndim for d in self.dims)
            rest = [d for d in range(t.ndim) if d not in dims]
            return list(t.permute((*rest, *dims)).reshape(math.prod(t.shape[d] for d in rest), -1))
        out, into = (d % t.ndim for d in self.dims)
        rest = [d for d in range(t.ndim) if d not in (out, into)]
        matrices = t.permute((*rest, out, into)).reshape(-1, t.shape[out], t.shape[into])
        return [block for m in matrices for block in m.chunk(self.groups)]

    @property
    def taps(self) -> int:
        is_kernel = issubclass(self.kind, RMSToRMSConvTensor)
        return math.prod(self.shape) // (self.shape[self.dims[0]] * self.shape[self.dims[1]]) if is_kernel else 1

    def norm(self, t: torch.Tensor) -> float:
        """Largest of the blocks' norms."""
        return max(self._norm(b) for b in self.blocks(t.to(D)))

    def _norm(self, b: torch.Tensor) -> float:
        if issubclass(self.kind, RMSToRMSTensor):
            return torch.linalg.svdvals(b)[0].item() * math.sqrt(b.shape[1] / b.shape[0]) * self.taps
        if self.kind is RMSTensor:
            return math.sqrt((b**2).sum().item() / b.numel())
        return torch.linalg.vector_norm(b, {LinfTensor: math.inf, L2Tensor: 2, L1Tensor: 1}[self.kind]).item()

    def each(self, t: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`t` with `f` of each of the blocks in its place."""
        found = torch.empty_like(t, memory_format=torch.contiguous_format).flatten()
        for block, at in zip(self.blocks(t), self.blocks(torch.arange(t.numel()).view(t.shape)), strict=True):
            found[at.flatten()] = f(block).flatten()
        return found.view(t.shape)

    def steepest(self, b: torch.Tensor) -> torch.Tensor:
        """Of one block the vector or matrix of norm 1 along which it falls most; complex ones too."""
        if issubclass(self.kind, RMSToRMSTensor):
            u, s, vh = torch.linalg.svd(b, full_matrices=False)
            return u @ ((s > 1e-12 * s[0]).to(b.dtype)[:, None] * vh) * (math.sqrt(b.shape[0] / b.shape[1]) / self.taps)
        length = b.abs().square().mean().sqrt()
        return b.sgn() if self.kind is LinfTensor else b / (length if length else 1)

    def nearest(self, b: torch.Tensor) -> torch.Tensor:
        """Of one block the nearest of norm at most 1."""
        if issubclass(self.kind, RMSToRMSTensor):
            u, s, vh = torch.linalg.svd(b, full_matrices=False)
            return u @ (s.clamp(max=math.sqrt(b.shape[0] / b.shape[1]) / self.taps).to(b.dtype)[:, None] * vh)
        return b / (b.abs() if self.kind is LinfTensor else b.abs().square().mean().sqrt()).clamp(min=1)

    def dual_norm(self, g: torch.Tensor) -> torch.Tensor:
        """Largest <g, D> over the ball: the sum of the blocks', differentiable."""
        return torch.stack([self._dual_norm(b) for b in self.blocks(g)]).sum()

    def _dual_norm(self, b: torch.Tensor) -> torch.Tensor:
        if issubclass(self.kind, RMSToRMSTensor):
            return torch.linalg.matrix_norm(b, "nuc") * math.sqrt(b.shape[0] / b.shape[1]) / self.taps
        if self.kind is RMSTensor:
            return torch.linalg.vector_norm(b) * math.sqrt(b.numel())
        return torch.linalg.vector_norm(b, {LinfTensor: 1, L2Tensor: 2, L1Tensor: math.inf}[self.kind])


CASES = {
    "rows": Case(RMSTensor, (-1,), (5, 7)),
    "several dims": Case(RMSTensor, (-3, -1), (4, 3, 2)),
    "l2": Case(L2Tensor, (-2,), (4, 3)),
    "l1": Case(L1Tensor, (-1,), (4, 6)),
    "entries": Case(LinfTensor, (), (3, 4)),
    "scalar": Case(LinfTensor, (), ()),
    "wide": Case(RMSToRMSTensor, (-2, -1), (4, 9)),
    "tall": Case(RMSToRMSTensor, (-2, -1), (9, 4)),
    "square": Case(RMSToRMSTensor, (-2, -1), (6, 6)),
    "transposed": Case(RMSToRMSTensor, (-1, -2), (4, 9)),
    "heads": Case(RMSToRMSTensor, (-2, -1), (3, 4, 5)),
    "kernel": Case(RMSToRMSConvTensor, (-4, -3), (6, 4, 3, 2)),
    "grouped kernel": Case(RMSToRMSConvTensor.grouped(2), (-3, -2), (6, 4, 3), groups=2),
    "depthwise kernel": Case(RMSToRMSConvTensor.grouped(4), (-3, -2), (4, 1, 3), groups=4),
    "transposed kernel": Case(RMSToRMSConvTensor, (-2, -3), (6, 4, 3)),
}
