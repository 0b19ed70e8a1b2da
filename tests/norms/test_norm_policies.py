"""What `NormTransform(parameters=...)` and annotations make of a program's parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.norms.norm_models import Net, Tied, assert_same_normed, jit
from tests.seeds import seeded
from thunder_norm import (
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    annotate,
    normed,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import (
    MissingNormRuleError,
    NormMapKeyError,
    NormMismatchError,
)
from thunder_norm.norms.eager import run_eagerly
import thunder

# -- eager and traced agree ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Net:
    """Shared by tests that only read it."""
    torch.manual_seed(seeded(1))
    return Net()


# -- normed() --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """Some tokens."""
    return torch.tensor([[0, 1, 6], [2, 2, 5]])


# -- policies --------------------------------------------------------------------------------------------------------------


def test_given_norms_are_read_anew_in_each_call(model):
    sizes: dict[str, Any] = {"w1": 2.0, "b1": 0.0, "w2": torch.tensor(3.0), "b2": 0.25}
    jm = jit(model, parameters=sizes)
    x = RMSTensor(1.5, backing=torch.randn(2, 6))
    assert jm(x).norm_size.item() == 1.5 * 2 * 3 + 0.25
    sizes["w1"] = 4
    assert jm(x).norm_size.item() == 1.5 * 4 * 3 + 0.25
    sizes["w2"].fill_(0.5)
    assert jm(x).norm_size.item() == 1.5 * 4 * 0.5 + 0.25
    assert thunder.cache_misses(jm) == 1
    sizes["w1"] = RMSToRMSTensor(1.0)
    assert jm(x).norm_size.item() == 1.5 * 0.5 + 0.25
    sizes["w1"] = RMSToRMSTensor(2.0)
    assert jm(x).norm_size.item() == 1.5 * 2 * 0.5 + 0.25


def test_a_given_norm_of_another_kind_compiles_again(model):
    sizes: dict[str, Any] = {"w1": 1.0, "b1": 0.0, "w2": RMSToRMSTensor(2.0), "b2": 0.0}
    jm = jit(model, parameters=sizes)
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    assert jm(x).norm_size.item() == 2
    compiled = thunder.cache_misses(jm)
    sizes["w2"] = RMSTensor(2.0, elem_dims=(-2, -1))  # Frobenius: the operator norm is at most the input dimension times
    assert jm(x).norm_size.item() == pytest.approx(2 * 10)
    assert thunder.cache_misses(jm) == compiled + 1
    sizes["w2"] = with_perturbation(RMSToRMSTensor(2.0))
    y = jm(x)
    assert thunder.cache_misses(jm) == compiled + 2
    assert torch.autograd.grad(y.perturbation_size, sizes["w2"].perturbation_size)[0].item() == 1
    sizes["w2"] = RMSToRMSTensor(3.0)
    assert jm(x).norm_size.item() == 3
    assert thunder.cache_misses(jm) == compiled + 2


def test_a_given_norm_that_begins_to_require_grad_compiles_again(model):
    sizes = {name: 1.0 for name, _ in model.named_parameters()}
    jm = jit(model, parameters=sizes)
    x = RMSTensor(2.0, backing=torch.randn(2, 6))
    assert jm(x).norm_size.item() == 4
    size = sizes["w1"] = torch.tensor(1.0, requires_grad=True)
    assert torch.autograd.grad(jm(x).norm_size, size)[0].item() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_given_tensor_may_require_grad_where_no_gradients_are_recorded(dtype):
    jm = jit(nn.Linear(6, 3, bias=False), parameters={"weight": torch.tensor(3.0, dtype=dtype, requires_grad=True)})
    x = RMSTensor(2.0, backing=torch.randn(2, 6))
    for _ in range(2):
        with torch.no_grad():
            assert jm(x).norm_size.item() == 6
        assert jm(x).norm_size.item() == 6
    assert thunder.cache_misses(jm) == 2


def test_parameters_that_are_not_named_are_measured(model):
    jm = jit(model, parameters={"w1": 2.0})
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    with torch.no_grad():
        w = RMSToRMSTensor.of(model.w2).norm_size
        b0, b2 = (RMSTensor.of(b).norm_size for b in (model.b1, model.b2))
        assert jm(x).norm_size.item() == pytest.approx(((2 + b0) * w + b2).item(), rel=1e-6)


def test_unit_is_1_in_the_natural_norm_and_needs_no_weights(model):
    jm = jit(model, parameters="unit")
    y = jm(RMSTensor(5.0, backing=torch.randn(2, 6)))
    assert y.norm_size.item() == (5 * 1 + 1) * 1 + 1
    assert not any("operator_norm" in str(b.sym.name) for b in thunder.last_traces(jm)[-1].bound_symbols)


def test_measured_sizes_are_differentiable_in_the_weights(model):
    x = RMSTensor(2.0, backing=torch.randn(2, 6))
    y = jit(model)(x)
    got = torch.autograd.grad(y.norm_size, list(model.parameters()))
    want = torch.autograd.grad(model(x).norm_size, list(model.parameters()))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    weight = model.w2
    formula = torch.autograd.grad(torch.linalg.matrix_norm(weight, 2) * math.sqrt(10 / 3), weight)[0]
    first = RMSToRMSTensor.of(model.w1).norm_size * 2 + RMSTensor.of(model.b1).norm_size
    torch.testing.assert_close(got[2], formula * first.float())


def test_weights_that_change_change_the_norm():
    model = Net()
    jm = jit(model)
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    before = jm(x).norm_size.item()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with torch.no_grad():
        want = model(x).norm_size.item()
    assert jm(x).norm_size.item() == pytest.approx(want, rel=1e-6) != before
    assert thunder.cache_misses(jm) == 1


class WithBuffer(nn.Module):
    """A parameter and a buffer, both factors."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((6,), 3.0))
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x):
        return x * self.scale * self.gain


