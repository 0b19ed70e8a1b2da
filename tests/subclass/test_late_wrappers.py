"""Wrappers that meet what plain tensors with gradients were computed to: the gradients are eager mode's, also where they are wrappers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import thunder_norm  # noqa: F401 - before Thunder
from tests.seeds import seeded
from tests.subclasses import OneTensor
from thunder_norm.transforms import SubclassTransform
import thunder


def _tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seeded(seed)))


def _two(seed: int, *shape: int) -> TwoTensor:
    return TwoTensor(_tensor(seed, *shape), _tensor(seed + 1, *shape))


def _assert_equal(found, expected) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, TwoTensor):
        torch.testing.assert_close((found.a, found.b), (expected.a, expected.b))
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


def added(x, w):
    return x.sin() + w


def first_alone(x, w):
    y = x.sin().exp()
    return (y @ y.mT).sum() * w + y.sum()


def in_two_places(x, w):
    y = x.sin()
    z = y.cos()
    return (y + w) * z + w.detach() * 2


def with_what_has_none(x, w):
    with torch.no_grad():
        y = x.cos()
    return x.sin() * y + w


def written_before(x, w):
    y = x.sin()
    y.mul_(2)
    return y * w


def written_after(x, w):
    y = x.sin()
    z = y * w
    y.add_(1)
    return z + y


def branches(x, w):
    y = x.sin()
    try:
        y = y @ w  # shapes do not fit
    except RuntimeError:
        y = y * 3
    return y + w


def hooked(x, w):
    y = x.sin()
    z = y * 2
    y.register_hook(lambda g: g * 3)
    return z + w


def given_by_name(x, *, w):
    return F.gelu(x) * w


@pytest.mark.parametrize(
    "fn",
    [added, first_alone, in_two_places, with_what_has_none, written_before, written_after, branches, hooked, given_by_name],
    ids=lambda f: f.__name__,
)
def test_gradients_are_those_of_eager_mode(fn):
    """Of two calls, by one trace."""
    jitted = thunder.jit(fn, transforms=[SubclassTransform()])
    for call in range(2):
        answers = []
        for program in (jitted, fn):
            x, w = _tensor(call, 3, 4).requires_grad_(), _two(call + 10, 3, 4)
            y = program(x, w=w) if fn is given_by_name else program(x, w)
            y.sum().backward()
            answers.append((y.detach(), x.grad))
        for found, expected in zip(*answers, strict=True):
            _assert_equal(found, expected)
    assert thunder.cache_misses(jitted) == 1


class _Model(nn.Module):
    """Plain layers, one of which keeps statistics, before a wrapper; it counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0
        self.seen: list[int] = []

    def forward(self, x, w):
        self.calls += 1
        self.seen.append(len(self.seen))
        return self.norm(self.linear(x)).relu() * w


def test_what_a_program_does_besides_is_done_once():
    """Although it is acquired a second time: statistics, what it appends and counts; gradients of parameters are wrappers, as in eager mode."""
    torch.manual_seed(seeded(0))
    model = _Model()
    other = copy.deepcopy(model)
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    jitted(_tensor(0, 5, 4), _two(1, 5, 4)).sum().backward()
    other(_tensor(0, 5, 4), _two(1, 5, 4)).sum().backward()
    assert model.seen == other.seen == [0]
    for (name, found), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        _assert_equal(found.grad, expected.grad)


def test_random_numbers_are_drawn_once():
    """Those of the program are eager mode's after the same seed, and it draws as many."""

    def program(x, w):
        return F.dropout(x.sin(), 0.5) * w

    answers = []
    for fn in (program, thunder.jit(program, transforms=[SubclassTransform()])):
        x = _tensor(0, 3, 4).requires_grad_()
        torch.manual_seed(seeded(3))
        fn(x, _two(1, 3, 4)).sum().backward()
        answers.append((x.grad, torch.rand(3)))
    for found, expected in zip(*answers, strict=True):
        _assert_equal(found, expected)


def test_second_derivatives():
    """Those of the plain tensors before the wrapper too."""
    gradients = []
    for fn in (added, thunder.jit(added, transforms=[SubclassTransform()])):
        x = _tensor(0, 3, 4).requires_grad_()
        y = fn(x, _two(1, 3, 4)) ** 2
        (first,) = torch.autograd.grad(y.sum(), x, torch.ones_like(y.sum()), create_graph=True)
        gradients.append(torch.autograd.grad(first.sum(), x, torch.ones_like(first.sum()))[0])
    _assert_equal(*gradients)


