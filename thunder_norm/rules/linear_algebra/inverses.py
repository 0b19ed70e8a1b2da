"""Typical sizes of inverses of matrices, and of what solves systems: triangular ones that divide by their diagonals, and any others.

In mode "bound" they have no norm: a matrix may be singular.  Typically it is a multiple n Q of an orthogonal one, as in `determinants`, and its
inverse ``Q^T / n``.  At the data their derivative says how they move (`thunder_norm.core.by_data`).
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._shared import like, refuse

_TINY = 1e-30


def _is_typical(args: dict[str, Any]) -> bool:
    return current_mode() != "bound" and current_sensitivity() == "global"


def _divides(args: dict[str, Any]) -> bool:
    return _is_typical(args) and not args["unitriangular"]


def _solution(a: RMSToRMSTensor, b: RMSTensor) -> RMSTensor:
    inverse = a.norm_size.clamp(min=_TINY).reciprocal()
    size = b.norm_size * inverse
    return like(b, size, sensitivity={"B": inverse, "A": size * inverse})


def _inverse(a: RMSToRMSTensor) -> RMSToRMSTensor:
    if {*a.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"an inverse is one of matrices in the last two dimensions, got {a.elem_dims}")
    size = a.norm_size.clamp(min=_TINY).reciprocal()
    return RMSToRMSTensor(size, elem_dims=a.elem_dims[::-1], sensitivity={"input": size.square()})


@normed_op(torch.linalg.solve_triangular).register_norm(when=_divides)
def solve_triangular(
    A: RMSToRMSTensor,  # noqa: N803
    B: RMSTensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> RMSTensor:
    """X with ``A X = B``, A not of ones on its diagonal.  Typical: |B| / n; 1 / n to B, |B| / n^2 to A.

    Source:      ``dX = A^-1 (dB - dA X)``
    Untried:     in mode "bound" it does not apply
    """
    return _solution(A, B)


@normed_op(torch.linalg.solve).register_norm(when=_is_typical)
def solve(A: RMSToRMSTensor, B: RMSTensor, *, left: bool = True) -> RMSTensor:  # noqa: N803
    """X with ``A X = B``, or ``X A = B``.  Typical: |B| / n; 1 / n to B, |B| / n^2 to A.

    Source:      ``dX = A^-1 (dB - dA X)``
    Untried:     in mode "bound" it does not apply
    """
    return _solution(A, B)


@normed_op(torch.inverse).register_norm(when=_is_typical)
@normed_op(torch.linalg.inv).register_norm(when=_is_typical)
def inv(input: RMSToRMSTensor) -> RMSToRMSTensor:
    """The inverse of a matrix.  Typical: 1 / n, and 1 / n^2.

    Source:      ``d A^-1 = -A^-1 dA A^-1``
    Untried:     in mode "bound" it does not apply
    """
    return _inverse(input)


@normed_op(torch.linalg.pinv).register_norm(when=_is_typical)
def pinv(input: RMSToRMSTensor) -> RMSToRMSTensor:
    """The pseudoinverse of a matrix of full rank.  Typical: 1 / n, and 1 / n^2.

    Source:      that of n Q, Q with orthonormal rows or columns, is ``Q^T / n``
    Untried:     in mode "bound" it does not apply
    """
    return _inverse(input)


# -- factors ----------------------------------------------------------------------------------------------------------------


@normed_op(torch.linalg.cholesky).register_norm(when=_is_typical)
def cholesky(input: RMSToRMSTensor, *, upper: bool = False) -> RMSToRMSTensor:
    """L with ``A = L L^T``.  Typical: sqrt(n), and 1 / (2 sqrt(n)).

    Source:      |L|^2 = |A|; of A = n I it is sqrt(n) I
    Untried:     in mode "bound" it does not apply
    """
    if {*input.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"a Cholesky factor is one of matrices in the last two dimensions, got {input.elem_dims}")
    size = input.norm_size.clamp(min=_TINY).sqrt()
    return RMSToRMSTensor(size, elem_dims=input.elem_dims, sensitivity={"input": 0.5 / size})


@normed_op(torch.cholesky_solve).register_norm(when=_is_typical)
def cholesky_solve(B: RMSTensor, L: RMSToRMSTensor, upper: bool = False) -> RMSTensor:  # noqa: N803
    """X with ``L L^T X = B``.  Typical: |B| / n^2; 1 / n^2 to B, 2 |B| / n^3 to L.

    Source:      that of `solve`, twice
    Untried:     in mode "bound" it does not apply
    """
    inverse = L.norm_size.clamp(min=_TINY).reciprocal()
    size = B.norm_size * inverse.square()
    return like(B, size, sensitivity={"B": inverse.square(), "L": 2 * size * inverse})


_SINGULAR = (
    "a norm does not keep a matrix away from singular ones; norm_report's default, at the data, and mode='typical' have a size"
)
for _op in (torch.linalg.solve, torch.linalg.inv, torch.inverse, torch.linalg.pinv, torch.linalg.cholesky, torch.cholesky_solve):
    refuse(normed_op(_op), _SINGULAR)
