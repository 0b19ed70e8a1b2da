"""Norm rules for entrywise operations of two and three tensors: sums, products, quotients and what they make up.

Operands are broadcast.  Copies along a broadcast dimension leave every mean and every maximum unchanged, so an operand's norm
may be read as running over such a dimension or not, whichever suits the other operand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_environment, current_mode, lift, run_real
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.programs import written_as
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import (
    SAME_DIMS,
    Number,
    align,
    annotated,
    as_kind,
    broadcast,
    by_norm,
    is_constant_along,
    is_moving,
    like,
    negative,
    over_dims_of,
    own_dims,
    refined,
    refuse,
    rms,
    root,
    root_sum_squares,
    scaled,
    spread,
)
from thunder_norm.rules.entrywise.around_numbers import size_of_sum
from thunder_norm.scalars import times


def gain_of(t: torch.Tensor, x: NormedTensor) -> NormedTensor:
    """A plain tensor of any dtype as a factor beside x: by its largest entry.

    A mask counts as if something were set, drawn at random as it may have been: another draw is no other program.
    """
    if t.dtype is torch.bool:
        return LinfTensor._wrap(t, torch.ones_like(x.norm_size), None, ())
    if not has_norm(t) and (largest := current_environment().largest_without_values(t)) is not None:
        return LinfTensor._wrap(t, torch.full_like(x.norm_size, largest), None, ())
    return lift(t if has_norm(t) else run_real(torch.Tensor.to, (t, x.dtype), {}), LinfTensor)


# -- sums -----------------------------------------------------------------------------------------------------------------


def _sum(a: NormedTensor, b: NormedTensor, by_a: float, by_b: float) -> tuple[torch.Tensor, ed.Dims, float, float]:
    """Value, elem_dims and the sensitivities of ``by_a a + by_b b`` for RMS operands."""
    dims, (to_a, to_b) = align(broadcast(a.shape, b.shape), a, b)
    by_a, by_b = by_a * to_a, by_b * to_b
    return times(a.norm_size, by_a) + times(b.norm_size, by_b), dims, by_a, by_b


@normed_op(torch.sub).register_norm(lift_dims=SAME_DIMS)
@normed_op(torch.add).register_norm(lift_dims=SAME_DIMS)
def add(input: RMSTensor, other: RMSTensor, alpha: Number = 1) -> RMSTensor:
    """a + alpha b (and a - alpha b); a plain tensor is measured over the dims of the other.

    Value:       |a| + |alpha| |b|, once both run over the same dims   (attained: a along b)
    Sensitivity: 1 to a, |alpha| to b
    Source:      triangle inequality
    """
    value, dims, by_input, by_other = _sum(input, other, 1.0, math.fabs(alpha))
    return rms(value, dims, sensitivity={"input": by_input, "other": by_other})


@normed_op(torch.rsub).register_norm(lift_dims=SAME_DIMS)
def rsub(input: RMSTensor, other: RMSTensor, alpha: Number = 1) -> RMSTensor:
    """b - alpha a, as `add`."""
    value, dims, by_input, by_other = _sum(input, other, math.fabs(alpha), 1.0)
    return rms(value, dims, sensitivity={"input": by_input, "other": by_other})


def _add_same_kind(input: NormedTensor, other: NormedTensor, alpha: Number = 1) -> NormedTensor:
    """a + alpha b of one kind: value |a| + |alpha| |b|, sensitivities 1 and |alpha|."""
    c = math.fabs(alpha)
    if input.shape == other.shape and input.elem_dims == other.elem_dims:
        return like(input, input.norm_size + times(other.norm_size, c), sensitivity={"input": 1, "other": c})
    if isinstance(input, RMSToRMSTensor):
        return _sum_of_operators(input, other, c)
    (a, to_a), (b, to_b) = as_kind(input, RMSTensor, input.elem_dims), as_kind(other, RMSTensor, other.elem_dims)
    value, dims, by_input, by_other = _sum(a, b, 1.0, c)
    return rms(value, dims, sensitivity={"input": by_input * to_a, "other": by_other * to_b})


def _sum_of_operators(input: NormedTensor, other: NormedTensor, c: float) -> NormedTensor:
    """The same of matrices one of which is read the other way round (``A - A^T``), or stands for each of a batch (``A + I``)."""
    is_batch = input.shape[-2:] == other.shape[-2:] and {*input.elem_dims, *other.elem_dims} == {-2, -1}
    if (
        type(input) is not type(other)
        or not is_batch
        and (input.shape != other.shape or {*input.elem_dims} != {*other.elem_dims})
    ):
        raise NormMismatchError("operators can be added only where their shapes and elem_dims agree")
    b, k = as_kind(other, type(other), input.elem_dims)
    return like(input, input.norm_size + times(b.norm_size, c), sensitivity={"input": 1, "other": c * k})


for _kind in (L1Tensor, L2Tensor, RMSToRMSTensor):
    for _op in (torch.add, torch.sub):
        normed_op(_op).register_norm(annotated(_add_same_kind, input=_kind, other=_kind), lift_dims=SAME_DIMS)


@normed_op(torch.add).register_norm
def add_number(input: RMSTensor, other: Number, alpha: Number = 1) -> RMSTensor:
    """a + alpha c: value |a| + |alpha c|, attained by a constant; sensitivity 1."""
    return like(input, size_of_sum(input, 1.0, other * alpha), sensitivity={"input": 1})


@normed_op(torch.sub).register_norm
def sub_number(input: RMSTensor, other: Number, alpha: Number = 1) -> RMSTensor:
    """a - alpha c: value |a| + |alpha c|, attained by a constant; sensitivity 1."""
    return like(input, size_of_sum(input, 1.0, -other * alpha), sensitivity={"input": 1})


@normed_op(torch.add).register_norm(mode="typical")
def add_number_l1(input: L1Tensor, other: Number, alpha: Number = 1) -> L1Tensor:
    """a + alpha c of an l1 norm over N entries, a softmax and a least share of each.  Typical: |a| + N |alpha c|, and 1."""
    more = math.fabs(alpha * other) * input.numel_normed
    return L1Tensor(input.norm_size + more, elem_dims=input.elem_dims, sensitivity={"input": 1})


@normed_op(torch.add).register_norm(mode="typical")
def number_add_l1(input: Number, other: L1Tensor, alpha: Number = 1) -> L1Tensor:
    """c + alpha b: `add_number_l1`."""
    c = math.fabs(alpha)
    size = times(other.norm_size, c) + math.fabs(input) * other.numel_normed
    return L1Tensor(size, elem_dims=other.elem_dims, sensitivity={"other": c})


@normed_op(torch.rsub).register_norm
def rsub_number(input: RMSTensor, other: Number, alpha: Number = 1) -> RMSTensor:
    """c - alpha a: value |c| + |alpha| |a|; sensitivity |alpha|."""
    return like(input, size_of_sum(input, -alpha, other), sensitivity={"input": math.fabs(alpha)})


@normed_op(torch.add).register_norm
def number_add(input: Number, other: RMSTensor, alpha: Number = 1) -> RMSTensor:
    """c + alpha b: value |c| + |alpha| |b|; sensitivity |alpha|."""
    return like(other, size_of_sum(other, alpha, input), sensitivity={"other": math.fabs(alpha)})


@normed_op(torch.sub).register_norm(allow_plain_tensors="constant")
@normed_op(torch.add).register_norm(allow_plain_tensors="constant")
def add_integers(input: RMSTensor, other: torch.Tensor, alpha: Number = 1) -> RMSTensor:
    """a + alpha b with a plain tensor of integers or bools: value |a| + |alpha| max |b|; sensitivity 1."""
    value, dims, by_input, _ = _sum(input, gain_of(other, input), 1.0, math.fabs(alpha))
    return rms(value, dims, sensitivity={"input": by_input})


@normed_op(torch.sub).register_norm(allow_plain_tensors="constant")
@normed_op(torch.add).register_norm(allow_plain_tensors="constant")
def integers_add(input: torch.Tensor, other: RMSTensor, alpha: Number = 1) -> RMSTensor:
    """a + alpha b with a plain tensor a of integers or bools: value max |a| + |alpha| |b|; sensitivity |alpha|."""
    value, dims, _, by_other = _sum(gain_of(input, other), other, 1.0, math.fabs(alpha))
    return rms(value, dims, sensitivity={"other": by_other})


# -- products -------------------------------------------------------------------------------------------------------------


def product_dims(a: NormedTensor, b: NormedTensor) -> tuple[ed.Dims, float]:
    """elem_dims of ``a b`` and the smallest known c with ``|a b| <= c |a| |b|``, for RMS operands."""
    of_a, of_b = own_dims(a), own_dims(b)
    # mean over of_b of (b^2 mean over of_a of a^2): one of them is a factor of the other's mean
    if is_constant_along(b, of_a) or is_constant_along(a, of_b):
        dims = tuple(sorted({*of_a, *of_b}))
        named = next((x.elem_dims for x in (a, b) if ed.is_same(broadcast(a.shape, b.shape), x.elem_dims, dims)), dims)
        return named, 1.0
    keep_a, keep_b = root(ed.numel(b.shape, of_b)), root(ed.numel(a.shape, of_a))
    return (a.elem_dims, spread(keep_a)) if keep_a <= keep_b else (b.elem_dims, spread(keep_b))


@normed_op(torch.mul).register_norm
def mul(input: LinfTensor, other: LinfTensor) -> LinfTensor:
    """a b.  Value |a| |b|, attained; sensitivities |b| and |a|."""
    return LinfTensor(
        input.norm_size * other.norm_size, elem_dims=(), sensitivity={"input": other.norm_size, "other": input.norm_size}
    )


def _multiply(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """a b, entry by entry.

    Value:       |a| |b| if one of them is a LinfTensor (a gain, a gate) or constant along the other's elem_dims,
                 else sqrt(N) |a| |b|       (all attained; the last by coinciding spikes)
    Sensitivity: c |b| to a, c |a| to b, with the same constant c
    Source:      Hoelder's inequality
    """
    dims, c = product_dims(input, other)
    value = times(input.norm_size * other.norm_size, c)
    return rms(value, dims, sensitivity={"input": times(other.norm_size, c), "other": times(input.norm_size, c)})


# A plain tensor that multiplies is a gain: LinfTensor comes first.
for _kinds in ((RMSTensor, LinfTensor), (LinfTensor, RMSTensor), (RMSTensor, RMSTensor)):
    normed_op(torch.mul).register_norm(annotated(_multiply, input=_kinds[0], other=_kinds[1]))


def scale_by(x: NormedTensor, gain: NormedTensor, name: str, gain_name: str | None = None) -> NormedTensor:
    """The result of x times a gain, in x's kind: |x| |gain|.

    Of a matrix it is that if the gain scales whole rows or columns, and typically; else sqrt(min(out, in)) times as much.

    Source:      ``W * G`` by Schur's product has a norm of at most ``|W| max_i |G_i|_2``, of rows or of columns (Horn and Johnson 1991, 5.5.3)
    """
    is_of_its_shape = broadcast(x.shape, gain.shape) == tuple(x.shape)
    fits = is_of_its_shape and any(is_constant_along(gain, (d,)) for d in x.elem_dims)
    dims, c, to_entries, kind = own_dims(x), 1.0, 1.0, type(x)
    if isinstance(x, RMSTensor):
        dims, c = product_dims(x, gain)
    elif isinstance(x, RMSToRMSTensor) and (fits or current_mode() != "bound" and is_of_its_shape):
        dims = x.elem_dims
    elif isinstance(x, RMSToRMSTensor) and is_of_its_shape and not isinstance(x, RMSToRMSConvTensor):
        dims, c = x.elem_dims, math.sqrt(min(x.shape[d] for d in x.elem_dims))
    elif isinstance(x, RMSToRMSTensor):
        entries, to_entries = as_kind(x, RMSTensor, x.elem_dims)
        (dims, c), kind = product_dims(entries, gain), RMSTensor
    c *= to_entries
    sensitivity = {name: times(gain.norm_size, c)}
    if gain_name is not None:
        sensitivity[gain_name] = times(x.norm_size, c)
    value = times(x.norm_size * gain.norm_size, c)
    return (
        rms(value, dims, sensitivity=sensitivity)
        if issubclass(kind, RMSTensor)
        else kind(value, elem_dims=dims, sensitivity=sensitivity)
    )


@normed_op(torch.mul).register_norm
def mul_gain(input: L1Tensor | L2Tensor | RMSToRMSTensor, other: LinfTensor) -> NormedTensor:
    """a b with a gain b.  Value |a| |b|, attained, in a's kind; sqrt(min(out, in)) |a| |b| of a matrix whose rows b does not scale (`scale_by`)."""
    return scale_by(input, other, "input", "other")


