"""Names of operations: what all spellings share, and what messages call them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.core.norm_inputs import aten
from thunder_norm import (
    RMSTensor,
    normed_op,
)
from thunder_norm.core.registry import NormedOp, has_rule, registered_ops
from thunder_norm.op_names import op_key, op_name


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
        ("shape", [torch.Tensor.shape.__get__]),
        ("data_", [torch.Tensor.data.__set__]),
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


def test_arguments_by_numpys_names():
    x = RMSTensor.of(torch.randn(3, 4), -2)
    for named, own in (
        (x.mean(axis=1, keepdims=True), x.mean(dim=1, keepdim=True)),
        (torch.sum(x, axis=0), torch.sum(x, dim=0)),
        (torch.sum(a=x, axis=(0, 1)), torch.sum(x, dim=(0, 1))),
        (torch.add(x1=x, x2=x), torch.add(x, x)),
    ):
        assert torch.equal(named.norm_size, own.norm_size) and named.elem_dims == own.elem_dims
        assert torch.equal(named.backing, own.backing)


def test_pieces_by_either_name_of_where_they_are_cut():
    x = RMSTensor.of(torch.randn(2, 7, 4))
    for named in (
        torch.tensor_split(x, indices=(3, 5), dim=1),
        torch.Tensor.tensor_split(x, indices=[3, 5], dim=-2),
        torch.tensor_split(input=x, sections=3, dim=1),
    ):
        own = x.backing.tensor_split((3, 5), 1)
        assert all(
            torch.equal(a.backing, b) and a.norm_size >= RMSTensor.of(b).norm_size for a, b in zip(named, own, strict=True)
        )


def test_the_method_where_takes_the_condition_second():
    x, y, mask = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([True, False, True, False])
    for found, expected in (
        (RMSTensor.of(x).where(mask, y), x.where(mask, y)),
        (x.where(mask, RMSTensor.of(y)), x.where(mask, y)),
        (RMSTensor.of(x).where(condition=mask, other=RMSTensor.of(y)), x.where(mask, y)),
        (RMSTensor.of(x).where(mask, 0.5), x.where(mask, 0.5)),
    ):
        torch.testing.assert_close(found.backing, expected)
        assert found.norm_size >= RMSTensor.of(expected, elem_dims=found.elem_dims).norm_size * (1 - 1e-6)


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
