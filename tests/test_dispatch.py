"""The rule registry: names, multiple dispatch, conversions, perturbations, in-place operations and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    norm_mode,
    normed_op,
    with_perturbation,
)
from thunder_norm.core.context import MODES
from thunder_norm.core.registry import NormedOp, has_rule, registered_ops
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, ThunderNormError, UnsupportedOpError
from thunder_norm.op_names import op_key, op_name

aten = torch.ops.aten


def rms(size: float = 1.0, shape: tuple[int, ...] = (4, 8), **options: Any) -> RMSTensor:
    """A normed tensor with data inside its ball."""
    t = torch.randn(shape)
    return RMSTensor(size, backing=t * (size / RMSTensor.of(t).norm_size.float()), **options)


# -- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "functions"),
    [
        ("relu", [F.relu, torch.relu, torch.Tensor.relu, aten.relu.default, aten.relu]),
        ("add", [torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, aten.add.Tensor]),
        ("mul", [torch.mul, torch.multiply, torch.Tensor.__mul__, torch.Tensor.__rmul__, aten.mul.Scalar]),
        ("div", [torch.div, torch.true_divide, torch.divide, torch.Tensor.__truediv__, aten.div.Tensor]),
        ("cat", [torch.cat, torch.concat, torch.concatenate, aten.cat.default]),
        ("softmax", [F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax, aten.softmax.int]),
        ("sigmoid", [F.sigmoid, torch.sigmoid, torch.special.expit, aten.special_expit.default]),
        ("view", [torch.Tensor.view, aten.view.default, aten._unsafe_view.default]),
        ("T", [torch.Tensor.T.__get__]),
        ("getitem", [torch.Tensor.__getitem__]),
        ("add_", [torch.Tensor.add_, torch.Tensor.__iadd__, aten.add_.Tensor]),
    ],
)
def test_all_spellings_of_an_operation_share_a_name(key, functions):
    assert {op_key(f) for f in functions} == {key}


def test_operations_that_only_share_a_name_are_told_apart():
    assert op_key(F.unfold) != op_key(torch.Tensor.unfold)
    assert op_key(F.unfold) == op_key(aten.im2col.default)


def test_an_argument_that_a_rule_does_not_name_is_off_only_where_torch_means_off():
    """False is torch's default of `keepdim`, but not of `sorted`."""
    op = NormedOp("topk", torch.topk)

    @op.register_norm
    def topk(input: RMSTensor, k: int) -> RMSTensor:
        return input

    x = RMSTensor.of(torch.ones(3))
    assert op.find((x, 2), {"largest": None}) is not None
    assert op.find((x, 2), {"sorted": False}) is None


def test_functions_that_are_not_torchs_are_their_own_key():
    def relu(x):
        return x

    assert op_key(relu) is relu and normed_op(relu).key is relu
    assert not has_rule(relu)


@pytest.mark.parametrize(
    "function",
    [
        torch.cdist,
        torch.linalg.svd,
        torch.fft.fft,
        F.relu,
        F.gelu,
        F.unfold,
        torch.Tensor.__getitem__,
        torch.Tensor.new_zeros,
        torch.Tensor.to,
        torch.Tensor.add_,
        torch.ops.aten.relu.default,
        torch.ops.aten.relu,
    ],
)
def test_the_name_in_messages_is_python_for_the_operation(function):
    assert op_key(eval(op_name(function))) == op_key(function)  # noqa: S307


def test_every_registered_operation_has_a_name_that_is_python():
    for key in registered_ops():
        if isinstance(key, str) and "::" not in key:
            assert eval(op_name(registered_ops()[key].body)) is not None, key  # noqa: S307


# -- which rule -----------------------------------------------------------------------------------------------------------


def answer(name: str):
    """A rule's result that tells which rule ran."""
    return {"first": LinfTensor(1.0), "second": LinfTensor(2.0), "third": LinfTensor(3.0)}[name]


def ran(op, *args, **kwargs) -> float:
    """Which rule ran."""
    return op(*args, **kwargs).norm_size.item()


def test_the_first_rule_that_fits_runs():
    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: L1Tensor):
        return answer("first")

    @f.register_norm
    def _(x: RMSTensor):
        return answer("second")

    @f.register_norm
    def _(x: NormedTensor):
        return answer("third")

    t = torch.ones(3)
    assert ran(f, L1Tensor.of(t)) == 1
    assert ran(f, RMSTensor.of(t)) == 2
    assert ran(f, LinfTensor.of(t)) == 2  # a subclass fits
    assert ran(f, L2Tensor.of(t)) == 3  # and no conversion is made while a rule takes it as it is
    assert f(t) is t


