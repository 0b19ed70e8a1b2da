"""Composed sensitivities of operations that are several in one, of sums along a dimension, of choices and of messages between rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.rules.movement import composed_programs as programs
from tests.seeds import seeded
from thunder_norm import L2Tensor, RMSTensor, norm_report, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.transforms import NormTransform
import thunder

F64 = torch.float64
SIZE = 6


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seeded(seed))) / 2


def turned(seed: int) -> torch.Tensor:
    return torch.linalg.qr(drawn(SIZE, SIZE, seed=seed))[0]


# what W stretches most V and U stretch least, whatever is drawn: the product of their norms is never what they do one after the other
SHARED, STRETCHED = turned(1), torch.linspace(2.0, 0.2, SIZE, dtype=F64)
W = SHARED * STRETCHED @ turned(2)
V, U = (turned(s) * STRETCHED.flip(0) @ SHARED.mT for s in (3, 10))
ROW = drawn(SIZE, seed=4)

LINEAR = {
    "cumsum": lambda x: F.linear(F.linear(x, W).cumsum(-1), V),
    "cumsum, of another dtype": lambda x: F.linear(torch.cumsum(x, 1, dtype=F64), V),
    "lerp": lambda x: F.linear(torch.lerp(F.linear(x, W), x, 0.3), V),
    "lerp by each entry's weight": lambda x: F.linear(torch.lerp(x, F.linear(x, W), ROW), V),
    "addcmul": lambda x: F.linear(torch.addcmul(F.linear(x, W), x, ROW, value=-0.7), V),
    "addcdiv": lambda x: F.linear(torch.addcdiv(F.linear(x, W), x, 1 + ROW.square(), value=0.5), V),
    "addmm": lambda x: F.linear(torch.addmm(x, F.linear(x, W), U, beta=-0.5, alpha=2), V),
}
BENT = {
    "glu": lambda x: F.linear(F.glu(F.linear(x, torch.cat([W, V])), -1), U),
    "leaky relu, written out": lambda x: (lambda h: F.linear(torch.where(h > 0, h, 0.1 * h), V))(F.linear(x, W)),
    "relu, written out": lambda x: (lambda h: F.linear(torch.where(h > 0, h, 0.0), V))(F.linear(x, W)),
    "a gate that is added": lambda x: F.linear(torch.addcmul(x, torch.sigmoid(F.linear(x, V)), torch.tanh(x), value=2), W),
    "between two": lambda x: F.linear(torch.lerp(F.linear(x, W), F.relu(x), 0.5), V),
}


def claimed(f, x: torch.Tensor, sensitivity: str, kind: type = L2Tensor) -> float:
    leaf = with_perturbation(kind.of(x))
    with norm_sensitivity(sensitivity):
        y = f(leaf)
    # of other kinds than L2 the largest row's mean, which a length is the root of its size times
    return sensitivities(y, leaf).item() * (1 if isinstance(y, L2Tensor) or kind is RMSTensor else math.sqrt(y.shape[-1]))


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_the_norm_of_its_matrix(name: str):
    f, x = LINEAR[name], drawn(3, SIZE, seed=5)
    matrix = torch.func.jacrev(lambda t: f(t[None])[0])(x[0])
    exact = torch.linalg.matrix_norm(matrix, 2).item()
    assert claimed(f, x, "composed") == pytest.approx(exact, rel=1e-6)
    assert exact < 0.98 * claimed(f, x, "global")


@pytest.mark.parametrize("name", BENT)
def test_what_is_bent_is_less_than_the_product_and_no_less_than_an_adversary_finds(name: str):
    f, x = BENT[name], 3 * drawn(3, SIZE, seed=5)
    found = claimed(f, x, "composed")
    largest = x.norm(dim=-1).amax()

    def near(t: torch.Tensor) -> torch.Tensor:  # rows of at most that length, which products of two depend on
        return f(t * (largest / t.norm(dim=-1, keepdim=True)).clamp(max=1.0))

    # the nearest point of a ball is no further from another one than the point itself
    assert programs.steepest(near, SIZE, 0, steps=60, starts=24) <= found * (1 + 1e-9)
    assert found < 0.98 * claimed(f, x, "global")


def test_baddbmm_of_fixed_matrices_is_linear_in_both():
    weights = drawn(2, SIZE, SIZE, seed=6)[:1].expand(2, SIZE, SIZE)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.baddbmm(F.linear(x, W), x, weights[: len(x)], beta=0.5, alpha=-2), V)

    x = drawn(2, 3, SIZE, seed=5)
    matrix = torch.func.jacrev(lambda t: f(t[None, None])[0, 0])(x[0, 0])
    exact = torch.linalg.matrix_norm(matrix, 2).item()
    assert claimed(f, x, "composed") == pytest.approx(exact, rel=1e-6)
    weights = drawn(2, SIZE, SIZE, seed=6)  # of others each row has one, and no one matrix is that of all
    largest = max(torch.linalg.matrix_norm(torch.func.jacrev(f)(x)[i, j, :, i, j], 2).item() for i in range(2) for j in range(3))
    assert largest <= claimed(f, x, "composed")


SOURCE, TARGET = torch.tensor([0, 1, 2, 3, 4, 0, 2]), torch.tensor([1, 2, 3, 4, 0, 3, 0])


def messages(x: torch.Tensor) -> torch.Tensor:
    """Of each edge of a graph, added where it ends."""
    h = F.linear(x, W).index_add(0, TARGET, F.relu(F.linear(x, U))[SOURCE], alpha=0.5)
    return F.linear(h.index_add(0, TARGET, torch.tanh(h).index_select(0, SOURCE)), V)


@pytest.mark.parametrize("sensitivity", ["composed", "within"])
def test_messages_between_rows_are_less_than_the_product(sensitivity: str):
    x = 2 * drawn(5, SIZE, seed=7)
    found = claimed(messages, x, sensitivity, RMSTensor)
    jacobian = torch.func.jacrev(messages)(x)
    moves = F.normalize(drawn(500, 5, SIZE, seed=8), dim=-1)
    reached = torch.einsum("iajb,njb->nia", jacobian, moves).norm(dim=-1).amax().item()
    assert reached <= found < 0.98 * claimed(messages, x, "global", RMSTensor)


def test_rows_by_number_are_those_of_any_other_numbers_too():
    """The largest entry of each row is of another row for other inputs, and goes on moving as far."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, W)[x.norm(dim=-1).argsort()].sum(0, keepdim=True)

    x = drawn(3, SIZE, seed=9)
    exact = 3 * torch.linalg.matrix_norm(W, 2).item()
    assert exact * (1 - 1e-9) <= claimed(f, x, "composed") <= exact * (1 + 1e-6)


