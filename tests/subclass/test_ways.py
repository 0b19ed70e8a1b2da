"""Programs with other people's wrappers in ways that are rarely met: results, gradients, strides and inputs afterwards are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from tests.fuzz.wrapper_classes import Masked
from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.subclass.backward import gradients
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def two(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> TwoTensor:
    return TwoTensor(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)).requires_grad_(requires_grad)


def jit(fn: Callable) -> Callable:
    return thunder.jit(fn, transforms=[SubclassTransform()])


# -- complex numbers ------------------------------------------------------------------------------------------------------------


def magnitude(x, w):
    return (x @ w).abs() + (x * 2j).angle().sum(-1, keepdim=True)


def as_reals(x, w):
    return torch.view_as_real(x.sin() @ w), x.real * 2


@pytest.mark.parametrize("program", [magnitude, as_reals])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradients_of_wrappers_of_complex_numbers(program: Callable, requires_grad: bool):
    """They are those of the inner tensors, one by one; in eager mode conjugation is lost inside of wrappers (docs/upstream.md)."""

    def gradients(call: Callable, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor | None]:
        w = w.detach().requires_grad_()
        results = [y for y in tree_leaves(call(x, w)) if y.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        return [x.grad, w.grad] if requires_grad else [w.grad]

    torch.manual_seed(seeded(0))
    x, w = two(2, 3, dtype=torch.complex64), torch.randn(3, 2, dtype=torch.complex64)
    inner = [gradients(program, t.clone().requires_grad_(requires_grad), w) for t in (x.a, x.b)]
    found = gradients(jit(program), x.requires_grad_(requires_grad), w)
    for f, *expected in zip(found, *inner, strict=True):
        torch.testing.assert_close([f.a, f.b], expected)


# -- inputs handed back ---------------------------------------------------------------------------------------------------------


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(two(3))
        self.last = None

    def forward(self, x):
        self.last = x
        return {"weight": self.weight, "input": [x], "other": x * self.weight}


@pytest.mark.parametrize("requires_grad", [True, False])
def test_inputs_that_are_handed_back_are_the_very_objects(requires_grad: bool):
    torch.manual_seed(seeded(0))
    model = Kept()
    jitted = jit(model)
    for _ in range(2):
        x = two(3, requires_grad=requires_grad)
        found = jitted(x)
        assert found["weight"] is model.weight and found["input"][0] is x and model.last is x
        torch.testing.assert_close(found["other"].a, (x * model.weight).a)
    found["other"].backward(torch.ones_like(x))
    torch.testing.assert_close(model.weight.grad.a, x.a.detach())


def test_an_input_that_is_changed_and_handed_back_is_the_very_object():
    torch.manual_seed(seeded(0))
    x = two(3)
    before = TwoTensor(x.a.clone(), x.b.clone())

    def program(x):
        y = x + 0
        return x.mul_(2), x, y

    changed, same, old = jit(program)(x)
    assert changed is x and same is x and old is not x
    assert_same(x, before * 2)
    assert_same(old, before)
    norm = RMSTensor.of(torch.randn(2, 3))
    assert thunder.jit(lambda x: x, transforms=[NormTransform()])(norm) is norm


class Handed(nn.Module):
    """Hands parameters back, as they are and by operations that have nothing to do."""

    def __init__(self, requires_grad: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3), requires_grad)
        self.other = nn.Parameter(torch.randn(3), requires_grad)

    def forward(self, x):
        return (
            self.weight,
            self.weight.mean(),
            self.weight.contiguous(),
            self.weight.to(self.other),
            x,
            x.float(),
            x.amin(),
            self.other,
            *((self.weight.view(3), self.weight[...], self.weight.data) if not self.weight.requires_grad else ()),
        )


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_that_are_handed_back_are_the_very_objects(requires_grad: bool, is_frozen: bool):
    torch.manual_seed(seeded(0))
    model, inner = Handed(not is_frozen), torch.randn(2, 3)
    found = []
    for call in (jit(model), model):
        model.zero_grad()
        x = TwoTensor(inner[0].clone(), inner[1].clone()).requires_grad_(requires_grad)
        results = call(x)
        assert [x is t for t in results] == [t in (4, 5) for t in range(len(results))]
        assert [model.weight is t for t in results] == [t in (0, 2, 3) for t in range(len(results))] and results[7] is model.other
        moving = [t for t in results if t.requires_grad]
        if moving:  # what arrives at an input that is a result is a gradient of its own
            torch.autograd.backward(moving, [torch.full_like(t.detach(), 2.0) for t in moving])
        gradients = [None if t.grad is None else getattr(t.grad, "a", t.grad) for t in (x, model.weight, model.other)]
        found.append([[t.requires_grad for t in results], gradients])
    torch.testing.assert_close(*found)


def test_a_gradient_of_an_input_that_is_handed_back_is_not_added_to_zeros_of_its_class():
    """Masked zeros are masked everywhere, and so would be the sum."""

    def program(x):
        return [x, x.amin(-1)]

    torch.manual_seed(seeded(0))
    values, mask = torch.randn(4, 4), torch.randn(4, 4) > -0.5
    found = []
    for call in (jit(program), program):
        x = Masked(values.clone(), mask).requires_grad_()
        same, least = call(x)
        torch.autograd.backward([same, least], [torch.ones_like(same.detach()), torch.ones_like(least.detach())])
        found.append([x.grad.values_, x.grad.mask])
    assert found[1][1].any()
    torch.testing.assert_close(*found)


# -- what is written in place, and where it lies --------------------------------------------------------------------------------


def filled(x, y):
    z = x * 2
    z.copy_(y)
    w = torch.empty_like(x).fill_(3.0)
    return z, w, x.clone().masked_fill_(x > 0, 1.0), z + w


def into_out(x, y):
    total, largest = torch.empty_like(x), (torch.empty_like(x[0]), torch.empty_like(x[0], dtype=torch.int64))
    torch.add(x, y, out=total)
    torch.max(x, 0, out=largest)
    torch.sin(x, out=x)
    return total, largest, x


def through_data(x, y):
    x.data.mul_(2)
    return x.data + y, x


@pytest.mark.parametrize("program", [filled, into_out, through_data])
def test_changes_in_place_and_strides_of_results(program: Callable):
    torch.manual_seed(seeded(0))
    args = two(4, 3).t(), two(3, 4)
    args = TwoTensor(args[0].a, args[0].b), args[1]
    ours, eager = copied(args), copied(args)
    jitted = jit(program)
    for _ in range(2):
        found, expected = tree_leaves(jitted(*ours)), tree_leaves(program(*eager))
        for f, e in zip([*found, *ours], [*expected, *eager], strict=True):
            assert_same(f, e)
            assert (f.stride(), f.a.stride()) == (e.stride(), e.a.stride())


def copied(args: tuple[TwoTensor, ...]) -> tuple[Any, ...]:
    return tuple(TwoTensor(copy.deepcopy(x.a), copy.deepcopy(x.b)) for x in args)


# -- refused: they would have left another input or result than in eager mode -----------------------------------------------------


def transposed(x):
    x.t_()
    return x * 2


def transposed_after_a_change(x):
    x.mul_(2).transpose_(0, 1)
    return x


def inner_transposed(x):
    x.a.t_()
    return x.a * 2


def of_another_shape(x):
    return torch.sin(x, out=torch.empty_like(x[:1]))


@pytest.mark.parametrize(
    "program, requires_grad, text",
    [
        (transposed, False, "changes the shape or the strides of an input"),
        (transposed_after_a_change, False, "changes the shape or the strides of an input"),
        (inner_transposed, False, "changes the shape or the strides of an input"),
        (lambda x: x.requires_grad_() * 2, False, r"requires_grad_\(True\) of an input"),
        (lambda x: x.requires_grad_(False) * 2, True, r"requires_grad_\(False\) of an input"),
        (lambda x: x.detach_() * 2, True, r"detach_\(\) of an input"),
        (of_another_shape, False, "of other shapes"),
        (lambda x: x if x._is_view() else x * 2, False, "_is_view"),
    ],
)
def test_what_would_change_what_an_input_is_is_refused(program: Callable, requires_grad: bool, text: str):
    x = two(3, 3, requires_grad=requires_grad)
    with pytest.raises(UnsupportedOpError, match=text):
        jit(program)(x)
    assert x.requires_grad == requires_grad and x.stride() == x.a.stride() == (3, 1)


def test_a_flag_that_is_set_to_what_it_is_says_nothing():
    x = two(3, requires_grad=True)

    def program(x):
        y = (x.requires_grad_() * 2).requires_grad_()
        try:
            y.requires_grad_(False)
        except RuntimeError:
            return y, x.detach().requires_grad_(False)

    found, expected = jit(program)(x), program(x)
    assert [t.requires_grad for t in found] == [t.requires_grad for t in expected] == [True, False]
    assert_same(found[0], expected[0])


# -- gradients that are added up ------------------------------------------------------------------------------------------------


def of_a_sum(x, y):
    return (x + y) * 2


def of_a_copy(x, y):
    return (x + 0) + (y.t() * 1).t()


def of_an_inner_product(x, y):
    return x @ y


@pytest.mark.parametrize("program", [of_a_sum, of_a_copy, of_an_inner_product])
def test_gradients_are_added_up_over_several_backwards(program: Callable):
    """Torch adds to the inner tensors of a gradient in place: they must be nobody else's, of another input or of the caller."""

    def added(call: Callable) -> list[torch.Tensor]:
        torch.manual_seed(seeded(0))
        x, y, g = two(3, 3, requires_grad=True), two(3, 3, requires_grad=True), two(3, 3)
        for _ in range(3):
            call(x, y).backward(g)
        return [x.grad, y.grad, g]

    for found, expected in zip(added(jit(program)), added(program), strict=True):
        assert_same(found, expected)


