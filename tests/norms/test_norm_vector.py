"""Norms with their sizes in one tensor are those of a dict of single sizes: values, derivatives, programs, errors."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from tests.norms.norm_map_models import KINDS, SIZES, Net, count_acquisitions, formula, state
from tests.seeds import seeded
from thunder_norm import LinfTensor, NormVector, RMSTensor, RMSToRMSTensor, build_norm_map, sensitivities, with_perturbation
from thunder_norm.errors import NormMapKeyError, NormMismatchError
from thunder_norm.norms.maps.scalars import FromVectors
from thunder_norm.transforms import NormTransform
import thunder


@pytest.fixture
def net():
    torch.manual_seed(seeded(0))
    return Net()


@pytest.fixture
def norm_map(net):
    return build_norm_map(net, torch.empty(4, 6))


def _by_formula(x: float, *, order: int) -> torch.Tensor:
    """The derivative of the formula to all sizes in their order, or its Hessian."""
    sizes = torch.tensor(list(SIZES.values()), dtype=torch.float64, requires_grad=True)

    def f(v: torch.Tensor) -> torch.Tensor:
        return formula(x, **dict(zip(SIZES, v, strict=True)))

    return torch.func.grad(f)(sizes) if order == 1 else torch.func.hessian(f)(sizes)


# -- values and derivatives ------------------------------------------------------------------------------------------------


def test_value_and_gradient_are_those_of_the_formula(norm_map):
    norms = NormVector(state(), requires_grad=True)
    y = norm_map(RMSTensor(1.25), normed_state_dict=norms)
    assert type(y) is RMSTensor and y.norm_size.item() == pytest.approx(formula(1.25, **SIZES), rel=1e-13)
    y.norm_size.backward()
    torch.testing.assert_close(norms.norm_sizes.grad, _by_formula(1.25, order=1), rtol=1e-12, atol=0)


def test_programs_are_shared_with_dicts(norm_map, monkeypatch):
    first = norm_map(RMSTensor(1.25), normed_state_dict=state(norm_size_requires_grad=True)).norm_size
    seen = count_acquisitions(monkeypatch)
    assert torch.equal(norm_map(RMSTensor(1.25), normed_state_dict=NormVector(state(), requires_grad=True)).norm_size, first)
    assert not seen
    norm_map(RMSTensor(1.25), normed_state_dict=NormVector({**state(), "w1": LinfTensor(1.0)}, requires_grad=True))
    norm_map(RMSTensor(1.25), normed_state_dict=NormVector(state()))
    assert len(seen) == 2


def test_hessian(norm_map):
    norms = NormVector(state(), requires_grad=True)
    y = norm_map(RMSTensor(1.25), normed_state_dict=norms).norm_size
    (first,) = torch.autograd.grad(y, norms.norm_sizes, create_graph=True)
    rows = [torch.autograd.grad(g, norms.norm_sizes, retain_graph=True)[0] for g in first]
    torch.testing.assert_close(torch.stack(rows), _by_formula(1.25, order=2), rtol=1e-12, atol=1e-13)


def test_mixed_derivative_with_the_input(norm_map):
    x, norms = RMSTensor(1.25, norm_size_requires_grad=True), NormVector(state(), requires_grad=True)
    y = norm_map(x, normed_state_dict=norms).norm_size
    by_x, by_norms = torch.autograd.grad(y, [x.norm_size, norms.norm_sizes], create_graph=True)
    assert by_x.item() == pytest.approx(SIZES["w1"] * SIZES["scale"] * SIZES["w2"], rel=1e-12)
    (crossed,) = torch.autograd.grad(by_norms[0], x.norm_size)  # d2 y / dw1 dx
    assert crossed.item() == pytest.approx(SIZES["scale"] * SIZES["w2"], rel=1e-12)


def test_a_parameter_of_the_model_beside_the_vector(net):
    """A 0-dim parameter that the program reads is an input of its own, with a gradient of its own."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.by = net, nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x):
            return self.net(x.double() * self.by)

    model = Scaled().double()
    norms = NormVector({f"net.{name}": v for name, v in state().items()}, requires_grad=True)
    y = build_norm_map(model, torch.empty(4, 6), parameters="measured")(RMSTensor(1.25), normed_state_dict=norms).norm_size
    assert y.item() == pytest.approx(formula(1.5 * 1.25, **SIZES), rel=1e-12)
    by_vector, by_scale = torch.autograd.grad(y, [norms.norm_sizes, model.by])
    torch.testing.assert_close(by_vector, _by_formula(1.5 * 1.25, order=1), rtol=1e-12, atol=0)
    assert by_scale.item() == pytest.approx(1.25 * SIZES["w1"] * SIZES["scale"] * SIZES["w2"], rel=1e-12)


