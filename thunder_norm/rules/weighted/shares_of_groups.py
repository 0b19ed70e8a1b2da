"""Weights over the sum of their group, where an index says which entries are a group: a softmax over the edges at each node.

    total = torch.zeros(n).index_add(0, node, weights) + 1e-16
    weights / total.index_select(0, node)

Each is part of its own sum, so that no share is larger than 1, however small the sum is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules.weighted import _weights as terms
from thunder_norm.rules.weighted._combinations import KINDS, Relative, least_share, weights_of
from thunder_norm.scalars import times

_Share = tuple[float, list[Relative]]


def _share_of_group(args: Mapping[str, Any]) -> _Share | None:
    """By what the shares are multiplied, and by which share of themselves the weights move; None if it is no such quotient."""
    a, b = args["input"], args["other"]
    if args["rounding_mode"] is not None or not (isinstance(a, KINDS) and isinstance(b, KINDS)) or a.shape != b.shape:
        return None
    for other in weights_of(b, exactly=False):
        for w in weights_of(a):
            total = terms.gathered_sum(w.term, other.term)
            if total is None or not other.term.scale > 0:
                continue
            known = [r for r in (w.relative, other.relative) if r is not None]
            if known or a.perturbation_size is None and b.perturbation_size is None:
                return total.scale / other.term.scale, known
    return None


@normed_op(torch.div).register_norm(when=lambda args: _share_of_group(args) is not None)
def div_by_sum_of_group(input: RMSTensor, other: RMSTensor, *, rounding_mode: str | None = None) -> NormedTensor:
    """Weights over the sums of their groups.

    Value:       1, the largest entry      (attained: a group of one, if nothing is added to the sum)
    Sensitivity: r / 2 for weights that move by at most a share r of themselves
    Source:      ``dp_j = p_j ((1 - p_j) r_j - sum of p r over the others)``, at most ``2 r p_j (1 - p_j)``
    Gap:         the weights of a group need not be two, equal ones
    """
    found = _share_of_group({"input": input, "other": other, "rounding_mode": None})
    assert found is not None, "the rule's condition has been checked"
    factor, shares = found
    share = least_share(shares)
    moved = None if share is None else times(share, factor / 2)
    result = LinfTensor._wrap(None, bounded(factor, input.norm_size), moved, ())
    result._sensitivity = {"input": 0, "other": 0}
    return result
