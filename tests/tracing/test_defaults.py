"""What defaults of parameters hold is found anew in each call, as what a function closes over is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


class Held:
    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.factor = tensor, 3


def _programs(tensor: torch.Tensor, linear: nn.Linear) -> dict[str, Callable]:
    """Programs whose functions have these for defaults, or what holds them."""

    def helper(x, t=tensor):
        return x + t

    def one_of_two(x, module=linear, factor=2, *, t=tensor):
        return module(x * t) * factor

    def in_containers(x, ts=[tensor, linear], named={"t": tensor}):  # noqa: B006
        return ts[1](x * ts[0]) - named["t"]

    def counted(x, calls=[]):  # noqa: B006
        calls.append(1)
        return x * len(calls)

    def kept(x, memory={}):  # noqa: B006
        if "t" not in memory:
            memory["t"] = x * 2
        return x + memory["t"]

    def positional(x, t=tensor, factor=2, /, *others):
        return x * t * factor + len(others)

    def of_objects(x, held=Held(tensor), call=linear.forward):  # noqa: B008
        return call(x * held.tensor * held.factor)

    def in_a_row(x, functions=(torch.sin, linear, helper)):
        return functools.reduce(lambda x, f: f(x), functions, x)

    class Module(nn.Module):
        def forward(self, x, t=tensor):
            return x * t

    return {
        "a helper's": lambda x: helper(x) * 2,
        "one of two": one_of_two,
        "two of two": lambda x: one_of_two(x, linear, 3, t=x),
        "in containers": in_containers,
        "counted": counted,
        "kept": kept,
        "positional": positional,
        "positional, with others": lambda x: positional(x, x, 3, 4),
        "of objects": of_objects,
        "in a row": in_a_row,
        "of a module": Module(),
        "of lambdas": lambda x: sum(f(x) for f in [lambda x, m=m: m(x) for m in (linear, nn.ReLU())]),
    }


def _outcomes(name: str, wrap: Callable) -> list[Any]:
    """Of three calls, before the last of which what the defaults hold is changed."""
    torch.manual_seed(seeded(0))
    tensor, linear = torch.full((3,), 2.0), nn.Linear(3, 3)
    run, found = wrap(_programs(tensor, linear)[name]), []
    for call in range(3):
        x = torch.linspace(1, 2, 3).mul(call + 1).requires_grad_()
        out = run(x)
        found += [out.detach().clone(), torch.autograd.grad(out.sum(), x)[0]]
        if call == 1:
            with torch.no_grad():
                tensor.mul_(2)
                linear.weight.mul_(1.5)
    return found


@pytest.mark.parametrize("name", _programs(torch.ones(3), nn.Linear(3, 3)))
def test_defaults_are_what_they_are_in_each_call(name: str) -> None:
    expected = _outcomes(name, lambda f: f)
    others = () if name == "kept" else (CheckpointTransform,)  # alone it refuses to put tensors into dicts
    for transform in (SubclassTransform, NormTransform, *others):
        torch.testing.assert_close(_outcomes(name, functools.partial(_jitted, transform)), expected)


def _jitted(transform: type, f: Callable) -> Callable:
    return thunder.jit(f, transforms=[transform()])


def test_a_default_that_is_another_by_now_is_used() -> None:
    def f(x, t=torch.ones(3)):  # noqa: B008
        return x * t

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    jf(torch.ones(3))
    f.__defaults__ = (torch.full((3,), 5.0),)
    assert jf(torch.ones(3)).tolist() == [5.0] * 3
    f.__defaults__ = None
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 't'"):
        jf(torch.ones(3))


def test_a_parameter_without_a_default_is_missed() -> None:
    def f(x, y, t=torch.ones(3)):  # noqa: B008
        return x * y * t

    def of_position(y, t=torch.ones(3), /):  # noqa: B008
        return y * t

    for program, name in ((lambda x: f(x), "f"), (lambda x: of_position(), "of_position")):
        with pytest.raises(TypeError, match=rf"{name}\(\) missing 1 required positional argument: 'y'"):
            thunder.jit(program, transforms=[SubclassTransform()])(torch.ones(3))
