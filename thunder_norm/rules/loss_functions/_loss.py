"""What the rules of losses share: reductions, however they are asked for, and results that are counted or averaged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import lift, run_real
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import LiftDims, normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import Constant, as_kind, refuse
from thunder_norm.scalars import times

_PLAIN = "labels, weights and variances are data, not sets of tensors: pass them as plain tensors, and options by name"
_OF_ATEN = ("none", "mean", "sum")


def reduction_of(reduction: str | int, size_average: bool | None = None, reduce: bool | None = None) -> str:
    """The reduction a call asks for: by name, by aten's number, or by torch's deprecated flags, which win if given.

    >>> reduction_of("sum"), reduction_of(2), reduction_of("mean", size_average=False), reduction_of("mean", reduce=False)
    ('sum', 'sum', 'sum', 'none')
    """
    if size_average is not None or reduce is not None:
        averages, reduces = size_average in (None, True), reduce in (None, True)
        return "none" if not reduces else "mean" if averages else "sum"
    if type(reduction) is int and 0 <= reduction < len(_OF_ATEN):
        return _OF_ATEN[reduction]
    if not isinstance(reduction, str):
        raise NormMismatchError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    return reduction


def measured(t: torch.Tensor, arguments: dict[str, Any]) -> ed.Dims:
    """elem_dims for a plain operand: an average needs no more than its RMS over everything."""
    reduction = reduction_of(arguments["reduction"], arguments.get("size_average"), arguments.get("reduce"))
    return () if reduction == "none" else tuple(range(-t.ndim, 0))


def loss(
    *ops: Callable, lift_dims: Mapping[str, LiftDims] | None = None, when: Callable[[dict[str, Any]], bool] | None = None
) -> Callable:
    """Register a rule of `ops` that takes `reduction` by name; its arguments are in the order of the aten operation.

    The rule then also answers aten's numbers and the flags `size_average` and `reduce`; under a condition, others say the rest.
    """

    def register(rule: Callable) -> Callable:
        signature = inspect.signature(rule)

        @functools.wraps(rule)
        def reduced(*args: Any, size_average: bool | None = None, reduce: bool | None = None, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            bound.arguments["reduction"] = reduction_of(bound.arguments["reduction"], size_average, reduce)
            return rule(*bound.args, **bound.kwargs)

        flags = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("size_average", "reduce")]
        vars(reduced)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *flags])
        for op in ops:
            normed_op(op).register_norm(reduced, allow_plain_tensors="constant", lift_dims=lift_dims, when=when)
            if when is None:
                refuse(normed_op(op), _PLAIN)
        return rule

    return register


def product(*factors: Constant) -> Constant:
    """The product of numbers and sizes."""
    result: Constant = 1.0
    for factor in factors:
        result = factor * result
    return result


def count(reduction: str, samples: int) -> int:
    """How often the bound of one sample is counted."""
    return samples if reduction == "sum" else 1


def scalar_loss(value: torch.Tensor, factor: Constant, **sensitivity: Constant) -> LinfTensor:
    """The result of a loss: value and sensitivities of one sample, times a factor."""
    constants = {
        name: c if isinstance(factor, int | float) and factor == 1 else product(c, factor) for name, c in sensitivity.items()
    }
    return LinfTensor(times(value, factor), elem_dims=(), sensitivity=constants)


def entries_or_mean(x: RMSTensor, reduction: str) -> tuple[NormedTensor, float]:
    """The norm of x that a mean or sum over all entries needs, which is any RMS; without reduction the largest entry."""
    return as_kind(x, LinfTensor, ()) if reduction == "none" else (x, 1.0)


def largest(t: torch.Tensor, beside: NormedTensor) -> torch.Tensor:
    """The largest modulus in a plain tensor of any dtype."""
    real = t if t.is_floating_point() else run_real(torch.Tensor.to, (t, beside.dtype), {})
    return lift(real, LinfTensor).norm_size


def unlikeliest(y: torch.Tensor, beside: NormedTensor) -> torch.Tensor:
    """The largest ``|y| + |1 - y|``: 1 for probabilities, whatever they are."""
    other = run_real(torch.abs, (run_real(torch.rsub, (y, 1), {}),), {})
    return largest(run_real(torch.add, (run_real(torch.abs, (y,), {}), other), {}), beside)