def test_an_lstm_of_a_wrapper():
    """Its layers by oneDNN have a workspace for the backward; of two biases there is one gradient."""

    def of_lstm(jitted: bool) -> list[torch.Tensor]:
        torch.manual_seed(seeded(0))
        lstm = nn.LSTM(3, 4, batch_first=True)
        output, (h, c) = (jit(lstm) if jitted else lstm)(two(2, 5, 3))
        for result in (output, h, c):
            result.backward(torch.ones_like(result), retain_graph=True)
        return [output, h, c, *(p.grad for p in lstm.parameters())]

    for found, expected in zip(of_lstm(True), of_lstm(False), strict=True):
        torch.testing.assert_close([found.a, found.b], [expected.a, expected.b])


# -- where tensors come from ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [two, torch.randn])
def test_a_tensor_that_is_the_default_of_a_parameter_is_an_input(make: Callable):
    given = make(3).requires_grad_()

    def program(x, by=given):
        return x * by

    x, found = torch.linspace(1, 2, 3), []
    for run in (program, jit(program)):
        out = run(x)
        (gradient,) = torch.autograd.grad(out, given, torch.ones_like(out.detach()))
        found.append([getattr(t, name, t) for t in (out.detach(), gradient) for name in ("a", "b")])
    torch.testing.assert_close(*found)


