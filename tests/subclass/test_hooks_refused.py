"""Hooks that a traced program gives to tensors, where a trace would call them otherwise than eager mode: right, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import thunder_norm  # noqa: F401 - before Thunder
from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder


def _plain(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seeded(seed))).requires_grad_()


def _two(seed: int) -> TwoTensor:
    return TwoTensor(_plain(seed).detach(), _plain(seed + 1).detach()).requires_grad_()


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    return [t.a, t.b] if isinstance(t, TwoTensor) else [t]


def shifting_part(x):
    y, z = x.sin(), x.cos()
    y.register_hook(lambda g: g + 1)
    return y, z


def scaling_part(x):
    y, z, s = x.sin(), x.cos(), x.detach()
    y.register_hook(lambda g: g * s)
    return y, z


@pytest.mark.parametrize("make", [_two, _plain], ids=["wrapper", "plain"])
def test_a_hook_is_not_called_where_other_results_are_differentiated(make):
    """In a trace it is, with zeros: only such that makes zeros of them is right."""
    gradients = []
    for fn in (scaling_part, thunder.jit(scaling_part, transforms=[SubclassTransform()])):
        x = make(0)
        fn(x)[1].sum().backward()
        gradients.append(x.grad)
    for parts in zip(*map(_parts, gradients), strict=True):
        torch.testing.assert_close(*parts)
    x = make(0)
    _, z = thunder.jit(shifting_part, transforms=[SubclassTransform()])(x)
    with pytest.raises(UnsupportedOpError, match="a hook of a tensor that some results do not depend on"):
        z.sum().backward()


def scaling_one(x, w):
    s = w.detach()
    x.register_hook(lambda g: g * s)
    return x.sin(), w * 2


def shifting_one(x, w):
    x.register_hook(lambda g: g + 1)
    return x.sin(), w * 2


def counting_one(x, w):
    x.register_post_accumulate_grad_hook(lambda p: p.grad.add_(1) is None or None)
    return x.sin(), w * 2


@pytest.mark.parametrize("make", [_two, _plain], ids=["wrapper", "plain"])
def test_nor_is_a_hook_of_an_input(make):
    """The gradient of an input is zeros where others alone are differentiated, as without a hook."""
    x, w = make(0), make(1)
    thunder.jit(scaling_one, transforms=[SubclassTransform()])(x, w)[1].sum().backward()
    assert not any(t.any() for t in _parts(x.grad))
    for fn in (shifting_one, counting_one):
        with pytest.raises(UnsupportedOpError, match="a hook of a tensor that some results do not depend on"):
            thunder.jit(fn, transforms=[SubclassTransform()])(make(0), make(1))[1].sum().backward()


@pytest.mark.parametrize("is_input", [True, False], ids=["input", "computed"])
def test_to_find_out_writes_nothing(is_input):
    """What a hook makes of zeros is asked of the hook: it does not get to write them into the user's tensors, or to draw numbers."""
    kept, state = torch.ones(3, 4), torch.get_rng_state()

    def f(x, w):
        y = x if is_input else x.sin()
        y.register_hook(lambda g: kept.copy_(g) * torch.rand(()))
        return y * 2, w * 2

    with pytest.raises(UnsupportedOpError):
        thunder.jit(f, transforms=[SubclassTransform()])(_plain(0), _plain(1))[1].sum().backward()
    assert torch.equal(kept, torch.ones(3, 4)) and torch.equal(torch.get_rng_state(), state)


def test_hooks_of_inputs_that_are_written_into_are_refused():
    """Such an input stands for two tensors of the graph."""
    for fn in (
        lambda x: (x.register_hook(lambda g: g * 3), x.mul_(2))[1] * 1,
        lambda x: (x.mul_(2).register_hook(abs), x)[1] * 1,
    ):
        with pytest.raises((UnsupportedOpError, RuntimeError)):
            thunder.jit(fn, transforms=[SubclassTransform()])(_two(0) * 1)


def _packing(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return x * x


def _of_several(x):
    torch.autograd.graph.register_multi_grad_hook((x,), lambda gradients: None)
    return x * x


def _a_changed_attribute(x):
    x.register_hook(lambda g: g)
    return x * x, x._backward_hooks is None


def _computed_handle(x):
    y = x * x
    return y, y.register_hook(lambda g: g)


@pytest.mark.parametrize(
    "fn, message",
    [
        (_packing, "saved_tensors_hooks"),
        (_of_several, "register_multi_grad_hook"),
        (_a_changed_attribute, "_backward_hooks"),
        (_computed_handle, "the handle of a hook of what the program computes"),
    ],
    ids=["packing", "of_several", "a_changed_attribute", "computed_handle"],
)
def test_what_a_trace_cannot_keep_is_refused(fn, message):
    """Without a word the gradients, or the answer, would be others."""
    with pytest.raises(UnsupportedOpError, match=message):
        thunder.jit(fn, transforms=[SubclassTransform()])(_two(0))
