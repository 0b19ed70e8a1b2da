"""Norm maps of programs of all sorts, and the norms of inputs and parameters: given, measured, annotated, tied."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.norms.norm_map_models import KINDS, SIZES, Net, count_acquisitions, formula, state
from tests.sizes import assert_same_size
from thunder_norm import (
    L1Tensor,
    LinfTensor,
    RMSTensor,
    RMSToRMSTensor,
    annotate,
    build_norm_map,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import MissingNormRuleError, NormMapKeyError, NormMismatchError, VanishingTargetWarning
from thunder_norm.modular import ModularNorm

# -- inputs that are not normed --------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Token ids in."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 6))

    def forward(self, ids, scale=1.0):
        return F.embedding(ids, self.table) * scale


def test_integer_inputs_stay_plain_with_a_dynamic_batch(monkeypatch):
    seen = count_acquisitions(monkeypatch)
    ids = torch.zeros(2, 3, dtype=torch.long)
    norm_map = build_norm_map(Tokens(), ids, dynamic_shapes=({0: "batch", 1: "tokens"},))
    for shape in ((2, 3), (5, 3), (1, 9)):
        y = norm_map(torch.zeros(shape, dtype=torch.long), normed_state_dict={"table": RMSTensor(2.0)})
        assert y.shape == (*shape, 6) and y.norm_size.item() == 2
        acquired = len(seen)
    assert acquired == 3  # one, and one for each dynamic dimension


def test_integer_inputs_on_meta():
    norm_map = build_norm_map(Tokens().to("meta"), torch.zeros(2, 3, dtype=torch.long, device="meta"))
    y = norm_map(torch.zeros(2, 3, dtype=torch.long), normed_state_dict={"table": 2.0})
    assert y.norm_size.item() == 2
    with pytest.raises(NormMismatchError, match="torch.int64"):
        norm_map(RMSTensor(1.0), normed_state_dict={"table": 2.0})


def test_numbers_are_part_of_the_program():
    norm_map = build_norm_map(Tokens(), torch.zeros(2, 3, dtype=torch.long), scale=1.0)
    for scale in (2.0, -3.0):
        y = norm_map(torch.zeros(2, 3, dtype=torch.long), scale=scale, normed_state_dict={"table": 2.0})
        assert y.norm_size.item() == 2 * abs(scale)


def test_a_float64_scalar_output_is_not_taken_for_a_norm_size():
    x = RMSTensor(3.0, backing=torch.randn(4, 5, dtype=torch.float64), perturbation_size=0.5)
    for f in (torch.sum, lambda x: (x.mean(), x.amax()), lambda x: F.mse_loss(x, x * 2)):
        got = torch.utils._pytree.tree_leaves(build_norm_map(f, torch.empty(4, 5, dtype=torch.float64, device="meta"))(x))
        for a, b in zip(got, torch.utils._pytree.tree_leaves(f(x)), strict=True):
            assert a.shape == ()
            assert_same_size(a.norm_size, b.norm_size)
            assert_same_size(a.perturbation_size, b.perturbation_size)


def test_a_plain_floating_input_is_measured(net):
    norm_map = build_norm_map(net, torch.empty(4, 6))
    for _ in range(2):
        x = torch.randn(4, 6)
        y = norm_map(x, normed_state_dict=state())
        assert y.norm_size.item() == pytest.approx(formula(RMSTensor.of(x).norm_size.item(), **SIZES), rel=1e-6)


# -- parameters ------------------------------------------------------------------------------------------------------------


def test_meta_models_need_no_weights():
    with torch.device("meta"):
        model = Net()
    norm_map = build_norm_map(model, torch.empty(4, 6, device="meta"), dynamic_shapes=({0: "batch"},))
    y = norm_map(RMSTensor(1.25), normed_state_dict=state())
    assert y.norm_size.item() == pytest.approx(formula(1.25, **SIZES), rel=1e-13)
    assert norm_map(RMSTensor(1.0, backing=torch.empty(9, 6, device="meta")), normed_state_dict=state()).shape == (9, 3)
    with pytest.raises(NormMismatchError, match="on the meta device"):
        norm_map(RMSTensor(1.0))  # nothing to measure


@pytest.mark.parametrize("value", [2.5, torch.tensor(2.5), RMSToRMSTensor(2.5), RMSToRMSTensor(2.5, backing=torch.empty(10, 6))])
def test_what_a_norm_of_a_parameter_may_be(norm_map, value):
    y = norm_map(RMSTensor(1.0), normed_state_dict={**state(), "w1": value})
    assert y.norm_size.item() == pytest.approx(formula(1.0, **{**SIZES, "w1": 2.5}), rel=1e-13)


def test_parameters_are_measured_when_no_norms_are_given(net):
    norm_map = build_norm_map(net, torch.empty(4, 6))
    y = norm_map(RMSTensor(1.25))
    exact = {name: KINDS[name].of(t.detach()).norm_size.item() for name, t in net.state_dict().items()}
    assert y.norm_size.item() == pytest.approx(formula(1.25, **exact), rel=1e-6)
    (grad,) = torch.autograd.grad(y.norm_size, net.w2)
    (want,) = torch.autograd.grad(torch.linalg.matrix_norm(net.w2, 2), net.w2)
    torch.testing.assert_close(grad / grad.norm(), want / want.norm())


def test_policies_for_parameters_that_are_not_named(net):
    x, some = RMSTensor(1.25), {"w1": 4.0}
    exact = {name: KINDS[name].of(t.detach()).norm_size.item() for name, t in net.state_dict().items()}
    unit = build_norm_map(net, torch.empty(4, 6), parameters="unit")
    measured = build_norm_map(net, torch.empty(4, 6), parameters="measured")
    mapping = build_norm_map(net, torch.empty(4, 6), parameters={"w2": 7.0, "b1": 0.5, "scale": 1.0})
    ones = {"w1": 1.0, "b1": 1.0, "w2": 1.0, "scale": exact["scale"]}  # a buffer is not a parameter
    assert unit(x).norm_size.item() == pytest.approx(formula(1.25, **ones))
    assert unit(x, normed_state_dict=some).norm_size.item() == pytest.approx(formula(1.25, **{**ones, **some}))
    assert measured(x, normed_state_dict=some).norm_size.item() == pytest.approx(formula(1.25, **{**exact, **some}), rel=1e-6)
    given = {"w2": 7.0, "b1": 0.5, "scale": 1.0, **some}
    assert mapping(x, normed_state_dict=some).norm_size.item() == pytest.approx(formula(1.25, **given), rel=1e-12)
    given = {**exact, "w2": 7.0, "b1": 0.5, "scale": 1.0}
    assert mapping(x).norm_size.item() == pytest.approx(formula(1.25, **given), rel=1e-6)


def test_a_mapping_given_when_building_is_read_anew(net):
    sizes: dict[str, Any] = dict(SIZES)
    norm_map = build_norm_map(net, torch.empty(4, 6), parameters=sizes)
    assert norm_map(RMSTensor(1.0)).norm_size.item() == pytest.approx(formula(1.0, **SIZES))
    sizes["w2"] = 5.0
    assert norm_map(RMSTensor(1.0)).norm_size.item() == pytest.approx(formula(1.0, **{**SIZES, "w2": 5.0}))
    leaf = sizes["w2"] = RMSToRMSTensor(3.0, norm_size_requires_grad=True)
    y = norm_map(RMSTensor(1.0))
    assert y.norm_size.item() == pytest.approx(formula(1.0, **{**SIZES, "w2": 3.0}))
    assert torch.autograd.grad(y.norm_size, leaf.norm_size)[0].item() == pytest.approx(y.norm_size.item() / 3)


def test_annotations_say_what_a_bare_size_means():
    model = nn.Linear(6, 4, bias=False)
    annotate(model, weight=RMSTensor)
    y = build_norm_map(model, torch.empty(2, 6))(RMSTensor(1.0), normed_state_dict={"weight": 2.0})
    assert type(y) is LinfTensor and y.norm_size.item() == 6 * 2


def test_kinds_of_given_norms_are_converted_if_they_can_be(norm_map):
    y = norm_map(RMSTensor(1.0), normed_state_dict={**state(), "b1": L1Tensor(0.25)})
    assert y.norm_size.item() == pytest.approx(formula(1.0, **{**SIZES, "b1": 0.25 / math.sqrt(10)}))


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_tied_parameter_may_be_given_under_either_name(name):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return F.linear(F.linear(x, self.a), self.b)

    leaf = RMSToRMSTensor(3.0, norm_size_requires_grad=True)
    y = build_norm_map(Tied(), torch.empty(2, 6))(RMSTensor(1.0), normed_state_dict={name: leaf})
    assert y.norm_size.item() == 9 and torch.autograd.grad(y.norm_size, leaf.norm_size)[0].item() == 6


def test_tensors_made_from_parameters_alone():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 10))

        def forward(self, x):
            return F.linear(x, self.w.T * 2)

    norm_map = build_norm_map(Transposed(), torch.empty(2, 6))
    leaf = with_perturbation(RMSToRMSTensor(3.0, elem_dims=(-1, -2)))
    y = norm_map(RMSTensor(1.0), normed_state_dict={"w": leaf})
    assert y.norm_size.item() == 6 and sensitivities(y, [leaf])[0].item() == 2
    with pytest.raises(NormMapKeyError, match="has no norm for 'w'"):
        norm_map(RMSTensor(1.0), normed_state_dict={})


def test_unused_names_are_allowed_but_unknown_ones_are_not(norm_map):
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.Parameter(torch.ones(3))

    y = build_norm_map(Unused(), torch.empty(4, 6))(RMSTensor(1.0), normed_state_dict={**state(), "other": 3.0})
    assert y.norm_size.item() == pytest.approx(formula(1.0, **SIZES))
    with pytest.raises(NormMapKeyError) as e:
        norm_map(RMSTensor(1.0), normed_state_dict={**state(), "w11": 1.0})
    message = str(e.value)
    assert "normed_state_dict names a parameter or buffer the model does not have" in message
    assert "'w11'" in message and "did you mean" in message and "'w1'" in message and "Net with 4" in message


@pytest.mark.parametrize("name", SIZES)
def test_a_missing_name_is_an_error_that_says_where_it_is_needed(norm_map, name):
    given = {k: v for k, v in state().items() if k != name}
    with pytest.raises(NormMapKeyError) as e:
        norm_map(RMSTensor(1.0), normed_state_dict=given)
    message = str(e.value)
    assert message.startswith(f"normed_state_dict has no norm for {name!r}\n")
    assert f"{inspect.getfile(Net)}:" in message and "F.linear(F.relu" in message
    assert "parameters='measured' or 'unit'" in message
    assert isinstance(e.value, KeyError) and isinstance(e.value, NormMismatchError)


def test_other_mistakes_in_a_normed_state_dict_are_refused(norm_map):
    x = RMSTensor(1.0)
    norm_map(x, normed_state_dict={**state(), "w1": RMSToRMSTensor(1.0, backing=torch.empty(10, 6))})
    with pytest.raises(NormMismatchError, match=r"\['w1'\] has shape \[6, 10\], the model's has \[10, 6\]"):
        norm_map(x, normed_state_dict={**state(), "w1": RMSToRMSTensor(1.0, backing=torch.empty(6, 10))})
    for bad in (-1.0, math.nan, torch.ones(2), "1", None):
        with pytest.raises(NormMismatchError, match="norm_size must be"):
            norm_map(x, normed_state_dict={**state(), "w1": bad})
    with pytest.raises(NormMapKeyError, match="'w4'"):
        build_norm_map(Net(), torch.empty(4, 6), parameters={"w4": 1.0})
    with pytest.raises(NormMapKeyError, match="not a module"):
        build_norm_map(F.relu, torch.empty(2))(x, normed_state_dict={})
    with pytest.raises(NormMismatchError, match="parameters must be"):
        build_norm_map(nn.ReLU(), torch.empty(2), parameters="some")
    with pytest.raises(NormMismatchError, match="mode must be one of"):
        build_norm_map(nn.ReLU(), torch.empty(2), mode="some")
    assert norm_map(x, normed_state_dict=state()).norm_size > 0


# -- programs --------------------------------------------------------------------------------------------------------------


def test_outputs_keep_their_structure_and_dtype():
    def f(x, flag):
        return {"out": (x * 2, [x.double()]), "flag": flag, "none": None}

    out = build_norm_map(f, torch.empty(3, 4), True)(RMSTensor(1.0), True)
    assert set(out) == {"out", "flag", "none"} and out["flag"] is True and out["none"] is None
    y, (z,) = out["out"]
    assert y.norm_size.item() == 2 and z.dtype is torch.float64 and z.backing.device.type == "meta"


def test_outputs_of_one_norm_each_have_their_derivatives():
    x = RMSTensor(1.0, norm_size_requires_grad=True)
    outputs = build_norm_map(lambda x: (x * 2, -(x * 2), x), torch.empty(3))(x)
    grads = [torch.autograd.grad(y.norm_size, x.norm_size, retain_graph=True)[0].item() for y in outputs]
    assert grads == [2, 2, 1]


def test_an_output_that_is_the_input():
    y = build_norm_map(nn.Identity(), torch.empty(3, 4))(RMSTensor(2.0, norm_size_requires_grad=True))
    assert y.norm_size.item() == 2 and y.shape == (3, 4)


def test_outputs_without_a_norm():
    with pytest.raises(NormMismatchError, match="plain tensors"):
        build_norm_map(lambda x: x > 0, torch.empty(3, 4))(RMSTensor(1.0))
    y, mask = build_norm_map(lambda x: (x * 2, x > 0), torch.empty(3, 4))(RMSTensor(1.0))
    assert y.norm_size.item() == 2
    assert mask.is_meta and mask.dtype is torch.bool and mask.shape == (3, 4)


def test_a_norm_that_depends_on_data_is_refused():
    def f(x, mask):
        return x * mask

    norm_map = build_norm_map(f, torch.empty(3, 4, device="meta"), torch.empty(3, 4, device="meta"))
    with pytest.raises(NormMismatchError, match="give a NormedTensor"):
        norm_map(RMSTensor(1.0), torch.empty(3, 4, device="meta"))
    assert norm_map(RMSTensor(1.0), LinfTensor(2.0)).norm_size.item() == 2


def test_a_missing_rule_is_reported_at_the_users_line():
    def f(x):
        return torch.detach_copy(x)

    with pytest.raises(
        MissingNormRuleError,
        match=rf"(?s)no norm rule for torch.detach_copy.*{__file__}:\d+:  return torch.detach_copy",
    ):
        build_norm_map(f, torch.empty(3, 4))(RMSTensor(1.0))


def test_the_last_trace_is_a_program_on_scalars(norm_map):
    norm_map(RMSTensor(1.0), normed_state_dict=state())
    trace = norm_map.last_trace
    compile(str(trace), "<trace>", "exec")
    proxies = [p for b in trace.bound_symbols for p in b.flat_proxy_args]
    assert proxies and all(p.ndim == 0 for p in proxies)
    with pytest.raises(NormMismatchError, match="has not been called yet"):
        _ = build_norm_map(nn.ReLU(), torch.empty(2)).last_trace


def test_the_model_is_left_as_it_was(net):
    before = {name: t.clone() for name, t in net.state_dict().items()}
    build_norm_map(net, torch.empty(4, 6))(RMSTensor(1.0), normed_state_dict=state()).norm_size.item()
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert net(torch.ones(1, 6)).shape == (1, 3) and all(p.grad is None for p in net.parameters())


def norm_maps_of_functions() -> list[tuple[str, Callable, tuple, tuple]]:
    t = torch.empty
    return [
        (
            "attention",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            (t(1, 2, 3, 4),) * 3,
            (0.5, 1.5, 2.0),
        ),
        ("layer_norm", lambda x: F.layer_norm(x, (4,)), (t(3, 4),), (2.0,)),
        ("gate", lambda a, b: F.silu(a) * b, (t(3, 4), t(3, 4)), (1.0, 2.0)),
    ]


@pytest.mark.parametrize("case", norm_maps_of_functions(), ids=lambda c: c[0])
def test_functions_have_norm_maps_too(case):
    _, f, examples, sizes = case
    y = build_norm_map(f, *examples)(*(with_perturbation(RMSTensor(n)) for n in sizes))
    want = f(*(with_perturbation(RMSTensor(n, backing=e)) for n, e in zip(sizes, examples, strict=True)))
    assert type(y) is type(want) and y.elem_dims == want.elem_dims and y.shape == want.shape
    torch.testing.assert_close(y.norm_size, want.norm_size, rtol=1e-12, atol=0)


# -- parameters that a program makes into others step by step -----------------------------------------------------------------


class Repeated(nn.Module):
    """A weight, so many times what an operation made of it."""

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor], count: int):
        super().__init__()
        self.weight, self.step, self.count = nn.Parameter(torch.randn(4, 4)), step, count

    def forward(self, x):
        w = self.weight
        for _ in range(self.count):
            w = self.step(w)
        return F.linear(x, w)


@pytest.mark.parametrize(
    "step, count, factor",
    [
        (lambda w: 0.4 * w + 0.4 * w, 26, 0.8**26),  # 2^26 paths
        (lambda w: 1.01 * w, 300, 1.01**300),  # more steps than Python's stack has room for
        (lambda w: (0.99 * w).t(), 15, 0.99**15),
    ],
)
def test_a_parameter_is_followed_through_many_steps(step, count, factor):
    """Its norm and its sensitivity are the factor that the steps multiply it by."""
    model, x = Repeated(step, count), torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VanishingTargetWarning)
        target = ModularNorm(model, x).targets["weight"]
    assert target == pytest.approx(1 / factor)
    if count < 250:  # a trace of more operations takes Thunder's interpreter too long
        found = build_norm_map(model, x, parameters="unit")(RMSTensor(1.0))
        assert found.norm_size.item() == pytest.approx(factor)


@pytest.mark.parametrize(
    "constant",
    [
        lambda x, mask: mask.type_as(x),
        lambda x, mask: mask.to(x).masked_fill(mask, -2.0),
        lambda x, mask: mask.type_as(x * 2).cos(),
    ],
)
def test_constants_of_the_shape_or_dtype_of_another_tensor_need_none_of_its_data(constant):
    def f(x, mask):
        return x + constant(x, mask).cumsum(0)

    mask = torch.tensor([[True, False], [False, True], [True, True]])
    norm_map = build_norm_map(f, torch.empty(3, 2), mask)
    added = constant(torch.zeros(3, 2), mask).cumsum(0)
    assert norm_map(RMSTensor(1.0), mask).norm_size.item() == pytest.approx(1 + RMSTensor.of(added, (-1,)).norm_size.item())