@normed_op(torch.mul).register_norm
def gain_mul(input: LinfTensor, other: L1Tensor | L2Tensor | RMSToRMSTensor) -> NormedTensor:
    """a b with a gain a: as `mul_gain`."""
    return scale_by(other, input, "other", "input")


@normed_op(torch.mul).register_norm
def mul_number(input: NormedTensor, other: Number) -> NormedTensor:
    """c a.  Value |c| |a|, sensitivity |c|, in every kind."""
    return scaled(input, math.fabs(other))


@normed_op(torch.mul).register_norm
def number_mul(input: Number, other: NormedTensor) -> NormedTensor:
    """c b.  Value |c| |b|, sensitivity |c|, in every kind."""
    return scaled(other, math.fabs(input), name="other")


@normed_op(torch.mul).register_norm(allow_plain_tensors="constant")
def mul_integers(input: NormedTensor, other: torch.Tensor) -> NormedTensor:
    """a b with a plain tensor of integers or bools, such as a mask: by its largest entry."""
    return scale_by(input, gain_of(other, input), "input")


@normed_op(torch.mul).register_norm(allow_plain_tensors="constant")
def integers_mul(input: torch.Tensor, other: NormedTensor) -> NormedTensor:
    """a b with a plain tensor a of integers or bools: as `mul_integers`."""
    return scale_by(other, gain_of(input, other), "other")


