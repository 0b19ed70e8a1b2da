"""Hooks that a traced program gives to tensors, and what its inputs say of themselves: eager mode's answers in each call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.hooks import RemovableHandle

import thunder_norm  # noqa: F401 - before Thunder
from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, ProfileTransform, SplitBiasTransform, SubclassTransform
import thunder


def _two(seed: int, requires_grad: bool = True) -> TwoTensor:
    generator = torch.Generator().manual_seed(seeded(seed))
    a, b = (torch.randn(3, 4, generator=generator) for _ in range(2))
    return TwoTensor(a, b).requires_grad_(requires_grad)


def _answers(fn, inputs: int) -> list:
    """Of two calls: results, and gradients where they can be had."""
    found = []
    for call in range(2):
        given = [_two(10 * call + i) for i in range(inputs)]
        results = fn(*given)
        results = results if isinstance(results, tuple) else (results,)
        sum(t.sum() for t in results if isinstance(t, torch.Tensor) and t.requires_grad).backward()
        found.append((results, [x.grad for x in given]))
    return found


def _assert_equal(found, expected) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            _assert_equal(*pair)
    elif isinstance(expected, RemovableHandle):
        return
    elif isinstance(expected, TwoTensor):
        _assert_equal((found.a, found.b), (expected.a, expected.b))
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


def of_input(x):
    x.register_hook(lambda g: g * 2)
    return x * x


def of_result(x):
    y = x * x
    y.register_hook(lambda g: g * 3)
    return y + 1


def removed_from_input(x):
    x.register_hook(lambda g: g * 2).remove()
    return x * x


def removed_from_result(x):
    y = x * x
    handle = y.register_hook(lambda g: g * 3)
    z = y * 2
    handle.remove()
    return z


def after_accumulating(x):
    def twice(p):
        p.grad.mul_(2)

    x.register_post_accumulate_grad_hook(twice)
    return x * x


def after_accumulating_of_result(x):
    y = x * 2
    try:
        y.register_post_accumulate_grad_hook(lambda p: None)
    except RuntimeError:
        return y * 3
    return y


def that_holds_what_is_computed(x):
    s = x.detach() * 2
    x.register_hook(lambda g: g * s)
    return x * x


def that_holds_an_input(x, y):
    z = x * y
    z.register_hook(lambda g: g * x.detach())
    return z


def of_inner_tensor(x):
    a = x.a * 2  # of a leaf they require no gradient
    try:
        a.register_hook(lambda g: g * 5)
    except RuntimeError:
        return x * 4
    return x


def retained(x):
    y = x * x
    y.retain_grad()
    x.retain_grad()
    return (y * 2).sum()


def with_its_handle(x):
    handle = x.register_hook(lambda g: g * 2)
    return x * x, handle, [handle]


def with_the_handle_of_nothing(x):
    handle = x.register_hook(lambda g: g * 2)
    handle.remove()
    y = x * x
    other = y.register_hook(lambda g: g * 3)
    other.remove()
    return y, handle, other


def as_long_as_a_block(x):
    with x.register_hook(lambda g: g * 2):
        return x * x


def of_a_node(x):
    y = x * x
    y.grad_fn.register_hook(lambda inputs, outputs: tuple(g * 2 for g in inputs))
    y.grad_fn.register_prehook(lambda outputs: (outputs[0] + 1,))
    return y


def that_says_so(x):
    y = x * x
    before = y.retains_grad
    y.retain_grad()
    return (y * 2).sum(), before, y.retains_grad, (x * 1).retains_grad


HOOKS = [
    with_its_handle,
    with_the_handle_of_nothing,
    as_long_as_a_block,
    of_a_node,
    that_says_so,
    of_input,
    of_result,
    removed_from_input,
    removed_from_result,
    after_accumulating,
    after_accumulating_of_result,
    that_holds_what_is_computed,
    that_holds_an_input,
    of_inner_tensor,
    retained,
]


def its_gradient(x):
    return x.sin() if x.grad is None else x.cos()


def its_base(x):
    return x.sin() if x._base is None else x.cos()


def base_of_a_view(x):
    return x[0].sin() if x[0]._base is x else x.cos()


def of_what_is_computed(x):
    y = x * 2
    return y, y.is_leaf, y.grad_fn is None


def without_gradients(x):
    with torch.no_grad():
        y = x * 2
    return x * 1, y._base is None, y.grad is None


ATTRIBUTES = [its_gradient, its_base, base_of_a_view, of_what_is_computed, without_gradients]


@pytest.mark.parametrize("fn", HOOKS + ATTRIBUTES, ids=lambda f: f.__name__)
def test_wrappers(fn):
    inputs = fn.__code__.co_argcount
    _assert_equal(_answers(thunder.jit(fn, transforms=[SubclassTransform()]), inputs), _answers(fn, inputs))


def test_attributes_are_guarded():
    """A gradient that is there, and an input that is a view, are other programs."""
    jitted = thunder.jit(its_gradient, transforms=[SubclassTransform()])
    x = _two(0)
    for _ in range(2):
        y = jitted(x)
        _assert_equal(y, its_gradient(x))
        y.sum().backward()
    jitted = thunder.jit(its_base, transforms=[SubclassTransform()])
    for given in (_two(0), _two(0)[:2], _two(1)):
        _assert_equal(jitted(given), its_base(given))


class _Hooked(nn.Module):
    """Hooks on a parameter, on the input and on what is computed."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        self.linear.weight.register_hook(lambda g: g * 3)
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(-0.1, 0.1))
        y = self.linear(x)
        z = self.last(y)
        y.register_hook(lambda g: g * 2)
        return z.relu()


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_plain_tensors(transform):
    """Of modules, in programs of plain tensors; parameters keep a hook for each call, as in eager mode."""
    torch.manual_seed(seeded(0))
    model = _Hooked()
    other = _Hooked()
    other.load_state_dict(model.state_dict())
    jitted = thunder.jit(model, transforms=[transform()])
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        y, expected = jitted(x), other(same)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert type(y) is torch.Tensor
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, same.grad)
        for found, p in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found.grad, p.grad)