def test_perturbations_are_a_vector_too(norm_map):
    given = {name: with_perturbation(v) for name, v in state().items()}
    x = with_perturbation(RMSTensor(1.25))
    want = sensitivities(norm_map(x, normed_state_dict=given), {**given, "x": x})
    norms = NormVector(state()).with_sizes(
        torch.tensor(list(SIZES.values())), torch.zeros(len(SIZES), dtype=torch.float64, requires_grad=True)
    )
    with torch.no_grad():  # which concerns the values, not how far they may move
        y = norm_map(x, normed_state_dict=norms)
    assert not y.norm_size.requires_grad
    (got,) = torch.autograd.grad(y.perturbation_size, norms.perturbation_sizes)
    for name, s in zip(SIZES, got, strict=True):
        assert s.item() == pytest.approx(want[name].item(), rel=1e-12)


def test_sensitivities_to_a_vector(norm_map):
    given = {name: with_perturbation(v) for name, v in state(norm_size_requires_grad=True).items()}
    want = sensitivities(norm_map(RMSTensor(1.25), normed_state_dict=given), given)
    norms = NormVector({name: with_perturbation(v) for name, v in state().items()}, requires_grad=True)
    assert norms.perturbation_sizes is not None and norms.perturbation_sizes.requires_grad
    y = norm_map(RMSTensor(1.25), normed_state_dict=norms)
    got = sensitivities(y, {"all": norms})["all"]
    assert got.tolist() == pytest.approx([s.item() for s in want.values()], rel=1e-12)
    (by_sizes,) = torch.autograd.grad(got[0], norms.norm_sizes)
    by_each = torch.autograd.grad(want["w1"], [v.norm_size for v in given.values()], materialize_grads=True)
    assert by_sizes.tolist() == pytest.approx([g.item() for g in by_each], rel=1e-12)
    for asked in (norms["w1"], dict(norms)):  # others than those that the norm map had: they would be said not to matter
        with pytest.raises(NormMismatchError, match="entry of a NormVector"):
            sensitivities(y, asked)
    with pytest.raises(NormMismatchError, match="carries no perturbation_size"):
        sensitivities(y, NormVector(state()))


def test_no_grad_and_inference_mode(norm_map):
    norms = NormVector(state(), requires_grad=True)
    want = norm_map(RMSTensor(1.25), normed_state_dict=norms).norm_size
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            y = norm_map(RMSTensor(1.25), normed_state_dict=norms).norm_size
        assert not y.requires_grad and torch.equal(y, want)


def test_sizes_computed_from_other_parameters(norm_map):
    """Logarithms are optimised; the vector of their exponentials is not a leaf."""
    logs, norms = torch.zeros(len(SIZES), dtype=torch.float64, requires_grad=True), NormVector(state())
    y = norm_map(RMSTensor(1.25), normed_state_dict=norms.with_sizes(logs.exp())).norm_size
    (got,) = torch.autograd.grad(y, logs)
    want = torch.func.grad(lambda v: formula(1.25, **dict(zip(SIZES, v.exp(), strict=True))))(logs.detach())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_norms_that_require_grad_stay_connected(norm_map):
    given = state(norm_size_requires_grad=True)
    y = norm_map(RMSTensor(1.25), normed_state_dict=NormVector(given)).norm_size
    found = torch.stack(torch.autograd.grad(y, [v.norm_size for v in given.values()]))
    torch.testing.assert_close(found, _by_formula(1.25, order=1), rtol=1e-12, atol=0)
    with pytest.raises(NormMismatchError, match="do already"):
        NormVector(given, requires_grad=True)


