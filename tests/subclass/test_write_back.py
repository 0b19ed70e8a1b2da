"""In-place operations on input wrappers: what the caller's tensors hold afterwards is what eager leaves in them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import OpCounter, assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder


def two(*shape: int) -> TwoTensor:
    return TwoTensor(torch.randn(shape), torch.randn(shape))


def copy_of(x: TwoTensor) -> TwoTensor:
    return TwoTensor(x.a.clone(), x.b.clone())


def exponential_average(m, g):
    m.lerp_(g, 0.1)
    return m * 2


def adam(p, m, v, g):
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.1)


def returned(x, y):
    z = x.add_(y)
    return z, x, z * 1


def both(x, y):
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def old_value(x, y):
    before = x * 1
    x.mul_(y)
    return before, before + x, before.t()


def swapped(x, y):
    old = x * 1
    y.copy_(x.copy_(y * 1) * 0 + old)


PROGRAMS: dict[str, tuple[Callable, int]] = {
    f.__name__: (f, f.__code__.co_argcount) for f in (exponential_average, adam, returned, both, old_value, swapped)
}


@pytest.mark.parametrize("executors", [None, ["torchcompile"]], ids=["default", "torchcompile"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_inputs_hold_afterwards_what_eager_leaves(name: str, executors: list[str] | None):
    function, count = PROGRAMS[name]
    jitted = thunder.jit(function, transforms=[SubclassTransform()], executors=executors)
    args = [two(3, 4) for _ in range(count)]
    args = [TwoTensor(x.a.abs(), x.b.abs()) for x in args]
    expected_args = [copy_of(x) for x in args]
    inner = [(x.a, x.b) for x in args]
    for _ in range(3):  # the state of one call is the input of the next
        expected, found = function(*expected_args), jitted(*args)
        torch.testing.assert_close([(x.a, x.b) for x in args], [(x.a, x.b) for x in expected_args])
        results, wanted = ((r if isinstance(r, tuple) else (r,) if r is not None else ()) for r in (found, expected))
        torch.testing.assert_close([(x.a, x.b) for x in results], [(x.a, x.b) for x in wanted])
    assert all(x.a is a and x.b is b for x, (a, b) in zip(args, inner, strict=True))
    assert thunder.cache_misses(jitted) == 1


def test_what_is_returned_is_the_memory_of_the_input():
    x, y = two(3), two(3)
    z, same, other = thunder.jit(returned, transforms=[SubclassTransform()])(x, y)
    assert z.a is x.a and z.b is x.b and same.a is x.a and other.a is not x.a
    z.a.zero_()
    assert not x.a.any()


class Replacing(OpCounter):
    """A class that computes out of place and replaces its inner tensor."""

    @staticmethod
    def __tensor_unflatten__(inner, ctx, outer_size, outer_stride):
        return Replacing(inner["value"], ctx)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.add_.Tensor:
            return super().__torch_dispatch__(func, types, args, kwargs)
        args[0].value = args[0].value + args[1]
        return args[0]


def test_other_classes():
    for cls in (OpCounter, Replacing):
        c = cls(torch.randn(3))
        held, expected = c.value, c.value + 1
        thunder.jit(lambda c: c.add_(1), transforms=[SubclassTransform()])(c)
        torch.testing.assert_close(c.value, expected)
        assert (c.value is held) == (cls is OpCounter)


def test_parameters_are_updated():
    model = torch.nn.Linear(3, 3, bias=False)
    model.register_buffer("average", two(3, 3))
    expected = copy_of(model.average)

    def update(x):
        model.average.lerp_(x, 0.5)

    x = two(3, 3)
    jitted = thunder.jit(update, transforms=[SubclassTransform()])
    for _ in range(2):
        jitted(x)
        expected.lerp_(x, 0.5)
    torch.testing.assert_close((model.average.a, model.average.b), (expected.a, expected.b))


def test_inner_tensors_that_are_differentiated_are_refused_and_nothing_is_written():
    leaf = OpCounter(torch.randn(3, requires_grad=True))
    before = leaf.value.detach().clone()
    with pytest.raises(UnsupportedOpError, match="the program is differentiated"):
        thunder.jit(lambda x: x.mul_(2) + 1, transforms=[SubclassTransform()])(leaf)
    assert torch.equal(leaf.value, before)
    with torch.no_grad():
        thunder.jit(lambda x: x.mul_(2) + 1, transforms=[SubclassTransform()])(leaf)
    torch.testing.assert_close(leaf.value.detach(), 2 * before)


def test_operators_of_bits_write_into_inputs_views_and_what_is_made():
    def program(x, y):
        z = x.clone()
        for write in (operator.ior, operator.iand, operator.ixor, operator.ilshift, operator.irshift):
            z = write(z, y)
        x |= y
        row = x[0]
        row ^= 5
        return z, row

    def make() -> list[TwoTensor]:
        torch.manual_seed(seeded(0))
        return [TwoTensor(torch.randint(1, 7, (3, 4)), torch.randint(1, 7, (3, 4))) for _ in "xy"]

    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        want, got = make(), make()
        assert_same((jf(*got), got), (program(*want), want))
