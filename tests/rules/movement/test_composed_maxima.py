"""Maxima of pairs, groups and windows in composed sensitivities and near the data: adversaries, Jacobians, and the norm rule alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.rules.movement import composed_programs as programs
from tests.rules.movement.test_composed_linear import claimed, drawn, matrix
from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, norm_sensitivity, sensitivities, with_perturbation

F64 = torch.float64
SHAPE = (2, 4, 3)
MAXIMA = {
    "windows": lambda x: F.max_pool2d(x, 2),
    "windows that overlap": lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0)),
    "windows with gaps": lambda x: torch.nn.MaxPool2d(2, 1, 1, 2)(x),
    "the last window is smaller": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    "so many windows": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "windows of a sequence": lambda x: F.max_pool1d(x.flatten(2), 5, padding=2),
    "of an image": lambda x: x.amax((2, 3)),
    "least of channels": lambda x: x.amin(1, keepdim=True),
    "and its number": lambda x: x.max(-1).values,
    "least of three": lambda x: x.min(dim=-1)[0],
    "of two": lambda x: torch.maximum(x, 2 * x.flip(1)),
    "less of two": lambda x: torch.min(x.relu(), 1 - x),
    "with numbers": lambda x: torch.maximum(x, drawn(*SHAPE)),
}


def program(name: str):
    """Between two matrices, the first of a convolution, on images that are rows."""
    kernel = drawn(2, 2, 3, 3) / 2

    def f(x: torch.Tensor) -> torch.Tensor:
        y = MAXIMA[name](F.conv2d(x.unflatten(-1, SHAPE), kernel, padding=1)).flatten(1)
        return y @ drawn(y.shape[-1], 3)

    return f


@pytest.mark.parametrize("name", MAXIMA)
def test_no_adversary_is_steeper(name: str):
    f, size = program(name), math.prod(SHAPE)
    point = torch.randn(1, size, dtype=F64, generator=torch.Generator().manual_seed(seeded(2)))
    bound = claimed(f, point)
    assert programs.steepest(f, size, 3, steps=25, starts=16) <= bound * (1 + 1e-9)
    assert bound <= claimed(f, point, "global") * 0.95 if name != "with numbers" else True


@pytest.mark.parametrize(("name", "radius"), crossed(MAXIMA, [1e-7, 0.1, 1.0]))
def test_no_two_points_nearby_are_steeper_and_an_order_that_stays_is_linear(name: str, radius: float):
    f, size = program(name), math.prod(SHAPE)
    make = torch.Generator().manual_seed(seeded(4))
    point = torch.randn(1, size, dtype=F64, generator=make)
    bound, exact = claimed(f, point, "within", radius), torch.linalg.matrix_norm(matrix(f, point), 2).item()
    assert exact <= bound * (1 + 1e-6)
    if radius < 1e-6:
        assert bound <= exact * (1 + 1e-4)
    a, b = (point + radius * torch.rand(64, 1, dtype=F64, generator=make) * _directions(64, size, make) for _ in range(2))
    apart = (f(a) - f(b)).norm(dim=-1) - 1e-13
    assert (apart <= bound * (a - b).norm(dim=-1) * (1 + 1e-9)).all()
    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: f(x[None])[0]), randomness="same")(a)
    assert torch.linalg.matrix_norm(jacobians, 2).amax().item() <= bound * (1 + 1e-9)


def _directions(count: int, size: int, make: torch.Generator) -> torch.Tensor:
    return F.normalize(torch.randn(count, size, dtype=F64, generator=make), dim=-1)


def test_of_tensors_that_move_for_reasons_of_their_own_each_counts():
    make = torch.Generator().manual_seed(seeded(5))
    x, y = (torch.randn(2, 5, dtype=F64, generator=make) for _ in range(2))
    leaves = [with_perturbation(RMSTensor.of(t)) for t in (x, y)]

    def f(a, b):
        return torch.maximum(a @ drawn(5, 5), b @ drawn(5, 5).mT) @ drawn(5, 5)[:, :2]

    with norm_sensitivity("composed"):
        out = f(*leaves)
    for i, leaf in enumerate(leaves):
        g = (lambda t: f(t, y[:1])) if i == 0 else (lambda t: f(x[:1], t))
        found = programs.steepest(g, 5, 6, steps=25, starts=16) * (5 / 2) ** 0.5
        assert found <= sensitivities(out, leaf).item() * (1 + 1e-9)


@pytest.mark.parametrize("sensitivity", ["composed", "within"])
def test_a_scalar_is_its_own_maximum(sensitivity):
    x = with_perturbation(RMSTensor.of(torch.tensor(0.5, dtype=torch.float64)), 0.1)
    with norm_sensitivity(sensitivity):
        found = sensitivities(x.max(0)[0], x), sensitivities(x.amin(-1), x)
    assert [f.item() for f in found] == [1.0, 1.0]
