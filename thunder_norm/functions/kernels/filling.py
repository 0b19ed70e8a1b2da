"""Entries that a mask replaces by a number: Thunder selects them where it differentiates, and the result lies in another order than torch's."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch

from thunder_norm.functions.kernels.registry import Joint, are_floats, kernels, like, operations
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy

_filled = operations.register_operator("masked_fill", meta=lambda a, mask, value: like(a), fn=torch.masked_fill)
_gradient = operations.register_operator(
    "masked_fill_gradient", meta=lambda g, mask: like(g), fn=lambda g, mask: torch.masked_fill(g, mask, 0)
)


@kernels(ltorch.masked_fill)
def _rule(wanted: Callable[[Any], bool], a: TensorProxy, mask: TensorProxy, value: Any) -> Joint | None:
    if not (are_floats(a) and isinstance(value, Number)) or torch.broadcast_shapes(a.shape, mask.shape) != a.shape:
        return None

    def joint(a: TensorProxy, mask: TensorProxy, value: Number) -> TensorProxy:
        out = _filled(a, mask, value)
        prims.put_grad(a, _gradient(prims.get_grad(out), mask))
        return out

    return joint
