"""Transformed functions written inside a function that is transformed or jitted give what they give outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import thunder_norm.transforms as T
from tests.seeds import crossed, seeded
from tests.transform_oracles import assert_same, float64
from thunder_norm.errors import TransformError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def cubic(y: torch.Tensor) -> torch.Tensor:
    return (y**3).sum() + y.prod()


def _inside(t: Any) -> dict[str, Callable]:
    """Functions of a vector, written with the transforms of `t`."""
    return {
        "hessian": lambda x: t.hessian(cubic)(x),
        "hessian of a closure": lambda x: t.hessian(lambda y: cubic(y * x))(x),
        "hessian by several arguments": lambda x: t.hessian(lambda a, b: cubic(a * b), argnums=(0, 1))(x, x)[0][1],
        "hessian by a tuple of one": lambda x: t.hessian(cubic, argnums=(0,))(x)[0][0],
        "jacfwd of jacrev": lambda x: t.jacfwd(t.jacrev(cubic))(x),
        "hessian of a gradient": lambda x: t.hessian(lambda y: t.grad(cubic)(y) @ x)(x),
    }


@pytest.mark.parametrize(("name", "transforms"), crossed(_inside(T), [(), (SubclassTransform,), (NormTransform,)]))
def test_second_derivatives_inside(name: str, transforms: tuple[type, ...]) -> None:
    ours, theirs = _inside(T)[name], _inside(torch.func)[name]
    x, v = float64(3), float64(3, seed=1)
    expected = theirs(x)
    assert_same(ours(x), expected)
    assert_same(T.vmap(ours)(torch.stack([x, v])), torch.stack([expected, theirs(v)]))
    assert_same(T.grad(lambda x: ours(x).sum())(x), torch.func.grad(lambda x: theirs(x).sum())(x))
    assert_same(T.jvp(ours, (x,), (v,)), torch.func.jvp(theirs, (x,), (v,)))
    assert_same(thunder.jit(ours, transforms=[t() for t in transforms])(x), expected)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return torch.diag(x.exp()) + torch.outer(x, x)


LINEAR_ALGEBRA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "det": lambda x: torch.linalg.det(_matrix(x)),
    "slogdet": lambda x: torch.linalg.slogdet(_matrix(x)).logabsdet,
    "logdet": lambda x: torch.logdet(_matrix(x)),
    "solve": lambda x: torch.linalg.solve(_matrix(x), x.cos()).pow(2).sum(),
    "inverse": lambda x: torch.linalg.inv(_matrix(x)).pow(2).sum(),
    "cholesky": lambda x: torch.linalg.cholesky(_matrix(x)).pow(3).sum(),
    "Gaussian log density": lambda x: -0.5 * (x @ torch.linalg.solve(_matrix(x), x)) - 0.5 * torch.logdet(_matrix(x)),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(_matrix(x)).pow(3).sum(),
}


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_second_derivatives_of_linear_algebra_in_every_order(name: str) -> None:
    """Torch's own reverse mode over forward mode is wrong for det, slogdet and solve; reverse over reverse is right."""
    f, x = LINEAR_ALGEBRA[name], float64(3)
    expected = torch.autograd.functional.hessian(f, x)
    for order in (T.hessian, lambda f: T.jacrev(T.jacrev(f)), lambda f: T.jacrev(T.jacfwd(f)), lambda f: T.jacfwd(T.jacfwd(f))):
        assert_same(order(f)(x), expected, rtol=1e-7, atol=1e-8)


TRIANGLES = ({}, {"upper": False}, {"transpose": True}, {"upper": False, "transpose": True, "unitriangular": True})


