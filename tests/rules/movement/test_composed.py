"""Composed sensitivities: against singular values, ECLipsE-Fast written out, Jacobians, and an adversary on whole networks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.rules.movement import composed_programs as programs
from tests.seeds import seeded
from thunder_norm import (
    L2Tensor,
    LinfTensor,
    RMSTensor,
    build_norm_map,
    norm_mode,
    norm_report,
    norm_sensitivity,
    normed_op,
    sensitivities,
    with_perturbation,
)
from thunder_norm.core import one_bend
from thunder_norm.core.slopes import Slopes
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules.movement import slopes
from thunder_norm.transforms import NormTransform
import thunder

F64 = torch.float64


def composed(f, x, kind=L2Tensor, dims=(-1,), scope="composed") -> float:
    """The claimed sensitivity of f's output to x."""
    leaf = with_perturbation(kind.of(x, dims))
    with norm_sensitivity(scope):
        y = f(leaf)
    return sensitivities(y, leaf).item() * (1 if kind is RMSTensor else _to_l2(y))


def _to_l2(y) -> float:
    """What turns the norm of y into a length over its last dimension."""
    return 1.0 if isinstance(y, L2Tensor) else math.sqrt(y.shape[-1]) if y.elem_dims == (-1,) else math.nan


def matrices(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(seeded(seed))
    return [torch.randn(b, a, generator=make, dtype=F64) / a**0.5 for a, b in zip(sizes, sizes[1:], strict=False)]


def net(weights, act=F.relu):
    def run(x):
        for w in weights[:-1]:
            x = act(F.linear(x, w))
        return F.linear(x, weights[-1])

    return run


def eclipse_fast(weights) -> float:
    """ECLipsE-Fast, as in the paper: ``M_i = L I - L^2/4 W M_(i-1)^-1 W^T``, ``L = 2 / lambda_max(W M_(i-1)^-1 W^T)``."""
    m = torch.eye(weights[0].shape[1], dtype=F64)
    for w in weights[:-1]:
        q = w @ torch.linalg.inv(m) @ w.T
        factor = 2 / torch.linalg.eigvalsh(q)[-1]
        m = factor * torch.eye(len(q), dtype=F64) - factor**2 / 4 * q
    return torch.linalg.eigvalsh(weights[-1] @ torch.linalg.inv(m) @ weights[-1].T)[-1].sqrt().item()


def largest(w) -> float:
    return torch.linalg.matrix_norm(w, 2).item()


# -- what is exact ----------------------------------------------------------------------------------------------------


def test_linear_maps_are_composed_exactly():
    a, b, c = matrices(5, 7, 4, 6)
    f = lambda x: F.linear(F.linear(F.linear(x, a), b) * 3, c)[..., 1:].flip(-1)  # noqa: E731
    exact = largest(3 * c[1:] @ b @ a)
    x = torch.randn(3, 2, 5, dtype=F64)
    assert composed(f, x, RMSTensor) == pytest.approx(exact * math.sqrt(5 / 5), rel=1e-6)
    assert composed(f, x, RMSTensor, scope="global") > 1.2 * exact


def test_a_residual_that_is_linear_is_exact():
    (a,) = matrices(6, 6)
    x = torch.randn(4, 6, dtype=F64)
    assert composed(lambda x: x - F.linear(x, a), x, RMSTensor) == pytest.approx(largest(torch.eye(6, dtype=F64) - a), rel=1e-6)
    assert composed(lambda x: (x + 1) - x, x, RMSTensor) == pytest.approx(0, abs=1e-4)


def test_entries_and_lengths_are_read_in_the_norm_of_the_output():
    (a,) = matrices(5, 3)
    x = torch.randn(4, 5, dtype=F64)
    f = lambda x: F.linear(x, a)  # noqa: E731
    assert composed(f, x, RMSTensor) == pytest.approx(largest(a) * math.sqrt(5 / 3), rel=1e-6)
    rows = with_perturbation(RMSTensor.of(x))
    with norm_sensitivity("composed"):
        y = F.linear(rows, a[:1])[..., 0]
    assert isinstance(y, LinfTensor) or y.elem_dims == ()
    assert sensitivities(y, rows).item() == pytest.approx(a[0].norm().item() * math.sqrt(5), rel=1e-6)


@pytest.mark.parametrize("f", [torch.abs, torch.sin, lambda x: F.leaky_relu(x, -1.0), F.relu, torch.tanh, F.gelu])
def test_one_function_of_each_entry_has_its_steepest_slope(f):
    x = torch.randn(4, 5, dtype=F64)
    steepest = 0.5 * math.erfc(-1) + math.exp(-1) / math.sqrt(math.pi) if f is F.gelu else 1.0
    assert composed(f, x, RMSTensor) == pytest.approx(steepest, rel=2e-4)


# -- networks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [2, 5, 20, pytest.param(100, marks=pytest.mark.slow)])
def test_it_is_below_eclipse_fast_and_the_product(layers: int):
    weights = matrices(4, *[80] * layers, 1, seed=layers)
    x = torch.randn(2, 4, dtype=F64)
    found = composed(net(weights), x, RMSTensor) / math.sqrt(4)
    assert found < 0.8 * eclipse_fast(weights) < 0.8 * math.prod(map(largest, weights))
    smallest = torch.func.vmap(torch.func.jacrev(net(weights)))(torch.randn(64, 4, dtype=F64)).norm(dim=-1).max().item()
    assert smallest <= found


def test_a_residual_is_kept_together_with_its_branch():
    pairs = [matrices(32, 32, 32, seed=i) for i in range(8)]

    def f(x):
        for a, b in pairs:
            x = x + F.linear(F.relu(F.linear(x, a)), b) / 2
        return x

    x = torch.randn(3, 32, dtype=F64)
    product = math.prod(1 + largest(a) * largest(b) / 2 for a, b in pairs)
    apart = 1.0
    for a, b in pairs:  # sums of ellipsoids: what one block does to a ball is below (1 + |B| |A| / 2)
        apart *= 1 + eclipse_fast([a, b]) / 2
    found = composed(f, x, RMSTensor)
    assert programs.steepest(f, 32, 0, steps=20, starts=8) <= found < apart / 20 < product / 20


@pytest.mark.parametrize("seed", range(12))
def test_no_adversary_is_steeper(seed: int):
    f = programs.program(seed)
    claimed = composed(f, torch.randn(2, 6, dtype=F64), RMSTensor)
    out = f(torch.zeros(1, 6, dtype=F64)).shape[-1]
    found = programs.steepest(f, 6, seed) * math.sqrt(6 / out)
    assert found <= claimed * (1 + 1e-9)
    assert claimed <= composed(f, torch.randn(2, 6, dtype=F64), RMSTensor, scope="global") * (1 + 1e-3)


def _rows_mixed(x):
    return x - x.flip(0)


def _pairs(x):
    return (x[:, None] - x[None]).flatten(0, 1)


@pytest.mark.parametrize("f", [_rows_mixed, _pairs, lambda x: x - x.mean(0), lambda x: x.T - x, lambda x: x - x.roll(1, 0)])
def test_other_rows_are_not_the_same_row(f):
    """All rows move by 1, those next to each other in opposite directions: the differences of two move by up to 2."""
    x = torch.zeros(4, 4, dtype=F64)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)[:, None].expand(4, 4)
    moved = (f(x + signs) - f(x)).square().mean(-1).sqrt().max().item()
    assert composed(f, x, RMSTensor) >= moved * (1 - 1e-12)