@pytest.mark.parametrize("size", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("position", range(len(SIZES)))
def test_zero_infinity_and_nan(norm_map, size, position):
    sizes = torch.tensor([size if i == position else v for i, v in enumerate(SIZES.values())], dtype=torch.float64)
    norms = NormVector(state()).with_sizes(sizes.requires_grad_())
    single = [s.detach().requires_grad_() for s in sizes]
    given = {name: KINDS[name](s) for name, s in zip(SIZES, single, strict=True)}
    results = [norm_map(RMSTensor(1.25), normed_state_dict=n).norm_size for n in (norms, given)]
    assert torch.equal(results[0].isnan(), results[1].isnan()) and (results[0].isnan() or torch.equal(*results))
    by_vector = torch.autograd.grad(results[0], sizes, create_graph=True)[0]
    by_each = torch.stack(torch.autograd.grad(results[1], single, create_graph=True))
    torch.testing.assert_close(by_vector, by_each, rtol=1e-12, atol=0, equal_nan=True)


def test_changes_in_place_are_seen(norm_map):
    norms = NormVector(state(), requires_grad=True)
    y = norm_map(RMSTensor(1.25), normed_state_dict=norms).norm_size
    with torch.no_grad():
        norms.norm_sizes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, norms.norm_sizes, create_graph=True)
    doubled = {name: 2 * size for name, size in SIZES.items()}
    assert norm_map(RMSTensor(1.25), normed_state_dict=norms).norm_size.item() == pytest.approx(formula(1.25, **doubled))


def test_one_entry_as_several_inputs_has_the_sum_of_their_gradients():
    layout = FromVectors([1, 0, 1, -1])
    carriers = [torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64), torch.tensor(7.0, dtype=torch.float64)]
    assert layout.values(carriers, []) == (3.0, 2.0, 3.0, 7.0)
    vector, other = layout.gradients([0.5, None, 0.25, 4.0], carriers)
    assert vector.tolist() == [0.0, 0.75, 0.0] and other.item() == 4.0
    assert layout.gradients([0.5, None, 0.25, None], carriers)[1] is None


@pytest.mark.parametrize("order", [[2, 0, -1], [3, 1, 0, 2, -2, -1], [4, -1], [1], [-1]])
def test_each_entry_has_the_gradient_of_its_input(order):
    vectors = [torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64), torch.tensor([11.0, 13.0], dtype=torch.float64)]
    others = [torch.tensor(float(17 + i), dtype=torch.float64) for i in range(sum(i < 0 for i in order))]
    layout, carriers = FromVectors(order), [*vectors, *others]
    given = [2.0, 3.0, 5.0, 11.0, 13.0, *(t.item() for t in others)]
    assert layout.values(carriers, []) == layout.values(carriers, given[:5]) == tuple(given[i] for i in order)
    for found in ([float(i + 1) for i in range(len(order))], [None, *(float(i + 1) for i in range(1, len(order)))]):
        expected = [sum(g for i, g in zip(order, found, strict=True) if i == e and g is not None) for e in range(5)]
        first, second, *rest = layout.gradients(found, carriers)
        assert [*first.tolist(), *second.tolist()] == expected
        assert [None if g is None else g.item() for g in rest] == [g for i, g in zip(order, found, strict=True) if i < 0]


# -- wherever a dict may stand -----------------------------------------------------------------------------------------------


def test_a_vector_is_a_mapping_of_norms():
    norms = NormVector({**state(), "other": 3})
    assert list(norms) == [*SIZES, "other"] and len(norms) == 5 and "w1" in norms and "no" not in norms
    assert type(norms["w1"]) is RMSToRMSTensor and norms["w1"].norm_size.item() == SIZES["w1"]
    assert type(norms["other"]) is torch.Tensor and norms["other"].item() == 3
    assert repr(norms).startswith("NormVector(w1, b1, w2, scale, other; norm_sizes=")
    backing = torch.zeros(2, 6)
    assert NormVector({"a": RMSTensor(1.0, backing=backing, elem_dims=(-2, -1))})["a"].elem_dims == (-2, -1)
    assert len(NormVector({})) == 0


def test_norm_transform_takes_it(net):
    x, norms = RMSTensor(1.25, backing=torch.zeros(4, 6)), NormVector(state(), requires_grad=True)
    y = thunder.jit(net, transforms=[NormTransform(parameters=norms)])(x).norm_size
    assert y.item() == pytest.approx(formula(1.25, **SIZES), rel=1e-13)
    (got,) = torch.autograd.grad(y, norms.norm_sizes)
    torch.testing.assert_close(got, _by_formula(1.25, order=1), rtol=1e-12, atol=0)


