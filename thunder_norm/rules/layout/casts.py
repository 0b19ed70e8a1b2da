"""Norm rules for copies and for other dtypes and devices."""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.context import current_environment, current_mode
from thunder_norm.core.kinds import RMSToRMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.op_names import torch_dtype
from thunder_norm.rules._shared import like, scaled
from thunder_norm.scalars import times

# Significant bits; rounding to nearest errs by at most 2^-bits of the entry, in the normal range.  A part of a complex number is less.
_PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_PRECISION |= {torch.complex128: 53, torch.complex64: 24, torch.complex32: 11}


def cast(x: NormedTensor, dtype: torch.dtype | None, **ignored: Any) -> NormedTensor | None:
    """The result of x as another dtype; as bools, which are its comparison with 0, it is plain.

    So are integers where claims are about the data at hand, and where sizes are typical ones: as comparisons they are taken to turn out
    the same, and nothing moves with them.

    Raises:
        NormMismatchError: the dtype is that of integers, in mode "bound", for all tensors of a norm.
    """
    dtype = torch_dtype(dtype)
    if dtype == torch.bool:
        return None
    is_integer = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    if is_integer and (current_mode() != "bound" or is_local(x)):
        return None
    source, target = _PRECISION.get(x.dtype), _PRECISION.get(x.dtype if dtype is None else dtype)
    sensitivity = {"input": 1, **ignored}
    if target is None:
        raise NormMismatchError(
            f"a tensor of {dtype} is not covered by a norm: rounding to it has no useful bound; norm_report's default, at the "
            "data, and mode='typical' take it as it is there"
        )
    if source is None or target >= source:
        return like(x, x.norm_size, sensitivity=sensitivity)
    error = 2.0**-target
    if isinstance(x, RMSToRMSTensor):  # errors of up to |w| u in every entry: by their Euclidean length
        error *= math.sqrt(min(x.in_features, x.out_features))
    return like(x, times(x.norm_size, 1 + error), sensitivity=sensitivity)


def _dtype_among(values: tuple) -> torch.dtype | None:
    return next((v for v in map(torch_dtype, values) if isinstance(v, torch.dtype)), None)


@normed_op(torch.Tensor.to).register_norm
@normed_op(torch.ops.aten._to_copy.default).register_norm
def to(input: NormedTensor, *args: Any, **kwargs: Any) -> NormedTensor | None:
    """x in another dtype or on another device.

    Value:       n; rounded to fewer bits n (1 + u), u the unit roundoff: 2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32
                 (attained to 0.998; an operator: u sqrt(min(in, out)))
    Sensitivity: 1 in exact arithmetic
    Source:      IEEE rounding to nearest, in the normal range
    Bools are plain, as those of ``x != 0`` are, and so are integers in modes "typical" and "modula", and at the data.  Raises
    NormMismatchError for integers in mode "bound" elsewhere.
    """
    return cast(input, _dtype_among((*args, *kwargs.values())))


@normed_op(torch.Tensor.to).register_norm(allow_plain_tensors="constant")
@normed_op(torch.Tensor.type_as).register_norm(allow_plain_tensors="constant")
def type_as(input: NormedTensor, other: NormedTensor | torch.Tensor, *args: Any, **kwargs: Any) -> NormedTensor | None:
    """x in the dtype and on the device of another tensor: `to`."""
    return cast(input, other.dtype, other=0)


def _has_no_norm(args: dict[str, Any]) -> bool:
    x = args["input"]
    return not isinstance(x, NormedTensor) and (not x.is_floating_point() or current_environment().is_constant(x))


for _op in (torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.reshape_as):

    @normed_op(_op).register_norm(allow_plain_tensors="constant", when=_has_no_norm)
    def of_numbers(input: torch.Tensor, other: NormedTensor, *args: Any, **kwargs: Any) -> NormedTensor | None:
        """A constant of the program, a mask or integers, in the shape or dtype of a normed tensor: plain as before.

        Untried:     the result has no norm
        """


@normed_op(torch.Tensor.type).register_norm
def type_of(input: NormedTensor, dtype: torch.dtype | str | type | None = None, **kwargs: Any) -> NormedTensor | None:
    """x in another dtype, which may be that of a type of tensors, ``"torch.HalfTensor"``: `to`; without one, the name of its type."""
    named: Any = getattr(torch, dtype.rpartition(".")[2]) if isinstance(dtype, str) else dtype
    return None if named is None else cast(input, getattr(named, "dtype", named))


def _register_cast(name: str, dtype: torch.dtype) -> None:
    def rule(input: NormedTensor) -> NormedTensor | None:
        return cast(input, dtype)

    rule.__name__ = rule.__qualname__ = name
    rule.__doc__ = f"x as {dtype}: `to`."
    normed_op(getattr(torch.Tensor, name)).register_norm(rule)


_register_cast("float", torch.float32)
_register_cast("double", torch.float64)
_register_cast("half", torch.float16)
_register_cast("bfloat16", torch.bfloat16)
_register_cast("bool", torch.bool)


def copy(input: NormedTensor) -> NormedTensor:
    """The same entries.  Value n, sensitivity 1: detach changes what autograd sees, not the function."""
    return scaled(input, 1)


_COPIES = (
    torch.clone, torch.detach, torch.Tensor.contiguous, torch.ops.aten.alias.default, torch.alias_copy,
    torch.ops.aten.lift_fresh.default, torch.Tensor.cpu, torch.Tensor.resolve_conj, torch.Tensor.resolve_neg,
)  # fmt: skip
for _op in _COPIES:
    normed_op(_op).register_norm(copy)


@normed_op(torch.nan_to_num).register_norm
def nan_to_num(
    input: NormedTensor, nan: float | None = 0.0, posinf: float | None = None, neginf: float | None = None
) -> NormedTensor:
    """The same entries: a tensor of finite norm has no NaN and no infinite entry.  Value n, sensitivity 1."""
    return scaled(input, 1)


@normed_op(torch.Tensor.cuda).register_norm
def cuda(input: NormedTensor, device: Any = None) -> NormedTensor:
    """The same entries on a CUDA device.

    Untried:     needs the device
    """
    return scaled(input, 1)


@normed_op(torch.ops.prims.convert_element_type.default).register_norm
def convert_element_type(input: NormedTensor, dtype: torch.dtype) -> NormedTensor | None:
    """x as another dtype: `to`."""
    return cast(input, dtype)
