"""Changes in place of views: of wrappers, of their inner tensors, of what a program holds beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

pytestmark = pytest.mark.filterwarnings("ignore")  # MaskedTensor warns whenever one is made


def two(**options: Any) -> Callable[[], TwoTensor]:
    return lambda: TwoTensor(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)).requires_grad_(
        **options
    )


def of_strides() -> TwoTensor:
    return TwoTensor(torch.randn(4, 3, dtype=torch.float64).t(), torch.randn(4, 3, dtype=torch.float64).t())


def outcome(f: Callable, make: Callable[[], torch.Tensor], is_differentiated: bool) -> tuple:
    torch.manual_seed(seeded(0))
    x = make()
    result = f(x)
    if is_differentiated:
        y = result[0] if isinstance(result, tuple) else result
        y.backward(torch.ones_like(y))
    return result, x, x.grad


def check(f: Callable, make: Callable[[], torch.Tensor], is_differentiated: bool = False) -> None:
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    with torch.set_grad_enabled(is_differentiated):
        expected = outcome(f, make, is_differentiated)
        for _ in range(2):
            assert_same(outcome(jf, make, is_differentiated), expected)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)


def slice_assigned(x):
    y = x * 2
    y[0] = 1.0
    y[1:, 2] = x[1:, 0]
    return y


def row_added(x):
    y = x * 2
    y[0].add_(x[1]).mul_(3)
    return y * x


def copied_into_columns(x):
    y = x * 2
    y[:, 1:3].copy_(x[:, :2])
    return y


def transposed(x):
    y = x * 2
    y.t()[0] = 5
    return y, y.sum(), y.t()


def flat(x):
    y = x * 2
    v = y.view(-1)
    v.mul_(3)
    return y, v


def view_taken_before(x):
    y = x * 2
    v, w = y[0], y.t()[1:]
    y.add_(1)
    return y, v, w


def view_of_a_view(x):
    y = x * 2
    v = y.view(4, 3)
    w = v[1:]
    w.zero_()
    v.add_(1)
    return y, v, w


def split(x):
    y = x * 2
    a, b = y.split(2, -1)
    a.mul_(2)
    b[0] = a[1]
    return y, b, a


def diagonal(x):
    y = x * 2
    y.diagonal().fill_(0)
    return y


def made_inside(x):
    y = torch.zeros_like(x)
    y[1:] = x[1:]
    y[0] += x[1]
    return y


def written_twice(x):
    y = x * 2
    v = y[1]
    v.mul_(2)
    z = y.sin()
    v.copy_(z[0])
    return y, z, v


PROGRAMS = [slice_assigned, row_added, copied_into_columns, transposed, flat, view_taken_before, view_of_a_view, split, diagonal]
PROGRAMS += [made_inside, written_twice]


@pytest.mark.parametrize("make", [two(requires_grad=False), of_strides], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_it_is_as_in_eager(f, make):
    if make is of_strides and f in (flat, view_of_a_view):
        f = of_contiguous(f)  # these views need it
    check(f, make)


def of_contiguous(f: Callable) -> Callable:
    return lambda x: f(x.contiguous())


@pytest.mark.parametrize("f", [slice_assigned, row_added, copied_into_columns, made_inside, diagonal], ids=lambda f: f.__name__)
def test_gradients_are_eager_s(f):
    check(f, two(), is_differentiated=True)


@pytest.mark.parametrize("f", [g for g in PROGRAMS if g not in (made_inside, split, written_twice)], ids=lambda f: f.__name__)
def test_a_wrapper_made_inside_of_tensors_that_require_grad_is_as_in_eager(f):
    """What the class makes of the tensors inside has no history there."""

    def of_two(a, b):
        y = f(TwoTensor(a * 1, b * 1))
        y = y[0] if isinstance(y, tuple) else y
        z = (y * y).sum()
        return z.a + 2 * z.b

    torch.manual_seed(seeded(0))
    a, b = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, expected = thunder.jit(of_two, transforms=[SubclassTransform()])(a, b), of_two(a, b)
    assert_same(found, expected)
    assert not found.requires_grad and not expected.requires_grad


def input_written(x):
    before = x * 1
    x[0] = 1.0
    x.t()[1].add_(x[0, 0])
    return before, x * 2, x[0]


def test_a_view_of_an_input_is_written_into():
    check(input_written, two(requires_grad=False))


def inner_row(x):
    y = x * 2
    y.a[0].zero_()
    return y


def inner_columns(x):
    y = x * 2
    y.a[:, 1:].mul_(3)
    y.b.T[0].copy_(y.a[:, 1].detach()[:3])
    return y


def inner_assigned(x):
    y = x * 2
    v = y.a
    v[0] = 0
    y.b.view(-1)[0] = 0
    return y


def inner_without_grad(x):
    y = x * 2
    v = y.a.detach()
    with torch.no_grad():
        v[0].zero_()
        y.b.type_as(y.a)[1].add_(1)
    return y


def inner_activated(x):
    y = x * 2
    torch.nn.functional.relu(y.a[0], inplace=True)
    return y


def inner_written_after_use(x):
    y = x * 2
    v = y.a[0]
    z = y * 3
    v.exp_()
    y.add_(1)
    return z, y, v


INNER = [inner_row, inner_columns, inner_assigned, inner_without_grad, inner_activated, inner_written_after_use]


@pytest.mark.parametrize("f", INNER, ids=lambda f: f.__name__)
def test_views_of_inner_tensors_of_what_is_differentiated_are_written_into(f):
    check(f, two(), is_differentiated=True)
    make, jf = two(), thunder.jit(f, transforms=[SubclassTransform()])
    x = make()
    assert_same(jf(x), f(x))  # also before the backward


def test_a_view_taken_before_there_was_a_wrapper():
    def f(x):
        p = x.b.detach() * 1
        v = p[0]
        y = TwoTensor(p, p + 1) * x
        v.zero_()
        return TwoTensor(p, p + 1) * y

    check(f, two())
    check(f, two(), is_differentiated=True)


def masked() -> torch.Tensor:
    return masked_tensor(torch.randn(3, 4), torch.ones(3, 4).bool())


def test_a_masked_tensor_that_the_program_made_is_changed_in_place():
    check(lambda x: (x * 2).mul_(3), masked)


def test_a_masked_tensor_that_was_given_is_changed_in_place():
    """Its class puts another tensor into it, for the caller too."""
    jf = thunder.jit(lambda x: x.add_(1) * 2, transforms=[SubclassTransform()])
    with torch.no_grad():
        for _ in range(2):
            given, wanted = (masked_tensor(torch.ones(3, 4), torch.arange(12).view(3, 4) % 3 > 0) for _ in range(2))
            assert_same(jf(given), wanted.add_(1) * 2)
            assert_same(given, wanted)


def other_dtypes(x):
    y = x * 2
    v = y.view(torch.int32)
    y[0].add_(1)
    v[1].mul_(0)
    return y, v


def test_tensors_of_other_dtypes_in_one_memory():
    check(other_dtypes, two(requires_grad=False))
    check(other_dtypes, two(), is_differentiated=True)

    def made_inside(a):
        return other_dtypes(TwoTensor(a * 1, a * 2))[0].a

    a = torch.randn(3, 4, requires_grad=True)
    assert_same(thunder.jit(made_inside, transforms=[SubclassTransform()])(a), made_inside(a))