class KeptGradient(torch.autograd.Function):
    """A backward that returns what it has kept, as it is."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0], None


def test_a_gradient_that_is_a_tensor_kept_for_the_backward():
    x, factor = two(3, requires_grad=True), two(3)
    before = TwoTensor(factor.a.clone(), factor.b.clone())
    result = jit(lambda x, factor: KeptGradient.apply(x, factor))(x, factor)
    for _ in range(2):
        result.backward(torch.ones_like(result), retain_graph=True)
    assert_same(x.grad, before * 2)
    assert_same(factor, before)


def test_a_plain_input_that_is_cast_to_its_own_dtype_and_not_used():
    def program(x, y):
        y.type(torch.float32)
        return x.erf()

    torch.manual_seed(seeded(0))
    x, y = two(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    result = jit(program)(x, y)
    assert_same(result, program(x, y))
    result.backward(torch.ones_like(result))
    assert y.grad is None and x.grad is not None


def test_gradients_of_wrappers_are_copied_where_somebody_else_has_their_memory_alone(monkeypatch):
    seen: list[tuple[bool, tuple[int, ...]]] = []
    owned = gradients._owned

    def watched(grads):
        made = owned(grads)
        seen.extend((m is g, tuple(g.shape)) for m, g in zip(made, grads, strict=True) if g is not None)
        return made

    monkeypatch.setattr(gradients, "_owned", watched)
    torch.manual_seed(seeded(0))
    x, w, b = (TwoTensor(torch.randn(shape), torch.randn(shape)).requires_grad_() for shape in ((3, 4), (3, 4), (4,)))

    def f(x, w, b):
        return x.sin() * w + b

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    incoming = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    for _ in range(3):  # from the third on a shorter way to the program
        found, wanted = (torch.autograd.grad(g(x, w, b), (x, w, b), incoming, retain_graph=True) for g in (jf, f))
        assert_same(list(found), list(wanted))
    assert len(seen) == 18 and all(is_same for is_same, _ in seen)  # products and sums, which are new

    seen.clear()
    jf = thunder.jit(lambda x, w: x + w, transforms=[SubclassTransform()])
    a, b = torch.autograd.grad(jf(x, w), (x, w), incoming)
    assert seen and not any(is_same for is_same, _ in seen)  # the gradient that came in, twice
    memory = {t.untyped_storage().data_ptr() for g in (a, b, incoming) for t in (g.a, g.b)}
    assert len(memory) == 6


def test_inputs_that_lost_whose_gradients_they_stand_for_on_their_way_are_refused(monkeypatch):
    given = gradients.Carriers.__call__
    monkeypatch.setattr(gradients.Carriers, "__call__", lambda self, *inputs: tuple(t.detach() for t in given(self, *inputs)))
    x = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
    with pytest.raises(UnsupportedOpError, match="were replaced by others"):
        thunder.jit(lambda x: x.sin(), transforms=[SubclassTransform()])(x)
