"""Dropouts and what is made like them: a tensor times noise, with the noise that eager PyTorch draws from the same state.

Thunder takes dropout apart into uniform numbers, or has torch run the whole again for its gradient, which draws others.  Here the noise
is an operation of its own: it takes the tensor for its shape and the order of its memory, has no gradient, and torch draws it as its own
function does (``ATen/native/Dropout.cpp``).  In a batch of `vmap` it is what it consists of, uniform numbers of each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from thunder_norm.functions.registry import decompositions, symbol_id
from thunder_norm.functions.rules.neural import with_kernel
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.torch import _torch_to_thunder_function_map

_DETACH = _torch_to_thunder_function_map[torch.Tensor.detach]
_SELU_AT_MINUS_INFINITY = -1.7580993408473766  # what alpha dropout sets to: minus scale times alpha of selu
_WHOLE = -1  # one number for each element


def _draw_kept(like: torch.Tensor, p: float, leading: int, is_mask: bool) -> torch.Tensor:
    if leading != _WHOLE:
        noise = like.new_empty(_of_channels(like, leading))
    else:
        noise = torch.empty_like(like, dtype=torch.bool if is_mask else None)
    return noise.bernoulli_(1 - p)


def _of_channels(x: Any, leading: int) -> tuple[int, ...]:
    """One number for the whole of what comes after the first dimensions."""
    return (*x.shape[:leading], *[1] * (x.ndim - leading))


@with_kernel(_draw_kept, draws=True)
def dropout_noise(like: TensorProxy, p: float, leading: int, is_mask: bool) -> TensorProxy:
    """1 with probability 1 - p, else 0: for each element, or for each place in the first `leading` dimensions."""
    shape = tuple(like.shape) if leading == _WHOLE else _of_channels(like, leading)
    draws = ltorch.uniform(shape, 0.0, 1.0, device=like.device, dtype=like.dtype)
    return ltorch.to(ltorch.ge(draws, p), dtypes.bool8 if is_mask else like.dtype)


def _draw_slopes(x: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)  # as torch's function makes it
    torch.ops.aten.rrelu_with_noise(x, noise, lower, upper, True)
    return noise


@with_kernel(_draw_slopes, draws=True)
def rrelu_noise(x: TensorProxy, lower: float, upper: float) -> TensorProxy:
    """Uniform in [lower, upper) where x <= 0, else 1; numbers are drawn for the former alone."""
    noise = ltorch.uniform_like(x, lower, upper, dtype=x.dtype, device=x.device)
    return ltorch.where(ltorch.le(x, 0.0), noise, 1.0)


def _kept(x: TensorProxy, p: float, leading: int = _WHOLE, is_mask: bool = False) -> TensorProxy:
    return dropout_noise(_DETACH(x), p, leading, is_mask)


def _leading(x: TensorProxy, unbatched_ndim: int | None = None) -> int:
    """[N, C, ...], or [C, ...] if it has `unbatched_ndim` dimensions: one number for each channel of each sample."""
    return 1 if x.ndim == unbatched_ndim else 2


# -- y = x noise / (1 - p) ------------------------------------------------------------------------------------------------


def _scaled(x: TensorProxy, p: float, training: bool, leading: int = _WHOLE) -> TensorProxy:
    if not training or p == 0:
        return ltorch.mul(x, 1.0)
    if p == 1:
        return ltorch.mul(x, 0.0)
    return ltorch.mul(x, ltorch.true_divide(_kept(x, p, leading), 1 - p))


def _dropout(input: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> TensorProxy:
    if input.device.devicetype is not devices.DeviceType.CPU:  # one kernel draws and multiplies there
        return NotImplemented
    return _scaled(input, p, training)


def _of_each_channel(unbatched_ndim: int | None) -> Callable:
    def dropout(input: TensorProxy, p: float = 0.5, training: bool = True, inplace: bool = False) -> TensorProxy:
        return _scaled(input, p, training, _leading(input, unbatched_ndim))

    return dropout


def _native_dropout(input: TensorProxy, p: float, train: bool | None) -> tuple[TensorProxy, TensorProxy] | Any:
    if input.device.devicetype is not devices.DeviceType.CPU or train is False:
        return NotImplemented
    mask = _kept(input, p, is_mask=True)
    return ltorch.mul(ltorch.mul(input, mask), 0.0 if p == 1 else 1 / (1 - p)), mask


# -- a (x kept + alpha' (1 - kept)) + b -----------------------------------------------------------------------------------


def _alpha(x: TensorProxy, p: float, training: bool, leading: int = _WHOLE) -> TensorProxy:
    """Mean 0 and variance 1 stay (Klambauer et al., Self-Normalizing Neural Networks, 2017)."""
    if not training or p == 0:
        return ltorch.mul(x, 1.0)
    if p == 1:
        return ltorch.mul(x, 0.0)
    low = -_SELU_AT_MINUS_INFINITY
    scale = ((1 - p) * (1 + p * low**2)) ** -0.5
    kept = _kept(x, p, leading)
    shift = ltorch.add(ltorch.mul(ltorch.sub(kept, 1.0), low * scale), low * scale * p)
    return ltorch.add(ltorch.mul(x, ltorch.mul(kept, scale)), shift)


def _alpha_dropout(input: TensorProxy, p: float = 0.5, training: bool = False, inplace: bool = False) -> TensorProxy:
    return _alpha(input, p, training)


def _feature_alpha_dropout(input: TensorProxy, p: float = 0.5, training: bool = False, inplace: bool = False) -> TensorProxy:
    return _alpha(input, p, training, 2)


# -- the slope is drawn ---------------------------------------------------------------------------------------------------


def _rrelu(
    a: TensorProxy, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> TensorProxy:
    return ltorch.mul(a, rrelu_noise(_DETACH(a), lower, upper)) if training else NotImplemented


_functional = torch.nn.functional
_OF: dict[Any, Callable] = {
    ltorch.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    torch.feature_dropout: lambda input, p, train: _scaled(input, p, train, 2),
    torch.native_dropout: _native_dropout,
    _functional.dropout1d: _of_each_channel(2),
    _functional.dropout2d: _of_each_channel(None),  # torch takes three dimensions for [N, C, L]
    _functional.dropout3d: _of_each_channel(4),
    torch.alpha_dropout: lambda input, p, train: _alpha(input, p, train),
    torch.feature_alpha_dropout: lambda input, p, train: _alpha(input, p, train, 2),
    _functional.alpha_dropout: _alpha_dropout,
    _functional.feature_alpha_dropout: _feature_alpha_dropout,
    ltorch.rrelu: _rrelu,
}
for _operation, _formula in _OF.items():
    decompositions.add(_operation, _formula)
_IDS: frozenset[Hashable] = frozenset(map(symbol_id, _OF))


def draws_noise(bsym: BoundSymbol) -> bool:
    """Whether an operation, or one it consists of, is one whose noise Thunder would draw in another way than torch."""
    if bsym.sym.id not in _IDS:
        return any(map(draws_noise, bsym.subsymbols))
    if bsym.sym.id == ltorch.dropout.id and bsym.args[0].device.devicetype is not devices.DeviceType.CPU:
        return False
    return not bsym.subsymbols or draws_numbers(bsym)