def test_a_handle_that_is_returned_takes_the_hook_off():
    """It is that of the call at hand, and torch's."""
    jitted = thunder.jit(with_its_handle, transforms=[SubclassTransform()])
    gradients = []
    for fn in (with_its_handle, jitted, jitted):
        x = _two(0)
        y, handle, (same,) = fn(x)
        assert type(handle) is RemovableHandle and same is handle
        y.sum().backward(retain_graph=True)
        handle.remove()
        y.sum().backward()
        gradients.append(x.grad)
    assert thunder.cache_misses(jitted) == 1
    for gradient in gradients[1:]:
        _assert_equal(gradient, gradients[0])


class _Backward(nn.Module):
    """A layer with hooks of its backward, given before or after it runs."""

    def __init__(self, **hooks):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, hook in hooks.items():
            getattr(self.linear, name)(hook)

    def forward(self, x):
        return self.linear(x.sin())


def test_hooks_of_modules():
    """What torch's hooks of modules do to gradients of wrappers is in the backward."""
    hooks = {
        "register_full_backward_hook": lambda module, inputs, outputs: tuple(g * 2 for g in inputs),
        "register_full_backward_pre_hook": lambda module, outputs: tuple(g + 1 for g in outputs),
    }
    torch.manual_seed(seeded(0))
    model = _Backward(**hooks)
    _assert_equal(_answers(thunder.jit(model, transforms=[SubclassTransform()]), 1), _answers(model, 1))


def returned(x):
    y = x * x
    y.retain_grad()
    return y, (x * 3).sum()


def returned_and_written_in_place(x):
    y = x * x
    y.retain_grad()
    y.mul_(3)
    return y, y


def returned_several(x):
    y, z = x * x, x.exp()
    y.retain_grad()
    z.retain_grad()
    return y, z, y.detach()


def returned_after_a_hook(x):
    y = x * x
    y.register_hook(lambda g: g * 3)
    z = y * 2
    z.retain_grad()
    return z, x * 1


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, CheckpointTransform])
@pytest.mark.parametrize("is_wrapper", [False, True])
@pytest.mark.parametrize("fn", [returned, returned_and_written_in_place, returned_several, returned_after_a_hook])
def test_a_result_keeps_its_gradient(fn, is_wrapper: bool, transform: type):
    def run(f):
        torch.manual_seed(seeded(0))
        x = TwoTensor(torch.randn(3), torch.randn(3)) if is_wrapper else torch.randn(3)
        results, found = f(x.requires_grad_()), []
        for of in (results[-1:], results, results[:1]):  # a gradient arrives at some, and all add up
            moving = [(t * t).sum() for t in of if t.requires_grad]
            if moving:
                loss = sum(moving[1:], moving[0])
                loss.backward(torch.ones_like(loss), retain_graph=True)
            found.append([x.grad.clone() if x.grad is not None else None, *(t.retains_grad and t.grad for t in results)])
        return results, found

    expected, jf = run(fn), thunder.jit(fn, transforms=[transform()])
    for _ in range(2):
        assert_same(run(jf), expected)


@pytest.mark.parametrize("fn", [lambda y: (y, y.sin()), lambda y: (y[0], y), lambda y: (y.register_hook(lambda g: g * 2), y)[1:]])
def test_a_gradient_that_comes_from_within_is_not_kept(fn):
    def kept(x):
        y = x * x
        y.retain_grad()
        return fn(y)

    with pytest.raises(UnsupportedOpError, match="retain_grad.. of a tensor that the program computes and returns"):
        thunder.jit(kept, transforms=[SubclassTransform()])(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("transform", [CheckpointTransform, ProfileTransform, SplitBiasTransform])
@pytest.mark.parametrize("fn", [after_accumulating, of_input, of_result, retained], ids=lambda f: f.__name__)
def test_transforms_for_plain_tensors_have_hooks_led(fn, transform):
    """By a SubclassTransform, which they do not name."""
    found = []
    for call in (fn, thunder.jit(fn, transforms=[transform()])):
        for n in range(2):
            x = torch.arange(1.0 + n, 4.0 + n).requires_grad_()
            call(x).sum().backward()
            found.append(x.grad)
    torch.testing.assert_close(found[2:], found[:2])


def test_handles_in_containers_of_the_user():
    """What stands in them is torch's handle of the call."""
    kept: list = []

    def f(x):
        kept.append(x.register_hook(lambda g: g * 2))
        return x * x

    for fn in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        x = _two(0)
        y = fn(x)
        assert type(kept[-1]) is RemovableHandle
        kept.pop().remove()
        y.sum().backward()
        _assert_equal(x.grad, _two(0, requires_grad=False) * 2)


def test_hooks_that_change_something_are_refused():
    """They would run once, while the trace is acquired."""
    seen: list = []

    def f(x):
        y = x * x
        y.register_hook(seen.append)
        return y

    counted = _Backward(register_full_backward_hook=lambda module, inputs, outputs: seen.append(outputs))
    for program in (f, counted):
        y = thunder.jit(program, transforms=[SubclassTransform()])(_two(0))
        with pytest.raises(UnsupportedOpError, match="a hook changes a list"):
            y.sum().backward()
        assert seen == []
