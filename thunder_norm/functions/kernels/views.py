"""A view that Thunder differentiates as a copy: in the memory of its argument, as torch's is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.functions.kernels.registry import Joint, kernels, operations
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy


def _shaped(like: TensorProxy, shape: Sequence[int]) -> TensorProxy:
    return TensorProxy(like=like, shape=tuple(shape), requires_grad=False)


_diagonal = operations.register_operator(
    "diagonal",
    meta=lambda a, *places: _shaped(a, torch.empty(a.shape, device="meta").diagonal(*places).shape),
    fn=torch.diagonal,
)
_gradient = operations.register_operator(
    "diagonal_gradient", meta=lambda g, shape, *places: _shaped(g, shape), fn=torch.ops.aten.diagonal_backward
)


@kernels(ltorch.diagonal)
def _rule(wanted: Callable[[Any], bool], a: TensorProxy, *places: int) -> Joint | None:
    def joint(a: TensorProxy, *places: int) -> TensorProxy:
        out = _diagonal(a, *places)
        prims.put_grad(a, _gradient(prims.get_grad(out), a.shape, *places))
        return out

    return joint