def test_conversions_are_made_only_if_no_rule_takes_the_kinds_as_they_are():
    @normed_op
    def f(x, y):
        return x

    @f.register_norm
    def _(x: L1Tensor, y: L1Tensor):
        return answer("first")

    @f.register_norm
    def _(x: L2Tensor, y: L1Tensor):
        return LinfTensor(x.norm_size * y.norm_size)

    t = torch.ones(4)
    assert ran(f, L1Tensor.of(t), L1Tensor.of(t)) == 1
    assert ran(f, L2Tensor.of(t), L1Tensor.of(t)) == 2 * 4  # l2 = 2, l1 = 4
    # neither takes (l2, l2): the first it can be converted to runs, with a sound size: l1 <= sqrt(N) l2
    assert ran(f, L2Tensor.of(t), L2Tensor.of(t)) == 1
    spike = torch.tensor([1.0, 0, 0, 0])
    assert ran(f, L2Tensor.of(spike), L1Tensor.of(spike)) == 1


def test_a_converted_argument_arrives_as_the_annotated_kind():
    seen = []

    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: L1Tensor):
        seen.append(x)
        return LinfTensor(x.norm_size)

    f(L2Tensor(3.0, backing=torch.ones(4)))
    (x,) = seen
    assert type(x) is L1Tensor and x.norm_size.item() == 6  # sqrt(4) * 3


def test_there_is_no_conversion_from_activations_to_convolution_kernels():
    conv = torch.randn(3, 2, 3, 3)
    x = rms(1.0, (1, 2, 5, 5), elem_dims=(1,))
    with pytest.raises((MissingNormRuleError, NormMismatchError)):
        F.conv2d(x, RMSTensor.of(conv))


def test_a_rule_with_a_condition_goes_before_the_others():
    @normed_op
    def f(x, k=1):
        return x

    @f.register_norm
    def _(x: RMSTensor, k: Any = 1):
        return answer("first")

    @f.register_norm(when=lambda args: args["k"] == 2)
    def _(x: RMSTensor, k: Any = 1):
        return answer("second")

    x = rms()
    assert ran(f, x) == 1 and ran(f, x, 2) == 2 and ran(f, x, k=2) == 2


def test_a_rule_of_the_current_mode_goes_before_one_for_all_modes():
    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: RMSTensor):
        return answer("second")

    @f.register_norm(mode="typical")
    def _(x: RMSTensor):
        return answer("third")

    @normed_op
    def only_typical(x):
        return x

    @only_typical.register_norm(mode="typical")
    def _(x: RMSTensor):
        return answer("third")

    x = rms()
    assert ran(f, x) == 2
    with norm_mode("typical"):
        assert ran(f, x) == 3 and ran(only_typical, x) == 3
    with norm_mode("bound"):
        assert ran(f, x) == 2
        with pytest.raises(MissingNormRuleError, match=r"\[mode typical\]"):
            only_typical(x)
    with norm_mode("modula"):
        assert ran(f, x) == 1  # every size is 1 after every operation


def test_modes_nest_and_unknown_ones_are_refused():
    with pytest.raises(NormMismatchError, match="'bound', 'typical', 'modula'"), norm_mode("sound"):
        pass
    x = rms(2.0, (4, 16))
    with norm_mode("typical"):
        with norm_mode("bound"):
            assert F.relu(x).norm_size.item() == 2
        assert F.relu(x).norm_size.item() == pytest.approx(2 / math.sqrt(2))
    assert F.relu(x).norm_size.item() == 2
    assert set(MODES) == {"bound", "typical", "modula"}


# -- slots ----------------------------------------------------------------------------------------------------------------


def test_optional_arguments():
    w = RMSToRMSTensor.of(torch.randn(5, 8))
    b = RMSTensor(0.5, backing=torch.ones(5) / 2)
    x = rms(2.0)
    expected = 2 * w.norm_size
    assert torch.equal(F.linear(x, w).norm_size, expected)
    assert torch.equal(F.linear(x, w, None).norm_size, expected)
    assert torch.equal(F.linear(x, w, bias=None).norm_size, expected)
    assert torch.equal(F.linear(x, w, b).norm_size, expected + 0.5)
    assert torch.equal(F.linear(x, w, bias=b).norm_size, expected + 0.5)


