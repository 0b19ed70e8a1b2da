"""One derivative of an elementwise operation, for both directions.

For ``y = f(a, b, ...)``, element by element, the *slope* of an argument is the linear map ``t -> (df/da) t``.  Forward mode applies it
to the argument's tangent and adds over the arguments.  Reverse mode applies its transpose to the cotangent: of a real function that is
the slope itself; of a holomorphic one, in PyTorch's convention that a gradient is the conjugate of the derivative, ``conj(df/da) g``,
which is the slope between two conjugations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

from thunder_norm.functions.complex_numbers import conjugate
from thunder_norm.functions.programs import has_complex
from thunder_norm.functions.registry import VjpRule, jvp_rules, vjp_rules

Slope = Callable[..., Any]


def register_slopes(
    operation: Symbol, *slopes: Slope | None, runs: Symbol | None = None, check_active: Callable | None = None
) -> None:
    """Register an elementwise operation's derivative for forward and reverse mode.

    Args:
        operation: a primitive that is real, or holomorphic where its arguments are complex.
        slopes: one for each positional argument, None where the derivative is zero wherever it exists.  ``slope(t, y, *args)`` is the
            derivative by that argument, at ``y = operation(*args)``, times t; linear in t.
        runs: what to write for the operation, if an executor takes it in another form only.
        check_active: see `VjpRule`; a slope that is None is not to be reached then.
    """
    runs = operation if runs is None else runs

    def pushed(primals: tuple, tangents: tuple, **kwargs: Any) -> tuple:
        if check_active is not None:
            check_active(primals, {a.name for a, t in zip(primals, tangents, strict=True) if t is not None})
        out, total = runs(*primals, **kwargs), None
        for slope, t in zip(slopes, tangents, strict=False):
            if slope is not None and t is not None:
                moved = slope(t, out, *primals)
                total = moved if total is None else ltorch.add(total, moved)
        return out, total

    def forward(*args: Any, **kwargs: Any) -> tuple:
        out = runs(*args, **kwargs)
        return out, (out, args)

    def backward(saved: tuple, g: TensorProxy) -> tuple:
        out, args = saved
        found = (_pulled(slope, g, out, args, a) for slope, a in zip(slopes, args, strict=False))
        return (*found, *[None] * (len(args) - len(slopes)))

    jvp_rules.add(operation, pushed)
    vjp_rules.add(operation, VjpRule(forward, backward, check_active))


def _pulled(slope: Slope | None, g: TensorProxy, out: TensorProxy, args: tuple, target: Any) -> TensorProxy | None:
    if slope is None or not (isinstance(target, TensorProxy) and dtypes.is_inexact_dtype(target.dtype)):
        return None
    if has_complex((out, args)):
        gradient = conjugate(slope(conjugate(g), out, *args))
    else:
        gradient = slope(g, out, *args)
    return of_operand(gradient, target)


def of_operand(gradient: TensorProxy, target: TensorProxy) -> TensorProxy:
    """A gradient in the shape of an operand.

    Thunder takes a 0-dim CPU tensor among the operands for a number and writes no broadcast, whose transpose is this sum.
    """
    return ltorch.sum(gradient) if target.ndim == 0 and gradient.ndim > 0 else gradient


def summed_to(gradient: TensorProxy, target: TensorProxy) -> TensorProxy:
    """The transpose of broadcasting `target` to the shape of the gradient."""
    extra = gradient.ndim - target.ndim
    dims = [d for d in range(extra, gradient.ndim) if target.shape[d - extra] == 1 and gradient.shape[d] != 1]
    if dims:
        gradient = ltorch.sum(gradient, tuple(dims), True)
    return ltorch.sum(gradient, tuple(range(extra))) if extra else gradient