def test_features_by_number_are_not_taken_for_those_at_hand():
    """``sort`` by its places, which are others for other inputs: by the norm rule, whatever comes after them."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.index_select(-1, x[0].argsort()), W)

    x = drawn(1, SIZE, seed=9)
    assert programs.steepest(lambda t: F.linear(t.sort(-1).values, W), SIZE, 0, steps=20, starts=8) <= claimed(f, x, "composed")


class _Written(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.row = torch.nn.Parameter(torch.cat([W, V])), torch.nn.Parameter(ROW.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(F.glu(F.linear(x, self.weight), -1), x, self.row)


def test_a_report_has_rows_of_the_programs_operations_and_the_slopes_of_its_parameters():
    model, x = thunder.jit(_Written(), transforms=[NormTransform()]), drawn(3, SIZE, seed=5)
    report = norm_report(model, RMSTensor.of(x), sensitivity="composed")
    assert [row.op for row in report.rows] == ["linear", "glu", "addcmul"]
    # a move of 1 in each entry of the parameter moves the result by x
    assert report.parameters["row"].sensitivity >= x.square().mean(-1).sqrt().amax().item() * (1 - 1e-9)


COSINES = {
    "of rows": lambda x: F.cosine_similarity(F.linear(x, W), F.linear(x, V) + 1, dim=-1),
    "along rows": lambda x: F.cosine_similarity(x, F.linear(x, U), dim=1, eps=0.1),
    "with what stays": lambda x: F.cosine_similarity(F.linear(x, W), ROW, dim=-1),
}


@pytest.mark.parametrize("name", COSINES)
def test_a_cosine_near_the_data_is_one_of_normalizations(name: str):
    """At the data its Jacobian's norm, and no adversary moves it further within a radius."""
    f, x = COSINES[name], drawn(1, 4, SIZE, seed=8) + 0.5
    jacobian = torch.func.jacrev(f)(x)
    largest = torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2).item()

    def within(radius: float) -> float:
        leaf = with_perturbation(L2Tensor(x.norm() + radius, backing=x, elem_dims=(-2, -1)), radius)
        with norm_sensitivity("within"):
            y = f(leaf)
        return sensitivities(y, leaf).item()  # of the largest entry

    steepest = jacobian.reshape(-1, x.numel()).norm(dim=1).amax().item()
    assert steepest * (1 - 1e-9) <= within(0.0) <= largest * (1 + 1e-6)
    claim, radius = within(0.05), 0.05
    assert claim < 3 * largest
    generator = torch.Generator().manual_seed(seeded(3))
    for _ in range(8):
        d = torch.randn(x.shape, generator=generator, dtype=F64)
        d = radius * d / d.norm()
        for _ in range(20):
            d = d.detach().requires_grad_()
            (moved := (f(x + d) - f(x)).abs().amax() / d.norm()).backward()
            assert moved.item() <= claim * (1 + 1e-9)
            assert d.grad is not None
            d = radius * d.grad / d.grad.norm().clamp_min(1e-30)
