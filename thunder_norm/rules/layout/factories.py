"""Norm rules for making tensors: constants in the shape of a normed tensor, and random tensors.

Other constants (zeros, arange, ...) stay plain; like any plain tensor they are measured once they meet a normed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.elem_dims import Dims
from thunder_norm.core.initializing import unit
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.op_names import torch_dtype
from thunder_norm.rules._shared import Number, as_kind, like, maximum, refuse, refuse_perturbation, register_refusal, scalar


def _is_floating(options: dict[str, Any]) -> bool:
    dtype = torch_dtype(options.get("dtype"))
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _constant(x: NormedTensor, value: float, options: dict[str, Any]) -> LinfTensor | None:
    """A constant beside x, which does not move with it; integers and bools stay plain."""
    if not _is_floating(options):
        return None
    return LinfTensor(scalar(math.fabs(value), x.norm_size), elem_dims=(), sensitivity={"input": 0})


@normed_op(torch.zeros_like).register_norm
def zeros_like(input: NormedTensor, **options: Any) -> LinfTensor | None:
    """Zeros: value 0, sensitivity 0."""
    return _constant(input, 0.0, options)


@normed_op(torch.ones_like).register_norm
def ones_like(input: NormedTensor, **options: Any) -> LinfTensor | None:
    """Ones: value 1, sensitivity 0."""
    return _constant(input, 1.0, options)


@normed_op(torch.full_like).register_norm
def full_like(input: NormedTensor, fill_value: float, **options: Any) -> LinfTensor | None:
    """A constant c: value |c|, sensitivity 0."""
    return _constant(input, fill_value, options)


@normed_op(torch.Tensor.new_zeros).register_norm
def new_zeros(input: NormedTensor, *size: Any, **options: Any) -> LinfTensor | None:
    """Zeros of another shape: value 0, sensitivity 0."""
    return _constant(input, 0.0, options)


@normed_op(torch.Tensor.new_ones).register_norm
def new_ones(input: NormedTensor, *size: Any, **options: Any) -> LinfTensor | None:
    """Ones of another shape: value 1, sensitivity 0."""
    return _constant(input, 1.0, options)


@normed_op(torch.Tensor.new_full).register_norm
def new_full(input: NormedTensor, size: Sequence[int], fill_value: float, **options: Any) -> LinfTensor | None:
    """A constant c of another shape: value |c|, sensitivity 0."""
    return _constant(input, fill_value, options)


@normed_op(torch.fill).register_norm
def fill(input: RMSTensor, value: RMSTensor | int | float) -> RMSTensor:
    """A constant c in the place of x, in x's kind as x may be filled in place.

    Value:       |c|        (attained)
    Sensitivity: 0 to x, 1 to a c that is a tensor
    """
    if isinstance(value, NormedTensor):
        c, moved = as_kind(value, LinfTensor, ())
        return like(input, c.norm_size, sensitivity={"input": 0, "value": moved})
    return like(input, scalar(math.fabs(value), input.norm_size), sensitivity={"input": 0})


@normed_op(torch.ops.aten.zero.default).register_norm
def zero(input: NormedTensor) -> NormedTensor:
    """Zeros in the place of x, in x's kind: value 0, sensitivity 0."""
    return like(input, torch.zeros_like(input.norm_size), sensitivity={"input": 0})


@normed_op(torch.linspace).register_norm(allow_plain_tensors="constant")
def linspace(
    start: RMSTensor | torch.Tensor | Number, end: RMSTensor | torch.Tensor | Number, steps: int, **options: Any
) -> LinfTensor | None:
    """Numbers from one to another, evenly spaced: convex combinations of both.

    Value:       max(n, m)      (attained: at either end)
    Sensitivity: 1 to both      (attained: at their own end)
    """
    if not _is_floating(options):
        return None
    ends = [x for x in (start, end) if isinstance(x, NormedTensor)]
    sizes = [as_kind(x, LinfTensor, ())[0].norm_size for x in ends]
    for x in (start, end):
        if isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor):
            sizes.append(x.detach().abs().to(sizes[0]))
        elif not isinstance(x, NormedTensor):
            sizes.append(scalar(math.fabs(x), sizes[0]))
    return LinfTensor(maximum(sizes), elem_dims=(), sensitivity={"start": 1, "end": 1})


