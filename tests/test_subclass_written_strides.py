"""What is written into an inner tensor lies there with the strides of that tensor, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.transforms import SubclassTransform
import thunder


def transposed(x: TwoTensor) -> None:
    x.a.copy_(x.b.t())


def expanded(x: TwoTensor) -> None:
    x.a.copy_(x.b[0])


def out(x: TwoTensor) -> None:
    torch.mul(x.b.t(), 2, out=x.a)


def of_a_list(x: TwoTensor) -> None:
    torch._foreach_copy_([x.a], [x.b.t()])


def of_another_dtype(x: TwoTensor) -> None:
    x.a.copy_(x.b.t().double())


@pytest.mark.parametrize("write", [transposed, expanded, out, of_a_list, of_another_dtype])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rows", "columns"])
def test_strides_of_what_was_written_into_are_eagers(write: Callable, order: tuple[int, int]) -> None:
    torch.manual_seed(seeded(0))
    inner = [torch.randn(3, 3) for _ in range(2)]
    mine, theirs = (TwoTensor(*(t.clone().permute(order) for t in inner)) for _ in range(2))

    def f(x: TwoTensor) -> tuple[torch.Tensor, ...]:
        write(x)
        return x * 2, x.a.permute(order).view(-1) * 1

    found, expected = thunder.jit(f, transforms=[SubclassTransform()])(mine), f(theirs)
    for one, other in zip((found[0], mine), (expected[0], theirs), strict=True):
        assert (one.stride(), one.a.stride(), one.b.stride()) == (other.stride(), other.a.stride(), other.b.stride())
        assert_close((one.a, one.b), (other.a, other.b))
    assert_close(found[1], expected[1])