PRODUCTS = {
    "x x": lambda x: x @ x,
    "x (c x)": lambda x: x @ (x * 0.01),
    "from the right": lambda x: torch.eye(3, dtype=F64) @ x @ (x * 0.01),
    "a row of it": lambda x: x * (x[:1] * 0.01),
    "unbatched convolution": lambda x: F.conv1d(x, (x * 0.01)[..., None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_moves_with_the_inputs_is_no_matrix_as_it_is(name: str):
    """The data at hand is 1000 times smaller than the norm that it is claimed to have."""
    f, at = PRODUCTS[name], torch.ones(3, 3, dtype=F64)
    claims = []
    for sensitivity in ("global", "composed"):
        x = with_perturbation(RMSTensor(1.0, backing=at / 1000))
        with norm_sensitivity(sensitivity):
            claims.append(sensitivities(f(x), x).item())
    step = 1e-6
    moved = f(at + step) - f(at)
    assert moved.abs().max().item() / step <= claims[1] * (1 + 1e-3)
    assert claims[1] == pytest.approx(claims[0], rel=1e-6)


def test_a_product_of_entries_is_bounded_by_those_that_the_norm_allows():
    """Of x y with x^2 + y^2 + z^2 <= 3 the gradient is as long as 3^(1/2), and a move of RMS 1 too; the data at hand is smaller."""
    claims = []
    for sensitivity in ("global", "composed"):
        x = with_perturbation(RMSTensor(1.0, backing=torch.ones(3, 3, dtype=F64) / 1000))
        with norm_sensitivity(sensitivity):
            claims.append(sensitivities(x.select(1, 0) * x.select(1, 1), x).item())
    assert 3 <= claims[1] < claims[0]


def test_the_largest_entry_may_be_another_one():
    """At this input the entry taken is one that moves by 1; at others the largest moves by 100."""
    factors = torch.tensor([100.0, 1.0], dtype=F64)
    f = lambda x: (x * factors).index_select(-1, torch.argmax((x.backing if hasattr(x, "backing") else x) * factors).reshape(1))  # noqa: E731
    x = torch.tensor([[-1.0, 0.5]], dtype=F64)
    assert composed(f, x, RMSTensor) >= 100
    masked = lambda x: x * ((x.backing if hasattr(x, "backing") else x) > 0)  # noqa: E731
    assert composed(masked, -x.abs(), RMSTensor) == pytest.approx(1, rel=1e-3)


# -- an adversary that is wrong about nothing finds rules that are -----------------------------------------------------------


def _exceeds(f, size: int) -> bool:
    x = torch.zeros(2, size, dtype=F64)
    out = f(x).shape[-1]
    return programs.steepest(f, size, 0, steps=60, starts=16) > composed(f, x, RMSTensor) * math.sqrt(out / size) * 1.0001


@pytest.mark.parametrize("broken", ["none", "slopes", "bend", "inflation"])
def test_the_adversary_finds_rules_that_claim_too_little(broken: str, monkeypatch: pytest.MonkeyPatch):
    eye = torch.eye(3, dtype=F64)
    f = lambda x: x + F.linear(torch.abs(F.linear(x, eye)), eye)  # noqa: E731
    if broken == "slopes":
        monkeypatch.setattr(normed_op(torch.abs), "movement_rule", slopes._between(torch.abs, lambda given: (-0.5, 0.5)))
    elif broken == "bend":
        monkeypatch.setattr(slopes, "between", slopes.between.__wrapped__)  # what is found of them is kept
        monkeypatch.setattr(Slopes, "half", property(lambda self: (self.high - self.low) / 8))
    elif broken == "inflation":
        too_large = lambda q, *rest: torch.full((3,), 0.99 / q.max().item(), dtype=F64) * 4  # noqa: E731
        monkeypatch.setattr(one_bend, "first_multipliers", too_large)
        monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: (torch.eye(len(a), dtype=F64) * 10, torch.tensor(0)))
    assert _exceeds(f, 3) == (broken != "none")


# -- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-43, 1e-150, 1e30, 1e-5])
def test_magnitudes_do_not_matter(factor: float):
    weights = matrices(4, 6, 6, 3)
    x = torch.randn(2, 4, dtype=F64)
    small = composed(net([weights[0] * factor, *weights[1:]]), x, RMSTensor)
    assert small == pytest.approx(factor * composed(net(weights), x, RMSTensor), rel=1e-9)


def test_weights_of_zeros_and_of_rank_one():
    a, b, c = matrices(4, 6, 6, 3)
    x = torch.randn(2, 4, dtype=F64)
    assert composed(net([a, b * 0, c]), x, RMSTensor) == 0
    assert composed(lambda x: x + net([a * 0, b[:4]])(x), x, RMSTensor) == pytest.approx(1, rel=1e-9)
    u, v = a[:, :1], a[:1]
    one = net([u @ v, b, c])
    bound = composed(one, x, RMSTensor) * math.sqrt(3 / 4)
    assert programs.steepest(one, 4, 0) <= bound <= largest(u @ v) * largest(b) * largest(c) * 1.0001
    dead = a.clone()
    dead[::2] = 0  # entries that never move
    few = net([dead, b, c])
    assert (
        programs.steepest(few, 4, 0)
        <= composed(few, x, RMSTensor) * math.sqrt(3 / 4)
        <= composed(net([dead[1::2], b[:, 1::2], c]), x, RMSTensor) * math.sqrt(3 / 4) * (1 + 1e-3)
    )


def test_infinite_weights_go_by_the_norm_rule():
    (a,) = matrices(3, 3)
    a[0, 0] = math.inf
    leaf = with_perturbation(RMSTensor.of(torch.randn(2, 3, dtype=F64)))
    with norm_sensitivity("composed"):
        y = F.linear(leaf, a)
    assert not math.isfinite(sensitivities(y, leaf).item())


def test_deep_networks_of_small_weights_do_not_vanish():
    weights = [w / 8 for w in matrices(4, *[10] * 60, 1)]
    found = composed(net(weights), torch.randn(2, 4, dtype=F64), RMSTensor)
    assert 0 < found < math.prod(map(largest, weights)) * 2


# -- where there is no such thing ---------------------------------------------------------------------------------------------


def test_traces_and_norm_maps_refuse_it():
    model = torch.nn.Linear(3, 3)
    with pytest.raises(NormMismatchError, match="not for a trace"):
        NormTransform(sensitivity="composed")
    norm_map = build_norm_map(model, torch.randn(2, 3, device="meta"))
    with norm_sensitivity("composed"):
        with pytest.raises(NormMismatchError, match="not for a norm map"):
            norm_map(RMSTensor(1.0))
        with pytest.raises(NormMismatchError, match="not for a trace"):
            thunder.jit(model, transforms=[NormTransform()])(RMSTensor.of(torch.randn(2, 3)))
    norm_map(RMSTensor(1.0))
    with pytest.raises(NormMismatchError, match="not for a norm map"):
        norm_report(norm_map, sensitivity="composed")


def test_other_modes_and_weights_without_values_are_refused():
    x = with_perturbation(RMSTensor.of(torch.randn(2, 3)))
    with norm_sensitivity("composed"):
        with norm_mode("typical"), pytest.raises(NormMismatchError, match="is a bound"):
            F.relu(x)
        on_meta = with_perturbation(RMSTensor(1.0, backing=torch.empty(2, 3, device="meta")))
        with pytest.raises(NormMismatchError, match="on meta"):
            F.linear(on_meta, torch.empty(4, 3, device="meta"))


_OF_BATCHES = {
    "rows of factors": lambda x: x * torch.ones(x.shape[0], 1, 1, dtype=F64),
    "mlp": torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2)),
    "attention": torch.nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
    "GRU": torch.nn.GRU(3, 2, batch_first=True),
    "LSTM, both directions": torch.nn.LSTM(3, 2, batch_first=True, bidirectional=True),
}