@normed_op(torch.rand_like).register_norm
def rand_like(input: NormedTensor, **options: Any) -> LinfTensor:
    """Uniform in [0, 1): value 1 (typical 1 / sqrt 3), sensitivity 0."""
    value = math.sqrt(1 / 3) if current_mode() == "typical" else 1.0
    return LinfTensor(scalar(value, input.norm_size), elem_dims=(), sensitivity={"input": 0})


@normed_op(torch.rand).register_norm
def rand(*size: Any, **options: Any) -> LinfTensor:
    """Uniform in [0, 1): value 1 (typical 1 / sqrt 3).

    Untried:     random, of no argument
    """
    return LinfTensor(math.sqrt(1 / 3) if current_mode() == "typical" else 1.0, elem_dims=())


@normed_op(torch.Tensor.bernoulli_).register_norm(allow_plain_tensors="constant")
@normed_op(torch.bernoulli).register_norm(allow_plain_tensors="constant")
def bernoulli(input: torch.Tensor, p: Any = None, *, generator: Any = None) -> LinfTensor:
    """Zeros and ones, drawn: value 1, whatever was drawn now.

    Untried:     random, of no argument
    """
    return LinfTensor(1.0, elem_dims=())


@normed_op(torch.randn_like).register_norm(mode="typical")
def randn_like_typical(input: NormedTensor, **options: Any) -> RMSTensor:
    """Standard normal: expected RMS 1 over any dimensions."""
    return LinfTensor(scalar(1.0, input.norm_size), elem_dims=(), sensitivity={"input": 0})


@normed_op(torch.randn).register_norm(mode="typical")
def randn_typical(*size: Any, **options: Any) -> RMSTensor:
    """Standard normal: expected RMS 1 over any dimensions."""
    return LinfTensor(1.0, elem_dims=())


@normed_op(torch.randn).register_norm(when=lambda args: current_sensitivity() == "local")
def randn_at_data(*size: Any, **options: Any) -> None:
    """Standard normal, at the data of a run: as drawn, a constant, which is measured where it meets a normed tensor.

    Untried:     random, of no argument
    """


@normed_op(torch.bernoulli).register_norm
def bernoulli_of_normed(input: RMSTensor, p: float | None = None, *, generator: Any = None) -> LinfTensor:
    """Zeros and ones, drawn for each entry of x with probability p, or with that entry itself.

    Value:       1
    Sensitivity: 0 with p, of which x says the shape alone; else none, as an entry jumps
    Typical:     1 without p, as at steps larger than its jumps
    Untried:     random
    """
    if p is None and (current_mode() == "bound" or current_sensitivity() != "global"):
        refuse_perturbation(torch.bernoulli, input)
    return LinfTensor(scalar(1.0, input.norm_size), elem_dims=(), sensitivity={"input": int(p is None)})


@unit.register_norm
def initialized(kind: type[NormedTensor], shape: tuple[int, ...], elem_dims: Dims, generator: Any, device: str) -> NormedTensor:
    """What `thunder_norm.initialize` draws before it is scaled: norm 1, exactly.

    Untried:     random, of no argument
    """
    return kind(1.0, elem_dims=elem_dims)


# -- refused ------------------------------------------------------------------------------------------------------------------

_UNBOUNDED = (
    "a normal distribution is unbounded, so {} has no norm in mode 'bound'; give a tensor with a norm instead, use mode "
    "'typical' (expected RMS 1), or register a rule of your own with the norm you want to assume"
)


def _refuse_factory(op: Callable, reason: str) -> None:
    def refused(*size: Any, **options: Any) -> NormedTensor:
        raise NormMismatchError(reason.format(op.__name__))

    register_refusal(normed_op(op), refused)


def _refuse_like(op: Callable, reason: str) -> None:
    def refused(input: NormedTensor, *size: Any, **options: Any) -> NormedTensor:
        raise NormMismatchError(reason.format(op.__name__))

    register_refusal(normed_op(op), refused)


_refuse_factory(torch.randn, _UNBOUNDED)
_refuse_like(torch.randn_like, _UNBOUNDED)

for _op in (torch.ops.aten.resize.default, torch.ops.aten.resize_as.default):
    refuse(
        normed_op(_op),
        "a tensor that is resized keeps some entries and gets others from whatever was in memory, which has no norm; use reshape, "
        "a slice or torch.nn.functional.pad",
    )
