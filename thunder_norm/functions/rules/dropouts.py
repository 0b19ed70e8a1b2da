"""Dropouts and what is made like them: a tensor times noise, with the noise that eager PyTorch draws from the same state.

Thunder takes dropout apart into uniform numbers, or has torch run the whole again for its gradient, which draws others.  Here the noise
is an operation of its own: it takes the tensor for its shape and the order of its memory, has no gradient, and torch draws it as its own
function does (``ATen/native/Dropout.cpp``).  A batch of `vmap` has it in one tensor, sample after sample, as ``torch.vmap`` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from thunder_norm.functions.registry import decompositions, drawing_rules, symbol_id
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
    dtype = torch.bool if is_mask else None
    if leading == _WHOLE:
        return torch.empty_like(like, dtype=dtype).bernoulli_(1 - p)
    return like.new_empty(_of_channels(like, leading), dtype=dtype).bernoulli_(1 - p)


def _of_channels(x: Any, leading: int) -> tuple[int, ...]:
    """One number for the whole of what comes after the first dimensions."""
    return (*x.shape[:leading], *[1] * (x.ndim - leading))


@with_kernel(_draw_kept, draws=True)
def dropout_noise(like: TensorProxy, p: float, leading: int, is_mask: bool) -> TensorProxy:
    """1 with probability 1 - p, else 0: for each element, or for each place in the first `leading` dimensions."""
    shape = tuple(like.shape) if leading == _WHOLE else _of_channels(like, leading)
    draws = ltorch.uniform(shape, 0.0, 1.0, device=like.device, dtype=like.dtype)
    return ltorch.to(ltorch.ge(draws, p), dtypes.bool8 if is_mask else like.dtype)


def _noise_of_samples(size: int | None, dim: int | None, like: TensorProxy, p: float, leading: int, is_mask: bool) -> TensorProxy:
    """In the order of the samples whatever that of the memory is; but for masks, which torch draws in the order of the memory."""
    if is_mask and size is not None and dim is not None:
        return dropout_noise(like, p, leading, is_mask)
    leading = like.ndim - (dim is not None) if leading == _WHOLE else leading
    of_samples = _whose_numbers(size, dim, like)
    return dropout_noise(of_samples, p, leading if size is None else leading + 1, is_mask)


def _whose_numbers(size: int | None, dim: int | None, like: TensorProxy) -> TensorProxy:
    """A tensor with one entry for each number, from what has all samples (`dim` 0), or what is the same for all."""
    if size is None:
        return like if dim is None else like[0]
    return ltorch.expand(like, (size, *like.shape)) if dim is None else like


drawing_rules.add(dropout_noise, _noise_of_samples)


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


# -- exponentially distributed --------------------------------------------------------------------------------------------


def _draw_exponential(like: torch.Tensor, rate: float) -> torch.Tensor:
    return torch.empty_like(like).exponential_(rate)


@with_kernel(_draw_exponential, draws=True)
def exponential_noise(like: TensorProxy, rate: float) -> TensorProxy:
    """-log(u) / rate for u uniform."""
    u = ltorch.uniform(tuple(like.shape), torch.finfo(torch.float32).tiny, 1.0, device=like.device, dtype=torch.float32)
    return ltorch.to(ltorch.true_divide(ltorch.neg(ltorch.log(u)), rate), like.dtype)


def _exponential_of_samples(size: int | None, dim: int | None, like: TensorProxy, rate: float) -> TensorProxy:
    return exponential_noise(_whose_numbers(size, dim, like), rate)


drawing_rules.add(exponential_noise, _exponential_of_samples)


def _exponential(a: TensorProxy, rate: float = 1, *, generator: Any = None) -> TensorProxy:
    return exponential_noise(_DETACH(a), rate)


# -- softmax((x + noise) / tau) ---------------------------------------------------------------------------------------------


def _draw_gumbel(like: torch.Tensor) -> torch.Tensor:
    return -torch.empty_like(like, memory_format=torch.legacy_contiguous_format).exponential_().log()


@with_kernel(_draw_gumbel, draws=True)
def gumbel_noise(like: TensorProxy) -> TensorProxy:
    """-log(-log u) for u uniform: the logarithm of what is exponentially distributed, negated."""
    u = ltorch.uniform(tuple(like.shape), torch.finfo(torch.float32).tiny, 1.0, device=like.device, dtype=torch.float32)
    return ltorch.to(ltorch.neg(ltorch.log(ltorch.neg(ltorch.log(u)))), like.dtype)


def _gumbel_of_samples(size: int | None, dim: int | None, like: TensorProxy) -> TensorProxy:
    return gumbel_noise(_whose_numbers(size, dim, like))


drawing_rules.add(gumbel_noise, _gumbel_of_samples)


def _gumbel_softmax(logits: TensorProxy, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> TensorProxy:
    """hard: the largest is 1, with the gradients of what it would be otherwise (Jang et al., 2017)."""
    soft = ltorch.softmax(ltorch.true_divide(ltorch.add(logits, gumbel_noise(_DETACH(logits))), tau), dim)
    if not hard:
        return soft
    axis = dim % soft.ndim
    places = ltorch.arange(soft.shape[axis], device=soft.device)
    places = ltorch.reshape(places, tuple(n if d == axis else 1 for d, n in enumerate(soft.shape)))
    largest = ltorch.to(ltorch.eq(places, ltorch.argmax(soft, axis, True)), soft.dtype)
    return ltorch.add(ltorch.sub(largest, ltorch.detach(soft)), soft)


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
    ltorch.exponential: _exponential,
    ltorch.rrelu: _rrelu,
    _functional.gumbel_softmax: _gumbel_softmax,
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