@pytest.mark.parametrize("scope", ["composed", "within"])
@pytest.mark.parametrize("name", _OF_BATCHES)
def test_a_batch_without_entries_does_not_move(name: str, scope):
    model = _OF_BATCHES[name]
    model = model.double().eval() if isinstance(model, torch.nn.Module) else model
    x = with_perturbation(RMSTensor(0.5, backing=torch.zeros(0, 4, 3, dtype=F64)), 0.1)
    with norm_sensitivity(scope):
        y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    assert y.numel() == 0 and 0 <= sensitivities(y, x).item() < math.inf


# -- reports ------------------------------------------------------------------------------------------------------------------


def _model():
    torch.manual_seed(seeded())
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6)
    )


def test_a_report_has_the_sensitivity_of_each_result_to_the_inputs():
    model, x = _model(), RMSTensor.of(torch.randn(4, 6))
    report = norm_report(thunder.jit(model, transforms=[NormTransform()]), x, sensitivity="composed")
    assert report.scope == "composed" and "when the inputs move by 1" in str(report)
    for i, row in enumerate(report):
        leaf = with_perturbation(x)
        with norm_sensitivity("composed"):
            y = model[: i + 1](leaf)
        assert row.sensitivity == pytest.approx(sensitivities(y, leaf).item(), rel=1e-5)
    assert all(r.sensitivity > 0 for r in report.parameters.values())


