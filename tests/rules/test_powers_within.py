"""Powers of what is positive, roots of what is not negative, logarithms of probabilities, and the exponential of a matrix."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, norm_mode, rules  # noqa: F401
from thunder_norm.audit import Ball, Case, Witness, check
from thunder_norm.errors import NormMismatchError

D = torch.float64
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}


def x(*shape, n=0.7, kind=RMSTensor, dims=None, name="x"):
    return Ball(name, kind, shape, n, dims)


CASES = [
    Case("an inverse", lambda a: torch.pow(a.square() + 0.5, -1), (x(2, 3, kind=LinfTensor),), 0.0, FEW),
    Case("a negative power", lambda a: (torch.relu(a) + 0.5) ** -1.5, (x(2, 3),), 0.0, FEW),
    Case("a root", lambda a: torch.pow(torch.relu(a) + 0.5, 0.3), (x(2, 3),), 0.0, FEW),
    Case("a power that a tensor says", lambda a, p: torch.pow(a.abs() + 0.5, p), (x(2, 3), x(1, 3, name="p", kind=LinfTensor, n=2.0)), 0.0, FEW),
    Case("of a number", lambda a, p: torch.pow(a.abs() + 0.5, p), (x(2, 3), x(1, name="p", kind=LinfTensor, n=0.3)), 0.0, FEW),
    Case("of a gate", lambda a, p: torch.sigmoid(a) ** (1 + F.softplus(p)), (x(2, 3, n=2.0), x(2, 3, name="p", n=2.0)), 0.0, FEW),
    Case("a root of what may be 0", lambda a: torch.sqrt(torch.relu(a)), (x(2, 3),), 0.0, FEW),
    Case("log sigmoid", lambda a: torch.log(torch.sigmoid(a)), (x(2, 3),), 0.9, FEW),
    Case("log sigmoid of a multiple", lambda a: torch.sigmoid(-2.0 * a).log(), (x(2, 3, kind=LinfTensor),), 0.9, FEW),
    Case("log of one minus sigmoid", lambda a: (1 - torch.sigmoid(a)).log(), (x(2, 3, kind=LinfTensor),), 0.9, FEW),
    Case("log softmax", lambda a: torch.log(torch.softmax(a, -1)), (x(2, 3, kind=LinfTensor),), 0.9, FEW),
    Case("log softmax of exponentials", lambda a: (lambda e: e / e.sum(-1, keepdim=True))(a.exp()).log(), (x(2, 3, kind=LinfTensor),), 0.0, FEW),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_sound_and_as_tight_as_said(case):
    case.check()


@pytest.mark.parametrize(
    "written, fused",
    [
        (lambda a: torch.sigmoid(a).log(), F.logsigmoid),
        (lambda a: (1 - a.sigmoid()).log(), lambda a: F.logsigmoid(-a)),
        (lambda a: (1 + torch.exp(-a)).reciprocal().log(), F.logsigmoid),
        (lambda a: F.softmax(a, dim=-1).log(), lambda a: F.log_softmax(a, -1)),
        (lambda a: a.softmax(0).log(), lambda a: a.log_softmax(0)),
    ],
)
@pytest.mark.parametrize("mode", ["bound", "typical"])
def test_logarithms_of_probabilities_have_the_norms_of_the_fused_operation(written, fused, mode):
    torch.manual_seed(seeded())
    a = RMSTensor(0.7, backing=torch.randn(3, 4, dtype=D), perturbation_size=1.0)
    with norm_mode(mode):
        found, expected = written(a), fused(a)
    assert torch.allclose(found.backing, expected.backing)
    assert found.norm_size.item() == pytest.approx(expected.norm_size.item())
    assert found.perturbation_size.item() == pytest.approx(expected.perturbation_size.item())


@pytest.mark.parametrize("call", [lambda a: a.relu().log(), lambda a: (a.softmax(-1) * a).log(), lambda a: a.tanh().log()])
def test_other_logarithms_are_refused_as_ever(call):
    with pytest.raises(NormMismatchError):
        call(RMSTensor(0.7, backing=torch.rand(3, 4, dtype=D)))


def test_matrix_exponential_is_attained_by_multiples_of_the_identity():
    eye = torch.eye(3, dtype=D)
    check(torch.matrix_exp, [x(3, 3, kind=RMSToRMSTensor)], witnesses=[Witness([0.7 * eye], [eye])])
    check(
        torch.linalg.matrix_exp,
        [x(2, 3, 3, kind=RMSToRMSTensor, n=0.2)],
        witnesses=[Witness([0.2 * eye.expand(2, 3, 3)], [eye.expand(2, 3, 3)])],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_root_of_what_is_not_negative_has_the_slope_at_the_least_number_of_its_dtype(dtype):
    s = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    y = torch.sqrt(torch.relu(RMSTensor(1.0, backing=torch.ones(2, 3, dtype=dtype), perturbation_size=1.0)))
    assert y.norm_size.item() == pytest.approx(1.0)
    moved = torch.tensor(s, dtype=dtype).double().sqrt()
    assert y.perturbation_size.item() == pytest.approx((moved / s).item())
    with pytest.raises(NormMismatchError):
        torch.sqrt(RMSTensor(1.0, backing=torch.ones(2, 3), perturbation_size=1.0))


@pytest.mark.parametrize("mode", ["bound", "typical"])
def test_weights_may_be_sharpened_by_a_power_that_a_tensor_says(mode):
    """As the addresses of a neural Turing machine are: shares, in the L1 norm, to a power of at least 1, and shares again."""
    torch.manual_seed(seeded())
    a, g = (RMSTensor(0.7, backing=torch.randn(3, k, dtype=D), perturbation_size=1.0) for k in (4, 1))
    with norm_mode(mode):
        w = a.softmax(-1) ** (1 + F.softplus(g))
        shares = w / w.sum(-1, keepdim=True)
    assert w.norm_size <= 1 and shares.norm_size <= 1 and 0 < shares.perturbation_size < math.inf
    assert mode == "bound" or 0.1 < shares.perturbation_size < 10


def test_typical_power_of_a_tensor_is_that_of_its_size():
    p = LinfTensor(3.0, backing=torch.tensor([3.0], dtype=D), perturbation_size=0.0)
    a = RMSTensor(0.7, backing=torch.randn(2, 3, dtype=D), perturbation_size=1.0)
    with norm_mode("typical"):
        y = torch.pow(a.abs() + 0.5, p)
    n = 0.7 + 0.5
    assert y.norm_size.item() == pytest.approx(n**3, rel=0.3)
    assert y.perturbation_size.item() / y.norm_size.item() == pytest.approx(3 / n, rel=0.3)
    assert math.isfinite(y.norm_size)
