"""What a transformed function keeps outside of itself: numbers as in eager mode, none of its tensors, which mean nothing there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thunder_norm.errors import EscapeError
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, jvp, vmap
import thunder

x = torch.tensor([0.5, -1.0, 2.0])

HOW: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda f: grad(f),
    "jitted": lambda f: thunder.jit(grad(f)),
    "in vmap": lambda f: lambda t: vmap(grad(f))(t[None])[0],
    "in jvp": lambda f: lambda t: jvp(grad(f), (t,), (t,))[0],
    "torch's, traced": lambda f: thunder.jit(lambda t: torch.func.grad(f)(t), transforms=[NormTransform()]),
    "traced": lambda f: thunder.jit(lambda t: grad(f)(t), transforms=[SubclassTransform()]),
}


def keep_in_list(kept: Any, t: torch.Tensor) -> None:
    kept.items.append(t.detach())


def keep_in_dict(kept: Any, t: torch.Tensor) -> None:
    kept.names["t"] = [t * 2]


def keep_as_attribute(kept: Any, t: torch.Tensor) -> None:
    kept.last = t * 2


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("keep", [keep_in_list, keep_in_dict, keep_as_attribute])
def test_its_tensors_are_refused_and_nothing_is_kept(keep: Callable, how: str) -> None:
    kept = SimpleNamespace(items=[], names={}, last=None)

    def f(t: torch.Tensor) -> torch.Tensor:
        keep(kept, t)
        return t.sin().sum()

    with pytest.raises(EscapeError, match="would have been a proxy"):
        HOW[how](f)(x)
    assert kept == SimpleNamespace(items=[], names={}, last=None)


def test_a_variable_of_the_surroundings_is_not_left_with_one() -> None:
    last = None

    def f(t: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = t * 2
        return t.sin().sum()

    with pytest.raises(EscapeError, match="would have been a proxy"):
        grad(f)(x)
    assert last is None


@pytest.mark.parametrize("how", ["grad", "jitted", "in vmap", "traced"])
def test_numbers_are_kept_in_each_call(how: str) -> None:
    kept = SimpleNamespace(calls=0, sizes=[])

    def f(t: torch.Tensor) -> torch.Tensor:
        kept.calls += 1
        kept.sizes.append(t.shape[0] + kept.calls)
        return t.sin().sum()

    g = HOW[how](f)
    for n in range(1, 4):
        torch.testing.assert_close(g(x), x.cos())
        assert (kept.calls, kept.sizes) == (n, [*range(4, 4 + n)])
