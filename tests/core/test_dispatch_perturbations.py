"""Perturbations and sensitivities, and what an operation is made of: aten overloads, in-place variants."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.core.norm_inputs import aten, rms
from thunder_norm import (
    RMSTensor,
    RMSToRMSTensor,
    normed_op,
)
from thunder_norm.errors import NormMismatchError, UnsupportedOpError

# -- perturbations ---------------------------------------------------------------------------------------------------------


def test_no_perturbation_is_computed_unless_an_argument_carries_one():
    assert F.linear(rms(), torch.randn(3, 8)).perturbation_size is None


def test_a_perturbation_is_the_sum_over_arguments():
    w = RMSToRMSTensor(3.0, backing=torch.randn(5, 8), perturbation_size=0.25)
    b = RMSTensor(0.5, backing=torch.ones(5) / 2, perturbation_size=0.125)
    y = F.linear(rms(2.0, perturbation_size=0.5), w, b)
    assert y.norm_size.item() == 2 * 3 + 0.5
    assert y.perturbation_size.item() == 3 * 0.5 + 2 * 0.25 + 0.125


def test_a_perturbation_is_the_sum_over_paths():
    d = torch.zeros((), dtype=torch.float64, requires_grad=True)
    x = rms(2.0, perturbation_size=d)
    a, b = 3 * x, F.relu(x)
    y = a + b - 0.5 * a  # paths: 3, 1, 1.5
    assert torch.autograd.grad(y.perturbation_size, d)[0].item() == 3 + 1 + 1.5
    square = x * x  # both slots of one operation
    n = 8
    assert torch.autograd.grad(square.perturbation_size, d)[0].item() == pytest.approx(2 * math.sqrt(n) * 2)


def test_an_argument_that_is_not_moved_needs_no_sensitivity():
    @normed_op
    def f(x, y):
        return x + y

    @f.register_norm
    def _(x: RMSTensor, y: RMSTensor):
        return RMSTensor(x.norm_size + y.norm_size, sensitivity={"x": 1})

    still, moving = rms(1.0), rms(1.0, perturbation_size=1.0)
    assert f(still, still).perturbation_size is None
    assert f(moving, still).perturbation_size.item() == 1
    with pytest.raises(NormMismatchError, match="states no sensitivity to 'y'"):
        f(still, moving)


def test_a_rule_without_sensitivities_refuses_perturbations():
    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: RMSTensor):
        return RMSTensor(x.norm_size)

    assert f(rms()).norm_size.item() == 1
    with pytest.raises(NormMismatchError, match="states no sensitivity, but 'x' carries"):
        f(rms(perturbation_size=1.0))


def test_sensitivities_of_a_multilinear_rule_are_the_partial_derivatives_of_its_value():
    @normed_op
    def f(x, y, z):
        return x * y + z

    def value(x, y, z):
        return 3 * x * y + 2 * z + 5

    @f.register_norm
    def _(x: RMSTensor, y: RMSTensor, z: RMSTensor):
        return RMSTensor(value(x.norm_size, y.norm_size, z.norm_size), multilinear=True)

    sizes = torch.rand(3, dtype=torch.float64).requires_grad_()
    moves = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    t = torch.zeros(4)
    out = f(*(RMSTensor(n, backing=t, perturbation_size=d) for n, d in zip(sizes, moves, strict=True)))
    (got,) = torch.autograd.grad(out.perturbation_size, moves, create_graph=True)
    (want,) = torch.autograd.grad(value(*sizes), sizes, create_graph=True)
    torch.testing.assert_close(got, want)
    # and they are differentiable themselves
    (got2,) = torch.autograd.grad(got.sum(), sizes)
    (want2,) = torch.autograd.grad(want.sum(), sizes)
    torch.testing.assert_close(got2, want2)


def test_multilinear_does_not_go_with_lists():
    @normed_op
    def f(tensors):
        return sum(tensors)

    @f.register_norm
    def _(tensors: list[RMSTensor]):
        return RMSTensor(sum(x.norm_size for x in tensors), multilinear=True)

    assert f([rms(1.0), rms(2.0)]).norm_size.item() == 3
    with pytest.raises(NormMismatchError, match="list of tensors"):
        f([rms(1.0, perturbation_size=1.0)])


def test_a_perturbation_of_zero_sensitivity_is_zero():
    x = rms(1.0, perturbation_size=1.0)
    y = torch.zeros_like(x)
    assert y.perturbation_size is None or y.perturbation_size.item() == 0


# -- two levels ------------------------------------------------------------------------------------------------------------


Q = torch.randn(2, 2, 3, 4)


LEVELS = {
    "relu": (F.relu, aten.relu.default, (Q,)),
    "add": (torch.add, aten.add.Tensor, (Q, 2 * Q)),
    "mul": (torch.mul, aten.mul.Tensor, (Q, 2 * Q)),
    "addmm": (torch.addmm, aten.addmm.default, (torch.ones(5), torch.randn(3, 4), torch.randn(4, 5))),
    "mm": (torch.mm, aten.mm.default, (torch.randn(3, 4), torch.randn(4, 5))),
    "softmax": (lambda x: F.softmax(x, -1), lambda x: aten._softmax.default(x, -1, False), (Q,)),
    "gelu": (F.gelu, aten.gelu.default, (Q,)),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        lambda x, w, b: aten.native_layer_norm.default(x, (4,), w, b, 1e-5)[0],
        (Q, torch.ones(4), torch.zeros(4)),
    ),
    "cast": (lambda x: x.to(torch.float64), lambda x: aten._to_copy.default(x, dtype=torch.float64), (Q,)),
    "view": (lambda x: x.reshape(2, 2, 12), lambda x: aten.view.default(x, (2, 2, 12)), (Q,)),
    "transpose": (lambda x: x.mT, lambda x: aten.transpose.int(x, -2, -1), (Q,)),
    "embedding": (
        lambda x: F.embedding(torch.tensor([0, 2]), x),
        lambda x: aten.embedding.default(x, torch.tensor([0, 2])),
        (Q[0, 0],),
    ),
    "conv": (
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: aten.convolution.default(x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        (Q, torch.randn(3, 2, 3, 3)),
    ),
    "max_pool": (
        lambda x: F.max_pool2d(x, 2),
        lambda x: aten.max_pool2d_with_indices.default(x, (2, 2), (2, 2))[0],
        (torch.randn(1, 2, 4, 4),),
    ),
    "batch_norm": (
        lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2)),
        lambda x: aten._native_batch_norm_legit_no_training.default(x, None, None, torch.zeros(2), torch.ones(2), 0.1, 1e-5)[0],
        (Q,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEVELS)
def test_aten_overloads_give_what_torch_functions_give(name):
    """What a program that is already decomposed gets is what the function gives."""
    function, overload, tensors = LEVELS[name]
    dims = (1,) if name in ("conv", "max_pool", "batch_norm") else None
    first = RMSTensor(2.0, backing=tensors[0], elem_dims=dims, perturbation_size=0.5)
    a, b = function(first, *tensors[1:]), overload(first, *tensors[1:])
    assert type(a) is type(b) and a.elem_dims == b.elem_dims and a.shape == b.shape
    assert torch.equal(a.backing, b.backing)
    torch.testing.assert_close(a.norm_size, b.norm_size, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.perturbation_size, b.perturbation_size, rtol=1e-12, atol=0)


def test_a_function_without_a_rule_of_its_own_runs_as_the_functions_it_is_made_of():
    """F.multi_head_attention_forward is written in Python."""
    x = rms(1.0, (3, 2, 8))
    layer = torch.nn.MultiheadAttention(8, 2)
    y, _ = layer(x, x, x, need_weights=False)
    want, _ = layer(x.backing, x.backing, x.backing, need_weights=False)
    torch.testing.assert_close(y.backing, want)
    assert RMSTensor.of(want, y.elem_dims).norm_size <= y.norm_size


# -- in place --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_place", "functional"),
    [
        (lambda y: y.add_(1.0), lambda y: y + 1.0),
        (lambda y: y.__iadd__(y), lambda y: y + y),
        (lambda y: y.mul_(-3), lambda y: y * -3),
        (lambda y: y.__imul__(2), lambda y: y * 2),
        (lambda y: y.sub_(2.0), lambda y: y - 2.0),
        (lambda y: y.__itruediv__(4), lambda y: y / 4),
        (lambda y: y.relu_(), lambda y: y.relu()),
        (lambda y: F.relu(y, inplace=True), F.relu),
        (lambda y: torch.nn.ReLU(inplace=True)(y), F.relu),
        (lambda y: F.silu(y, inplace=True), F.silu),
        (lambda y: y.clamp_(-1, 1), lambda y: y.clamp(-1, 1)),
        (lambda y: aten.add_.Tensor(y, y), lambda y: y + y),
    ],
)
def test_in_place_on_an_intermediate_is_the_out_of_place_operation(in_place, functional):
    x = rms(2.0, perturbation_size=0.5)
    y, want = 3 * x, functional(3 * x)
    out = in_place(y)
    assert out is y
    assert torch.equal(y.backing, want.backing) and torch.equal(y.norm_size, want.norm_size)
    assert y.elem_dims == want.elem_dims
    torch.testing.assert_close(y.perturbation_size, want.perturbation_size)
    assert torch.equal(x.norm_size, torch.tensor(2.0, dtype=torch.float64))


def test_the_tensor_an_intermediate_was_made_from_keeps_its_values():
    x = rms(2.0)
    before = x.backing.clone()
    y = 3 * x
    y += 1
    y *= 2
    assert torch.equal(x.backing, before)
    assert torch.equal(y.backing, (3 * before + 1) * 2)
    assert y.norm_size.item() == (3 * 2 + 1) * 2


def test_in_place_on_an_input_is_refused():
    x = rms()
    with pytest.raises(UnsupportedOpError, match="given from outside"):
        x += 1
    with pytest.raises(UnsupportedOpError, match="given from outside"):
        F.relu(x, inplace=True)
    y = x.clone()
    y += 1
    assert y.norm_size.item() == 2 and x.norm_size.item() == 1


@pytest.mark.parametrize("view", [lambda y: y.unfold(1, 3, 2), lambda y: y.expand(2, 4, 8)])
def test_in_place_on_either_side_of_a_view_that_slices_do_not_cut_out_is_refused(view):
    y = 2 * rms()
    z = view(y)
    with pytest.raises(UnsupportedOpError, match="shares its storage"):
        y += 1
    with pytest.raises(UnsupportedOpError, match="shares its storage"):
        z += 1


@pytest.mark.parametrize(
    "write",
    [
        lambda x, t: t.add_(x),
        lambda x, t: t.copy_(x),
        lambda x, t: t.__setitem__(0, x[0]),
        lambda x, t: (2 * x).normal_(),
        lambda x, t: (2 * x).uniform_(),
    ],
)
def test_writing_a_normed_tensor_into_another_is_refused(write):
    with pytest.raises(UnsupportedOpError, match="in-place"):
        write(rms(), torch.zeros(4, 8))


def test_in_place_that_would_change_kind_or_shape_is_refused():
    y = 2 * rms(1.0, (1, 8))
    with pytest.raises(UnsupportedOpError, match="would turn"):
        y += torch.ones(4, 8)
    y = 2 * rms()
    with pytest.raises(UnsupportedOpError, match="out= is not possible"):
        torch.add(y, y, out=torch.empty(4, 8))
