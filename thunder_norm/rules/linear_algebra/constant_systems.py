"""Norm rules for systems whose matrix is a constant: ``A X = B`` for given A is the product of B with a constant, A's inverse.

Mahalanobis distances (``MultivariateNormal(mean, covariance).log_prob(x)``), whitening by a given Cholesky factor, implicit steps of a
given operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.core.context import current_mode, lift, run_real
from thunder_norm.core.kinds import L1Tensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor
from thunder_norm.rules._shared import like


def _is_constant(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: not any(isinstance(args[name], NormedTensor) for name in names)


def _identity(of: torch.Tensor) -> torch.Tensor:
    eye = run_real(torch.eye, (of.shape[-1],), {"dtype": NORM_DTYPE, "device": of.device})
    return run_real(torch.Tensor.expand, (eye, of.shape), {})


def _product(inverse: torch.Tensor, B: RMSTensor, axis: int, is_vector: bool = False) -> RMSTensor:  # noqa: N803 - torch's name
    """What an inverse M [.., N, N], a constant, makes of B along an axis: -2, ``M B``, or -1, ``B M``; of vectors ``M b``.

    Batches in which B's norm takes a mean, and not along the axis, share the largest moduli: the mean of ``sum_j M_ij b_j`` over
    them is at most ``sum_j max |M_ij|`` times that of b.
    """
    if not inverse.numel():
        return like(B, B.norm_size, sensitivity={"B": 1.0})
    if axis == -1 and not is_vector:
        inverse = run_real(torch.transpose, (inverse, -2, -1), {})
    is_within = axis in B.elem_dims
    batch = tuple(d - is_vector for d in B.elem_dims if -inverse.ndim <= d - is_vector < -2)
    if batch and not is_within:
        inverse = run_real(torch.amax, (run_real(torch.abs, (inverse,), {}), batch, True), {})
    if current_mode() != "bound":
        constant = lift(inverse, RMSTensor, (-2, -1) if is_within else (-1,)).norm_size * inverse.shape[-1] ** 0.5
    elif is_within:
        constant = lift(inverse, RMSToRMSTensor, (-2, -1)).norm_size
    else:
        constant = lift(inverse, L1Tensor, (-1,)).norm_size
    return like(B, B.norm_size * constant, sensitivity={"B": constant})


def _in_norm_dtype(t: torch.Tensor) -> torch.Tensor:
    return run_real(torch.Tensor.to, (t, NORM_DTYPE), {})


@normed_op(torch.linalg.solve_triangular).register_norm(when=_is_constant("A"), allow_plain_tensors="constant")
def solve_triangular(
    A: torch.Tensor,  # noqa: N803
    B: RMSTensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> RMSTensor:
    """X with ``A X = B``, or ``X A = B``, A a constant and M its inverse.

    Value:       |B| |M|_2 where B's norm runs along the system, else |B| times the largest sum of moduli in a row of M    (attained)
    Sensitivity: that over |B|
    Typical:     |M|_F / sqrt(N) |B|, else the longest row of M
    """
    matrix = _in_norm_dtype(A)
    flags = {"upper": upper, "left": left, "unitriangular": unitriangular}
    inverse = run_real(torch.linalg.solve_triangular, (matrix, _identity(matrix)), flags)
    return _product(inverse, B, -2 if left else -1)


@normed_op(torch.linalg.solve).register_norm(when=_is_constant("A"), allow_plain_tensors="constant")
def solve(A: torch.Tensor, B: RMSTensor, *, left: bool = True) -> RMSTensor:  # noqa: N803
    """X with ``A X = B``, or ``X A = B``, A a constant and M its inverse; B matrices or vectors, as torch has it.

    Value:       that of `solve_triangular`      (attained)
    Sensitivity: that over |B|
    """
    matrix = _in_norm_dtype(A)
    is_vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    inverse = run_real(torch.linalg.inv, (matrix,), {})
    return _product(inverse, B, -1 if is_vector or not left else -2, is_vector)


@normed_op(torch.cholesky_solve).register_norm(when=_is_constant("L"), allow_plain_tensors="constant")
def cholesky_solve(B: RMSTensor, L: torch.Tensor, upper: bool = False) -> RMSTensor:  # noqa: N803
    """X with ``L L^T X = B``, L a constant and M the inverse of ``L L^T``.

    Value:       that of `solve_triangular`      (attained)
    Sensitivity: that over |B|
    """
    factor = _in_norm_dtype(L)
    return _product(run_real(torch.cholesky_solve, (_identity(factor), factor, upper), {}), B, -2)


@normed_op(torch.linalg.lu_solve).register_norm(when=_is_constant("LU"), allow_plain_tensors="constant")
def lu_solve(
    LU: torch.Tensor,  # noqa: N803
    pivots: torch.Tensor,
    B: RMSTensor,  # noqa: N803
    *,
    left: bool = True,
    adjoint: bool = False,
) -> RMSTensor:
    """X with ``A X = B``, ``X A = B``, or the same of A^T, for the factors of a constant A; M is the inverse.

    Value:       that of `solve_triangular`      (attained)
    Sensitivity: that over |B|
    """
    factors = _in_norm_dtype(LU)
    inverse = run_real(torch.linalg.lu_solve, (factors, pivots, _identity(factors)), {"left": left, "adjoint": adjoint})
    return _product(inverse, B, -2 if left else -1)


@normed_op(torch.linalg.ldl_solve).register_norm(when=_is_constant("LD"), allow_plain_tensors="constant")
def ldl_solve(
    LD: torch.Tensor,  # noqa: N803
    pivots: torch.Tensor,
    B: RMSTensor,  # noqa: N803
    *,
    hermitian: bool = False,
) -> RMSTensor:
    """X with ``A X = B`` for the factors of a constant symmetric A; M is the inverse.

    Value:       that of `solve_triangular`      (attained)
    Sensitivity: that over |B|
    """
    factors = _in_norm_dtype(LD)
    inverse = run_real(torch.linalg.ldl_solve, (factors, pivots, _identity(factors)), {"hermitian": hermitian})
    return _product(inverse, B, -2)
