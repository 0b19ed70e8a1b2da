"""Whether the data of normed tensors are within their norms, without the library's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from thunder_norm import L1Tensor, L2Tensor, LinfTensor, NormedTensor, RMSTensor, RMSToRMSTensor


def actual_norm(t: NormedTensor) -> torch.Tensor:
    """The norm that a normed tensor's data have, written out."""
    x, dims = (t.backing.abs() if t.backing.is_complex() else t.backing).double(), t.elem_dims
    if isinstance(t, LinfTensor) or not dims:
        return x.abs().max()
    if isinstance(t, L1Tensor):
        return x.sum(dims).max()
    if isinstance(t, L2Tensor):
        return x.square().sum(dims).sqrt().max()
    if isinstance(t, RMSToRMSTensor):
        matrices = t.backing.double().movedim(dims, (-2, -1))
        return torch.linalg.svdvals(matrices).max() * (matrices.shape[-1] / matrices.shape[-2]) ** 0.5
    assert isinstance(t, RMSTensor)
    return x.square().mean(dims).sqrt().max()


def check_bounds(tensors: Iterable[torch.Tensor]) -> None:
    """All are normed, and none is larger than it says."""
    for t in tensors:
        assert isinstance(t, NormedTensor)
        assert actual_norm(t) <= t.norm_size * (1 + 1e-6)
