"""Typical sizes of inverses and of what solves linear systems.

In mode "bound" they have no norm: a matrix may be singular.  Typically it is a multiple n Q of an orthogonal one, as in `determinants`, and its
inverse ``Q^T / n``.  At the data their derivative says how they move (`thunder_norm.core.by_data`).
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import like, refuse

_TINY = 1e-30


def _is_typical(args: dict[str, Any]) -> bool:
    return current_mode() != "bound" and current_sensitivity() == "global"


def _inverse_size(x: RMSToRMSTensor) -> torch.Tensor:
    return x.norm_size.clamp(min=_TINY).reciprocal()


@normed_op(torch.linalg.inv).register_norm(when=_is_typical)
def inv(A: RMSToRMSTensor) -> RMSToRMSTensor:  # noqa: N803 - torch's name
    """The inverse.  Typical: 1 / n, and 1 / n^2.

    Source:      ``d A^-1 = -A^-1 dA A^-1``
    Untried:     in mode "bound" it does not apply
    """
    size = _inverse_size(A)
    return like(A, size, sensitivity={"A": size.square()})


def _solution(matrix: RMSToRMSTensor, right: RMSTensor, of_matrix: str, of_right: str, power: int = 1) -> RMSTensor:
    """``(A^power)^-1 B``: |B| / n^power, 1 / n^power to B and power |B| / n^(power + 1) to A."""
    inverse = _inverse_size(matrix)
    gain = inverse.pow(power)
    size = right.norm_size * gain
    return like(right, size, sensitivity={of_right: gain, of_matrix: size * inverse * power})


@normed_op(torch.linalg.solve).register_norm(when=_is_typical)
def solve(A: RMSToRMSTensor, B: RMSTensor, *, left: bool = True) -> RMSTensor:  # noqa: N803
    """X with ``A X = B``.  Typical: |B| / n; 1 / n to B, |B| / n^2 to A.

    Untried:     in mode "bound" it does not apply
    """
    return _solution(A, B, "A", "B")


def _divides(args: dict[str, Any]) -> bool:
    return _is_typical(args) and not args["unitriangular"]


@normed_op(torch.linalg.solve_triangular).register_norm(when=_divides)
def solve_triangular(
    A: RMSToRMSTensor,  # noqa: N803
    B: RMSTensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> RMSTensor:
    """X with ``A X = B``, A not of ones on its diagonal.  Typical: as `solve`.

    Untried:     in mode "bound" it does not apply
    """
    return _solution(A, B, "A", "B")


@normed_op(torch.cholesky_solve).register_norm(when=_is_typical)
def cholesky_solve(input: RMSTensor, L: RMSToRMSTensor, upper: bool = False) -> RMSTensor:  # noqa: N803
    """X with ``L L^T X = B``.  Typical: |B| / n^2; 1 / n^2 to B, 2 |B| / n^3 to L.

    Untried:     in mode "bound" it does not apply
    """
    return _solution(L, input, "L", "input", 2)


@normed_op(torch.linalg.cholesky).register_norm(when=_is_typical)
def cholesky(input: RMSToRMSTensor, *, upper: bool = False) -> RMSToRMSTensor:
    """L with ``L L^T = A``.  Typical: sqrt(n), and 1 / (2 sqrt(n)), of a multiple of the identity.

    Untried:     in mode "bound" it does not apply
    """
    root = input.norm_size.clamp(min=_TINY).sqrt()
    return like(input, root, sensitivity={"input": 0.5 / root})


@normed_op(torch.linalg.det).register_norm(when=lambda args: _is_typical(args) and args["A"].ndim == 2)
def det(A: RMSToRMSTensor) -> RMSTensor:  # noqa: N803
    """The determinant.  Typical: n^N, and N n^(N - 1), for N singular values of n.

    Untried:     in mode "bound" it does not apply
    """
    n, count = A.norm_size, A.shape[-1]
    return RMSTensor(n.pow(count), elem_dims=(), sensitivity={"A": count * n.pow(count - 1)})


_SINGULAR = (
    "a norm does not keep a matrix away from singular ones; norm_report's default, at the data, and mode='typical' have a size"
)
for _op in (torch.linalg.inv, torch.linalg.solve, torch.cholesky_solve, torch.linalg.cholesky):
    refuse(normed_op(_op), _SINGULAR)
