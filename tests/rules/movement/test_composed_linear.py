"""What is linear in a sample is exact in composed sensitivities: images larger and smaller, padded, and rows that are mixed; prelu by its channels."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.rules.movement import composed_programs as programs
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.core.composed import spread_of
from thunder_norm.core.ellipsoids import Ellipsoid, Picked, Scaled

F64 = torch.float64
SHAPE = (2, 4, 3)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seeded(1)))


LINEAR = {
    "transposed": lambda x: F.conv_transpose2d(x, drawn(2, 3, 2, 2), stride=2, padding=1),
    "transposed, in groups": lambda x: F.conv_transpose2d(x, drawn(2, 2, 2, 3), drawn(4), groups=2, dilation=2),
    "strided": lambda x: F.conv2d(x, drawn(3, 2, 2, 2), stride=2, dilation=2, padding=1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(3, 7), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=(1.5, 2), mode="bicubic", align_corners=True),
    "area": lambda x: F.interpolate(x, size=(2, 2), mode="area"),
    "zeros around": lambda x: F.conv2d(F.pad(x, (1, 2, 0, 1)), drawn(3, 2, 2, 2)),
    "reflected": lambda x: F.conv2d(F.pad(x, (1, 1, 2, 0), mode="reflect"), drawn(3, 2, 2, 2)),
    "repeated": lambda x: F.conv2d(F.pad(x, (1, 1, 2, 0), mode="replicate"), drawn(3, 2, 2, 2)),
    "round": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "less": lambda x: F.pad(x, (-1, 0, 0, 1)) * 2,
    "rows": lambda x: drawn(5, 4) @ x[:, 0],
}


def claimed(f, point: torch.Tensor, sensitivity: str = "composed", radius: float = 1.0) -> float:
    """From Euclidean length to Euclidean length."""
    over, moved = tuple(range(1 - point.ndim, 0)), radius / math.sqrt(point[0].numel())
    x = with_perturbation(RMSTensor._wrap(point.clone(), RMSTensor.of(point, over).norm_size + moved, None, over), moved)
    with norm_sensitivity(sensitivity):
        spread = spread_of(f(x))
    assert spread is not None
    return sum(v.ellipsoid.length.item() * v.root.size.item() for v in spread.parts) / radius


def matrix(f, point: torch.Tensor) -> torch.Tensor:
    return torch.func.jacrev(lambda x: f(x[None])[0])(point[0]).reshape(-1, point[0].numel())


@pytest.mark.parametrize("name", LINEAR)
def test_it_is_the_norm_of_the_matrix(name: str):
    torch.manual_seed(seeded(0))
    f, point = LINEAR[name], torch.randn(1, *SHAPE, dtype=F64)
    assert claimed(f, point) == pytest.approx(torch.linalg.matrix_norm(matrix(f, point), 2).item(), rel=1e-6)


def test_a_number_around_an_image_is_not_taken_for_an_entry():
    torch.manual_seed(seeded(0))
    point = torch.randn(1, *SHAPE, dtype=F64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), value=3.0), drawn(3, 2, 2, 2))

    assert claimed(f, point) >= torch.linalg.matrix_norm(matrix(f, point), 2).item() * (1 - 1e-9)


@pytest.mark.parametrize("slopes", [(0.3, -0.5), (1.5, 0.2)])
def test_prelu_has_the_slopes_of_its_channels(slopes: tuple[float, float]):
    weight, after = torch.tensor(slopes, dtype=F64), drawn(3, 24)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.prelu(x.unflatten(-1, SHAPE) if x.ndim == 2 else x, weight).flatten(1) @ after.mT

    torch.manual_seed(seeded(0))
    point = torch.randn(1, *SHAPE, dtype=F64)
    exact = torch.linalg.matrix_norm(matrix(f, point), 2).item()
    assert claimed(f, point, "within", 1e-6) == pytest.approx(exact, rel=1e-4)
    found = programs.steepest(f, point[0].numel(), 0, steps=40, starts=16)
    assert max(found, exact) <= claimed(f, point) * (1 + 1e-9)
    # the steepest slope everywhere says no less
    steepest = torch.linalg.matrix_norm(after, 2).item() * max(1.0, *map(abs, slopes))
    assert claimed(f, point) <= steepest * (1 + 1e-5)


@pytest.mark.parametrize("scope", ["composed", "within"])
def test_prelu_of_one_number_has_its_one_slope(scope):
    leaf = with_perturbation(LinfTensor.of(torch.tensor(-2.0, dtype=F64)), 0.5)
    with norm_sensitivity(scope):
        moved = sensitivities(F.prelu(leaf, torch.tensor([0.25], dtype=F64)), leaf).item()
    assert moved == pytest.approx(1.0 if scope == "composed" else 0.25)


def test_turned_ellipsoids_are_those_of_the_turned_vectors():
    covariance = drawn(6, 6)
    e = Ellipsoid.of(covariance @ covariance.mT)
    assert e.eigenvalues.numel() == 6
    order, some = torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([3, 1, -1, 0, 2, 4])
    for c in (Picked(order), Scaled(torch.tensor([-0.3], dtype=F64), 6), Picked(some)):
        turned, matrix = e.image(c), c.times(torch.eye(6, dtype=F64)) * c.scale
        torch.testing.assert_close(turned.cov * turned.scale**2, matrix @ (e.cov * e.scale**2) @ matrix.mT)
        torch.testing.assert_close(turned.eigenvalues, torch.linalg.eigvalsh(turned.cov))


def test_the_longest_part_is_that_of_all_and_its_derivative_that_of_its_singular_value():
    root = drawn(12, 12).requires_grad_()
    e = Ellipsoid.of(root @ root.mT)
    groups = torch.arange(12).reshape(3, 4).T.reshape(2, 6)
    exact = torch.stack([torch.linalg.matrix_norm(root[g], 2) for g in groups]).amax()
    torch.testing.assert_close(e.part(groups), exact, rtol=1e-9, atol=0)
    for found, true in ((e.part(groups), exact), (e.length, torch.linalg.matrix_norm(root, 2))):
        torch.testing.assert_close(*(torch.autograd.grad(t, root, retain_graph=True)[0] for t in (found, true)))
