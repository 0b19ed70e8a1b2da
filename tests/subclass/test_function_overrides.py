"""Classes without dispatch whose ``__torch_function__`` does something else than torch: refused where the program meets it, else eager's answers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from thunder_norm.errors import UnsupportedSubclassError
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
_OTHER = {(_Exp, "sigmoid"), (_Twice, "linear"), (_Minus, "reflected"), *((_TenDimensions, p) for p in _PROGRAMS)}


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
@pytest.mark.parametrize("program", _PROGRAMS)
@pytest.mark.parametrize("cls", [_Counting, _Unit, _Exp, _Twice, _TenDimensions, _Minus])
def test_inputs(cls: type, program: str, transform: Callable) -> None:
    x = cls(torch.ones(4, 3)) if cls is _Twice else torch.ones(4, 3).as_subclass(cls)
    x.unit = "m"
    f = _PROGRAMS[program]
    jf = thunder.jit(f, transforms=[transform()])
    if (cls, program) in _OTHER:
        with pytest.raises(UnsupportedSubclassError, match=f"{cls.__name__} has a __torch_function__ of its own"):
            jf(x)
        return
    want, got = f(x), jf(x)
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want.as_subclass(torch.Tensor))


def test_parameters_and_globals() -> None:
    class Model(torch.nn.Module):
        def __init__(self, cls: type):
            super().__init__()
            self.weight = cls(torch.ones(2, 3))

        def forward(self, x):
            return F.linear(x, self.weight)

    x, held = torch.ones(4, 3), torch.ones(3).as_subclass(_Exp)
    torch.testing.assert_close(thunder.jit(Model(torch.nn.Parameter), transforms=[NormTransform()])(x), torch.full((4, 2), 3.0))
    with pytest.raises(UnsupportedSubclassError, match="_Twice has"):
        thunder.jit(Model(_Twice), transforms=[NormTransform()])(x)
    with pytest.raises(UnsupportedSubclassError, match="sigmoid"):
        thunder.jit(lambda x: x + held.sigmoid(), transforms=[NormTransform()])(x)
