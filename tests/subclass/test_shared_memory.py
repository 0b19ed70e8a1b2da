"""Inputs that lie in one memory, wrappers' inner tensors among them: what is written into one is in the others, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import _functional_collectives as collectives
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder


def two() -> TwoTensor:
    return TwoTensor(torch.randn(2, 3), torch.randn(2, 3))


def apart() -> list[torch.Tensor]:
    return [two(), two()]


def one_object() -> list[torch.Tensor]:
    return [x := two(), x]


def same_tensors() -> list[torch.Tensor]:
    return [x := two(), TwoTensor(x.a, x.b)]


def swapped() -> list[torch.Tensor]:
    return [x := two(), TwoTensor(x.b, x.a)]


def one_in_common() -> list[torch.Tensor]:
    return [x := two(), TwoTensor(torch.randn(2, 3), x.a)]


def one_twice() -> list[torch.Tensor]:
    return [TwoTensor(a := torch.randn(2, 3), a), two()]


def parts_of_one() -> list[torch.Tensor]:
    whole = TwoTensor(torch.randn(3, 3), torch.randn(3, 3))
    return [whole[:2], whole[1:]]  # the second row of one is the first of the other


def transposed() -> list[torch.Tensor]:
    whole = TwoTensor(torch.randn(3, 3), torch.randn(3, 3))
    return [whole[:2], whole.t()[:2]]


def with_a_plain_one() -> list[torch.Tensor]:
    return [x := two(), x.a]


def with_a_plain_view() -> list[torch.Tensor]:
    return [x := two(), x.b.view(3, 2).t()]


def first_written(x, y):
    x.add_(1)
    return y * 2


def second_written(x, y):
    y.mul_(2)
    return x * 1, y


def both_written(x, y):
    x.mul_(3)
    y.add_(0.5)
    return x - y


def through_a_view(x, y):
    v = y[0]
    x[1:].sub_(y[1:] * 1)
    return v, x * v


def inner_written(x, y):
    before = y * 1
    x.a[0] = 5.0
    return before, y * 2


KINDS = [
    apart,
    one_object,
    same_tensors,
    swapped,
    one_in_common,
    one_twice,
    parts_of_one,
    transposed,
    with_a_plain_one,
    with_a_plain_view,
]


def leaves(tensors) -> list[torch.Tensor]:
    return [t for x in tensors for t in ((x.a, x.b) if isinstance(x, TwoTensor) else (x,))]


def in_one_memory(tensors: list[torch.Tensor]) -> list[list[bool]]:
    addresses = [t.untyped_storage().data_ptr() for t in tensors]
    return [[a == b for b in addresses] for a in addresses]


def check(f: Callable, jf: Callable, make: Callable) -> None:
    torch.manual_seed(seeded(0))
    args = make()
    torch.manual_seed(seeded(0))
    own = make()
    held = leaves(own)
    expected, found = f(*args), jf(*own)
    expected, found = (r if isinstance(r, tuple) else (r,) for r in (expected, found))
    torch.testing.assert_close(held, leaves(args))
    torch.testing.assert_close(leaves(found), leaves(expected))
    assert all(a is b for a, b in zip(held, leaves(own), strict=True))
    assert [any(r is x for x in own) for r in found] == [any(r is x for x in args) for r in expected]
    assert in_one_memory(leaves([*own, *found])) == in_one_memory(leaves([*args, *expected]))


@pytest.mark.parametrize(
    "f", [first_written, second_written, both_written, through_a_view, inner_written], ids=lambda f: f.__name__
)
def test_it_is_as_in_eager_and_another_sharing_is_another_trace(f: Callable):
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for make in (*KINDS, *KINDS):
        check(f, jf, make)
    assert thunder.cache_misses(jf) <= len(KINDS)


def test_a_program_that_writes_into_nothing_serves_all():
    jf = thunder.jit(lambda x, y: x * y, transforms=[SubclassTransform()])
    for make in (apart, same_tensors, one_object):
        check(lambda x, y: x * y, jf, make)
    assert thunder.cache_misses(jf) == 1


def test_one_object_given_twice_is_one_tensor_of_the_trace():
    def f(x, y):
        return x is y, x * y

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for make in (one_object, apart, one_object, same_tensors):
        args = make()
        assert jf(*args)[0] is (args[0] is args[1])
        torch.testing.assert_close(leaves(jf(*args)[1:]), leaves(f(*args)[1:]))
    assert thunder.cache_misses(jf) == 2


class Buffers(torch.nn.Module):
    """Buffers in one memory, met one after the other."""

    first: TwoTensor
    second: TwoTensor
    third: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", two())
        self.register_buffer("second", TwoTensor(self.first.b, torch.randn(2, 3)))
        self.register_buffer("third", self.first.a.view(-1))

    def forward(self, x):
        self.first.add_(x)
        y = self.second * 2
        self.third[:2] = 1.0
        return y, self.third * 2, self.first * self.second


def test_buffers_that_are_met_after_the_writing():
    torch.manual_seed(seeded(0))
    model = Buffers()
    torch.manual_seed(seeded(0))
    own = Buffers()
    jm = thunder.jit(own, transforms=[SubclassTransform()])
    for _ in range(2):
        x = two()
        torch.testing.assert_close(leaves(jm(x)), leaves(model(x)))
        torch.testing.assert_close(leaves(own.buffers()), leaves(model.buffers()))
    assert thunder.cache_misses(jm) == 1


def test_plain_tensors_of_the_surroundings_in_the_memory_of_a_wrapper_are_refused_and_nothing_is_written():
    x = two()
    elsewhere = [x.a]

    def f(x):
        x.add_(1)
        return elsewhere[0] * 2

    before = x.a.clone(), x.b.clone()
    with pytest.raises(UnsupportedOpError, match="shares its memory"):
        thunder.jit(f, transforms=[SubclassTransform()])(x)
    torch.testing.assert_close((x.a, x.b), before)


def test_autograd_outside_knows_of_the_writing():
    x, p = two(), TwoTensor(torch.randn(2, 3), torch.randn(2, 3)).requires_grad_()
    product = p * x  # whose backward needs x
    thunder.jit(lambda x: x.add_(1), transforms=[SubclassTransform()])(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward(torch.ones_like(product))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.mul_(x[:, 1]),
        lambda x: x[:, 1:].copy_(x[:, :-1]),
        lambda x: torch._foreach_mul_([x], [x[:, 1:2]]),
        lambda x: torch.mul(x[:, :1].expand(2, 3), 2, out=x),
        lambda x: x[:, 1].mul_(x[0, 1]),
    ],
)
def test_what_reads_elements_that_it_writes_is_refused_and_nothing_is_written(f: Callable):
    torch.manual_seed(seeded(0))
    x = two()
    before = x.a.clone(), x.b.clone()
    with pytest.raises(UnsupportedOpError, match="in the same memory"):  # eager mode's answer hangs on a kernel's order
        thunder.jit(f, transforms=[SubclassTransform()])(x)
    torch.testing.assert_close((x.a, x.b), before)


@pytest.mark.parametrize(
    "f",
    [lambda x: x.expand(2, 2, 3).mul_(2), lambda x: x.t().unfold(0, 2, 1).mul_(2), lambda x: x[:1].expand(2, 3).copy_(x.sin())],
)
def test_several_values_for_one_element_are_refused_and_nothing_is_written(f: Callable):
    torch.manual_seed(seeded(0))
    x = two()
    before = x.a.clone(), x.b.clone()
    with pytest.raises(UnsupportedOpError, match="several of its entries are one element"):
        thunder.jit(f, transforms=[SubclassTransform()])(x)
    torch.testing.assert_close((x.a, x.b), before)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.expand(2, 2, 3).zero_(),
        lambda x: x.unfold(1, 2, 1).fill_(0.5),
        lambda x: x.masked_fill_(x > 0, x[1, 1]),  # a number, which is read first
        lambda x: x[:, 1].fill_(x[0, 1]),
        lambda x: x.index_fill_(0, torch.tensor([1]), x[1, 1]),
        lambda x: x[:, :1].mul_(x[:, 1:2]),
        lambda x: x.add_(x[:]),
        lambda x: torch._foreach_mul_([x, x[0]], [x.view(2, 3), x[1]]),
    ],
)
def test_what_reads_other_elements_or_each_one_that_it_writes_is_as_in_eager(f: Callable):
    torch.manual_seed(seeded(0))
    x = two()
    own = TwoTensor(x.a.clone(), x.b.clone())
    f(x)
    thunder.jit(f, transforms=[SubclassTransform()])(own)
    torch.testing.assert_close(leaves([own]), leaves([x]))


def test_what_waits_for_a_tensor_returns_it():
    """Torch's operator does not say that what it returns is what it was given."""

    def program(x):
        x.mul_(2)  # the class waits, and writes into what it got
        return x[:2].sum(), x.clone()

    def make() -> torch.Tensor:
        torch.manual_seed(seeded(0))
        return collectives.AsyncCollectiveTensor(torch.randn(3))

    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        want, got = make(), make()
        assert_same(jf(got), program(want))
        assert_same(got, want)


def _one_object() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 3)
    return x, x


def _overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randn(4, 3)
    return base[:3], base[1:]


def _transposed() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 3)
    return x, x.t()


def _written_without_autograd(w, x, y):
    with torch.no_grad():
        x.mul_(2)
    return w * y, x + 1


def _written_and_used(w, x, y):
    x.add_(1)
    y[0] = 5.0
    return w * y + x, y.sum()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("f", [_written_without_autograd, _written_and_used])
@pytest.mark.parametrize("make", [_one_object, _overlapping, _transposed])
def test_plain_tensors_in_one_memory_beside_a_wrapper(make: Callable, f: Callable, requires_grad: bool):
    def given() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seeded(4))
        return (TwoTensor(torch.randn(3, 3), torch.randn(3, 3)).requires_grad_(requires_grad), *make())

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        expected, found = given(), given()
        assert_same(jf(*found), f(*expected))
        assert_same(found, expected)
