"""Composed sensitivities of operations on two tensors with norms, of which one moves: the other stands for all tensors of its norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import RMSTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.core.context import COMPOSED

_PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x * z": lambda x, z: x * z,
    "z * x": lambda x, z: z * x,
    "z @ x": lambda x, z: z @ x,
    "x @ z": lambda x, z: x @ z,
    "linear": lambda x, z: F.linear(x, z),
    "quotient": lambda x, z: x / (-z).sigmoid().clamp(min=0.05),
    "prelu": lambda x, z: F.prelu(x, z.mean().reshape(1)),
    "einsum": lambda x, z: torch.einsum("ij,kj->ik", x, z),
}


@pytest.mark.parametrize("scope", COMPOSED)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_tensor_that_does_not_move_stands_for_all_of_its_norm(name: str, scope):
    f = _PROGRAMS[name]
    torch.manual_seed(seeded(0))
    data, other = torch.randn(4, 4, dtype=torch.float64), torch.full((4, 4), 2.0, dtype=torch.float64)
    x = with_perturbation(RMSTensor.of(data), 0.1)
    with norm_sensitivity(scope):
        y = f(x, RMSTensor(2.0, backing=torch.full_like(other, 1e-3)))
    jacobian = torch.autograd.functional.jacobian(lambda t: f(t, other), data).reshape(-1, 16)
    steepest = torch.linalg.svd(jacobian).Vh[0]
    moved = type(y).of((jacobian @ steepest).reshape(y.shape), y.elem_dims)
    found = moved.norm_size / RMSTensor.of(steepest.reshape(4, 4)).norm_size
    assert sensitivities(y, x) >= found * (1 - 1e-9)


@pytest.mark.parametrize("factor", [1e90, 1e160, 1e300])
def test_slopes_whose_squares_are_no_numbers(factor: float):
    """Rows with factors of their own: two such functions in a row are as steep as the product of the larger ones."""
    rows = torch.tensor([[factor], [1.0]], dtype=torch.float64)
    for f, steepest in ((lambda x: (x * rows).sin() * rows, factor * factor), (lambda x: (x * rows).relu() / factor, 1.0)):
        x = with_perturbation(RMSTensor.of(torch.ones(2, 3, dtype=torch.float64)))
        with norm_sensitivity("composed"):
            claimed = sensitivities(f(x), x).item()
        assert claimed >= steepest * (1 - 1e-9)
