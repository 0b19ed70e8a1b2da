"""Norm rules for what is drawn from distributions whose parameters are normed: gammas and Dirichlets, which most others are made of.

No number bounds what is drawn.  At the data it is what it is, and moves with the parameters as torch's own derivatives say
(`thunder_norm.core.by_data`); typically it is as large as the distribution's second moment.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.rules._shared import is_typical, like, refuse, rms

_TINY = 1e-30
_gamma, _dirichlet = torch.ops.aten._standard_gamma.default, torch.ops.aten._sample_dirichlet.default


def _growth(n: torch.Tensor) -> torch.Tensor:
    """How a draw g of a gamma moves with its shape n: ``sqrt(1 + 1 / (4 n))``, as of ``n + sqrt(n) z`` with a Gaussian z."""
    return (1 + (4 * n.clamp(min=_TINY)).reciprocal()).sqrt()


@normed_op(_gamma).register_norm(when=is_typical)
def _standard_gamma(input: RMSTensor, generator: Any = None) -> RMSTensor:
    """A draw of a gamma distribution of scale 1.  Typical: ``sqrt(n^2 + n)``, and ``sqrt(1 + 1 / (4 n))``.

    Source:      its mean and its variance are its shape; Figurnov, Mohamed and Mnih, "Implicit Reparameterization Gradients", NeurIPS 2018
    Untried:     in mode "bound" it does not apply
    """
    n = input.norm_size
    return like(input, (n.square() + n).sqrt(), sensitivity={"input": _growth(n)})


@normed_op(_dirichlet).register_norm(when=is_typical)
def _sample_dirichlet(input: RMSTensor, generator: Any = None) -> RMSTensor:
    """A draw of a Dirichlet distribution over the K entries of the last dimension.

    Typical:     ``1 / K sqrt(1 + (K - 1) / (K n + 1))``, and ``sqrt(1 + 1 / (4 n)) / n`` times that
    Source:      each entry is a gamma over the sum of all: of mean 1 / K and variance ``(K - 1) / (K^2 (K n + 1))`` where parameters are equal
    Untried:     in mode "bound" it does not apply
    """
    n, count = input.norm_size.clamp(min=_TINY), max(input.shape[-1], 1)
    size = (1 + (count - 1) / (count * n + 1)).sqrt() / count
    return rms(size, input.elem_dims, sensitivity={"input": size * _growth(n) / n})


for _op in (_gamma, _dirichlet):
    refuse(
        normed_op(_op),
        "no number bounds what is drawn from a gamma distribution; norm_report's default, at the data, and mode='typical' have a size",
    )
