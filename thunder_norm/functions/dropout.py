"""Dropout in programs that Thunder differentiates, with the numbers that eager PyTorch draws from the same state.

Thunder takes it apart for its gradient and draws uniform numbers; on a CPU torch draws 0 or 1, in the order of the memory of its input.
"""

from __future__ import annotations

import functools

import torch

from thunder_norm.functions.opaque import opaque_executor
from thunder_norm.tracing.locations import at_line_of
from thunder_norm.tracing.random_numbers import draws_numbers
from thunder_norm.tracing.recording import scope
import thunder.torch as ltorch
from thunder.core import devices, prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import register_grad
from thunder.torch import _torch_to_thunder_function_map

_DETACH = _torch_to_thunder_function_map[torch.Tensor.detach]


def drops_on_cpu(bsym: BoundSymbol) -> bool:
    """Whether an operation is dropout of something on a CPU, and does drop."""
    is_dropout = bsym.sym.id == ltorch.dropout.id and any(map(draws_numbers, bsym.subsymbols))
    return is_dropout and bsym.args[0].device.devicetype is devices.DeviceType.CPU


def with_torchs_noise(bsym: BoundSymbol, trace: TraceCtx) -> list[BoundSymbol]:
    """The operation as torch does it: x times 0 or 1 / (1 - p); `trace` knows the names of what is new."""
    x, p = bsym.args[0], bsym.args[1] if len(bsym.args) > 1 else bsym.kwargs.get("p", 0.5)
    with tracectx(trace), langctx(Languages.TORCH), at_line_of(trace, bsym), scope(trace) as made:
        dropped = ltorch.mul(x, _noise()(_DETACH(x), p))
    return [b.from_bsym_swap_proxies({variableify(dropped): bsym.output}) for b in made]


def _draw(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)


@functools.cache
def _noise() -> Symbol:
    symbol = opaque_executor.register_operator(
        "dropout_noise",
        meta=lambda like, p: TensorProxy(like=like, requires_grad=False),
        fn=_draw,
        tags=[prims.OpTags.RANDOM_OP],
    )
    # no gradient, as only the shape of its argument counts; here, as an import of ours changes nothing of Thunder
    register_grad(symbol, symbol)
    return symbol