class _Scale(OneTensor):
    """What is multiplied by it is a plain tensor, and so is the gradient."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def test_what_thunder_can_hand_on_it_keeps():
    """A gradient that is a plain tensor: the operations before are Thunder's own."""

    def program(x, w):
        return x.sin() * w

    x, scale = _tensor(0, 3, 4).requires_grad_(), _tensor(1, 3, 4)
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    jitted(x, _Scale(scale)).sum().backward()
    assert any(b.sym.id == "torch.sin" for b in thunder.last_traces(jitted)[0].bound_symbols)
    torch.testing.assert_close(x.grad, x.detach().cos() * scale)


_LAID_OUT = {
    "transposed": lambda x: (x / 2).t(),
    "permuted": lambda x: (x.reshape(3, 2, 2) * 2).permute(2, 0, 1),
    "of a transposed one": lambda x: x.t().sin() + x.t(),
    "like a transposed one": lambda x: torch.ones_like((x * 2).t()),
    "of both layouts": lambda x: x.t() + torch.ones(4, 3),
    "made contiguous": lambda x: (x * 2).t().contiguous(),
    "written into": lambda x: (x * 2).t().mul_(3),
    "reduced": lambda x: (x.reshape(3, 2, 2) * 2).permute(2, 0, 1).sum(1),
    "channels last": lambda x: torch.relu(x.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last) * 2),
}


@pytest.mark.parametrize("kind", _LAID_OUT)
def test_wrappers_of_what_plain_operations_compute_have_its_strides(kind):
    def f(x):
        y = _LAID_OUT[kind](x)
        return TwoTensor(y, y * 1.0) * 3

    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4)
    found, expected = thunder.jit(f, transforms=[SubclassTransform()])(x), f(x)
    torch.testing.assert_close((found.a, found.b), (expected.a, expected.b))
    assert [t.stride() for t in (found, found.a, found.b)] == [t.stride() for t in (expected, expected.a, expected.b)]


_RETURNED_TWICE = {
    "then without its history": lambda y: (y, y.detach()),
    "first without its history": lambda y: (y.detach(), y),
    "and its data": lambda y: (y, y.data),
    "as it is": lambda y: (y, y),
    "three times": lambda y: (y, y.detach(), y.detach()),
}


@pytest.mark.parametrize("kind", _RETURNED_TWICE)
@pytest.mark.parametrize("compute", [lambda x: x * 2, lambda x: x[0], lambda x: x.t()])
def test_what_is_returned_with_its_history_and_without_has_its_gradient(compute, kind):
    def f(w, x):
        return *_RETURNED_TWICE[kind](compute(x)), w * 2

    def run(g):
        w, x = _two(0, 2, 3).requires_grad_(), _tensor(2, 2, 3).requires_grad_()
        *results, _ = g(w, x)
        moving = [r for r in results if r.requires_grad]
        return results, torch.autograd.grad(moving, x, [torch.ones_like(r) for r in moving])

    torch.testing.assert_close(run(thunder.jit(f, transforms=[SubclassTransform()])), run(f))


def of_an_operation_on_it(x):
    return (TwoTensor(x, x * 2) * 3).a


def beside_the_tensor_itself(x):
    w = TwoTensor(x.sin(), x)
    return w * x, x.cos()


def what_was_put_into_it(x):
    w = TwoTensor(x, x * 2)
    return w.a + (w * w).b * x


def multiplied_by_what_it_holds(x):
    return _Scale(x) * x, x


def nothing_has_a_gradient(x):
    return _Scale(x) * 2


def one_in_another(x):
    w = TwoTensor(TwoTensor(x, x), TwoTensor(x * 2, x))
    return (w * x).a.b, w.a * x


def what_it_says_of_itself(x):
    w = TwoTensor(x * 1, x)
    return w * x if w.requires_grad and w.is_leaf and not w.detach().requires_grad else w.a


@pytest.mark.parametrize(
    "fn",
    [of_an_operation_on_it, beside_the_tensor_itself, what_was_put_into_it, multiplied_by_what_it_holds, nothing_has_a_gradient, one_in_another,
     what_it_says_of_itself],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_what_a_class_makes_of_tensors_that_the_program_put_into_it_has_no_history(fn):
    """Gradients go by way of the wrapper, which has a flag of its own, and not of what is inside."""
    jitted = thunder.jit(fn, transforms=[SubclassTransform()])
    for call in range(2):
        answers = []
        for program in (jitted, fn):
            x, results = _tensor(call, 3, 4).requires_grad_(), []
            results.extend(r if isinstance(r := program(x), tuple) else (r,))
            moving = [r for r in results if r.requires_grad]
            (found,) = torch.autograd.grad([r.sum() for r in moving], x, [torch.ones_like(r.sum().detach()) for r in moving], allow_unused=True) if moving else (None,)  # fmt: skip
            answers.append((*[r.detach() for r in results], found, [r.requires_grad for r in results]))
        for found, expected in zip(*answers, strict=True):
            _assert_equal(found, expected)
    assert thunder.cache_misses(jitted) == 1