def _addproduct_dims(input: RMSTensor, a: RMSTensor, b: NormedTensor, v: float) -> tuple[torch.Tensor, ed.Dims, tuple]:
    """Value, elem_dims and the three sensitivities of ``input + v a b``."""
    shape = broadcast(input.shape, a.shape, b.shape)
    dims, c = product_dims(a, b)
    target, (_, to_product) = ed.align(shape, own_dims(input), ed.nontrivial(shape, dims))
    c *= v * spread(to_product)
    to_input = refined(input, target)
    # v first, as torch has it: the product of two tiny numbers is 0, whatever it is multiplied by
    value = times(input.norm_size, to_input) + times(a.norm_size, c) * b.norm_size
    return value, target, (to_input, times(b.norm_size, c), times(a.norm_size, c))


def _addcmul(input: RMSTensor, tensor1: RMSTensor, tensor2: RMSTensor, value: Number = 1) -> RMSTensor:
    """t + v a b.  Value |t| + |v| |a b|, sensitivities 1, c |v| |b|, c |v| |a|: `add` of `mul`."""
    size, dims, constants = _addproduct_dims(input, tensor1, tensor2, math.fabs(value))
    return rms(size, dims, sensitivity=dict(zip(("input", "tensor1", "tensor2"), constants, strict=True)))


