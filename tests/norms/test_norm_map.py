"""Norm maps: the same numbers as the normed program, without data, as a function of scalars."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.norms.norm_map_models import SIZES, count_acquisitions, formula, state
from tests.sizes import assert_same_size
from thunder_norm import (
    LinfTensor,
    NormedTensor,
    NormVector,
    RMSTensor,
    RMSToRMSTensor,
    build_norm_map,
    load_norm_map,
    normed_op,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import AcquiredAnewWarning, NormMismatchError, ThunderNormError, UnsupportedOpError
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform
import thunder

# -- the document's example ------------------------------------------------------------------------------------------------


def test_the_example_of_the_reference_implementation():
    """A custom function with a rule, a factory function, learnable norms and scale factors, on the meta device."""

    @normed_op
    def mul_with_scaler(input: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert scale.ndim == 0
        return input * scale

    @mul_with_scaler.register_norm(allow_plain_tensors=True)
    def _(input: NormedTensor, scale: torch.Tensor) -> NormedTensor:
        assert scale.ndim == 0
        return type(input)(input.norm_size * scale, elem_dims=input.elem_dims, sensitivity={"input": scale})

    @normed_op
    def noise(size: list[int]) -> torch.Tensor:
        return torch.zeros(size, device="meta")

    @noise.register_norm
    def _(size: list[int]) -> RMSTensor:
        return RMSTensor(1, elem_dims=None, sensitivity={})

    class Block(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False, device="meta")
            self.scale = nn.Parameter(scale)

        def forward(self, x):
            return x + mul_with_scaler(F.relu(self.linear(x)), self.scale) + noise([8])

    scale = torch.tensor(0.5)
    model = Block(scale)
    norm_map = build_norm_map(model, torch.empty(2, 8, device="meta"))
    x = RMSTensor(2.0, norm_size_requires_grad=True)
    weight = RMSToRMSTensor(3.0, norm_size_requires_grad=True)
    y = norm_map(x, normed_state_dict={"linear.weight": weight})
    assert type(y) is RMSTensor and y.norm_size.item() == 2 + 3 * 2 * 0.5 + 1
    assert y.device.type == "meta" and y.shape == (2, 8)
    grads = torch.autograd.grad(y.norm_size, [x.norm_size, weight.norm_size, model.scale])
    assert [g.item() for g in grads] == [1 + 3 * 0.5, 2 * 0.5, 2 * 3]
    # optimise the scale factor with torch.optim, as the document does
    optimizer = torch.optim.SGD([model.scale], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        norm_map(x, normed_state_dict={"linear.weight": weight}).norm_size.backward()
        optimizer.step()
    assert model.scale.item() == pytest.approx(0.5 - 3 * 0.01 * 6)


def test_factories_with_a_rule():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn(3, 6)

    y = build_norm_map(Noisy(), torch.empty(3, 6), mode="typical")(RMSTensor(2.0))
    assert y.norm_size.item() == 3
    with pytest.raises(ThunderNormError):
        build_norm_map(Noisy(), torch.empty(3, 6))(RMSTensor(2.0))  # no bound holds for every draw


# -- values and derivatives ------------------------------------------------------------------------------------------------


def test_a_norm_map_is_the_norm_of_the_program(norm_map, net):
    y = norm_map(RMSTensor(1.25), normed_state_dict=state())
    assert type(y) is RMSTensor and y.elem_dims == (-1,) and y.shape == (4, 3) and y.device.type == "meta"
    assert y.norm_size.item() == pytest.approx(formula(1.25, **SIZES), rel=1e-13)
    x = RMSTensor(1.25, backing=torch.zeros(4, 6))
    want = thunder.jit(net, transforms=[NormTransform(parameters=state())])(x)
    assert_same_size(y.norm_size, want.norm_size)
    assert_same_size(y.norm_size, run_eagerly(net, (x,), {}, policy=state(), mode="bound")[0].norm_size)


@pytest.mark.parametrize("mode", ["typical", "modula"])
def test_modes(net, mode):
    y = build_norm_map(net, torch.empty(4, 6), mode=mode)(with_perturbation(RMSTensor(1.25)), normed_state_dict=state())
    x = with_perturbation(RMSTensor(1.25, backing=torch.zeros(4, 6)))
    want, _ = run_eagerly(net, (x,), {}, policy=state(), mode=mode)
    assert_same_size(y.norm_size, want.norm_size)


def test_derivatives_to_the_input_and_every_parameter(norm_map):
    x, leaves = RMSTensor(1.25, norm_size_requires_grad=True), state(norm_size_requires_grad=True)
    y = norm_map(x, normed_state_dict=leaves)
    got = torch.autograd.grad(y.norm_size, [x.norm_size, *(v.norm_size for v in leaves.values())])
    sizes = torch.tensor([1.25, *SIZES.values()], dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(formula(sizes[0], **dict(zip(SIZES, sizes[1:], strict=True))), sizes)[0]
    for g, w in zip(got, want, strict=True):
        assert g.item() == pytest.approx(w.item(), rel=1e-12)


def test_second_derivatives(norm_map):
    x, leaves = RMSTensor(1.25, norm_size_requires_grad=True), state(norm_size_requires_grad=True)
    wanted = [x.norm_size, *(v.norm_size for v in leaves.values())]
    sizes = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.25, *SIZES.values())]

    def second(value: torch.Tensor, inputs: list[torch.Tensor]) -> tuple:
        first = torch.autograd.grad(value, inputs, create_graph=True)
        return torch.autograd.grad(sum(g * (i + 1) for i, g in enumerate(first)), inputs)

    got = second(norm_map(x, normed_state_dict=leaves).norm_size, wanted)
    want = second(formula(sizes[0], **dict(zip(SIZES, sizes[1:], strict=True))), sizes)
    for g, w in zip(got, want, strict=True):
        assert g.item() == pytest.approx(w.item(), rel=1e-12)


def test_sensitivities(norm_map):
    x = with_perturbation(RMSTensor(1.25, norm_size_requires_grad=True))
    leaves = {name: with_perturbation(v) for name, v in state().items()}
    y = norm_map(x, normed_state_dict=leaves)
    found = sensitivities(y, {**leaves, "x": x})
    sizes = {name: torch.tensor(v, dtype=torch.float64, requires_grad=True) for name, v in {"x": 1.25, **SIZES}.items()}
    want = dict(zip(sizes, torch.autograd.grad(formula(**sizes), list(sizes.values())), strict=True))  # multilinear
    for name, s in found.items():
        assert s.item() == pytest.approx(want[name].item(), rel=1e-12)
    (got,) = torch.autograd.grad(found["w2"], x.norm_size)
    assert got.item() == pytest.approx(SIZES["w1"] * SIZES["scale"], rel=1e-12)


def test_norms_can_be_optimised(norm_map):
    """Scale the layers so that the output has norm 1: gradient descent on log sizes."""
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logs], lr=0.2)
    for _ in range(60):
        sizes = {**state(), "w1": RMSToRMSTensor(logs[0].exp()), "w2": RMSToRMSTensor(logs[1].exp())}
        loss = (norm_map(RMSTensor(1.0), normed_state_dict=sizes).norm_size - 1) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-6


def test_no_grad(norm_map):
    x, leaves = RMSTensor(1.25, norm_size_requires_grad=True), state(norm_size_requires_grad=True)
    with torch.no_grad():
        y = norm_map(x, normed_state_dict=leaves)
    assert not y.norm_size.requires_grad
    assert torch.equal(y.norm_size, norm_map(x, normed_state_dict=leaves).norm_size)


# -- no new acquisitions ---------------------------------------------------------------------------------------------------


def test_programs_are_acquired_once_per_kinds(net, monkeypatch):
    seen = count_acquisitions(monkeypatch)
    norm_map = build_norm_map(net, torch.empty(4, 6))
    assert len(seen) == 0  # not before it is known what the norms are
    for size in (1.0, 2.0, 0.0, 3.5):
        y = norm_map(RMSTensor(size), normed_state_dict={**state(), "w1": RMSToRMSTensor(size)})
        assert y.norm_size.item() == pytest.approx(formula(size, **{**SIZES, "w1": size}), rel=1e-13)
    assert len(seen) == 1
    norm_map(RMSTensor(1.0), normed_state_dict={**state(), "w1": 1.0})  # a number in place of a NormedTensor
    assert len(seen) == 2
    norm_map(LinfTensor(1.0), normed_state_dict=state())
    assert len(seen) == 3
    norm_map(RMSTensor(1.0), normed_state_dict=state())
    norm_map(LinfTensor(2.0), normed_state_dict=state())
    norm_map(RMSTensor(1.0), normed_state_dict={**state(), "w1": 3.0})
    assert len(seen) == 3
    norm_map(with_perturbation(RMSTensor(1.0)), normed_state_dict=state())
    assert len(seen) == 4


def test_a_dynamic_batch_needs_no_new_acquisition(norm_map, monkeypatch):
    expected = norm_map(RMSTensor(1.25), normed_state_dict=state()).norm_size
    seen = count_acquisitions(monkeypatch)
    for batch in (1, 2, 7, 1000):
        y = norm_map(RMSTensor(1.25, backing=torch.empty(batch, 6, device="meta")), normed_state_dict=state())
        assert y.shape == (batch, 3) and torch.equal(y.norm_size, expected)
    assert seen == []
    assert norm_map(RMSTensor(1.25), normed_state_dict=state()).shape == (4, 3)


DYNAMIC_FORMS = {
    "dict by name": {"x": {0: "batch"}},
    "tuple": ({0: "batch"},),
    "list": [{0: "batch"}],
    "negative": {"x": {-2: "batch"}},
    "Dim": {"x": {0: torch.export.Dim("batch", min=1, max=1024)}},
    "None beside it": ({0: "batch", 1: None},),
}


@pytest.mark.parametrize("form", DYNAMIC_FORMS)
def test_forms_of_dynamic_shapes(form):
    norm_map = build_norm_map(nn.ReLU(), torch.empty(4, 6), dynamic_shapes=_named(DYNAMIC_FORMS[form], "input"))
    for batch in (4, 9):
        assert norm_map(RMSTensor(1.0, backing=torch.empty(batch, 6))).shape == (batch, 6)
    with pytest.raises(NormMismatchError, match="dynamic_shapes"):
        norm_map(RMSTensor(1.0, backing=torch.empty(4, 7)))


def _named(shapes: Any, name: str) -> Any:
    return {name: shapes["x"]} if isinstance(shapes, dict) else shapes


def test_dynamic_dimensions_of_several_arguments_and_outputs():
    def f(x, pair, *, z):
        y = torch.cat([x, pair["a"]])
        return y, y.reshape(-1), z.sum(0), F.pad(x, (0, 0, 1, 2)), x.unsqueeze(0).expand(3, -1, -1)

    shapes = {"x": {0: "batch"}, "pair": {"a": {0: "batch"}}, "z": None}
    norm_map = build_norm_map(f, torch.empty(4, 6), {"a": torch.empty(4, 6)}, z=torch.empty(2, 5), dynamic_shapes=shapes)
    for batch in (4, 7):
        t = torch.empty(batch, 6)
        args = (RMSTensor(1.0, backing=t), {"a": RMSTensor(2.0, backing=t)})
        z = RMSTensor(1.0, backing=torch.empty(2, 5))
        out, want = norm_map(*args, z=z), f(*args, z=z)
        for a, b in zip(out, want, strict=True):
            assert a.shape == b.shape and a.elem_dims == b.elem_dims
            assert_same_size(a.norm_size, b.norm_size)
    with pytest.raises(NormMismatchError, match="'batch' is 4 in one argument and 7 in another"):
        norm_map(RMSTensor(1.0, backing=torch.empty(4, 6)), {"a": RMSTensor(1.0, backing=torch.empty(7, 6))}, z=z)


def test_one_tensor_as_two_arguments():
    t = torch.ones(4, 6)
    norm_map = build_norm_map(lambda x, y: x + 2 * y, t, t, dynamic_shapes=({0: "batch"}, {0: "batch"}))
    x = RMSTensor(1.0, backing=torch.empty(9, 6))
    assert norm_map(x, x).norm_size.item() == 3 and norm_map(x, x).shape == (9, 6)
    plain = build_norm_map(lambda z, x, y: z + x + 2 * y, t, t, t)
    assert plain(RMSTensor(1.0), t, t).norm_size.item() == 4
    assert plain(RMSTensor(1.0), 2 * t, t).norm_size.item() == 5 and plain(RMSTensor(1.0), t, 2 * t).norm_size.item() == 6
    with pytest.raises(NormMismatchError, match="nothing in the model has a norm"):
        plain(t, t, t)


def test_two_dynamic_dimensions():
    def f(x, y):
        return x.unsqueeze(1) + y

    norm_map = build_norm_map(f, torch.empty(4, 6), torch.empty(3, 6), dynamic_shapes=({0: "b"}, {0: "t"}))
    out = norm_map(RMSTensor(1.0, backing=torch.empty(2, 6)), RMSTensor(2.0, backing=torch.empty(9, 6)))
    assert out.shape == (2, 9, 6) and out.norm_size.item() == 3


def test_a_norm_that_depends_on_a_dynamic_dimension_is_refused():
    def f(x):
        return x.sum(0)

    norm_map = build_norm_map(f, torch.empty(4, 6), dynamic_shapes=({0: "batch"},))
    with pytest.raises(NormMismatchError, match="depends on the size of the dynamic dimension 'batch'"):
        norm_map(RMSTensor(1.0))
    assert build_norm_map(f, torch.empty(4, 6))(RMSTensor(1.0)).norm_size.item() == 4


def test_a_model_that_does_not_run_at_another_size_is_refused():
    norm_map = build_norm_map(lambda x: x.view(2, 2, 6), torch.empty(4, 6), dynamic_shapes=({0: "batch"},))
    with pytest.raises(NormMismatchError, match="'batch'"):
        norm_map(RMSTensor(1.0))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": {0: "batch"}}, r"names \['y'\], the arguments are \['x'\]"),
        ([{0: "batch"}, {0: "batch"}], "one entry for each of the 1 arguments"),
        ("batch", "one entry for each"),
        ({"x": {2: "batch"}}, "dimension 2 is out of range"),
        ({"x": {-3: "batch"}}, "dimension -3 is out of range"),
        ({"x": [{0: "batch"}, None]}, "structure|dict"),
        ({"x": "batch"}, "structure|dict"),
        ({"x": {"first": "batch"}}, "structure|dimension 'first'"),
    ],
)
def test_mistakes_in_dynamic_shapes_are_refused(net, shapes, message):
    with pytest.raises(NormMismatchError, match=message):
        build_norm_map(net, torch.empty(4, 6), dynamic_shapes=shapes)


def test_arguments_that_do_not_fit_the_example_are_refused(norm_map):
    good = RMSTensor(1.0)
    for bad in (torch.empty(4, 7), torch.empty(6), torch.empty(4, 6, 1)):
        with pytest.raises(NormMismatchError, match=r"argument 0 is RMSTensor\[.*the example was of shape \[4, 6\]"):
            norm_map(RMSTensor(1.0, backing=bad), normed_state_dict=state())
    for args, kwargs in (((), {}), ((good, good), {}), ((), {"x": good}), (([good],), {})):
        with pytest.raises(NormMismatchError, match="differ in structure"):
            norm_map(*args, normed_state_dict=state(), **kwargs)
    with pytest.raises(NormMismatchError, match="must be a tensor like the example, got float"):
        norm_map(1.0, normed_state_dict=state())
    with pytest.raises(NormMismatchError, match="elem_dims"):
        norm_map(RMSTensor(1.0, elem_dims=(5,)), normed_state_dict=state())
    assert norm_map(good, normed_state_dict=state()).norm_size > 0


def test_a_program_that_draws_pythons_random_numbers_has_no_norm_map():
    def program(x):
        return x * (1 + random.random())

    with pytest.warns(AcquiredAnewWarning), pytest.raises(UnsupportedOpError, match="something else each time"):
        build_norm_map(program, torch.randn(4, 8))(RMSTensor(1.0))


class Handing(nn.Module):
    """A norm of an input, and of a parameter, goes through as it is."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 4))

    def forward(self, x):
        return x.relu(), self.w.t().relu(), x.tanh()