def test_lists_of_tensors_lift_and_convert_their_elements():
    @normed_op
    def f(tensors, scale):
        return sum(tensors) * scale

    @f.register_norm
    def _(tensors: list[RMSTensor], scale: int | float):
        assert all(isinstance(x, RMSTensor) for x in tensors)
        return RMSTensor(sum(x.norm_size for x in tensors) * abs(scale), sensitivity={"tensors": [abs(scale)] * len(tensors)})

    t = torch.ones(4)
    out = f([RMSTensor(1.0, backing=t), t, L2Tensor(6.0, backing=t)], -2)
    assert out.norm_size.item() == 2 * (1 + 1 + 3)  # the plain one is measured; l2 6 over 4 entries is rms 3
    assert out.shape == (4,)
    moving = f([with_perturbation(RMSTensor(1.0, backing=t)), L2Tensor(6.0, backing=t, perturbation_size=2.0)], -2)
    assert moving.perturbation_size.item() == 2 * (0 + 1)
    with pytest.raises(MissingNormRuleError):
        f([RMSTensor(1.0, backing=t)], torch.tensor(2.0))  # a tensor where only a number will do


def test_tuples_work_as_lists():
    x, y = rms(1.0), rms(3.0)
    assert torch.cat((x, y)).norm_size.item() == torch.cat([x, y]).norm_size.item() == 3


def test_a_plain_tensor_in_a_normed_slot_is_measured():
    t = torch.randn(4, 8, dtype=torch.float64)
    out = rms(1.0) + t
    assert out.norm_size.item() == pytest.approx(1 + t.pow(2).mean(-1).sqrt().max().item(), rel=1e-6)


def test_measuring_a_plain_tensor_is_differentiable():
    w = torch.randn(5, 8, requires_grad=True)
    y = F.linear(rms(2.0), w)
    (got,) = torch.autograd.grad(y.norm_size, w)
    (want,) = torch.autograd.grad(2 * torch.linalg.matrix_norm(w, 2) * math.sqrt(8 / 5), w)
    torch.testing.assert_close(got, want)


def test_integer_tensors_are_not_measured():
    with pytest.raises(MissingNormRuleError):
        F.linear(rms(), torch.ones(5, 8, dtype=torch.long))