for _kind in (LinfTensor, RMSTensor):  # a plain tensor2 is a gain
    normed_op(torch.addcmul).register_norm(
        annotated(_addcmul, tensor2=_kind), lift_dims={"input": over_dims_of("tensor1", "tensor2")}
    )


# -- quotients ------------------------------------------------------------------------------------------------------------


@normed_op(torch.div).register_norm
def div_number(input: NormedTensor, other: Number) -> NormedTensor:
    """a / c.  Value |a| / |c|, sensitivity 1 / |c|, in every kind."""
    if other == 0:
        raise NormMismatchError("division by 0")
    return scaled(input, 1 / math.fabs(other))


def _is_by_parameter(x: Any, divisor: Any) -> bool:
    """Whether a divisor is a parameter, or made from some: its values would stand for all that it may be.

    Except in mode "bound", what is on a sphere is divided by its length (weight normalization, written out), as far as anybody knows.
    """
    return is_moving(divisor) and (current_mode() == "bound" or getattr(x, "_least", 0.0) == 0)


def _is_by_measured(args: dict[str, Any]) -> bool:
    """Whether it is one whose norm is that of its values, and which moves."""
    is_by_parameter = args["rounding_mode"] is None and _is_by_parameter(args["input"], args["other"])
    return is_by_parameter and current_environment().is_measured(args["other"])


@normed_op(torch.div).register_norm(allow_plain_tensors=True)
def div(input: NormedTensor, other: torch.Tensor) -> NormedTensor:
    """a / b with a plain tensor b, whose smallest modulus is known.  Value |a| max |1 / b|, attained; sensitivity max |1 / b|."""
    if _is_by_parameter(input, other):
        raise NormMismatchError(NO_DIVISION)
    return scale_by(input, gain_of(run_real(torch.reciprocal, (other,), {}), input), "input")


