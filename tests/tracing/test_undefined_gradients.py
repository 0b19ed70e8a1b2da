"""Results of one operation of which some have no gradient: torch's formula for the others alone, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

EQUAL = torch.eye(3, dtype=torch.float64)  # eigenvalues whose vectors have no derivative: their formula divides 0 by 0
WIDE = torch.arange(6, dtype=torch.float64).reshape(2, 3).cos()
PROGRAMS: dict[str, tuple[Callable, torch.Tensor]] = {
    "eigenvalues": (lambda x: torch.linalg.eigh(x)[0].square().sum(), EQUAL),
    "one eigenvalue": (lambda x: torch.linalg.eigh(x).eigenvalues[0], EQUAL),
    "eigenvectors that are looked at": (lambda x: (lambda e, v: (e * (v.detach().abs() >= 0).sum()).sum())(*torch.linalg.eigh(x)), EQUAL),
    "eigenvectors that are compared": (lambda x: (lambda e, v: torch.where((v > 2).any(), -e, e).sum())(*torch.linalg.eigh(x)), EQUAL),
    "singular values": (lambda x: torch.linalg.svd(x).S.sum(), EQUAL),
    "singular values of a wide matrix": (lambda x: torch.linalg.svd(x, full_matrices=True)[1].sum(), WIDE),
    "singular vectors": (lambda x: torch.linalg.svd(x, full_matrices=False)[0].square().sum(), WIDE),
    "R of QR": (lambda x: torch.linalg.qr(x)[1].square().sum(), WIDE[:, :2]),
    "the logarithm of a determinant": (lambda x: torch.linalg.slogdet(x)[1], EQUAL),
    "U of LU": (lambda x: torch.linalg.lu(x)[2].square().sum(), WIDE[:, :2]),
}  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: TwoTensor(t, t.clone())], ids=["plain", "TwoTensor"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(name: str, wrap: Callable) -> None:
    f, t = PROGRAMS[name]
    found = []
    for program in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        x = wrap(t.clone()).requires_grad_()
        program(x).backward()
        found.append(x.grad)
    wanted, got = (g.a if isinstance(g, TwoTensor) else g for g in found)
    assert wanted.isfinite().all()
    torch.testing.assert_close(got, wanted)


def test_beside_norms() -> None:
    f, t = PROGRAMS["one eigenvalue"]
    x = t.clone().requires_grad_()
    thunder.jit(f, transforms=[NormTransform()])(x).backward()
    assert x.grad is not None and x.grad.trace() == 1


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_inputs_that_no_gradient_reaches_are_not_told_of_one(transform) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            z = x * 2
        return z + y.sin(), x.detach() * y

    def found(f: Callable) -> list:
        told: list[torch.Tensor] = []
        x, y = (torch.arange(1.0, 4.0).requires_grad_() for _ in range(2))
        x.register_hook(told.append)
        results = f(x, y)
        gradients = torch.autograd.grad(results[0].sum() + results[1].sum(), (x, y), create_graph=True, allow_unused=True)
        assert gradients[0] is None and not told
        return [gradients[1], *torch.autograd.grad(gradients[1].sum(), y)]

    jitted = thunder.jit(f, transforms=[transform()])
    for _ in range(3):
        torch.testing.assert_close(found(jitted), found(f))
