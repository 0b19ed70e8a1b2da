"""Norm rules for functions of two with logarithms: log(e^a + e^b), a log b."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder_norm.core.context import current_mode, run_real
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.rules._pointwise import softplus_of
from thunder_norm.rules._shared import SAME_DIMS, align, broadcast, refuse, rms, root_sum_squares, scaled
from thunder_norm.rules.entrywise.binary import gain_of, scale_by
from thunder_norm.scalars import times


def _log_of_sum(op: Callable, base: float) -> None:
    unit = math.log(base)

    def rule(input: RMSTensor, other: RMSTensor) -> RMSTensor:
        dims, (ca, cb) = align(broadcast(input.shape, other.shape), input, other)
        a, b = times(input.norm_size, ca), times(other.norm_size, cb)
        reach_a, reach_b = (x.norm_size * math.sqrt(x.numel_normed) for x in (input, other))
        apart = reach_a + softplus_of((reach_b - reach_a) * unit) / unit
        # infinity minus infinity is NaN
        size = torch.where(torch.minimum(reach_a, reach_b) < math.inf, apart, reach_a + reach_b)
        if dims:
            size = torch.minimum(size, root_sum_squares(a, b) + math.log(2) / unit)
        if current_mode() == "typical":
            do_both_move = input.perturbation_size is not None and other.perturbation_size is not None
            typical = 0.5 if do_both_move else math.sqrt(0.5)
            return rms(size, dims, sensitivity={"input": ca * typical, "other": cb * typical})
        share = torch.sigmoid((reach_a + reach_b) * unit)
        return rms(size, dims, sensitivity={"input": times(share, ca), "other": times(share, cb)})

    rule.__name__ = rule.__qualname__ = op.__name__
    rule.__doc__ = f"""log(c^a + c^b) to the base c = {base:.4g}.

    Value:       that of the largest entries, from RMS at most sqrt(|a|^2 + |b|^2) + log 2      (attained by the largest entries,
                 and from RMS as the norms grow by disjoint supports; in between to 0.75)
    Sensitivity: 1 / (1 + c^-(reach_a + reach_b)) to each       (attained by spikes against each other)
    Typical:     half of each, as their slopes sum up to 1, else sums along a path double in each step; of one that moves alone it is
                 as if as many entries were from each
    Gap:         from RMS, where neither log 2 nor the norms are small beside the other
    Source:      max(a, b) <= log(c^a + c^b) <= max(a, b) + log 2, and its slopes are the shares of both in the sum
    """
    normed_op(op).register_norm(rule, lift_dims=SAME_DIMS)


_log_of_sum(torch.logaddexp, math.e)
_log_of_sum(torch.logaddexp2, 2.0)


def _times_log(op: Callable, log: Callable[[float], float], log_of_tensor: Callable, domain: str) -> None:
    def by_tensor(input: NormedTensor, other: torch.Tensor) -> NormedTensor:
        return scale_by(input, gain_of(run_real(log_of_tensor, (other,), {}), input), "input")

    def by_number(input: NormedTensor, other: int | float) -> NormedTensor:
        try:
            return scaled(input, math.fabs(log(other)))
        except ValueError as e:
            raise NormMismatchError(f"{other} has no logarithm: it must be {domain}") from e

    for rule in (by_tensor, by_number):
        rule.__name__ = rule.__qualname__ = op.__name__
        rule.__doc__ = f"""x times {log_of_tensor.__name__} of a number or a plain tensor.

        Value:       |x| times the largest logarithm in modulus, attained where it is constant; infinite where the logarithm is
        Sensitivity: the largest logarithm in modulus
        """
        normed_op(op).register_norm(rule, allow_plain_tensors="constant")
    refuse(
        normed_op(op),
        "the logarithm of a normed tensor is unbounded, and a norm does not keep its entries away from the singularity; use a plain "
        "tensor, or cross_entropy and kl_div, which take log probabilities",
    )


_times_log(torch.xlogy, math.log, torch.log, "positive")
_times_log(torch.special.xlog1py, math.log1p, torch.log1p, "above -1")
