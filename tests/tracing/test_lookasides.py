"""Implementations of users for calls of libraries, shown with einops."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import einops
import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm import RMSTensor
from thunder_norm.errors import TransformError, TransformTypeError
from thunder_norm.transforms import NormTransform, SubclassTransform, register_lookaside
import thunder
from thunder.core.jit_ext import _general_jit_lookaside_map


@pytest.fixture(autouse=True)
def own_registrations() -> Iterator[None]:
    """What a test registers ends with it."""
    saved = dict(_general_jit_lookaside_map)
    yield
    _general_jit_lookaside_map.clear()
    _general_jit_lookaside_map.update(saved)


def groups(side: str) -> list[list[str]]:
    """The axes on one side of a pattern, those in parentheses together."""
    found: list[list[str]] = []
    is_inside = False
    for token in side.replace("(", " ( ").replace(")", " ) ").split():
        if token in "()":
            is_inside = token == "("
            if is_inside:
                found.append([])
        elif is_inside:
            found[-1].append(token)
        else:
            found.append([token])
    return found


@functools.cache  # its code is not traced, as that of any built-in function
def recipe(shape: tuple[int, ...], pattern: str, sizes: tuple[tuple[str, int], ...]) -> tuple[list[int], list[int], list[int]]:
    """How to split the axes, how to permute them, and how to merge them."""
    left, right = (groups(side) for side in pattern.split("->"))
    lengths = dict(sizes)
    for size, group in zip(shape, left, strict=True):
        (unknown,) = [axis for axis in group if axis not in lengths] or [group[0]]
        lengths.setdefault(unknown, size // math.prod(lengths[axis] for axis in group if axis != unknown))
    axes = [axis for group in left for axis in group]
    order = [axes.index(axis) for group in right for axis in group]
    return [lengths[axis] for axis in axes], order, [math.prod(lengths[axis] for axis in group) for group in right]


def rearrange(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """einops.rearrange in torch operations."""
    split, order, merged = recipe(tuple(tensor.shape), pattern, tuple(sizes.items()))
    return tensor.reshape(split).permute(order).reshape(merged)


def heads(x: torch.Tensor) -> torch.Tensor:
    return einops.rearrange(x, "b n (h d) -> b h n d", h=2).sin()


PATTERNS = (
    ("b n (h d) -> b h n d", {"h": 2}),
    ("b n c -> (b n) c", {}),
    ("b n c -> c (n b)", {}),
    ("b (n k) (h d) -> (b k) h (n d)", {"k": 3, "d": 2}),
)


@pytest.mark.parametrize(("pattern", "sizes"), PATTERNS)
def test_the_replacement_is_einops(pattern: str, sizes: dict[str, int]) -> None:
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(rearrange(x, pattern, **sizes), einops.rearrange(x, pattern, **sizes), rtol=0, atol=0)


def test_einops_is_replaced_in_traces_and_only_there() -> None:
    calls = []

    def recorded(tensor, pattern, **sizes):
        calls.append(pattern)
        return rearrange(tensor, pattern, **sizes)

    register_lookaside(einops.rearrange, recorded)
    x = torch.randn(2, 3, 4, requires_grad=True)
    expected = heads(x)
    assert not calls
    found = thunder.jit(heads)(x)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected)
    (g,), (h,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    torch.testing.assert_close(g, h)


def test_with_wrappers() -> None:
    register_lookaside(einops.rearrange, rearrange)
    x = torch.randn(2, 3, 4)
    found = thunder.jit(heads, transforms=[SubclassTransform()])(TwoTensor(x, 2 * x))
    torch.testing.assert_close(found.b, heads(2 * x))
    normed = thunder.jit(heads, transforms=[NormTransform()])(RMSTensor.of(x, elem_dims=(-2, -1)))
    torch.testing.assert_close(normed.backing, heads(x))


def test_an_untraceable_call() -> None:
    def through_numpy(x):
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    def f(x):
        return through_numpy(x) * 2

    x = torch.randn(3)
    with pytest.raises(Exception, match="numpy"):
        thunder.jit(f)(x)

    @register_lookaside(through_numpy)
    def traceable(x):
        return torch.tanh(x)

    torch.testing.assert_close(thunder.jit(f)(x), f(x))
    assert callable(traceable)


def test_registered_ones_are_kept() -> None:
    register_lookaside(einops.rearrange, rearrange)
    with pytest.raises(TransformError, match="override"):
        register_lookaside(einops.rearrange, rearrange)
    with pytest.raises(TransformError, match="override"):
        register_lookaside(torch.sin, torch.cos)
    register_lookaside(torch.sin, torch.cos, override=True)
    torch.testing.assert_close(thunder.jit(lambda x: torch.sin(x))(torch.zeros(2)), torch.ones(2))


def test_mistakes() -> None:
    with pytest.raises(TransformTypeError, match="replacement"):
        register_lookaside(einops.rearrange, 3)
    with pytest.raises(TransformTypeError, match="fn"):
        register_lookaside("einops.rearrange", rearrange)
    with pytest.raises(TransformError, match="own replacement"):
        register_lookaside(rearrange, rearrange)


def test_registered_ones_come_before_what_we_do_as_torch_does_it() -> None:
    register_lookaside(torch.lerp, lambda x, y, weight: x - y, override=True)
    found = thunder.jit(lambda x: torch.lerp(x, x + 1, 0.5), transforms=[SubclassTransform()])(torch.zeros(2))
    torch.testing.assert_close(found, -torch.ones(2))
