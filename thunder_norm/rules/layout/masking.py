"""Norm rules for setting entries aside: masked_fill, tril and triu, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.context import current_mode, lift
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Masked, MaskedAbove, Source, with_fact
from thunder_norm.rules._shared import (
    VectorKind,
    by_norm,
    is_constant_along,
    like,
    own_dims,
    root_sum_squares,
    scalar,
    scaled,
)


@normed_op(torch.tril).register_norm
@normed_op(torch.triu).register_norm
def triangle(input: VectorKind, diagonal: int = 0) -> VectorKind:
    """Zeros above or below a diagonal.  Value n, attained; sensitivity 1: a coordinate projection.

    (A projection of entries can increase an operator norm; an operator is read through its entries.)
    """
    return scaled(input, 1)


@normed_op(torch.masked_fill).register_norm(allow_plain_tensors="constant")
def masked_fill(input: RMSTensor, mask: torch.Tensor, value: float | torch.Tensor) -> RMSTensor:
    """v where the plain mask is set, x elsewhere.

    Value:       sqrt(n^2 + v^2); max(n, |v|) for a LinfTensor or a mask that does not vary along elem_dims; n if v = 0
                 (attained: the mask covers what x does not need).  v = -inf is inf, which softmax does not read.
    Sensitivity: 1
    """
    if isinstance(value, int | float) and value == 0:
        return scaled(input, 1)
    n = input.norm_size
    if isinstance(value, torch.Tensor):
        v = lift(value, LinfTensor).norm_size
    else:
        v = scalar(math.fabs(value), n)
    is_blockwise = is_constant_along(mask, own_dims(input))
    return like(input, torch.maximum(n, v) if is_blockwise else root_sum_squares(n, v), sensitivity={"input": 1})


@written_as(torch.masked_fill, when=by_norm(2, "value"))
def masked_fill_normed(input: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """By a number of which the norm alone is known: a choice between it and x."""
    return torch.where(mask, value, input)


def _sets_aside(args: dict[str, Any]) -> bool:
    return isinstance(args["input"], RMSTensor) and not isinstance(args["value"], torch.Tensor) and abs(args["value"]) == math.inf


@normed_op(torch.masked_fill).register_norm(when=_sets_aside, allow_plain_tensors="constant")
def masked_fill_infinite(input: RMSTensor, mask: torch.Tensor, value: float) -> NormedTensor:
    """Infinity where the plain mask is set: as ever, and what the other entries are, which exponentials and largest entries are of."""
    kind = Masked if value < 0 else MaskedAbove
    return with_fact(masked_fill(input, mask, value), Alternatives((kind(Source.of(input), mask),)))


def _zeroes(args: dict[str, Any]) -> bool:
    return isinstance(args["value"], int | float) and args["value"] == 0


@normed_op(torch.masked_fill).register_norm(when=_zeroes, allow_plain_tensors="constant")
def masked_fill_zero(input: L1Tensor | L2Tensor, mask: torch.Tensor, value: float) -> NormedTensor:
    """0 where the plain mask is set, in kinds of sums: value n, sensitivity 1.  With another value they are read through their entries."""
    return scaled(input, 1)


# -- dropout ----------------------------------------------------------------------------------------------------------------


def _dropout(x: NormedTensor, p: float, training: bool) -> NormedTensor:
    if not training or p == 0:
        return scaled(x, 1)
    if p >= 1:
        return scaled(x, 0.0)
    return scaled(x, math.sqrt(1 / (1 - p)) if current_mode() == "typical" else 1 / (1 - p))


def dropout(input: VectorKind, p: float = 0.5, training: bool = True) -> NormedTensor:
    """Entries (or channels) set to 0 with probability p, the others divided by 1 - p; x itself if not training.

    Value:       n / (1 - p) in training, n otherwise       (attained: x where the mask is not)
    Sensitivity: the same factor
    Typical:     sqrt(1 / (1 - p)), the expected energy
    """
    return _dropout(input, p, training)


def dropout_aten(input: VectorKind, p: float, train: bool) -> NormedTensor:
    """`dropout`, as torch.dropout and ATen name its arguments."""
    return _dropout(input, p, train)


# in this order: a rule that does not name `train` would take False for the default
for _op in (torch.dropout, torch.feature_dropout):
    normed_op(_op).register_norm(dropout_aten)
for _op in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d):
    normed_op(_op).register_norm(dropout)


@normed_op(torch.native_dropout).register_norm
def native_dropout(input: VectorKind, p: float, train: bool | None = True) -> tuple:
    """`dropout` and its mask."""
    return _dropout(input, p, train is not False), None


_SELU_FLOOR = -1.7580993408473766  # what selu tends to below, the value a dropped entry gets


def alpha_dropout(input: RMSTensor, p: float = 0.5, training: bool = False) -> RMSTensor:
    """a (x where kept, else -1.758) + b, so that mean 0 and variance 1 stay as they are; x itself if not training.

    Value:       a n + max(|b|, |1.758 a - b|)
    Sensitivity: a = ((1 - p) (1 + 1.758^2 p))^(-1/2)
    """
    if not training or p == 0:
        return scaled(input, 1)
    if p >= 1:
        return scaled(input, 0.0)
    a = ((1 - p) * (1 + p * _SELU_FLOOR**2)) ** -0.5
    b = -a * _SELU_FLOOR * p
    return like(input, input.norm_size * a + max(math.fabs(b), math.fabs(a * _SELU_FLOOR + b)), sensitivity={"input": a})


def alpha_dropout_aten(input: RMSTensor, p: float, train: bool) -> RMSTensor:
    """`alpha_dropout`, as ATen names its arguments."""
    return alpha_dropout(input, p, train)


_ALPHA: tuple[Callable, ...] = (F.alpha_dropout, F.feature_alpha_dropout)
for _op in _ALPHA:
    normed_op(_op).register_norm(alpha_dropout_aten)
    normed_op(_op).register_norm(alpha_dropout)
