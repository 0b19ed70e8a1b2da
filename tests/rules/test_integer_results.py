"""Operators without a rule that return integers or bools alone have no norm to bound: torchvision's `nms`, libraries' own."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.errors import MissingNormRuleError
from thunder_norm.transforms import NormTransform
import thunder


@torch.library.custom_op("tests_integer_results::ranks", mutates_args=())
def ranks(x: torch.Tensor) -> torch.Tensor:
    return x.argsort(-1).argsort(-1)


@ranks.register_fake
def _(x):
    return torch.empty_like(x, dtype=torch.int64)


@torch.library.custom_op("tests_integer_results::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


def program(x):
    order = torch.ops.tests_integer_results.ranks.default(x)
    return x * (order > 1) + x.gather(-1, order)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(seeded(0))


@pytest.mark.parametrize("kind", [RMSTensor, LinfTensor])
def test_what_is_selected_by_them_has_eagers_values_and_is_bounded(kind):
    x = torch.randn(3, 5)
    expected = program(x)
    for f in (program, thunder.jit(program, transforms=[NormTransform()])):
        found = f(kind.of(x))
        torch.testing.assert_close(found.backing, expected)
        assert kind.of(expected).norm_size <= found.norm_size * (1 + 1e-6)


def test_they_are_plain():
    assert type(torch.ops.tests_integer_results.ranks.default(RMSTensor.of(torch.randn(3)))) is torch.Tensor


def test_torchvisions_nms_keeps_the_boxes_that_it_keeps():
    ops = pytest.importorskip("torchvision.ops")
    corners = torch.rand(20, 2)
    boxes, scores = torch.cat([corners, corners + torch.rand(20, 2)], -1), torch.rand(20)
    keep = lambda boxes: boxes[ops.nms(boxes, scores, 0.3)]  # noqa: E731
    for f in (keep, thunder.jit(keep, transforms=[NormTransform()])):
        torch.testing.assert_close(f(LinfTensor.of(boxes)).backing, keep(boxes))


def test_an_operator_that_returns_numbers_is_refused_as_before():
    with pytest.raises(MissingNormRuleError, match="doubled"):
        torch.ops.tests_integer_results.doubled.default(RMSTensor.of(torch.randn(3)))
