"""Systems and inverses of matrices that stay near the data, inside ``norm_sensitivity("within")``, against Jacobians nearby."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_report, norm_sensitivity, with_perturbation
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
EYE = torch.eye(4, dtype=D)
PROGRAMS = {
    "solve": lambda x: torch.linalg.solve(x + 3 * EYE, x.sin()),
    "solve from the right": lambda x: torch.linalg.solve(x + 3 * EYE, x.sin(), left=False),
    "inv": lambda x: torch.linalg.inv(x + 3 * EYE),
    "pinv": lambda x: torch.linalg.pinv(x + 3 * EYE),
    "lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x + 3 * EYE), x.sin()),
    "triangular": lambda x: torch.linalg.solve_triangular(x + 3 * EYE, x.sin(), upper=False),
    "triangular from the right": lambda x: torch.linalg.solve_triangular(x + 3 * EYE, x.sin(), upper=True, left=False),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 3 * EYE),
    "cholesky_solve": lambda x: torch.cholesky_solve(x.sin(), torch.linalg.cholesky(x @ x.mT + 3 * EYE)),
    "matrix_sqrth": lambda x: torch.linalg.matrix_sqrth(x @ x.mT + 3 * EYE),
    "slogdet": lambda x: torch.slogdet(x + 3 * EYE)[1][..., None],
    "cond": lambda x: torch.linalg.cond(x + 3 * EYE)[..., None],
}


def matrices() -> torch.Tensor:
    torch.manual_seed(seeded(0))
    return 0.8 * torch.linalg.qr(torch.randn(4, 4, dtype=D))[0]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dims", [(-2, -1), (-1,)])
@pytest.mark.parametrize("radius", [0.01, 0.2])
def test_no_matrix_nearby_is_steeper(name, dims, radius):
    program, x = PROGRAMS[name], matrices()
    with norm_sensitivity("within"):
        size = RMSTensor.of(x, dims).norm_size + radius
        y = program(with_perturbation(RMSTensor(size, backing=x, elem_dims=dims), radius))
    whole = (y.shape[-1] if y.elem_dims != (-2, -1) else y.numel()) if y.elem_dims else 1
    near = torch.randn(60, 4, 4, dtype=D)
    near *= radius / near.square().mean(dims, keepdim=True).sqrt()
    near[:20] *= torch.rand(20, 1, 1, dtype=D)
    base = program(x)
    moved = torch.stack([program(x + e) - base for e in near]).flatten(1).square()
    moved = (
        moved.view(60, -1, whole).mean(-1).sqrt().amax(-1)
        if y.elem_dims != (-2,)
        else moved.view(60, 4, 4).mean(1).sqrt().amax(-1)
    )
    assert moved.max() <= y.perturbation_size * (1 + 1e-9)
    assert moved.max() > 1e-3 * y.perturbation_size


def test_where_matrices_nearby_may_be_singular_there_is_no_bound():
    x = matrices()
    for call in (torch.linalg.inv, lambda a: torch.linalg.solve_triangular(a + EYE, a, upper=True)):
        with norm_sensitivity("within"), pytest.raises(NormMismatchError):
            call(with_perturbation(RMSTensor(5.0, backing=x, elem_dims=(-2, -1)), 2.0))


class Implicit(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(4, 4, dtype=D))

    def forward(self, x):
        return torch.linalg.solve(EYE - self.weight, x.mT).mT.tanh()


def test_an_implicit_layer_has_a_report_within_a_radius():
    torch.manual_seed(seeded(0))
    model, x = Implicit(), torch.randn(1, 4, dtype=D)
    jm = thunder.jit(model, transforms=[NormTransform()])
    jacobian = torch.linalg.matrix_norm(torch.func.jacrev(model)(x).view(4, 4), 2)
    for radius in (0.0, 0.05):
        rows = norm_report(jm, RMSTensor.of(x), radius=radius).rows
        assert jacobian.item() * (1 - 1e-6) <= rows[-1].sensitivity < 20 * jacobian.item()