def test_allow_plain_tensors_takes_a_tensor_as_it_is():
    @normed_op
    def mul_with_scaler(input: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert scale.ndim == 0
        return input * scale

    @mul_with_scaler.register_norm(allow_plain_tensors=True)
    def _(input: NormedTensor, scale: torch.Tensor) -> NormedTensor:
        assert scale.ndim == 0
        return type(input)(input.norm_size * scale.abs(), elem_dims=input.elem_dims, sensitivity={"input": scale.abs()})

    scale = torch.tensor(-3.0, requires_grad=True)
    t = torch.randn(2, 4)
    for kind in (RMSTensor, L1Tensor, L2Tensor):
        x = kind(2.0, backing=t, elem_dims=(0,))
        y = mul_with_scaler(x, scale)
        assert type(y) is kind and y.elem_dims == (-2,) and y.norm_size.item() == 6
        assert torch.autograd.grad(y.norm_size, scale)[0].item() == -2
    assert torch.equal(mul_with_scaler(t, scale), t * scale)
    y = mul_with_scaler(RMSTensor(2.0, backing=t, perturbation_size=0.5), scale)
    assert y.perturbation_size.item() == 1.5


def test_a_rule_may_return_plain_values_and_tuples():
    @normed_op
    def f(x):
        return x.relu(), x > 0, 3

    @f.register_norm
    def _(x: RMSTensor):
        return RMSTensor(x.norm_size), None, None

    x = rms(2.0)
    y, mask, three = f(x)
    assert y.norm_size.item() == 2 and torch.equal(y.backing, x.backing.relu())
    assert type(mask) is torch.Tensor and torch.equal(mask, x.backing > 0) and three == 3

    @normed_op
    def g(x):
        return x.relu(), x > 0

    @g.register_norm
    def _(x: RMSTensor):
        return (RMSTensor(x.norm_size),)

    with pytest.raises(NormMismatchError, match="returned 1 results"):
        g(x)


def test_arguments_a_rule_does_not_name_must_not_matter():
    x = rms(2.0)
    assert F.relu(x, inplace=False).norm_size.item() == 2

    @normed_op
    def f(x, scale=None, memory_format=None):
        return x if scale is None else x * scale

    @f.register_norm
    def _(x: RMSTensor):
        return RMSTensor(x.norm_size)

    assert f(x, scale=None).norm_size.item() == 2
    assert f(x, memory_format=torch.preserve_format).norm_size.item() == 2
    with pytest.raises(MissingNormRuleError):
        f(x, scale=3.0)


# -- registering ----------------------------------------------------------------------------------------------------------


def test_mistakes_in_a_registration_are_refused():
    @normed_op
    def f(x):
        return x

    with pytest.raises(NormMismatchError, match="allow_plain_tensors"):

        @f.register_norm
        def _(x: torch.Tensor):
            return None

    with pytest.raises(NormMismatchError, match="mode must be one of"):
        f.register_norm(lambda x: None, mode="loose")
    with pytest.raises(NormMismatchError, match="lifts for no argument of it: \\['y'\\]"):

        @f.register_norm(lift_dims={"y": lambda t, args: ()})
        def _(x: RMSTensor):
            return None

    assert f.rules == [] and not has_rule(f)


def test_normed_op_gives_one_entry_for_an_operation():
    assert normed_op(F.relu) is normed_op(aten.relu.default)
    assert normed_op(F.relu) is not normed_op(F.gelu)
    assert "rules" in repr(normed_op(F.relu))


# -- perturbations --------------------------------------------------------------------------------------------------------


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


# -- two levels -----------------------------------------------------------------------------------------------------------

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


# -- in place -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("view", [lambda y: y[0], lambda y: y.mT, lambda y: y[:, 1:], lambda y: y.view(-1)[3:]])
def test_in_place_on_either_side_of_a_view_of_other_elements_is_refused(view):
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
        lambda x, t: (2 * x).__setitem__(0, 1.0),
        lambda x, t: t.__setitem__(0, x[0]),
        lambda x, t: (2 * x).normal_(),
        lambda x, t: (2 * x).copy_(t),
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


# -- errors ---------------------------------------------------------------------------------------------------------------


def test_the_error_for_a_missing_rule_says_everything():
    with pytest.raises(MissingNormRuleError) as e:
        torch.linalg.householder_product(rms(), RMSTensor.of(torch.ones(16, 8)))
    message = str(e.value)
    assert message.startswith("no norm rule for torch.linalg.householder_product\n")
    assert "called with" in message and "RMSTensor[4, 8] over dims (-1,), RMSTensor[16, 8] over dims (-1,)" in message
    assert "registered" in message and "(none)" in message
    assert (
        '@thunder_norm.normed_op(torch.linalg.householder_product).register_norm   -- see CONTRIBUTING.md, "Adding a rule"'
        in message
    )
    assert isinstance(e.value, ThunderNormError) and isinstance(e.value, NotImplementedError)


def test_the_error_for_kinds_that_do_not_fit_lists_the_rules_there_are():
    @normed_op
    def f(x, y):
        return x

    @f.register_norm
    def for_operators(x: RMSToRMSTensor, y: L1Tensor | None = None) -> RMSTensor:
        return RMSTensor(1.0)

    x = rms(1.0, (4, 8, 2), elem_dims=(0, 1, 2))
    with pytest.raises(MissingNormRuleError) as e:
        f(x, None)
    assert "RMSTensor[4, 8, 2] over dims (-3, -2, -1), None" in str(e.value)
    assert "for_operators(x: 'RMSToRMSTensor', y: 'L1Tensor | None' = None)" in str(e.value)


def test_the_error_of_a_rule_names_the_operation_and_its_arguments():
    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: RMSTensor):
        raise NormMismatchError("the last dimension must be normed")

    with pytest.raises(NormMismatchError) as e:
        f(rms())
    assert "f: the last dimension must be normed" in str(e.value)
    assert "(RMSTensor[4, 8] over dims (-1,))" in str(e.value)


def test_elem_dims_that_do_not_fit_are_an_error_that_says_so():
    w = RMSToRMSTensor(1.0, backing=torch.randn(5, 8), elem_dims=(1, 0))
    y = F.linear(rms(), w)  # an operator the other way round: converted, soundly
    assert y.norm_size.item() == pytest.approx(8 / 5)
    w = RMSToRMSTensor(1.0, backing=torch.randn(3, 5, 8), elem_dims=(0, 1))
    with pytest.raises((NormMismatchError, MissingNormRuleError), match="RMSToRMSTensor"):
        torch.matmul(rms(), w.mT)


def test_a_failed_operation_leaves_its_arguments_as_they_were():
    x = 2 * rms()
    with pytest.raises(MissingNormRuleError):
        torch.linalg.qr(x)
    x += 1
    assert x.norm_size.item() == 3
