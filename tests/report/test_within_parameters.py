"""Reports within a radius of programs that make tensors of parameters alone, and use them beside what moves with the inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import L2Tensor, RMSTensor, norm_report, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.transforms import NormTransform
import thunder

F64 = torch.float64


class Decoder(nn.Module):
    """Queries of parameters alone, with a bias of scores that is looked up (T5's): normed tensors that no input moves."""

    def __init__(self):
        super().__init__()
        self.start, self.table = nn.Parameter(torch.randn(1, 2, 4)), nn.Embedding(3, 1)
        self.query, self.key, self.value, self.out = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x):
        bias = self.table(torch.arange(6).reshape(2, 3) % 3).permute(2, 0, 1)
        for _ in range(3):
            y = F.rms_norm(self.start * 0.5, (4,))
            y = y + F.scaled_dot_product_attention(self.query(y), self.key(x), self.value(x), bias)
            x = x + self.out(F.rms_norm(x, (4,))) * y.mean(-2, keepdim=True)
        return x.tanh()


def decoder() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seeded(1))
    return Decoder().to(F64), torch.randn(1, 3, 4, dtype=F64)


def report(model: nn.Module, x: torch.Tensor, radius: float, dims: tuple[int, ...] = (-2, -1)):
    return norm_report(thunder.jit(model, transforms=[NormTransform()]), RMSTensor.of(x, dims), radius=radius)


def test_at_the_data_the_bound_is_the_jacobian_whatever_is_made_of_parameters():
    model, x = decoder()
    jacobian = torch.autograd.functional.jacobian(model, x).reshape(x.numel(), -1)
    exact = torch.linalg.matrix_norm(jacobian, 2).item()
    assert report(model, x, 0.0).rows[-1].sensitivity == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("radius", [0.0, 1e-3])
def test_that_parameters_might_move_loosens_hardly_anything_of_the_inputs(radius):
    model, x = decoder()
    size = RMSTensor.of(x).norm_size + radius
    given = with_perturbation(RMSTensor(size, backing=x), radius)
    with norm_sensitivity("within"):
        alone = sensitivities(model(given), given).item()
    assert report(model, x, radius, (-1,)).rows[-1].sensitivity <= 1.1 * alone


def test_parameters_move_results_no_further_than_the_report_says():
    model, x = decoder()
    found = report(model, x, 1e-3).parameters
    for name, p in model.named_parameters():
        if found[name].kind != "RMSTensor":
            continue  # of matrices the Frobenius norm says more than the operator norm

        def f(t, name=name):
            return torch.func.functional_call(model, {name: t}, (x,))

        over = found[name].elem_dims
        jacobian, best = torch.autograd.functional.jacobian(f, p.detach()).reshape(x.numel(), *p.shape), 0.0
        d = torch.randn(p.shape, dtype=F64)
        for _ in range(10):
            d = d / d.square().mean(over, keepdim=True).sqrt().clamp(min=1e-30)
            y = torch.einsum("i...,...->i", jacobian, d)
            best = max(best, y.square().mean().sqrt().item())
            d = torch.einsum("i...,i->...", jacobian, y)
        assert 0 < best <= found[name].sensitivity * (1 + 1e-9), name


def test_of_two_inputs_each_has_the_lesser_of_what_is_known():
    """The norm rule knows more of one, matrices of the other: a sum of both has what is known of each."""
    torch.manual_seed(seeded(2))
    a, b = torch.randn(4, 4, dtype=F64), torch.randn(4, 4, dtype=F64)
    x, z = torch.randn(1, 4, dtype=F64), torch.randn(1, 4, dtype=F64)

    def f(x, z):
        return (x @ a).relu() @ b + z.amax(-1, keepdim=True) * 0.1

    def claims(*moving: bool) -> list[float]:
        given = [with_perturbation(L2Tensor.of(t)) if m else t for t, m in zip((x, z), moving, strict=True)]
        with norm_sensitivity("composed"):
            y = f(*given)
        return [s.item() for s in sensitivities(y, [g for g, m in zip(given, moving, strict=True) if m])]

    together, alone = claims(True, True), claims(True, False) + claims(False, True)
    assert together == pytest.approx(alone, rel=1e-6)
