"""Modes that a program enters: those of functions are called as in eager mode, those of the dispatcher are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor, TwoTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class _Exchanging(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.sub if func in (torch.add, torch.Tensor.add) else func
        return func(*args, **(kwargs or {}))


class _Adding(TorchFunctionMode):
    """Adds to all that torch computes, and knows what was called."""

    def __init__(self, by: float):
        super().__init__()
        self.by, self.called = by, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.called.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        return result + self.by if isinstance(result, torch.Tensor) and result.is_floating_point() else result


class _Inner(TorchFunctionMode):
    """Is in itself where it calls something else."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            with self:
                return torch.mm(args[0], args[1].t())
        return func(*args, **(kwargs or {})) * (3 if func is torch.mm else 1)


def functions_and_methods(x, y):
    with _Exchanging():
        return torch.add(x, y), x + y, x.add(y), x * y, torch.ops.aten.mul.Tensor(x, y)


def all_that_is_computed(x, y):
    with _Adding(2.0) as mode:
        z = x.exp() * y
        found = F.gelu(z), z.sum(), torch.cat([x, y]), torch.ones(3), -z, 1 - z, x[0], x @ y.T
    return found, mode.called


def nested(x, y):
    with _Adding(1.0), _Exchanging(), BaseTorchFunctionMode():
        return torch.mul(x, y), torch.add(x, y)


def in_itself(x, y):
    with _Inner():
        return F.linear(x, y)


def left_by_an_error(x, y):
    try:
        with _Exchanging():
            raise ValueError
    except ValueError:
        return torch.add(x, y)


def in_place(x, y):
    x = x * 1
    with _Exchanging():
        x += y
        x[0] = 1.0
    return x


def with_a_device(x, y):
    with torch.device("cpu"), _Exchanging():
        return torch.add(x, torch.ones(4)), len(torch.overrides._get_current_function_mode_stack()) > 0


_MADE = {
    "plain": lambda: (torch.randn(3, 4), torch.randn(3, 4)),
    "wrappers": lambda: (TwoTensor(torch.randn(3, 4), torch.randn(3, 4)), TwoTensor(torch.randn(3, 4), torch.randn(3, 4))),
    "both": lambda: (TwoTensor(torch.randn(3, 4), torch.randn(3, 4)), torch.randn(3, 4)),
}
_PROGRAMS = [functions_and_methods, all_that_is_computed, nested, in_itself, left_by_an_error, in_place, with_a_device]


@pytest.mark.parametrize("made", _MADE)
@pytest.mark.parametrize("program", _PROGRAMS)
def test_calls_go_through_the_mode(program, made):
    torch.manual_seed(seeded(0))
    args = _MADE[made]()
    jf = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(jf(*args), program(*args))


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_gradients_are_those_of_what_the_mode_calls(transform):
    torch.manual_seed(seeded(1))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)

    def program(model, x):
        with _Adding(1.0):
            return model(x)

    wanted = program(model, x)
    result = thunder.jit(program, transforms=[transform()])(model, x)
    torch.testing.assert_close(result, wanted)
    leaves = [x, *model.parameters()]
    torch.testing.assert_close(torch.autograd.grad(result.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves))


@pytest.mark.parametrize("mode", [FlopCounterMode(display=False), TwoTensorMode()], ids=lambda m: type(m).__name__)
def test_modes_of_the_dispatcher_are_refused(mode):
    def program(x):
        with mode:
            return x @ x

    for x in (torch.ones(2, 2), TwoTensor(torch.ones(2, 2), torch.ones(2, 2))):
        with pytest.raises(UnsupportedOpError, match=f"{type(mode).__name__}, a TorchDispatchMode, inside a jitted function"):
            thunder.jit(program, transforms=[SubclassTransform()])(x)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_what_torch_leaves_out_of_its_list_is_told():
    def program(x):
        with _Adding(1.0) as mode:
            rows = [row for row in x]  # noqa: C416 - which asks for no length
            found = [*rows, x.new_ones(2), x.unflatten(0, (1, 2)), x.max(0)[0]]
            with torch._C.DisableTorchFunction():
                found.append(x * 2)
            return [*found, x * 3], mode.called

    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert_same(thunder.jit(program, transforms=[SubclassTransform()])(x), program(x))