@normed_op(torch.div).register_norm(when=_is_by_measured, lift_dims={"other": lambda t, args: ()})
def div_measured(input: RMSTensor, other: LinfTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """a / b with a parameter b, whose values are known.  Value |a| max |1 / b|; sensitivities max |1 / b| and |a| max |1 / b|^2 at these values.

    Untried:     it is for parameters alone
    """
    gain = gain_of(run_real(torch.reciprocal, (other.backing,), {}), input)
    found = scale_by(input, gain, "input")
    slope = found.norm_size * gain.norm_size
    return rms(found.norm_size, found.elem_dims, sensitivity={**(found._sensitivity or {}), "other": slope})


NO_DIVISION = (
    "division by a normed tensor: its norm gives no lower bound on entries; use the fused operation (layer_norm, rms_norm, "
    "normalize, softmax), or register a rule with the lower bound you know"
)
refuse(normed_op(torch.div), NO_DIVISION)


@normed_op(torch.addcdiv).register_norm(allow_plain_tensors=True, lift_dims={"input": over_dims_of("tensor1")})
def addcdiv(input: RMSTensor, tensor1: RMSTensor, tensor2: torch.Tensor, value: Number = 1) -> RMSTensor:
    """t + v a / b with a plain tensor b.  Value |t| + |v| |a| max |1 / b|."""
    if _is_by_parameter(tensor1, tensor2):
        raise NormMismatchError(NO_DIVISION)
    gain = gain_of(run_real(torch.reciprocal, (tensor2,), {}), tensor1)
    size, dims, (by_input, by_tensor1, _) = _addproduct_dims(input, tensor1, gain, math.fabs(value))
    return rms(size, dims, sensitivity={"input": by_input, "tensor1": by_tensor1})


# -- of both ---------------------------------------------------------------------------------------------------------------


@normed_op(torch.lerp).register_norm(lift_dims={"input": over_dims_of("end"), "end": over_dims_of("input")})
def lerp(input: RMSTensor, end: RMSTensor, weight: Number) -> RMSTensor:
    """(1 - w) a + w b.  Value |1 - w| |a| + |w| |b|, attained; sensitivities |1 - w| and |w|."""
    value, dims, by_input, by_end = _sum(input, end, math.fabs(1 - weight), math.fabs(weight))
    return rms(value, dims, sensitivity={"input": by_input, "end": by_end})


@written_as(torch.lerp, when=by_norm(2, "weight"))
def lerp_by_normed(input: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """a + w (b - a), of whose w the norm alone is known: a gate, a learnt step."""
    return input + weight * (end - input)


@normed_op(torch.lerp).register_norm(
    allow_plain_tensors="constant", lift_dims={"input": over_dims_of("end"), "end": over_dims_of("input")}
)
def lerp_by_tensor(input: RMSTensor, end: RMSTensor, weight: torch.Tensor) -> RMSTensor:
    """(1 - w) a + w b with a plain tensor w.  Value max |1 - w| |a| + max |w| |b|, sensitivities its factors."""
    to_input = gain_of(run_real(torch.rsub, (weight, 1), {}), input).norm_size
    to_end = gain_of(weight, end).norm_size
    dims, (ca, cb) = align(broadcast(input.shape, end.shape, weight.shape), input, end)
    by_input, by_end = times(to_input, ca), times(to_end, cb)
    value = input.norm_size * by_input + end.norm_size * by_end
    return rms(value, dims, sensitivity={"input": by_input, "end": by_end})


@normed_op(torch.hypot).register_norm(lift_dims=SAME_DIMS)
def hypot(input: RMSTensor, other: RMSTensor) -> RMSTensor:
    """sqrt(a^2 + b^2).  Value sqrt(|a|^2 + |b|^2), attained; sensitivities 1."""
    dims, (ca, cb) = align(broadcast(input.shape, other.shape), input, other)
    value = root_sum_squares(times(input.norm_size, ca), times(other.norm_size, cb))
    return rms(value, dims, sensitivity={"input": ca, "other": cb})


@normed_op(F.glu).register_norm
def glu(input: RMSTensor, dim: int = -1) -> RMSTensor:
    """a s(b) for the halves a and b along `dim`, s the logistic function.

    Value:       c n s(reach), with reach the largest entry there can be; c = sqrt 2 if the halves share elem_dims, else 1
    Sensitivity: s(reach) + reach / 4, if the halves share elem_dims sqrt 2 sqrt(s(reach)^2 + reach^2 / 16)
    Source:      |d(a s(b))| <= s(b) |da| + |a| |db| / 4
    """
    n = input.norm_size
    reach = n * math.sqrt(input.numel_normed)
    gate, slope = torch.sigmoid(reach), reach / 4
    if negative(dim, input.ndim) not in input.elem_dims:
        return like(input, n * gate, sensitivity={"input": gate + slope})
    c = spread(math.sqrt(2))
    return like(input, times(n * gate, c), sensitivity={"input": times(root_sum_squares(gate, slope), c)})