@pytest.mark.parametrize("options", TRIANGLES, ids=str)
def test_forward_mode_of_triangular_solve_does_not_read_the_other_half(options: dict) -> None:
    """Torch's own pushes the half that the operation ignores, and with ``unitriangular`` the diagonal."""
    b, A = float64(3, 2), float64(3, 3, seed=1) + 2 * torch.eye(3, dtype=torch.float64)
    directions = (float64(3, 2, seed=2), float64(3, 3, seed=3))

    def solution(b: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        return torch.triangular_solve(b, A, **options)[0]

    def the_same(b: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
        A = A.mT if options.get("transpose") else A
        upper = options.get("upper", True) != options.get("transpose", False)
        return torch.linalg.solve_triangular(A, b, upper=upper, unitriangular=options.get("unitriangular", False))

    def pulled(solve: Callable, t: Any) -> Callable:
        return lambda b, A: t.vjp(lambda b, A: t.jvp(solve, (b, A), directions), b, A)[1]((b.cos(), b.sin()))

    expected = torch.func.jvp(the_same, (b, A), directions)
    assert_same(T.jvp(solution, (b, A), directions), expected)
    assert_same(thunder.jit(lambda b, A: T.jvp(solution, (b, A), directions))(b, A), expected)
    assert_same(T.vmap(lambda b: T.jvp(solution, (b, A), directions))(b[None])[1][0], expected[1])
    assert_same(pulled(solution, T)(b, A), pulled(the_same, torch.func)(b, A))


@pytest.mark.parametrize("upper", [False, True])
def test_forward_mode_of_cholesky_inverse_is_that_of_the_inverse(upper: bool) -> None:
    """Torch's own is another function's.  Both halves count, as in reverse mode."""
    factor, direction = (
        t.triu() if upper else t.tril() for t in (float64(3, 3) + 2 * torch.eye(3, dtype=torch.float64), float64(3, 3, seed=1))
    )

    def inverse(factor: torch.Tensor) -> torch.Tensor:
        return torch.cholesky_inverse(factor, upper=upper)

    def the_same(factor: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(factor.mT @ factor if upper else factor @ factor.mT)

    expected = torch.func.jvp(the_same, (factor,), (direction,))
    assert_same(T.jvp(inverse, (factor,), (direction,)), expected)
    assert_same(thunder.jit(lambda t: T.jvp(inverse, (t,), (direction,)))(factor), expected)
    assert_same(T.jacfwd(T.jacfwd(inverse))(factor), torch.func.jacfwd(torch.func.jacfwd(the_same))(factor))


NAMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sort": lambda x: x.sort().values * x.sort(dim=0).values,
    "torch.sort": lambda x: torch.sort(x, descending=True).values.cumsum(0),
    "topk": lambda x: x.topk(2).values * torch.topk(x, 2, largest=False).values,
    "max, min": lambda x: x.max(0).values * torch.min(x, dim=1).values,
    "median, kthvalue": lambda x: x.median(0).values + torch.kthvalue(x, 2).values,
    "cummax": lambda x: x.cummax(0).values - torch.cummin(x, 1).values,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet * torch.slogdet(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x + x.mT).eigenvalues.pow(3),
    "qr, svd": lambda x: torch.linalg.qr(x).R.abs() + torch.linalg.svd(x).S,
    "unpacked, by index and by name": lambda x: (lambda r: r[0] + r.values * (r[1] > 0))(x.sort()),
}


@pytest.mark.parametrize("name", NAMED)
def test_fields_of_results(name: str) -> None:
    f, x = NAMED[name], float64(3, 3)
    assert_same(T.grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: f(x).sum())(x))
    assert_same(thunder.jit(f, transforms=[SubclassTransform()])(x), f(x))


def test_results_with_fields_are_returned() -> None:
    x = float64(2, 3)
    assert_same(T.vmap(lambda x: x.sort())(x), torch.func.vmap(lambda x: x.sort())(x))
    for jitted in (thunder.jit(lambda x: x.sort(), transforms=[SubclassTransform()]), thunder.jit(T.vmap(lambda x: x.sort()))):
        assert_same(tuple(jitted(x)), tuple(x.sort()))  # Thunder's programs return plain tuples


def _weighted(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return (x.sin() * by * x).sum()


@pytest.mark.parametrize(
    "made",
    [
        torch.func.grad(_weighted),
        torch.func.grad_and_value(_weighted),
        torch.func.grad(lambda x: (_weighted(x), x * 2), has_aux=True),
        torch.func.vmap(_weighted),
        torch.func.vmap(torch.func.grad(_weighted)),
        torch.func.grad(lambda x: torch.func.grad(_weighted)(x).sum()),
    ],
)
def test_what_torch_made_before_is_ours_in_a_program(made: Callable):
    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4, dtype=torch.float64)
    for jitted in (
        thunder.jit(made, transforms=[SubclassTransform()]),
        thunder.jit(lambda x: made(x), transforms=[SubclassTransform()]),
    ):
        for _ in range(2):
            torch.testing.assert_close(jitted(x), made(x))
        assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_what_torch_made_before_of_whole_jacobians_is_refused(transform: Callable):
    with pytest.raises(TransformError, match="jacrev, jacfwd or hessian made outside"):
        thunder.jit(transform(_weighted), transforms=[SubclassTransform()])(torch.ones(2))


def _without_gradients(x: torch.Tensor) -> tuple:
    """Transforms of torch's under ``torch.no_grad()``: what they give is a constant, and right."""

    def of(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) + F.elu(x)

    with torch.no_grad():
        gradient = torch.func.grad(lambda x: of(x).square().sum())(x)
        y, pull = torch.func.vjp(of, x)
        (pulled,) = pull(y)
        again = torch.func.grad(lambda x: torch.func.grad(lambda x: of(x).sum())(x).square().sum())(x)
        tangent = torch.func.jvp(lambda x: x * 1, (x,), (x,))[1]
    return gradient, y, pulled, again, tangent


def test_transforms_under_no_grad_are_right_and_their_results_constants() -> None:
    x = float64(3, 4).requires_grad_()
    jitted = thunder.jit(_without_gradients, transforms=[SubclassTransform()])
    assert_same(jitted(x), _without_gradients(x))

    def loss(f: Callable) -> Callable:
        return lambda x: sum((t * x).sum() for t in f(x))

    (expected,) = torch.autograd.grad(loss(_without_gradients)(x), x)
    (found,) = torch.autograd.grad(thunder.jit(loss(_without_gradients), transforms=[SubclassTransform()])(x), x)
    assert_same(found, expected)


def test_transforms_under_no_grad_inside_of_a_gradient_are_constants() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (_without_gradients(x)[0] * x).sum())(x)

    x = float64(3, 4)
    assert_same(thunder.jit(f, transforms=[SubclassTransform()])(x), f(x))


@pytest.mark.parametrize("penalizes", [False, True])
def test_running_statistics_are_written_once_through_a_derivative(penalizes: bool) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.norm(x).detach().requires_grad_()
            (found,) = torch.autograd.grad(self.norm(z).tanh().sum(), z, create_graph=penalizes)
            return found.square().sum()

    torch.manual_seed(seeded(0))
    net = Net()
    other, x = copy.deepcopy(net), float64(5, 3)
    jitted = thunder.jit(other, transforms=[NormTransform()])
    for _ in range(2):
        assert_same(jitted(x), net(x))
        assert_same([b.double() for b in other.buffers()], [b.double() for b in net.buffers()])
