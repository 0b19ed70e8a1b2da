"""Where a function has no derivative, at a bound, ours is the one that the installed torch has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform, grad, jacrev, jvp, vjp, vmap
import thunder


def _compiled(function: Callable, transforms: list) -> Callable:
    jitted = thunder.jit(lambda x: function(x).sum(), transforms=transforms)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(jitted(y := x.clone().requires_grad_()), y)
        return found

    return gradient


CLAMPED = [
    lambda x: x.clamp(-1, 1),
    lambda x: torch.clamp(x, min=1.0),
    lambda x: torch.clamp(x, max=1),
    lambda x: x.clamp(torch.full_like(x, -1.0), torch.ones_like(x)),
    lambda x: x.clamp(1, -1),
    lambda x: x.clamp(1, 1),
    lambda x: (x * 1).clamp_(-1, 1),
    lambda x: torch.ops.aten.clamp.default(x, -1, 1),
    lambda x: x.clip(-1, 1),
    lambda x: x.clamp_min(1) + x.clamp_max(-1),
]
POWERS = [lambda x: x**0 + x**0.0 + torch.pow(x, 0) + x.sin() ** 1 + (x * 1).pow_(0)]
ACTIVATIONS = [
    lambda x: F.hardtanh(x) + F.relu6(6 * x) + F.hardswish(3 * x) + F.hardsigmoid(3 * x),
    lambda x: F.threshold(x, 1, 0) + F.relu(x - 1) + F.leaky_relu(x + 1) + F.softshrink(x, 1.0) + F.hardshrink(x, 1.0),
]


EXTREMA = [
    lambda x: x.max(0)[0] * torch.maximum(x, torch.ones(())),
    lambda x: torch.max(x, -1, keepdim=True).values * x.sign(),
    lambda x: x.min(0)[0] * torch.minimum(torch.ones(()), x),
    lambda x: x.max(0).values.sin() + x.max(dim=0).indices * x,
]


@pytest.mark.parametrize("extremum", EXTREMA)
@pytest.mark.parametrize(
    "rest", [[0.5, 1.0], [1.0, 2.0, 2.0], [torch.inf, -torch.inf, torch.inf], [2.0, torch.nan, 2.0, torch.nan]], ids=str
)
def test_derivatives_of_extrema_are_those_of_the_entries_that_torch_takes(extremum: Callable, rest: list):
    """Along a dimension the first of equal entries; Thunder divides it among them."""
    x = torch.tensor([1.0, *rest, 0.0])
    expected = torch.func.grad(lambda x: extremum(x).sum())(x)
    for gradient in (
        grad(lambda x: extremum(x).sum()),
        lambda x: vmap(grad(lambda x: extremum(x).sum()))(x[None])[0],
        _compiled(extremum, [SubclassTransform()]),
        _compiled(extremum, [CheckpointTransform()]),
        lambda x: thunder.jit(lambda x: torch.autograd.grad(extremum(x).sum(), x)[0], transforms=[NormTransform()])(
            x.clone().requires_grad_()
        ),
    ):
        torch.testing.assert_close(gradient(x), expected, equal_nan=True)
    if x.isfinite().all():  # torch multiplies the tangent of a sign, which is none, by infinity
        wanted = torch.func.jvp(extremum, (x,), (torch.arange(len(x)).float(),))
        torch.testing.assert_close(jvp(extremum, (x,), (torch.arange(len(x)).float(),)), wanted)


def test_the_largest_of_bools_along_a_dimension_in_a_batch():
    x = torch.tensor([[False, True, True], [False, False, False]])
    ours, torchs = (tuple(t(lambda x: tuple(x.max(0)))(x)) for t in (vmap, torch.func.vmap))
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("clamped", [*CLAMPED, *POWERS, *ACTIVATIONS])
def test_derivatives_at_bounds_are_those_of_the_installed_torch(clamped: Callable):
    """Torch's own changed in 2.15; Thunder's have 0 at the bounds of clamp, 1 where there is no number, and NaN for ``0 ** 0``."""
    numbers = torch.tensor([-2.0, -1.0, 0.5, 1.0, 2.0, 0.0])
    x = numbers if clamped in ACTIVATIONS else torch.cat((numbers, torch.full((1,), torch.nan)))
    expected = torch.func.grad(lambda x: clamped(x).sum())(x)
    for gradient in (
        grad(lambda x: clamped(x).sum()),
        jacrev(lambda x: clamped(x).sum()),
        lambda x: vmap(grad(lambda x: clamped(x).sum()))(x[None])[0],
        lambda x: vjp(clamped, x)[1](torch.ones_like(x))[0],
        _compiled(clamped, [SubclassTransform()]),
        _compiled(clamped, [NormTransform()]),
    ):
        torch.testing.assert_close(gradient(x), expected, rtol=0, atol=0, equal_nan=True)
    moved = torch.func.jvp(clamped, (numbers,), (torch.ones(6),))[1]
    torch.testing.assert_close(jvp(clamped, (numbers,), (torch.ones(6),))[1], moved, rtol=0, atol=0)


INDEX = torch.tensor([[0, 1, 1], [1, 2, 0]])
SCATTERED = {
    "add": lambda x, source: torch.scatter_add(x, 1, INDEX, source),
    "in place": lambda x, source: (x * 1).scatter_add_(0, INDEX, source),
    "copied": lambda x, source: x.scatter(0, INDEX[:, 1:], source),
    "sum": lambda x, source: x.scatter_reduce(1, INDEX, source, "sum"),
    "largest": lambda x, source: torch.scatter_reduce(x, 0, INDEX, source, "amax", include_self=False),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_a_source_may_be_larger_than_its_index(name: str):
    """Torch's backward refuses its gradient, which is that of what the index reads."""
    torch.manual_seed(seeded())
    scattered, size = SCATTERED[name], INDEX[:, 1:].shape if name == "copied" else INDEX.shape
    given = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def expected(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return scattered(x, source[: size[0], : size[1]])

    y = expected(*given)
    cotangent = torch.randn_like(y)
    for found in (scattered, expected):
        z = thunder.jit(found, transforms=[NormTransform()])(*given)
        torch.testing.assert_close(z, y)
        for a, b in zip(
            torch.autograd.grad(z, given, cotangent), torch.autograd.grad(expected(*given), given, cotangent), strict=True
        ):
            torch.testing.assert_close(a, b)


COPIED = {
    "one element": lambda x, s: x[0].index_copy(0, torch.tensor(2), s[0, :1]),
    "a scalar": lambda x, s: x[0].index_copy(0, torch.tensor(2), s[0, 0]),
    "a scalar to a list": lambda x, s: torch.index_copy(x[0], 0, torch.tensor([1]), s[0, 0]),
    "a column": lambda x, s: torch.index_copy(x, 1, torch.tensor(0), s[:, :1]),
    "in place": lambda x, s: (x * 1).index_copy_(0, torch.tensor(1), s[:1]),
    "several": lambda x, s: x.index_copy(0, torch.tensor([2, 0]), s[:2]),
}


@pytest.mark.parametrize("name", COPIED)
def test_copies_to_a_position_that_is_no_list(name: str):
    torch.manual_seed(seeded())
    given = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for transform in (NormTransform(), SubclassTransform()):
        found, expected = thunder.jit(lambda x, s: COPIED[name](x, s), transforms=[transform])(*given), COPIED[name](*given)
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(expected)
        torch.testing.assert_close(torch.autograd.grad(found, given, weights), torch.autograd.grad(expected, given, weights))


@pytest.mark.parametrize("n", [2.0, 0.0, 1.0])
@pytest.mark.parametrize("power", [torch.pow, lambda n, y: n**y, torch.float_power])
def test_a_number_of_a_tensor_to_the_power_of_a_tensor(power: Callable, n: float):
    torch.manual_seed(seeded())
    y = torch.rand(3, requires_grad=True)
    for transform in (NormTransform(), SubclassTransform()):
        found = thunder.jit(lambda n, y: power(n.item(), y), transforms=[transform])(torch.tensor(n), y)
        expected = power(n, y)
        torch.testing.assert_close(found, expected)
        (a,), (b,) = (torch.autograd.grad(t.sum(), y) for t in (found, expected))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("rows", "columns", "out"), [((3,), 0, 5), ((3,), 4, 0), ((2, 3), 0, 0), ((), 0, 2), ((0,), 4, 5)])
def test_a_linear_map_of_nothing(rows: tuple, columns: int, out: int):
    given = [torch.ones(shape, requires_grad=True) for shape in ((*rows, columns), (out, columns), (out,))]
    found = thunder.jit(F.linear, transforms=[SubclassTransform()])(*given)
    expected = F.linear(*given)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True):
        torch.testing.assert_close(a, b)
