"""Gradients through 0-dim tensors on the CPU, of which Thunder 0.2.6 gets some silently wrong: right with each of our transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import thunder_norm.transforms as T
import thunder

FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: (x + x.sum()).square().sum(),
    lambda x: (x / x.sum()).square().sum(),
    lambda x: (x - x.amax()).square().sum(),
    lambda x: (x * x.mean()).sum(),
    lambda x: (x / x.square().mean().sqrt()).pow(3).sum(),
    lambda x: (x / x.norm()).pow(3).sum(),
    lambda x: torch.where(x > 0.5, x.sum(), x).sum(),
    lambda x: (x.abs() ** x.abs().sum()).sum(),
    lambda x: torch.maximum(x, x.mean()).square().sum(),
]
X = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)


def all_of_them(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([f(x) for f in FUNCTIONS])


def jacobian(f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """By torch's autograd, a row at a time."""
    x = X.clone().requires_grad_()
    return torch.stack([torch.autograd.grad(f(x), x, row)[0] for row in torch.eye(len(FUNCTIONS), dtype=torch.float64)])


def test_thunder_alone_is_wrong() -> None:
    """When this fails, the broadcasts may go."""
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(thunder.jit(FUNCTIONS[0])(x), x)
    assert not torch.allclose(gradient, torch.func.grad(FUNCTIONS[0])(X))


@pytest.mark.parametrize("transform", [T.NormTransform, T.SubclassTransform])
def test_programs_on_plain_tensors(transform: type) -> None:
    torch.testing.assert_close(jacobian(thunder.jit(all_of_them, transforms=[transform()])), torch.func.jacrev(all_of_them)(X))


def test_transformed_functions_in_a_program_that_thunder_differentiates() -> None:
    def gradients(grad: Callable) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.stack([torch.dot(grad(f)(x), x) for f in FUNCTIONS])

    torch.testing.assert_close(jacobian(thunder.jit(gradients(T.grad))), torch.func.jacrev(gradients(torch.func.grad))(X))


ALONG_DIMENSION_0: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "var": lambda x: torch.var(x, 0, correction=0),
    "std": lambda x: torch.std(x, 0, correction=0) + x,
    "var_mean": lambda x: torch.var_mean(x, 0, correction=0)[1],
    "prod": lambda x: x.prod(0),
    "gather": lambda x: x.gather(0, torch.tensor(0)).sin(),
    "topk": lambda x: x.topk(1).values.sin(),
}


@pytest.mark.parametrize("name", ALONG_DIMENSION_0)
def test_dimension_0_of_a_0_dim_tensor_is_none(name: str) -> None:
    f, x = ALONG_DIMENSION_0[name], X[0]
    torch.testing.assert_close(T.grad(f)(x), torch.func.grad(f)(x))
    torch.testing.assert_close(T.jvp(T.grad(f), (x,), (x,)), torch.func.jvp(torch.func.grad(f), (x,), (x,)))
    torch.testing.assert_close(T.vmap(T.grad(f))(X), torch.stack([torch.func.grad(f)(v) for v in X]))
