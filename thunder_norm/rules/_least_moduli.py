"""How near to 0 entries are that are known to be away from it: the least there can be, or, in the modes without a guarantee, what counts."""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_norm.core.context import current_mode, current_sensitivity
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import known_range
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._shared import Constant, is_moving

_GUARD = 2e-2  # below, a range is there to keep a program from dividing by 0; no typical entry of norm 1 is as small


def smallest(x: RMSTensor) -> Constant:
    """The least modulus of an entry; in mode "typical" what counts in its place where entries are means of many of one sign.

    A length of N Gaussians, of RMS n, has ``E 1 / l^2 = N / ((N - 2) n^2)``, and other means of many are as close to their size.  Where
    nothing but an epsilon keeps entries from 0 (``x.clamp(min=1e-7)``) they have the size of the norm, as in `typical_quotients`.  Others are
    no smaller than that part of their norm below which a number counts as an epsilon beside 1 (``1 + 300 x^2``).  In mode "modula" all
    have the size of the norm.
    """
    found = known_range(x)
    if current_mode() == "bound":
        return least_modulus(x)
    share = 1.0
    if current_mode() == "typical" and found.averaged > 2:
        share = math.sqrt(1 - 2 / found.averaged)
    elif current_mode() == "typical" and not is_near_its_norm(x):
        share = _GUARD
    return (x.norm_size * share).clamp(min=found.smallest_modulus)


def least_modulus(x: RMSTensor) -> Constant:
    """Of an entry of x, all of one sign: by what made x and, where they say more, by the norms at hand."""
    found = known_range(x)
    kept = found if found.is_above(0.0) else found.negative()
    return found.smallest_modulus if kept.least is None else kept.least_of(x.norm_size)


def is_near_its_norm(x: RMSTensor) -> bool:
    """Whether sizes are typical ones, and entries as large as the norm of x: they are means of many, or their least modulus is an epsilon."""
    found = known_range(x)
    is_typical = current_mode() == "typical" and current_sensitivity() == "global"
    return is_typical and (found.averaged > 2 or found.smallest_modulus < _GUARD)


def says_less_than_values(x: Any) -> bool:
    """Whether it is a constant that an epsilon alone keeps away from 0 (``mask.sum() + eps``): its values are further away."""
    is_constant = isinstance(x, torch.Tensor) and not isinstance(x, NormedTensor) and not is_moving(x)
    return is_constant and known_range(x).smallest_modulus < _GUARD
