"""The types of results, where Thunder's tables of type promotion have another than torch, and numbers in a type that is given.

Numbers have the types of Python, and tensors without dimensions weak dtypes; an operand with dimensions decides unless the other one is of
a higher kind.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
import thunder.torch as ltorch
from thunder.core import dtypes, utils
from thunder.core.proxies import NumberProxy, TensorProxy, pyval

_original_promotion = utils._elementwise_type_promotion


def mended_promotion(a: Any, b: Any) -> Any | None:
    """The type of two operands by torch's rules, where Thunder's tables have another.

    They have with uint8, for bool with a number, and for a real and a complex tensor without dimensions of other precisions.

    Raises:
        UnsupportedOpError: Thunder has no such dtype.
    """
    if (a, b) in _of_no_dtype():
        raise UnsupportedOpError(
            with_details(
                "an operation between torch.bfloat16 and complex numbers",
                why="torch's result has the dtype bcomplex32, which Thunder does not have",
                instead="x.to(torch.float32)",
            )
        )
    return _promotions().get((a, b))


def filling(value: Any, dtype: Any) -> Any:
    """What fills places of a tensor of a dtype: the value in that dtype, a number as Python's of its kind.

    Raises:
        RuntimeError: the dtype has no such number, as torch says.
        NotImplementedError: of a tensor that shows with its value alone.
    """
    own = dtypes.to_torch_dtype(dtype)
    if not isinstance(value, TensorProxy):
        number = pyval(value) if isinstance(value, NumberProxy) else value
        return torch.zeros((), dtype=own).masked_fill_(torch.tensor(True), number).item()
    if not holds(own, dtypes.to_torch_dtype(value.dtype)):
        raise NotImplementedError(f"a value of {value.dtype} in a tensor of {dtype} may overflow")
    return ltorch.to(value, dtype)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether numbers of another dtype never overflow in this one."""
    if dtype is torch.bool or other in (torch.bool, dtype):
        return True
    is_small = dtype.is_floating_point and torch.finfo(dtype).max < 2.0**64 and not other.is_floating_point
    return not is_small and torch.promote_types(dtype, other) is dtype


@functools.cache
def _of_no_dtype() -> frozenset[tuple[Any, Any]]:
    """The pairs that torch 2.14 and later has a dtype for which Thunder does not know; before, that was complex64."""
    if not hasattr(torch, "bcomplex32"):
        return frozenset()
    known = utils._inexact_dtype_to_number_map
    halves = [t for t in known if not isinstance(t, type) and dtypes.to_torch_dtype(t) is torch.bfloat16]
    complexes = [t for t in known if t is complex or (not isinstance(t, type) and t.is_weak and dtypes.is_complex_dtype(t))]
    pairs = [(a, b) for a in halves for b in complexes if b is complex or not a.is_weak]
    return frozenset([*pairs, *((b, a) for a, b in pairs)])


@functools.cache
def _promotions() -> dict[tuple[Any, Any], Any]:
    exact = utils._exact_dtype_to_number_map
    weak = [t for t in utils._inexact_dtype_to_number_map if _rank(t) == 1]
    pairs = {(a, b): _common_type(a, b) for known in (exact, weak) for a in known for b in known}
    return {(a, b): t for (a, b), t in pairs.items() if t != _original_promotion(a, b)}


def _common_type(a: Any, b: Any) -> Any:
    higher, lower = (a, b) if _rank(a) >= _rank(b) else (b, a)
    if _rank(higher) > _rank(lower):
        return lower if dtypes.is_boolean_dtype(higher) and lower is not bool else higher
    if _rank(a) == 0:
        return int if int in (a, b) else bool
    common = dtypes.to_dtype(torch.promote_types(dtypes.to_torch_dtype(a), dtypes.to_torch_dtype(b)))
    return dtypes.to_weak_dtype(common) if _rank(a) == 1 else common


def _rank(dtype: Any) -> int:
    """Which operand decides: one with dimensions, one without, and a number last."""
    return 0 if isinstance(dtype, type) else 1 if dtype.is_weak else 2