def test_a_report_refuses_what_has_no_ellipsoids():
    model, x = _model(), RMSTensor.of(torch.randn(4, 6))
    with pytest.raises(NormMismatchError, match="for parameters as they are"):
        norm_report(thunder.jit(model, transforms=[NormTransform(parameters="unit")]), x, sensitivity="composed")
    with pytest.raises(NormMismatchError, match="none is normed"):
        norm_report(thunder.jit(model, transforms=[NormTransform()]), torch.randn(4, 6), sensitivity="composed")


def test_parameters_that_move_count_by_the_norm_rules():
    model, x = _model(), RMSTensor.of(torch.randn(4, 6))
    both = {}
    for scope in ("global", "composed"):
        report = norm_report(thunder.jit(model, transforms=[NormTransform()]), x, sensitivity=scope)
        both[scope] = {name: row.sensitivity for name, row in report.parameters.items()}
    for name, found in both["composed"].items():
        assert 0 < found <= both["global"][name] * (1 + 1e-3)
    assert both["composed"]["4.bias"] == pytest.approx(1)


def test_it_is_differentiable_in_the_weights():
    weights = [w.requires_grad_() for w in matrices(4, 5, 3)]
    x = torch.randn(2, 4, dtype=F64)
    leaf = with_perturbation(RMSTensor.of(x))
    with norm_sensitivity("composed"):
        found = sensitivities(net(weights)(leaf), leaf)
    gradients = torch.autograd.grad(found, weights)
    # the multipliers do not follow the weights: a step against the gradient makes the bound smaller all the same
    smaller = [(w - 0.05 * g).detach() for w, g in zip(weights, gradients, strict=True)]
    assert composed(net(smaller), x, RMSTensor) < found.item()
    # where there are none it is the derivative of a singular value
    (w,) = matrices(4, 4)
    (gradient,) = torch.autograd.grad(_claimed_of_linear(w.requires_grad_(), x), w)
    (exact,) = torch.autograd.grad(torch.linalg.matrix_norm(w, 2), w)
    assert torch.allclose(gradient, exact, rtol=1e-4, atol=1e-6)