def test_given_when_the_norm_map_is_built(net):
    norms = NormVector(state(), requires_grad=True)
    y = build_norm_map(net, torch.empty(4, 6), parameters=norms)(RMSTensor(1.25)).norm_size
    assert y.item() == pytest.approx(formula(1.25, **SIZES), rel=1e-13)
    (got,) = torch.autograd.grad(y, norms.norm_sizes)
    torch.testing.assert_close(got, _by_formula(1.25, order=1), rtol=1e-12, atol=0)


def test_copies_and_pickles(norm_map):
    norms = NormVector(state(), requires_grad=True)
    want = norm_map(RMSTensor(1.25), normed_state_dict=norms).norm_size
    for other in (copy.deepcopy(norms), pickle.loads(pickle.dumps(norms))):
        assert other.norm_sizes is not norms.norm_sizes and other.norm_sizes.requires_grad
        assert torch.equal(norm_map(RMSTensor(1.25), normed_state_dict=other).norm_size, want)


# -- errors ------------------------------------------------------------------------------------------------------------------


def test_a_negative_entry_is_named(norm_map):
    norms = NormVector(state())
    norms.norm_sizes[2] = -0.5
    with pytest.raises(NormMismatchError, match=r">= 0, got -0.5 for 'w2'"):
        norm_map(RMSTensor(1.25), normed_state_dict=norms)
    norms.norm_sizes[0] = math.nan
    with pytest.raises(NormMismatchError, match=r">= 0, got -0.5 for 'w2'"):
        norm_map(RMSTensor(1.25), normed_state_dict=norms)


def test_what_is_no_vector_of_sizes_is_refused(norm_map):
    norms = NormVector(state())
    for bad in (
        torch.ones(3),
        torch.ones(4, 1),
        torch.ones(4, dtype=torch.int64),
        [1.0] * 4,
        torch.ones(4, dtype=torch.complex64),
    ):
        with pytest.raises(NormMismatchError, match=r"norm_sizes must be a floating tensor of shape \[4\]"):
            norms.with_sizes(bad)
    with pytest.raises(NormMismatchError, match="perturbation_sizes must be a floating tensor"):
        norms.with_sizes(torch.ones(4), torch.ones(5))
    with pytest.raises(NormMismatchError, match="bare sizes have no perturbation"):
        NormVector({**state(), "w1": 1.0}).with_sizes(torch.ones(4), torch.ones(4))
    with pytest.raises(NormMismatchError, match="for all of its norms or for none, not for 'b1'"):
        NormVector({**state(), "w1": with_perturbation(RMSToRMSTensor(1.0))})
    with pytest.raises(NormMismatchError, match="norm_size must be"):
        NormVector({"w1": "large"})
    norms.norm_sizes.resize_(3)
    with pytest.raises(NormMismatchError, match="4 names has 3 sizes"):
        norm_map(RMSTensor(1.25), normed_state_dict=norms)


def test_unknown_and_missing_names_are_refused(norm_map):
    with pytest.raises(NormMapKeyError, match="'w3'"):
        norm_map(RMSTensor(1.0), normed_state_dict=NormVector({**state(), "w3": 1.0}))
    with pytest.raises(NormMapKeyError, match="w2"):
        norm_map(RMSTensor(1.0), normed_state_dict=NormVector({k: v for k, v in state().items() if k != "w2"}))


def test_buffers_that_are_read_beside_a_vector_are_no_vectors_of_sizes():
    """Running statistics are tensors of the program: only a vector of sizes is taken apart."""
    model, x = nn.BatchNorm1d(4).eval(), LinfTensor(2.0)
    norms = {"weight": LinfTensor(3.0), "bias": LinfTensor(0.5)}
    norm_map = build_norm_map(model, torch.ones(2, 4, 3))
    found = [norm_map(x, normed_state_dict=given).norm_size.item() for given in (norms, NormVector(norms, requires_grad=True))]
    assert found[0] == pytest.approx(2 * 3 / (1 + model.eps) ** 0.5 + 0.5) == found[1]
