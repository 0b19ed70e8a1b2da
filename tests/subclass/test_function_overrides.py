"""Classes without dispatch that say themselves what torch's functions do with their tensors: eager mode's answers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.subclasses import assert_same
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


class _Counting(torch.Tensor):
    """Does what torch does, and counts."""

    num = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.num += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class _Unit(torch.Tensor):
    """Hands its unit on, as fastai's images do with what they know of themselves."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.unit = next(a.unit for a in args if isinstance(a, cls))
        return result


class _Exp(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        func = torch.Tensor.exp if func is torch.Tensor.sigmoid else func
        return super().__torch_function__(func, types, args, kwargs or {})


class _Twice(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


class _TenDimensions(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return 10 if func == torch.Tensor.ndim.__get__ else super().__torch_function__(func, types, args, kwargs or {})


class _Minus(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        func = torch.mul if func is torch.Tensor.__rsub__ else func
        return super().__torch_function__(func, types, args, kwargs or {})


def _linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.ones(2, 3), x)


_PROGRAMS: dict[str, Callable] = {
    "sigmoid": lambda x: x.sigmoid() + x,
    "linear": _linear,
    "indexed": lambda x: F.relu(x[0] * 2).sum(),
    "reflected": lambda x: 1 - x,
}


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
@pytest.mark.parametrize("program", _PROGRAMS)
@pytest.mark.parametrize("cls", [_Counting, _Unit, _Exp, _Twice, _TenDimensions, _Minus])
def test_inputs(cls: type, program: str, transform: Callable) -> None:
    x = cls(torch.ones(4, 3)) if cls is _Twice else torch.ones(4, 3).as_subclass(cls)
    x.unit = "m"
    f = _PROGRAMS[program]
    jf = thunder.jit(f, transforms=[transform()])
    for _ in range(2):
        assert_same(jf(x), f(x))


def test_parameters_and_globals() -> None:
    class Model(torch.nn.Module):
        def __init__(self, cls: type):
            super().__init__()
            self.weight = cls(torch.ones(2, 3))

        def forward(self, x):
            return F.linear(x, self.weight)

    x, held = torch.ones(4, 3), torch.ones(3).as_subclass(_Exp)
    for cls in (torch.nn.Parameter, _Twice):
        assert_same(thunder.jit(Model(cls), transforms=[NormTransform()])(x), Model(cls)(x))
    assert_same(thunder.jit(lambda x: x + held.sigmoid(), transforms=[NormTransform()])(x), x + held.sigmoid())


def test_objects_are_made_of_what_answers():
    class Held:
        def __init__(self, scalar):
            self.scalar = scalar

    class Scalar:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    scalar = Scalar()
    made = thunder.jit(
        lambda x: (object.__new__(Held) is not None, Held(scalar).scalar is scalar, x * 2), transforms=[SubclassTransform()]
    )
    assert_same(made(torch.ones(2)), (True, True, torch.full((2,), 2.0)))
