"""``torch.vmap`` of NormedTensors in eager PyTorch: torch's batching runs operations on the whole tensor, whose rules hold for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import L2Tensor, LinfTensor, RMSTensor

D = torch.float64

PROGRAMS = {
    "sum": lambda row, w: row.sum(),
    "softmax": lambda row, w: row.softmax(0),
    "layer norm": lambda row, w: F.layer_norm(row, (4,)),
    "matrix times row": lambda row, w: w @ row,
    "linear": lambda row, w: F.linear(row, w).tanh(),
    "outer": lambda row, w: row[None] * row[:, None],
    "einsum": lambda row, w: torch.einsum("i,j->ij", row, row),
    "matrices": lambda row, w: row.view(2, 2) @ row.view(2, 2).t(),
    "joined": lambda row, w: torch.cat([row, row.flip(0) * row]),
    "stacked": lambda row, w: torch.stack([row, 2 * row]).unsqueeze(0).squeeze(0),
    "normalized": lambda row, w: F.normalize(row, dim=0)[1:3],
    "chosen": lambda row, w: torch.where(row > 0, row, 2 * row).cumsum(0),
}


@pytest.mark.parametrize("kind", [LinfTensor, RMSTensor, L2Tensor])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_the_plain_tensor_and_norms_bound_them(name, kind):
    torch.manual_seed(seeded(0))
    w, x = torch.randn(3, 4, dtype=D), torch.randn(4, 4, dtype=D)
    for in_dim in (0, 1):
        for out_dim in (0, -1):
            mapped = torch.vmap(lambda row: PROGRAMS[name](row, w), in_dim, out_dim)
            y = mapped(kind.of(x))
            torch.testing.assert_close(y.backing, mapped(x))
            assert actual_norm(y) <= y.norm_size * (1 + 1e-9)
