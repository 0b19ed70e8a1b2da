"""Cotangents in the joint rules that Thunder differentiates with."""

from __future__ import annotations

from collections.abc import Sequence

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy


def cotangents_of(results: Sequence[TensorProxy]) -> list[TensorProxy]:
    """``prims.get_grad`` of each result of an operation.

    Of a result that nothing uses Thunder writes ``zeros(*shape)``, which is ``torch.zeros()``, an error, where it has no dimensions.  To
    such a result a zero of ours goes first.
    """
    if len(results) > 1:  # a single one is used, or the rule is not asked
        for p in results:
            if p.ndim == 0 and dtypes.is_inexact_dtype(p.dtype):
                prims.put_grad(p, ltorch.full((), 0, device=p.device, dtype=p.dtype))
    return [prims.get_grad(p) for p in results]
