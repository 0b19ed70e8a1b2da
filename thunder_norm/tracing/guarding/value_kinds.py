"""Kinds of values that a program is given, by what guards of them compare; of which kind a value is, looked up by its type."""

from __future__ import annotations

import enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from thunder.core.proxies import NumberProxy

OPAQUE = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
SINGLE = (type(None), torch.dtype, torch.layout, torch.memory_format, torch.qscheme, enum.Enum)
_OPERATORS = (MethodDescriptorType, WrapperDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
IDENTICAL = (*SINGLE, *_OPERATORS, type, FunctionType, BuiltinFunctionType, torch.Generator)
GUARDED_BY_THUNDER = (
    torch.Tensor,
    torch.nn.Module,
    int,
    float,
    complex,
    str,
    slice,
    torch.device,
    MethodType,
    ModuleType,
    *OPAQUE,
)
# of what stands at two places equal ones are the same, or Thunder looks at each place
EQUAL = (complex, bytes, slice, torch.device)
STAND_ANYWHERE = (torch.Tensor, int, float, str, CodeType, CellType)


def is_number_of_tensors(value: Any) -> bool:
    """Whether it stands for a number that is known in each call alone: what ``.item()`` makes, and what is computed of it."""
    return isinstance(value, NumberProxy) and value.value is None


class ValueKinds:
    """Kinds of values in order, each a class or a tuple of them as `isinstance` takes it; the number after the last is any other's."""

    def __init__(self, *kinds: Any):
        self._kinds = kinds
        self._of_types: dict[type, int] = {}

    def of(self, value: Any) -> int:
        """The number of the first kind that it is of."""
        found = self._of_types.get(type(value))
        if found is None:
            found = next((i for i, kind in enumerate(self._kinds) if isinstance(value, kind)), len(self._kinds))
            if value.__class__ is type(value):  # otherwise each may say something else of itself
                self._of_types[type(value)] = found
        return found

    def forget(self) -> None:
        """Look again at what classes are: one may have been registered with an abstract one since, and they are kept alive."""
        self._of_types.clear()
