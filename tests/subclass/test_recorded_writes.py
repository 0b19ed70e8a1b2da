"""Writes into wrappers in programs that are differentiated: what inputs hold, their history and all gradients are as in eager mode."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import OpCounter
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import SubclassTransform
import thunder


def two(requires_grad: bool = False) -> TwoTensor:
    return TwoTensor(torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)).requires_grad_(requires_grad)


# -- what is given: tensors that gradients are asked for, and the arguments ----------------------------------------------


def leaf_and_constant() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [x := two(requires_grad=True)], [x, two()]


def computed_and_constant() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [p := two(requires_grad=True)], [p * 2, two()]


def constant_and_leaf() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [y := two(requires_grad=True)], [two(), y]


def both_computed() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [p := two(requires_grad=True)], [p.sin(), p * 2]


def computed_twice() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [p := two(requires_grad=True)], [x := p * 2, x]


def leaf_twice() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [x := two(requires_grad=True)], [x, x]


def constant_and_plain_leaf() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [p := torch.randn(2, 3, dtype=torch.float64, requires_grad=True)], [two(), p]


def leaf_and_plain() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [x := two(requires_grad=True)], [x, torch.randn(2, 3, dtype=torch.float64)]


# -- without autograd -------------------------------------------------------------------------------------------------


def without_grad(x, y):
    with torch.no_grad():
        x.add_(1)
    return x * y


def data(x, y):
    x.data.mul_(2)
    return x * y


def data_after_use(x, y):
    z = x.sin()
    x.data.mul_(2)  # which autograd does not know of: the backward has the new value
    return z * y


def detached(x, y):
    x.detach()[0].mul_(2)
    return (x * y).sin()


def part_without_grad(x, y):
    with torch.no_grad():
        x[0] = 1.0
        x.t()[1:].sub_(y.t()[1:])
    return x * x


def constant_without_grad(x, y):
    z = x.sin()
    with torch.no_grad():
        y.copy_(z)
    return z * y


def descent(x, y):
    z = x * y
    with torch.no_grad():
        x -= 0.1 * x.sign()
    return z.sum()


def by_out(x, y):
    with torch.no_grad():
        torch.mul(y, 2, out=y)
    return x * y


def inner_beside(x, y):
    z = x * y
    z.mul_(2)
    return z, z.a


# -- which autograd records -------------------------------------------------------------------------------------------


def added(x, y):
    x.add_(1)
    return x * y


def multiplied(x, y):
    x.mul_(y)
    return x.sin()


def only_written(x, y):
    x.mul_(y)


def part_written(x, y):
    x[0].mul_(2)
    return x * y


def part_copied(x, y):
    x[:, 1].copy_(y[:, 0])
    return x * 1, x


def both_written(x, y):
    x.mul_(y * 2)
    y.add_(x)
    return x - y


def kept_result_overwritten_inside(x, y):
    x.relu_()
    x.a.copy_(x.b)  # autograd does not see it: the backward of relu computes with this
    return x


def kept_result_overwritten_by_data(x, y):
    z = x.exp()
    z.data[0].mul_(2)
    return z * y


def part_overwritten_inside(x, y):
    part = x[1:]
    with torch.no_grad():
        part.a.copy_(part.b)
    return part


CASES = [
    (part_overwritten_inside, leaf_and_constant),
    (kept_result_overwritten_inside, computed_and_constant),
    *((kept_result_overwritten_by_data, make) for make in (leaf_and_constant, computed_twice)),
    *((f, leaf_and_constant) for f in (without_grad, data, data_after_use, detached, part_without_grad, constant_without_grad, descent)),
    *((f, computed_and_constant) for f in (without_grad, data_after_use, part_without_grad)),
    *((f, computed_twice) for f in (added, part_written, data)),
    *((f, leaf_and_plain) for f in (by_out, constant_without_grad)),
    (inner_beside, leaf_and_constant),
    *((f, leaf_twice) for f in (data, without_grad)),
    *((f, computed_and_constant) for f in (added, multiplied, only_written, part_written, part_copied)),
    *((f, constant_and_leaf) for f in (added, multiplied, only_written, part_copied)),
    *((f, both_computed) for f in (both_written, multiplied)),
    *((f, constant_and_plain_leaf) for f in (multiplied, added)),
]  # fmt: skip


def parts(tensors) -> list[torch.Tensor]:
    return [t.detach() for x in tensors for t in ((x.a, x.b) if isinstance(x, TwoTensor) else (x,))]


def outcome(f: Callable, make: Callable) -> tuple[list[Any], list[torch.Tensor]]:
    torch.manual_seed(seeded(0))
    wanted, args = make()
    result = f(*args)
    results = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    history = [(type(t), t.requires_grad, t.is_leaf, any(t is a for a in args)) for t in (*args, *results)]
    outputs = [t * 1 for t in (*args, *results) if t.requires_grad]  # what was written is gone on with
    gradients = torch.autograd.grad(outputs, wanted, [torch.ones_like(t.detach()) * (i + 1) for i, t in enumerate(outputs)])
    return history, [t.clone() for t in parts([*args, *results, *gradients])]


@pytest.mark.parametrize(("f", "make"), CASES, ids=lambda v: v.__name__)
def test_it_is_as_in_eager(f: Callable, make: Callable) -> None:
    jf = thunder.jit(f, transforms=[SubclassTransform()])
    history, values = outcome(f, make)
    for _ in range(2):
        found = outcome(jf, make)
        assert found[0] == history
        torch.testing.assert_close(found[1], values)
    assert thunder.cache_misses(jf) == 1


def test_a_leaf_is_not_written_into_by_a_trace_for_what_was_computed():
    jf = thunder.jit(added, transforms=[SubclassTransform()])
    jf(two(requires_grad=True) * 1, two())
    leaf = two(requires_grad=True)
    for x in (leaf, leaf.view(2, 3)):
        before = [t.clone() for t in parts([leaf])]
        for f in (added, jf):
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
                f(x, two())
        torch.testing.assert_close(parts([leaf]), before)


def test_what_the_backward_needs_and_was_written_is_an_error():
    def f(x, y):
        z = x * y
        with torch.no_grad():
            y.add_(1)
        return z

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for g in (f, jf):
        x, y = two(requires_grad=True), two()
        before = y.a.clone()
        z = g(x, y)
        torch.testing.assert_close(y.a, before + 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward(torch.ones_like(z.detach()))


def test_views_of_one_tensor_are_not_written_into_where_autograd_records_it():
    for f in (added, part_written):
        x = two(requires_grad=True) * 1
        before = [t.clone() for t in parts([x])]
        with pytest.raises(ThunderNormError, match="a view of"):
            thunder.jit(f, transforms=[SubclassTransform()])(x, x.view(2, 3))
        torch.testing.assert_close(parts([x]), before)


def test_other_classes_get_a_history_too():
    x, p = OpCounter(torch.randn(3)), torch.randn(3, requires_grad=True)
    before = x.value.clone()

    def f(x, p):
        x.add_(p)

    thunder.jit(f, transforms=[SubclassTransform()])(x, p)
    torch.testing.assert_close(x.value, before + p.detach())
    with pytest.raises(ThunderNormError, match=r"the context \d") as e:
        x.backward(OpCounter(torch.ones(3)))
    (count,) = re.findall(r"expected .* the context (\d)", str(e.value))  # which torch's own operations hang on
    x.backward(OpCounter(torch.ones(3), int(count)))
    assert x.requires_grad and p.grad is not None


@pytest.mark.parametrize("f", [lambda x: x.a.mul_(x), lambda x: x.a[0].copy_(x[1])])
def test_an_inner_tensor_gets_a_history_from_its_wrapper(f: Callable):
    found = []

    def program(x):
        f(x)
        return x * 2

    for run in (program, thunder.jit(program, transforms=[SubclassTransform()])):
        torch.manual_seed(seeded(0))
        x = two(requires_grad=True)
        y = run(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y.detach()))
        assert (x.a.requires_grad, x.b.requires_grad) == (True, False)
        found.append(parts([x.detach(), y.detach(), gradient]))
    torch.testing.assert_close(*found)


def test_an_inner_tensor_is_not_made_to_require_grad():
    x = two(requires_grad=True)
    with pytest.raises(ThunderNormError, match="requires_grad_"):
        thunder.jit(lambda x: (x.a.requires_grad_(), x * 2)[1], transforms=[SubclassTransform()])(x)
    assert not (x.a.requires_grad or x.b.requires_grad)


def test_higher_derivatives_of_what_writes_into_inputs_are_refused():
    x = two(requires_grad=True)
    z = thunder.jit(lambda x: (x.data.mul_(2), x.sin())[1], transforms=[SubclassTransform()])(x)
    with pytest.raises(ThunderNormError, match="create_graph=True"):
        (g,) = torch.autograd.grad(z, x, torch.ones_like(z.detach()), create_graph=True)
        torch.autograd.grad(g, x, torch.ones_like(g.detach()))
