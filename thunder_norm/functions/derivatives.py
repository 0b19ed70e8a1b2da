"""How rules write derivatives: of elementwise operations, of linear ones, and of complex numbers.

For ``y = f(a, b, ...)``, element by element, the *slope* of an argument is the linear map ``t -> (df/da) t``.  Forward mode applies it
to the argument's tangent and adds over the arguments.  Reverse mode applies its transpose to the cotangent: of a real function that is
the slope itself; of a holomorphic one, in PyTorch's convention that a gradient is the conjugate of the derivative, ``conj(df/da) g``,
which is the slope between two conjugations.

Rules call Thunder's own operations (``thunder.clang``, ``thunder.prims``): what they emit is transformed again by an outer
transform.  A tangent of None is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.functions.programs import has_complex, is_complex
from thunder_norm.functions.registry import VjpRule, jvp_rules, register_jvp, vjp_rules
import thunder.torch as ltorch
from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

# -- complex numbers ----------------------------------------------------------------------------------------------------


# A copy: the lazy conjugate of torch.conj is a view that some kernels do not take.
conj_physical = ltorch._torch_to_thunder_function_map[torch.conj_physical]

complex_of = ltorch._torch_to_thunder_function_map[torch.complex]  # of a real and an imaginary part


def conjugate(value: Any) -> Any:
    """The conjugate of a complex tensor, anything else as it is."""
    return conj_physical(value) if is_complex(value) else value


def holomorphic(backward: Callable) -> Callable:
    """The backward of a vjp rule written for real numbers, for complex ones too, of a holomorphic operation.

    For real numbers the gradient is the derivative times the cotangent; for complex ones PyTorch's is the conjugate of the derivative
    times the cotangent, the same between two conjugations.
    """

    @functools.wraps(backward)
    def pulled(saved: Any, *cotangents: TensorProxy) -> Any:
        if not has_complex(cotangents):
            return backward(saved, *cotangents)
        return tree_map(conjugate, backward(saved, *map(conjugate, cotangents)))

    return pulled


def in_dtype_of(gradient: TensorProxy, target: TensorProxy) -> TensorProxy:
    """A gradient in the dtype of what it belongs to; of a real tensor that is the real part, as in PyTorch."""
    if is_complex(gradient) and not is_complex(target):
        gradient = prims.real(gradient)
    return gradient if gradient.dtype == target.dtype else ltorch.to(gradient, dtypes.to_torch_dtype(target.dtype))


# -- elementwise operations ---------------------------------------------------------------------------------------------


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


# -- linear operations --------------------------------------------------------------------------------------------------


def plus(a: TensorProxy | None, b: TensorProxy | None) -> TensorProxy | None:
    """The sum of two tangents."""
    if a is None or b is None:
        return b if a is None else a
    return clang.add(a, b)


def or_zeros(tangent: TensorProxy | None, primal: Any) -> Any:
    """A tangent as a tensor, or the number zero for a number."""
    if tangent is not None:
        return tangent
    return clang.full_like(primal, 0) if isinstance(primal, TensorProxy) else type(primal)(0)


def register_linear(operation: Symbol, *arguments: int) -> None:
    """Rule of an operation that is linear in `arguments` together: the tangent is the operation on their tangents."""

    def rule(primals: tuple, tangents: tuple, **kwargs: Any) -> tuple:
        pushed = list(primals)
        for i in arguments:
            pushed[i] = or_zeros(tangents[i], primals[i])
        return operation(*primals, **kwargs), operation(*pushed, **kwargs)

    register_jvp(operation)(rule)


def register_multilinear(operation: Symbol, *arguments: int) -> None:
    """Rule of an operation that is linear in each of `arguments` by itself: one term for each."""

    def rule(primals: tuple, tangents: tuple, **kwargs: Any) -> tuple:
        out, total = operation(*primals, **kwargs), None
        for i in arguments:
            if tangents[i] is not None:
                total = plus(total, operation(*primals[:i], tangents[i], *primals[i + 1 :], **kwargs))
        return out, total

    register_jvp(operation)(rule)
