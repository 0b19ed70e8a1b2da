"""Functions of matrices: bounds against adversarial inputs, typical sizes against random matrices, and what only the data bound."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.range_programs import random_results
from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, RMSToRMSTensor, norm_mode, norm_report, norm_sensitivity
from thunder_norm.audit import Ball, Case, search
from thunder_norm.core.known_ranges import range_within
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
EYE = torch.eye(3, dtype=D)
BELOW = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 1, 0]], dtype=D)


def operator(*shape, n=1.3):
    return Ball("A", RMSToRMSTensor, shape, n)


IDENTITY = {"witnesses": [[1.3 * EYE]]}
CASES = [
    Case("det", torch.linalg.det, (operator(3, 3),), 0.98, IDENTITY),
    Case("det, small", torch.det, (operator(3, 3, n=0.4),), 0.98, {"witnesses": [[0.4 * EYE]]}),
    Case("det, batch", torch.linalg.det, (operator(2, 2, 2),), 0.98, {"witnesses": [[1.3 * EYE[:2, :2].expand(2, 2, 2)]]}),
    Case("matrix_power", lambda a: torch.linalg.matrix_power(a, 3), (operator(3, 3),), 0.98, IDENTITY),
    Case("matrix_power 0", lambda a: torch.matrix_power(a, 0) + a, (operator(3, 3),), 0.98, IDENTITY),
    Case("householder_product, one", torch.linalg.householder_product, (operator(3, 1), Ball("t", LinfTensor, (1,), 0.6)), 0.15),
    Case("householder_product", torch.linalg.householder_product, (operator(4, 2, n=0.7), Ball("t", LinfTensor, (2,), 0.6)), 0.05),
    Case("householder_product, batch", torch.linalg.householder_product, (operator(2, 3, 3, n=0.2), Ball("t", LinfTensor, (2, 3), 0.5)), 0.05),
    Case(
        "householder_product of reflections",
        lambda a: torch.linalg.householder_product(a, 2 / (1 + a.tril(-1).square().sum(-2))), (operator(4, 2),), 5e-4
    ),
    Case("svdvals, wide", torch.linalg.svdvals, (operator(2, 3),), 0.98),
    Case("svdvals, tall", torch.linalg.svdvals, (operator(4, 2),), 0.98),
    Case("svd, values", lambda a: torch.linalg.svd(a, full_matrices=False)[1], (operator(4, 2),), 0.98),
    Case("eigh, values", lambda a: torch.linalg.eigh(a).eigenvalues, (Ball("A", RMSTensor, (3, 3), 1.3, (-2, -1)),), 0.9, {"witnesses": [[1.3 * BELOW * math.sqrt(3)]]}),
    Case("polar, symmetric factor", lambda a: torch.linalg.polar(a)[1], (Ball("A", RMSTensor, (3, 3), 1.3, (-2, -1)),), 0.6),
    Case("polar, symmetric factor, tall", lambda a: torch.linalg.polar(a)[1], (Ball("A", RMSTensor, (4, 2), 1.3),), 0.4),
    Case("spectral norm, wide", lambda a: torch.linalg.matrix_norm(a, 2), (operator(2, 3),), 0.98),
    Case("spectral norm, tall, batch", lambda a: torch.linalg.norm(a, 2, (-1, -2), keepdim=True), (operator(2, 4, 2),), 0.98),
    Case("smallest singular value", lambda a: torch.linalg.norm(a, -2), (operator(3, 3),), 0.98, IDENTITY),
    Case("spectral norm, of the rows' norms", lambda a: torch.linalg.matrix_norm(a, 2), (Ball("A", RMSTensor, (3, 3), 1.3),), 0.98),
    Case("eigvalsh", torch.linalg.eigvalsh, (Ball("A", RMSTensor, (3, 3), 1.3, (-2, -1)),), 0.9, {"witnesses": [[1.3 * BELOW * math.sqrt(3)]]}),
    Case("eigvalsh, of the rows' norms", lambda a: torch.linalg.eigvalsh(a, UPLO="U"), (Ball("A", RMSTensor, (3, 3), 1.3, (-1,)),), 0.5),
]  # fmt: skip


X, B = Ball("x", RMSTensor, (3, 2), 0.8), Ball("b", RMSTensor, (3, 2), 1.1, elem_dims=(-2,))
VECTOR, NUMBER = Ball("b", RMSTensor, (3,), 1.1), Ball("s", LinfTensor, (), 0.5)
# matrices that what makes them keeps away from singular ones
AWAY = [
    Case("cayley", lambda a, b: torch.linalg.solve(EYE + (a - a.T), b), (operator(3, 3), B)),
    Case("cayley from the right", lambda a, b: torch.linalg.solve(a.mT - a - 2 * EYE, b.T, left=False), (operator(3, 3), B)),
    Case("ridge", lambda x, b: torch.linalg.solve(x @ x.T + 0.3 * EYE, b), (X, B)),
    Case("ridge of rows", lambda x, b: torch.linalg.solve(0.3 * EYE + F.linear(x, x), b.T.contiguous().T), (X, B)),
    Case("ridge, a vector", lambda x, b: torch.linalg.solve(x.mm(x.t()) / 2 + 0.3 * EYE, b), (X, VECTOR)),
    Case("ridge by a number", lambda x, s: torch.linalg.inv(x @ x.T + F.softplus(s) * EYE), (X, NUMBER)),
    Case("negative", lambda x: torch.inverse(-(x @ x.T) - torch.diag(torch.tensor([0.2, 0.5, 0.3], dtype=D))), (X,)),
    Case("batch", lambda x: torch.linalg.pinv(torch.bmm(x.mT, x) + 0.5 * EYE[:2, :2]), (Ball("x", RMSTensor, (2, 3, 2), 0.8),)),
    Case("cholesky", lambda x: torch.linalg.cholesky(x @ x.T + 0.5 * EYE), (X,)),
    Case("cholesky_solve", lambda x, b: torch.cholesky_solve(b, torch.linalg.cholesky(x @ x.T + 0.3 * EYE)), (X, B)),
    Case("cholesky_ex", lambda x: torch.linalg.cholesky_ex(x @ x.T + 0.5 * EYE)[0], (X,)),
    Case("cholesky_inverse", lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x @ x.T + 0.5 * EYE)), (X,)),
    Case("inv_ex", lambda x: torch.linalg.inv_ex(x @ x.T + 0.5 * EYE)[0], (X,)),
    Case("solve_ex", lambda x, b: torch.linalg.solve_ex(x @ x.T + 0.3 * EYE, b)[0], (X, B)),
    Case("lu_solve", lambda x, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(x @ x.T + 0.3 * EYE), b), (X, B)),
    Case(
        "lu_solve, transposed from the right",
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(EYE + (a - a.T))[:2], b.mT, left=False, adjoint=True),
        (operator(3, 3), B),
    ),
    Case("lu_solve, older", lambda x, b: b.lu_solve(*torch.lu(x @ x.T + 0.3 * EYE)), (X, B)),
    Case("matrix_sqrth", lambda x: torch.linalg.matrix_sqrth(x @ x.T + 0.3 * EYE), (X,)),
    Case("cond", lambda x: torch.linalg.cond(x @ x.T + 0.5 * EYE), (X,)),
    Case("logdet", lambda x: torch.logdet(x @ x.T + 0.3 * EYE), (X,)),
    Case("slogdet", lambda a: torch.slogdet(0.1 * EYE + (a - a.T))[1], (operator(3, 3, n=0.1),)),
    Case("linalg.slogdet", lambda v: torch.linalg.slogdet(torch.diag_embed(v.sigmoid() + 0.1))[1], (Ball("v", LinfTensor, (3,), 0.8),)),
]  # fmt: skip


@pytest.mark.parametrize("case", AWAY, ids=lambda c: c.name)
def test_bound_of_what_stays_away_from_singular_matrices_holds(case):
    found = search(case.call, case.balls, restarts=2, steps=12, seed=seeded())
    assert found.is_sound, found
    assert found.value > 0.05, "a bound is finite, and no hundred times too large"


SQUARE = {
    "transpose": lambda x: x.transpose(0, 1), "T": lambda x: x.T, "mT": lambda x: x.mT, "neg": torch.neg, "x x^T": lambda x: x @ x.T,
    "x^T x": lambda x: x.t().mm(x), "less the transpose": lambda x: x - x.T, "and the identity": lambda x: torch.eye(4, dtype=D) + x,
    "and another": lambda x: torch.sub(x, torch.arange(16.0, dtype=D).view(4, 4), alpha=0.2), "by a number": lambda x: x * 0.3,
    "by another": lambda x: -2 * x, "by one of its own": lambda x: x.mean().tanh() * x, "over a positive one": lambda x: x / x.sum().exp(),
    "rows": lambda x: F.linear(x, x), "reversed": lambda x: x.flip(0), "triangle": torch.tril, "copy": torch.clone, "relu": torch.relu,
    "diagonal": lambda x: torch.diag(x.sigmoid()[0]), "view": lambda x: x.view(2, 8).reshape(4, 4), "row": lambda x: x[:1].expand(4, 4),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_quadratic_forms_of_random_programs_are_between_their_ends(seed):
    pick, generator = random.Random(seeded(seed)), torch.Generator().manual_seed(seeded(seed))
    start = [RMSTensor.of(torch.randn(4, 4, dtype=D, generator=generator))]
    for name, y in random_results(pick, start, SQUARE, {"add": torch.add, "sub": torch.sub, "mul": torch.mul}, (3, 9), 0.8):
        known = range_within(y)
        if known is None or known.rayleigh is None:
            continue
        values = torch.linalg.eigvalsh((y.backing + y.backing.mT) / 2)
        slack = 1e-9 * (1 + values.abs().max())
        assert known.rayleigh.least_of(y.norm_size) - slack <= values.min(), name
        assert values.max() <= known.rayleigh.most_of(y.norm_size) + slack, name
        assert not known.is_symmetric or torch.allclose(y.backing, y.backing.mT), name


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds(case):
    case.check(seeded())


def well_conditioned(count: int) -> torch.Tensor:
    """Twice an orthogonal matrix."""
    return 2 * torch.linalg.qr(torch.randn(count, count, dtype=D))[0]


def spd(a):
    return a @ a.mT


INVERSES = {
    "solve": lambda a, x: torch.linalg.solve(a, x.mT),
    "solve from the right": lambda a, x: torch.linalg.solve(a, x, left=False),
    "inv": lambda a, x: torch.linalg.inv(a) @ x.mT,
    "method": lambda a, x: a.inverse() @ x.mT,
    "pinv": lambda a, x: torch.linalg.pinv(a) @ x.mT,
    "cholesky": lambda a, x: torch.linalg.cholesky(spd(a)) @ x.mT,
    "cholesky_solve": lambda a, x: torch.cholesky_solve(x.mT, torch.linalg.cholesky(spd(a))),
    "cholesky_ex": lambda a, x: torch.linalg.cholesky_ex(spd(a)).L @ x.mT,
    "cholesky_inverse": lambda a, x: torch.cholesky_inverse(torch.linalg.cholesky_ex(spd(a))[0]) @ x.mT,
    "inv_ex": lambda a, x: torch.linalg.inv_ex(a).inverse @ x.mT,
    "solve_ex": lambda a, x: torch.linalg.solve_ex(a, x.mT, left=True)[0],
    "lstsq": lambda a, x: torch.linalg.lstsq(a, x.mT).solution,
    "pinverse": lambda a, x: torch.pinverse(a) @ x.mT,
    "lu_solve": lambda a, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), x.mT),
    "lu_solve, older": lambda a, x: torch.lu_solve(x.mT, *torch.lu(a)),
    "matrix_sqrth": lambda a, x: torch.linalg.matrix_sqrth(torch.linalg.inv(spd(a))) @ x.mT,
    "negative power": lambda a, x: torch.matrix_power(a, -2) @ x.mT,
}


class Around(nn.Module):
    def __init__(self, f, a):
        super().__init__()
        self.f, self.a, self.linear = f, nn.Parameter(a), nn.Linear(len(a), len(a), dtype=a.dtype)

    def forward(self, x):
        return self.f(self.a, self.linear(x))


@pytest.mark.parametrize("name", INVERSES)
def test_typical_sizes_are_those_of_multiples_of_orthogonal_matrices(name):
    torch.manual_seed(seeded(0))
    a, x = well_conditioned(24), torch.randn(24, 24, dtype=D)
    with norm_mode("typical"):
        y = INVERSES[name](RMSToRMSTensor.of(a), RMSTensor.of(x, (-2, -1)))
    actual = INVERSES[name](a, x).square().mean().sqrt()
    assert 0.5 < actual / y.norm_size < 1.5


VECTORS = {
    "svd": lambda a: torch.linalg.svd(a),
    "svd, reduced": lambda a: torch.linalg.svd(a, full_matrices=False),
    "svd, older": lambda a: torch.svd(a, some=False),
    "svd, values alone": lambda a: torch.svd(a, compute_uv=False),
    "eigh": lambda a: torch.linalg.eigh(a @ a.mT),
    "polar": lambda a: torch.linalg.polar(a.mT),
    "lu": lambda a: torch.linalg.lu(a)[1:],
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[:1],
    "lu_unpack": lambda a: torch.lu_unpack(*torch.linalg.lu_factor(a))[1:],
    "eig": lambda a: torch.linalg.eig(a @ a.mT + a[:, :6])[:1],
    "eigvals": lambda a: [torch.linalg.eigvals(a @ a.mT + a[:, :6])],
    "qr": lambda a: torch.linalg.qr(a),
    "qr, tall": lambda a: torch.linalg.qr(a.mT),
    "qr, complete": lambda a: torch.linalg.qr(a.mT, "complete"),
}


@pytest.mark.parametrize("name", VECTORS)
def test_singular_vectors_and_eigenvectors_have_norms_and_typical_movements(name):
    torch.manual_seed(seeded(0))
    a, step = torch.randn(6, 8, dtype=D), 1e-6
    x = RMSToRMSTensor.of(a)
    by = torch.randn_like(a)
    by *= step / RMSToRMSTensor.of(by).norm_size
    for mode in ("bound", "typical"):
        with norm_mode(mode):
            found = VECTORS[name](RMSToRMSTensor(x.norm_size, backing=a, perturbation_size=step))
        for y, before, after in zip(found, VECTORS[name](a), VECTORS[name](a + by), strict=True):
            if not before.any():  # of values alone
                assert (y.norm_size, y.perturbation_size) == (0, 0)
                continue
            moved = type(y).of(after - before, y.elem_dims).norm_size
            assert type(y).of(before, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-9 if mode == "bound" else 1.5)
            if mode == "bound":
                assert moved <= y.perturbation_size * (1 + 1e-3)
                assert y.perturbation_size.isfinite() == (
                    not y.is_complex() and (y.ndim == 1 or name == "polar" and y is found[1])
                )
            else:
                assert 0.01 < moved / y.perturbation_size < 20


def assert_reported(model: nn.Module, x: torch.Tensor) -> None:
    """A report at the data has a movement of every operation, and bounds that hold."""
    rows = norm_report(thunder.jit(model, transforms=[NormTransform()]), x).rows
    assert all(math.isfinite(r.sensitivity) and r.actual <= r.norm_size * (1 + 1e-6) for r in rows)


@pytest.mark.parametrize("name", INVERSES)
def test_what_a_norm_does_not_bound_has_a_movement_at_the_data_and_typically(name):
    torch.manual_seed(seeded(0))
    model, x = Around(INVERSES[name], well_conditioned(4)), torch.randn(4, 4, dtype=D)
    assert_reported(model, x)
    assert all(t > 1e-3 for t in ModularNorm(model, x, mode="typical").targets.values())
    with pytest.raises(NormMismatchError, match="singular"):
        ModularNorm(model, x)
    with pytest.raises(NormMismatchError, match="singular"):
        INVERSES[name](RMSToRMSTensor.of(model.a.detach()), x)


OF_PARAMETERS = {
    "det": lambda a, x: torch.det(a) * x,
    "matrix_power": lambda a, x: torch.linalg.matrix_power(a, 3) @ x,
    "matrix_exp": lambda a, x: torch.matrix_exp(a) @ x,
    "householder_product": lambda a, x: torch.linalg.householder_product(a, 2 / (1 + a.tril(-1).square().sum(0))) @ x,
    "svd": lambda a, x: torch.linalg.svd(a)[1] * x,
    "triangular_solve": lambda a, x: torch.triangular_solve(x, a, upper=False, transpose=True, unitriangular=True).solution,
    "lu_solve": lambda a, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(spd(a) + torch.eye(4, dtype=D)), x),
    "labels": lambda a, x: F.binary_cross_entropy(torch.sigmoid(a), torch.sigmoid(x)),
}


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_functions_of_a_parameter_have_a_report_at_the_data_and_targets(name):
    """An AttributeError of ours before: a parameter is no normed tensor where a report is at the data."""
    torch.manual_seed(seeded(0))
    model, x = Around(OF_PARAMETERS[name], well_conditioned(4)), torch.randn(4, 4, dtype=D)
    assert_reported(model, x)
    assert min(ModularNorm(model, x).targets.values()) > 0


def test_layers_that_are_orthogonal_by_torchs_parametrization():
    torch.manual_seed(seeded(0))
    model, x = nn.utils.parametrizations.orthogonal(nn.Linear(60, 40)), torch.randn(3, 60)
    y = model(RMSTensor.of(x))
    assert (model(x).square().mean(-1).sqrt() <= y.norm_size * (1 + 1e-6)).all()
    assert all(t > 1e-3 for t in ModularNorm(model, x, mode="typical").targets.values())
    with norm_mode("typical"):
        y = model(RMSTensor.of(x))
    assert 0.5 < model(x).square().mean(-1).sqrt().amax() / y.norm_size < 1.5


def test_a_negative_power_is_one_of_the_inverse():
    with pytest.raises(NormMismatchError, match="negative power"):
        torch.linalg.matrix_power(RMSToRMSTensor.of(EYE), -1)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, x: torch.linalg.solve(a, x),
        lambda a, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), x),
        lambda a, x: torch.linalg.solve_triangular(a, x, upper=True),
        lambda a, x: torch.linalg.eigvals(a).abs().amax() * x,
        lambda a, x: torch.linalg.cond(a) * x,
        lambda a, x: torch.linalg.tensorsolve(a.unflatten(0, (2, 2)), x[0].view(2, 2)),
    ],
)
def test_a_parameter_and_an_input_meet_at_the_data_before_any_rule(call):
    """A system of both was refused before, in a report at the data, where nothing had a norm yet."""
    torch.manual_seed(seeded(0))
    model = Around(call, well_conditioned(4) + torch.randn(4, 4, dtype=D))
    model.linear = nn.Identity()
    assert_reported(model, torch.randn(4, 4, dtype=D))


def test_eigenvalues_move_at_the_data_as_their_jacobian_says():
    torch.manual_seed(seeded(0))
    a = torch.randn(5, 5, dtype=D)
    with norm_sensitivity("local"):
        y = torch.linalg.eigvals(
            RMSTensor(RMSTensor.of(a, (-2, -1)).norm_size, backing=a, perturbation_size=1.0, elem_dims=(-2, -1))
        )
    jacobian = torch.func.jacrev(lambda t: torch.view_as_real(torch.linalg.eigvals(t)))(a).reshape(10, 25)
    assert torch.allclose(y.perturbation_size, torch.linalg.matrix_norm(jacobian, 2) * 5 / 5**0.5)
    with norm_sensitivity("local"):
        of_operator = torch.linalg.inv(RMSToRMSTensor(RMSToRMSTensor.of(a).norm_size, backing=a, perturbation_size=1e-6))
    step = torch.randn(200, 5, 5, dtype=D)
    step *= 1e-6 / torch.linalg.matrix_norm(step, 2)[:, None, None]
    moved = (torch.linalg.inv(a + step) - torch.linalg.inv(a)).square().mean((-2, -1)).sqrt().amax()
    assert 0.05 * of_operator.perturbation_size < moved <= of_operator.perturbation_size * (1 + 1e-4)


def test_factors_of_indefinite_matrices_say_what_to_use():
    a = torch.randn(4, 4, dtype=D)
    with pytest.raises(NormMismatchError, match="lu_factor"):
        torch.linalg.ldl_factor(RMSToRMSTensor.of(a + a.mT))
    with pytest.raises(NormMismatchError, match="without pivots"):
        torch.linalg.lu_factor(RMSToRMSTensor.of(a), pivot=False)


def test_entries_of_eliminations_double_at_most_once_in_a_step():
    """Wilkinson's matrix attains it."""
    a = torch.eye(6, dtype=D) - torch.ones(6, 6, dtype=D).tril(-1)
    a[:, -1] = 1
    factors = torch.linalg.lu_factor(LinfTensor.of(a))[0]
    assert factors.norm_size == 32 == factors.backing.amax()
