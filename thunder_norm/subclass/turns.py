"""What a program returns waits for its operations with effects; see `effects`.

Else Thunder would run those in the backward of a program that it differentiates: its forward is what the results need.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquisition import Acquisition
from thunder_norm.subclass.fallback import fallback_executor
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import register_grad


def _run(result: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    return result


def _meta(result: TensorProxy, turn: TensorProxy) -> TensorProxy:
    return TensorProxy(like=result)


@functools.cache
def _after_effects() -> Symbol:
    symbol = fallback_executor.register_operator("after_effects", meta=_meta, fn=_run, tags=(prims.OpTags.DONT_DCE,))

    def grad(result: TensorProxy, turn: TensorProxy) -> TensorProxy:
        out = symbol(result, turn)
        if dtypes.is_inexact_dtype(result.dtype):
            prims.put_grad(result, prims.get_grad(out))
        return out

    register_grad(symbol.id, grad)  # here, as an import of ours changes nothing of Thunder
    return symbol


def _check_is_forward(trace: TraceCtx) -> None:
    """Refuse a program of which no result waits for its operations with effects, if Thunder is to split it.

    Raises:
        UnsupportedOpError: it is differentiated.
    """
    if torch.is_grad_enabled() and any(isinstance(p, TensorProxy) and p.requires_grad for p in trace.args):
        raise UnsupportedOpError(
            with_details(
                "an operator that returns nothing, or writes into its arguments, in a program that returns no tensor it has computed",
                why="the program has inputs that require grad, and Thunder runs in its forward what its results need alone",
                instead="return a result that is computed, or call the program under torch.no_grad()",
            )
        )


def awaited(acquisition: Acquisition, trace: TraceCtx) -> TraceCtx:
    """A lowered computation, one result of which waits for the last operation with effects."""
    if acquisition.turn is None:
        return trace
    turn = acquisition.fakes.current(acquisition.fakes.proxy_of(acquisition.turn))
    *body, returned = trace.bound_symbols
    (values,) = returned.args
    given = {p.name for p in trace.args}
    found = next((p for p in values["output"] if isinstance(p, TensorProxy) and p.name not in given), None)
    if found is None:
        _check_is_forward(trace)
        return trace
    new = from_trace(trace)
    with tracectx(new):
        new.bound_symbols = list(body)
        new.push_scope(waiting := [])
        later = _after_effects()(found, turn)
        new.pop_scope()
    output: Any = type(values["output"])(later if p is found else p for p in values["output"])
    new.bound_symbols = [*body, *waiting, returned.from_bsym(args=({**values, "output": output},))]
    return new
