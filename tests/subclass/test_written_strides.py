"""What is written into an inner tensor lies there with the strides of that tensor, against eager PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm.subclass.acquiring.aliasing import is_dense, lies_once
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


VIEWS: dict[str, Callable] = {
    "a diagonal": lambda x: x.diagonal(),
    "a column": lambda x: x[:, 0],
    "every second row": lambda x: x[::2, 1:],
    "of what is computed": lambda x: (x * 2).diagonal(),
    "a view of it": lambda x: x.t()[:, 1:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("how", ["plain", "a leaf", "computed"])
def test_what_is_written_into_a_part_of_a_view_lies_with_its_steps(view: str, how: str) -> None:
    def f(x: TwoTensor) -> TwoTensor:
        v = VIEWS[view](x)
        v.a.mul_(2.0)
        return v

    torch.manual_seed(seeded(3))
    inner, found = torch.rand(2, 4, 4), []
    for g in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        for _ in range(2):
            given = TwoTensor(inner[0].clone(), inner[1].clone()).requires_grad_(how != "plain")
            x = given * 3 if how == "computed" else given
            y = g(x)
            if how != "plain":
                (y * y).sum().backward()
            found.append((y.a, y.b, x.a, x.b, given.grad))
            assert y.stride() == y.a.stride() == y.b.stride() == VIEWS[view](x.detach()).stride()
    for got in found[1:]:
        assert_close(got[:4], found[0][:4])
        assert how == "plain" or assert_close((got[4].a, got[4].b), (found[0][4].a, found[0][4].b)) is None


@pytest.mark.parametrize(
    "view", ["[1:3, ::2]", "[::3, ::2]", "[:, 1]", "[::2].t()", ".diagonal()", "[None, 1:, ::2]", ".view(2, 2, 3)[1, :, ::2]"]
)
def test_steps_over_a_tensor_have_each_of_its_elements_once(view: str):
    t = eval("torch.arange(12).view(4, 3)" + view)  # noqa: S307 - one of the words above
    assert len({int(v) for v in t.flatten()}) == t.numel()
    assert lies_once(t)


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (3, 1), (3, 2), (2, 2), (4, 2), (5, 2)])
def test_a_tensor_that_lies_once_has_no_element_twice(stride: tuple[int, int]):
    for rows in (1, 2, 3):
        t = torch.arange(20).as_strided((rows, 3), stride)
        assert not lies_once(t) or len(set(t.flatten().tolist())) == t.numel()
    assert not lies_once(torch.arange(20).as_strided((3, 3), (1, 1)))


def test_a_dense_tensor_has_all_elements_of_its_memory():
    steps = (0, 1, 2, 3, 4, 6)
    for shape in ((3,), (2, 3), (1, 3), (2, 2, 2), (3, 1, 2)):
        for stride in itertools.product(steps, repeat=len(shape)):
            found = torch.arange(40).as_strided(shape, stride, 2)
            assert is_dense(found) == (sorted(found.flatten().tolist()) == list(range(2, 2 + found.numel()))), (shape, stride)
    assert is_dense(torch.ones(0, 3)) and is_dense(torch.ones(()))
