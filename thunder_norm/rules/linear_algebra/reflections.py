"""Products of reflections, as orthogonal parametrizations make matrices of vectors."""

from __future__ import annotations

import math

import torch

from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import LinfTensor, RMSToRMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.local import are_local
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import NormMismatchError


@normed_op(torch.linalg.householder_product).register_norm(when=lambda args: not are_local(args))
def householder_product(input: RMSToRMSTensor, tau: LinfTensor) -> RMSToRMSTensor:
    """The first k columns of ``H_1 ... H_k``, ``H_i = I - tau_i v_i v_i^T``, v_i 0 above its entry i, which is 1, and the input's column below.

    input: [.., m, k], operator norm n, so that no column is longer than ``a = n sqrt(m / k)``
    tau:   [.., k], largest entry t

    Value:       ``h^k sqrt(k / m)``, ``h = 1 + t (1 + a^2)``; ``max(1, t (1 + a^2) - 1)`` where tau is known not to be negative
    Sensitivity: ``2 k h^(k - 1) t sqrt(1 + a^2)`` to the input, ``k h^(k - 1) (1 + a^2) sqrt(k / m)`` to tau
    Typical:     h = 1, as of reflections, and sqrt(k) in place of k: they move as they like
    Source:      the eigenvalues of H are 1 and ``1 - tau |v|^2``;  ``dH = -dtau v v^T - tau (dv v^T + v dv^T)``
    Gap:         no vector is as long as all columns together may be, and reflections do not all stretch the same direction
    Raises NormMismatchError where the operator is not from the last two dimensions to themselves.
    """
    if {*input.elem_dims} != {-2, -1}:
        raise NormMismatchError(f"reflections are columns of matrices in the last two dimensions, got {input.elem_dims}")
    m, k = input.shape[-2:]
    t, square = tau.norm_size, 1 + input.norm_size.square() * (m / max(k, 1))
    share = math.sqrt(k / m) if m else 0.0
    is_bound = current_mode() == "bound"
    stretch = torch.ones_like(t)
    if is_bound:
        stretch = (t * square - 1).clamp(min=1.0) if known_range(tau).low >= 0 else 1 + t * square
    others = stretch.pow(max(k - 1, 0)) * (k if is_bound else math.sqrt(k))
    return RMSToRMSTensor(
        stretch.pow(k) * share,
        elem_dims=input.elem_dims,
        sensitivity={"input": others * t * square.sqrt() * 2, "tau": others * square * share},
    )