@pytest.mark.parametrize(
    ("parameters", "size"), [("measured", 6.0), ("unit", 2.0), ({"gain": 5.0}, 10.0), ({"scale": 4.0}, 12.0), ({}, 6.0)]
)
def test_buffers_are_measured_unless_given(parameters, size):
    model = WithBuffer()
    x = LinfTensor(1.0, backing=torch.ones(2, 6))
    assert jit(model, parameters=parameters)(x).norm_size.item() == size
    assert run_eagerly(model, (x,), {}, policy=parameters, mode="bound")[0].norm_size.item() == size


class Derived(nn.Module):
    """A weight is changed before it is used."""

    def __init__(self, how: Callable, shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.how = how

    def forward(self, x):
        return F.linear(x, self.how(self.weight))


DERIVED = {
    "t": (lambda w: w.t(), (6, 10), (-1, -2), 1.0),
    "T": (lambda w: w.T, (6, 10), (-1, -2), 1.0),
    "mT": (lambda w: w.mT, (6, 10), (-1, -2), 1.0),
    "transpose": (lambda w: w.transpose(0, 1).contiguous(), (6, 10), (-1, -2), 1.0),
    "cast": (lambda w: w.t().to(torch.float64), (6, 10), (-1, -2), 1.0),
    "scaled": (lambda w: -2 * w.t(), (6, 10), (-1, -2), 2.0),
    "view": (lambda w: w.reshape(-1).view(10, 6), (10, 6), (-2, -1), None),
    "rows": (lambda w: w[2:7], (10, 6), (-2, -1), math.sqrt(10 / 5)),
    "chunk": (lambda w: w.chunk(2)[1], (10, 6), (-2, -1), math.sqrt(10 / 5)),
    "unbind": (lambda w: w.unbind(0)[1], (3, 10, 6), (-2, -1), 1.0),
    "sum": (lambda w: w + w / 2, (10, 6), (-2, -1), 1.5),
}


@pytest.mark.parametrize("name", DERIVED)
def test_tensors_made_from_parameters_alone_get_their_norm_from_them(name):
    how, shape, dims, factor = DERIVED[name]
    model = Derived(how, shape)
    x = RMSTensor(2.0, backing=torch.randn(3, 6, dtype=torch.float64))
    leaf = with_perturbation(RMSToRMSTensor(3.0, elem_dims=dims))
    with torch.no_grad():
        exact = RMSToRMSTensor.of(how(model.weight)).norm_size.item()
        for parameters, size in (("unit", 1.0), ({"weight": 3.0}, 3.0), ("measured", exact), ({}, exact)):
            y = jit(model, parameters=parameters)(x)
            want, _ = run_eagerly(model, (x,), {}, policy=parameters, mode="bound")
            assert_same_normed(y, want)
            expected = 2 * size * (1.0 if size == exact else factor or 1.0)
            if factor is not None or size == exact:
                assert y.norm_size.item() == pytest.approx(expected, rel=1e-12)
    y = jit(model, parameters={"weight": leaf})(x)
    moved = sensitivities(y, [leaf])[0].item()
    assert moved == pytest.approx(y.norm_size.item() / 3, rel=1e-12) and moved >= 2 * (factor or 1.0) * (1 - 1e-12)


@pytest.mark.parametrize("how", [lambda w: torch.detach_copy(w), torch.linalg.inv], ids=["detach_copy", "inv"])
def test_a_tensor_made_from_a_given_norm_by_an_operation_without_a_rule_is_refused(how):
    """Its own norm would have nothing to do with the one given."""
    model = Derived(how, (6, 6))
    x = RMSTensor(1.0, backing=torch.randn(3, 6, dtype=torch.float64))
    exact = RMSToRMSTensor.of(how(model.weight.detach())).norm_size.item()
    for parameters in ("measured", {}):
        with torch.no_grad():
            assert jit(model, parameters=parameters)(x).norm_size.item() == pytest.approx(exact)
            assert run_eagerly(model, (x,), {}, policy=parameters, mode="bound")[0].norm_size.item() == pytest.approx(exact)
    for parameters in ("unit", {"weight": 1.0}):
        for run in (
            lambda: jit(model, parameters=parameters)(x),  # noqa: B023
            lambda: run_eagerly(model, (x,), {}, policy=parameters, mode="bound"),  # noqa: B023
        ):
            with pytest.raises((MissingNormRuleError, NormMismatchError), match="no norm rule for torch|singular"):
                run()


@pytest.mark.parametrize(
    "how, instead",
    [(lambda w: w.clone().mul_(2), lambda w: w * 2), (lambda w: F.relu(w.clone(), inplace=True), F.relu)],
    ids=["mul_", "relu"],
)
def test_in_place_on_a_tensor_made_from_parameters_is_as_out_of_place(how, instead):
    """The norm is that of the data where the parameter's is; else it is what the operation makes of the one given."""
    model, other = Derived(how, (6, 6)), Derived(instead, (6, 6))
    x = RMSTensor(1.0, backing=torch.randn(3, 6, dtype=torch.float64))
    with torch.no_grad():
        exact = RMSToRMSTensor.of(how(model.weight)).norm_size.item()
        assert jit(model)(x).norm_size.item() == pytest.approx(exact, rel=1e-12)
        measured = run_eagerly(model, (x,), {}, policy="measured", mode="bound")[0]
        assert measured.norm_size.item() == pytest.approx(exact, rel=1e-12)
    expected = jit(other, parameters="unit")(x).norm_size.item()
    assert jit(model, parameters="unit")(x).norm_size.item() == pytest.approx(expected)
    assert run_eagerly(model, (x,), {}, policy="unit", mode="bound")[0].norm_size.item() == pytest.approx(expected)


def test_one_parameter_used_twice_is_lifted_once(model):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return F.linear(F.linear(x, self.weight), self.weight)

    jm = jit(Twice())
    y = jm(RMSTensor(1.0, backing=torch.randn(2, 6)))
    assert sum("operator_norm" in b.sym.name for b in thunder.last_traces(jm)[-1].bound_symbols) == 1
    w = RMSToRMSTensor.of(jm._model.weight).norm_size.item()
    assert y.norm_size.item() == pytest.approx(w * w, rel=1e-6)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_parameter_may_be_given_under_either_name(ids, name):
    leaf = with_perturbation(RMSTensor(2.0))
    model = Tied()
    y = normed(jit(model, parameters={name: leaf}))(ids)
    want, _ = run_eagerly(model, (ids,), {}, policy={name: leaf}, mode="bound")
    assert_same_normed(y, want)
    # logits: 6 entries of at most 2 * 2, moved by both uses
    assert y.norm_size.item() == 6 * 2 * 2
    assert torch.autograd.grad(y.perturbation_size, leaf.perturbation_size)[0].item() == 2 * 6 * 2


# -- annotations -----------------------------------------------------------------------------------------------------------


def test_an_annotation_overrides_the_natural_kind():
    torch.manual_seed(seeded(2))
    model = Net()
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    w = model.w2.detach()
    assert annotate(model, w2=RMSTensor) is model  # rows in RMS: the un-embedding rule
    with torch.no_grad():
        inner = RMSToRMSTensor.of(model.w1).norm_size + RMSTensor.of(model.b1).norm_size
        y = jit(model)(x)
        want, _ = run_eagerly(model, (x,), {}, policy="measured", mode="bound")
        assert_same_normed(y, want)
    assert type(y) is LinfTensor
    expected = 10 * inner * RMSTensor.of(w).norm_size + LinfTensor.of(model.b2.detach()).norm_size
    assert y.norm_size.item() == pytest.approx(expected.item(), rel=1e-6)


def test_an_annotation_may_state_elem_dims():
    model = nn.Linear(6, 4, bias=False)
    annotate(model, weight=RMSTensor, elem_dims={"weight": (0, 1)})
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    frobenius = RMSTensor.of(model.weight.detach(), (0, 1)).norm_size.item()
    with torch.no_grad():
        assert jit(model)(x).norm_size.item() == pytest.approx(6 * frobenius, rel=1e-6)
    assert jit(model, parameters="unit")(x).norm_size.item() == pytest.approx(6)


def test_a_given_kind_goes_before_an_annotation():
    model = nn.Linear(6, 4, bias=False)
    annotate(model, weight=RMSTensor)
    x = RMSTensor(1.0, backing=torch.randn(2, 6))
    y = jit(model, parameters={"weight": RMSToRMSTensor(2.0)})(x)
    assert type(y) is RMSTensor and y.norm_size.item() == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wieght": RMSTensor}, NormMapKeyError, r"no parameter or buffer 'wieght' of its own; it has \['bias', 'weight'\]"),
        ({"weight": "rms"}, NormMismatchError, "must be a kind"),
        ({"weight": NormedTensor}, NormMismatchError, "must be a kind"),
        ({"weight": torch.Tensor}, NormMismatchError, "must be a kind"),
        ({"mass": -1.0}, NormMismatchError, "mass must be a number >= 0"),
        ({"mass": math.nan}, NormMismatchError, "mass must be a number >= 0"),
        ({"elem_dims": {"weight": (0,)}}, NormMapKeyError, "have no kind"),
    ],
)
def test_mistakes_in_an_annotation_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        annotate(nn.Linear(6, 4), **options)