def _claimed_of_linear(w, x):
    leaf = with_perturbation(RMSTensor.of(x))
    with norm_sensitivity("composed"):
        y = F.linear(leaf, w)
    return sensitivities(y, leaf)


def test_images_go_through_convolutions_as_they_are():
    torch.manual_seed(seeded())
    layers = [torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.AvgPool2d(2)]
    model = torch.nn.Sequential(*layers, torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 5)).double().eval()
    x = torch.randn(2, 1, 8, 8, dtype=F64)
    found = composed(model, x, RMSTensor, (-3, -2, -1)) * math.sqrt(5 / 64)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(torch.randn(32, 1, 8, 8, dtype=F64))
    assert torch.linalg.matrix_norm(jacobians.flatten(2), 2).max().item() <= found
    assert found < composed(model, x, RMSTensor, (-3, -2, -1), "global") * math.sqrt(5 / 64) / 2


@pytest.mark.parametrize("size", [1, 3, 80])
@pytest.mark.parametrize("largest", [1e-150, 0.3, 0.7, 0.9, 0.99, 0.999, 0.9998, 1.001, 3.0])
def test_how_far_a_largest_eigenvalue_is_below_one(size: int, largest: float):
    torch.manual_seed(seeded(0))
    a = torch.randn(size, size, dtype=F64)
    for matrix in (a @ a.T, torch.eye(size, dtype=F64)):
        h = matrix * (largest / torch.linalg.eigvalsh(matrix)[-1])
        gap = one_bend.gap(h)
        assert (gap is None) == (largest >= 1)
        assert gap is None or (1 - largest) / 21 <= gap <= (1 - largest) * (1 + 1e-9)
