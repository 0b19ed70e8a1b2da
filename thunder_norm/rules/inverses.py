"""Typical sizes of what solves triangular systems that divide by their diagonals.

In mode "bound" they have no norm: a matrix may be singular.  Typically it is a multiple n Q of an orthogonal one, as in `determinants`, and its
inverse ``Q^T / n``.  At the data their derivative says how they move (`thunder_norm.core.by_data`).
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import like

_TINY = 1e-30


def _divides(args: dict[str, Any]) -> bool:
    return current_mode() != "bound" and current_sensitivity() == "global" and not args["unitriangular"]


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
    inverse = A.norm_size.clamp(min=_TINY).reciprocal()
    size = B.norm_size * inverse
    return like(B, size, sensitivity={"B": inverse, "A": size * inverse})
