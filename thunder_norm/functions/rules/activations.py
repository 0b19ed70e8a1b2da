"""Activations whose derivative is not what comes out of their parts.

Thunder's are made of exponentials of all entries, those that a ``where`` then leaves out as well: from 89 on in float32 an exponential
is infinite, and 0 times that is a gradient that is NaN where torch's is 0 or 1.  A relu made of a ``where`` loses numbers that are NaN.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from thunder_norm.functions.derivatives import register_slopes
from thunder_norm.functions.registry import batching_rules, decompositions
from thunder_norm.functions.rules.elementwise import elementwise
from thunder_norm.functions.rules.neural import with_kernel
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy

_ALPHA, _SCALE = 1.6732632423543772, 1.0507009873554805  # of selu

# y (1 - y); aten.sigmoid_backward
register_slopes(ltorch.sigmoid, lambda t, y, x: ltorch.mul(t, ltorch.mul(y, ltorch.sub(1.0, y))))


def _relu_kernel(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.threshold_backward(g, y, 0)


@with_kernel(_relu_kernel)
def relu_backward(g: TensorProxy, y: TensorProxy) -> TensorProxy:
    """0 where y <= 0, so that what is NaN is handed on."""
    return ltorch.where(ltorch.le(y, 0.0), 0.0, g)


register_slopes(ltorch.relu, lambda t, y, x, *_: relu_backward(t, y))
batching_rules.add(relu_backward, elementwise(relu_backward))


def _exponential(x: TensorProxy, factor: float = 1.0) -> TensorProxy:
    """exp(factor x) - 1 of what is not positive, 0 elsewhere."""
    low = ltorch.where(ltorch.gt(x, 0.0), 0.0, x)
    return ltorch.expm1(low if factor == 1.0 else ltorch.mul(low, factor))


def _elu(x: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> TensorProxy:
    return ltorch.where(ltorch.gt(x, 0.0), x, ltorch.mul(_exponential(x), alpha))


def _celu(x: TensorProxy, alpha: float = 1.0, inplace: bool = False) -> TensorProxy:
    return ltorch.where(ltorch.gt(x, 0.0), x, ltorch.mul(_exponential(x, 1.0 / alpha), alpha))


def _selu(x: TensorProxy, inplace: bool = False) -> TensorProxy:
    return ltorch.mul(ltorch.where(ltorch.gt(x, 0.0), x, ltorch.mul(_exponential(x), _ALPHA)), _SCALE)


def _silu(x: TensorProxy, inplace: bool = False) -> TensorProxy:
    return ltorch.mul(x, ltorch.sigmoid(x))


def _mish(x: TensorProxy, inplace: bool = False) -> TensorProxy:
    """x tanh(log(1 + exp(x))), whose logarithm is x from 40 on, to the precision of float64; aten.mish."""
    is_large = ltorch.gt(x, 40.0)
    return ltorch.mul(x, ltorch.tanh(ltorch.where(is_large, x, ltorch.log1p(ltorch.exp(ltorch.where(is_large, 0.0, x))))))


_PARTS = {ltorch.elu: _elu, ltorch.celu: _celu, ltorch.selu: _selu, ltorch.silu: _silu, ltorch.mish: _mish}
for _symbol, _parts in _PARTS.items():
    decompositions.add(_symbol, _parts)

# Thunder's gradients of these are NaN for numbers.  Of relu they are right for all numbers.
IDS: frozenset[Hashable] = frozenset(s.id for s in (ltorch.sigmoid, ltorch.elu, ltorch.celu, ltorch.selu, ltorch.mish))
