"""Explicit broadcasts of 0-dim CPU tensors, so that their gradients come out right.

Thunder 0.2.6 takes a 0-dim CPU tensor in an elementwise operation for a number and records no broadcast
(``clang.utils.maybe_broadcast_impl``); the gradient rules of mul, add, div, ... then give it a gradient of the full shape.  With the
broadcast written down the reduction is its transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core import prims, utils
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

_ELEMENTWISE = frozenset(
    getattr(prims.PrimIDs, name)
    for name in (
        "ADD ATAN2 BITWISE_AND BITWISE_OR BITWISE_XOR BITWISE_LEFT_SHIFT BITWISE_RIGHT_SHIFT COPYSIGN DIV EQ FMOD GE GT LE LT "
        "MAXIMUM MINIMUM MUL NE NEXTAFTER POW REMAINDER SUB WHERE ZETA"
    ).split()
    if hasattr(prims.PrimIDs, name)
)


def broadcast_scalars(trace: TraceCtx) -> TraceCtx:
    """The same computation with every 0-dim CPU operand of an n-dim elementwise primitive broadcast first."""
    new = from_trace(trace)
    new.bound_symbols = broadcast_scalars_of(trace.bound_symbols, new)
    if all(a is b for a, b in zip(new.bound_symbols, trace.bound_symbols, strict=False)):
        return trace
    new.set_provenance(TraceProvenance("Broadcast of 0-dim CPU operands"))
    return new


def broadcast_scalars_of(bsyms: Sequence[BoundSymbol], trace: TraceCtx) -> list[BoundSymbol]:
    """The same for some operations; `trace` names what is new."""
    with tracectx(trace):
        return [s for bsym in bsyms for s in _rewrite(bsym)]


def _rewrite(bsym: BoundSymbol) -> list[BoundSymbol]:
    if bsym.sym.id in _ELEMENTWISE:
        return _broadcast_operands(bsym)
    if not bsym.subsymbols:
        return [bsym]
    subsymbols = [s for sub in bsym.subsymbols for s in _rewrite(sub)]
    if len(subsymbols) == len(bsym.subsymbols) and all(a is b for a, b in zip(subsymbols, bsym.subsymbols, strict=True)):
        return [bsym]
    return [bsym.from_bsym(subsymbols=subsymbols)]


def _broadcast_operands(bsym: BoundSymbol) -> list[BoundSymbol]:
    out = bsym.output
    if not isinstance(out, TensorProxy) or out.ndim == 0:
        return [bsym]
    added: list[BoundSymbol] = []

    def broadcast(a: Any) -> Any:
        if not (isinstance(a, TensorProxy) and utils.is_cpu_scalar_tensor(a)):
            return a
        if a.device != out.device:  # and the gradient goes back
            moved = TensorProxy(like=a, device=out.device)
            added.append(prims.device_put.bind(a, out.device, output=moved))
            a = moved
        wide = TensorProxy(like=a, shape=out.shape)
        added.append(prims.broadcast_in_dim.bind(a, tuple(out.shape), (), output=wide))
        return wide

    args = tuple(broadcast(a) for a in bsym.args)
    return [*added, bsym.from_bsym(args=args)] if added else [bsym]