@pytest.mark.parametrize("moves", ["size", "perturbation", "both"])
@pytest.mark.parametrize("made", [dict, NormVector])
def test_what_is_handed_on_keeps_its_derivatives(made, moves, tmp_path):
    """Nothing is computed from it: the arithmetic has no backward part, and the norm is the one that was given."""

    def given(size: float) -> LinfTensor:
        size, step = (
            torch.tensor(v, dtype=torch.float64, requires_grad=moves in (m, "both"))
            for m, v in (("size", size), ("perturbation", 0.5))
        )
        return LinfTensor(size, perturbation_size=step)

    norm_map = build_norm_map(Handing(), torch.ones(2, 3))
    for _ in range(2):
        x, w = given(2.0), given(3.0)
        norms = made({"w": w})
        results = norm_map(x, normed_state_dict=norms)
        for y, source in zip(results, (x, w, x), strict=True):
            if moves != "perturbation" and y is not results[2]:
                assert torch.autograd.grad(y.norm_size, source.norm_size, retain_graph=True)[0].item() == 1
            if moves != "size":
                slope = torch.autograd.grad(y.perturbation_size, source.perturbation_size, retain_graph=True)[0]
                assert slope.item() == sensitivities(y, source).item() == 1
        norm_map.save(tmp_path / "map")
        norm_map = load_norm_map(tmp_path / "map")
