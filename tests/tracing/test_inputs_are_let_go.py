"""Tensors that a program is given do not live as long as its trace."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.functions import tried_views
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


def inner(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        x,
        *(t for name in ("a", "b", "elem", "backing", "norm_size", "_values") if (t := getattr(x, name, None)) is not None),
    ]


def written(x):
    with torch.no_grad():
        x.mul_(2)
    return x * 3


def hooked(x):
    x.register_hook(lambda g: g * 2)
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda g: g + 1)
    return y


def asked(x):
    return x * 2 if x.is_leaf and x.grad is None else x


def two(requires_grad: bool) -> Callable[[], tuple]:
    return lambda: (TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_(requires_grad),)


def shared() -> tuple:
    t = torch.randn(4, 4)
    return TwoTensor(t, t), TwoTensor(t[:2], t[:2])


def jagged() -> tuple:
    return (torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged, requires_grad=True),)


CASES: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "used": (lambda x: x * 2, two(False)),
    "differentiated": (lambda x: (x.sin() * x).sum(), two(True)),
    "handed back": (lambda x: (x, x + 1), two(True)),
    "beside a plain tensor": (lambda x, p: x * p + p.sin(), lambda: (*two(True)(), torch.randn(3, 4, requires_grad=True))),
    "written": (written, two(False)),
    "written, differentiated": (lambda x: written(x * 1), two(True)),
    "hooked": (hooked, two(True)),
    "hooked, plain": (hooked, lambda: (torch.randn(3, 4, requires_grad=True),)),
    "asked": (asked, two(True)),
    "of a size that is a value": (
        lambda x: x[x > 0] * 2,
        lambda: (TwoTensor(t := torch.randn(3, 4), t.clone()).requires_grad_(),),
    ),
    "in one memory": (lambda x, y: (x.mul_(2), y * 2), shared),
    "nested": (lambda x: x.sin() * 2, jagged),
    "opaque": (lambda x: x.sin() * 2, lambda: (LoggingTensor(torch.randn(3, 4)),)),
    "normed": (lambda x: x.relu() * 2, lambda: (RMSTensor.of(torch.randn(3, 4)),)),
    "plain": (lambda x: x.sin() * 2, lambda: (torch.randn(3, 4, requires_grad=True),)),
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_live_no_longer_than_their_call(name: str, frozen_heap: None) -> None:
    torch.manual_seed(seeded(0))
    program, make = CASES[name]
    transform: Any = NormTransform() if name == "normed" else SubclassTransform(opaque="run" if name == "opaque" else "error")
    jitted = thunder.jit(program, transforms=[transform])

    def call(goes_back: bool) -> list[weakref.ref]:
        given = make()
        results = jitted(*given)
        if goes_back:
            moving = [t for t in (results if isinstance(results, tuple) else (results,)) if t.requires_grad]
            torch.autograd.backward(moving, [torch.ones_like(t.detach()) for t in moving])
        return [weakref.ref(t) for x in given for t in inner(x)]

    for goes_back in (False, True):
        alive = call(goes_back)
        gc.collect()
        assert alive and not any(ref() is not None for ref in alive)
    jitted(*make())  # the trace still works


def test_what_torch_refuses_is_remembered_without_what_was_given(monkeypatch: pytest.MonkeyPatch, frozen_heap: None) -> None:
    """Torch is asked which results are views, and refuses the arguments that Thunder has for some."""
    monkeypatch.setattr(tried_views, "_found", {})

    def program(x):
        z = (x - x.mean(-1, keepdim=True)) * 1
        z += 1
        return z

    def alive() -> weakref.ref:
        x = torch.randn(3, 4, requires_grad=True)
        thunder.jit(program, transforms=[NormTransform()])(x)
        return weakref.ref(x)

    found = alive()
    gc.collect()
    assert found() is None
    assert any(isinstance(answer, Exception) for answer in tried_views._found.values())
