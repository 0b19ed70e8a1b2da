"""Views of what a program computes, which may lie in memory in another order than in eager mode.

    F.layer_norm(x.permute(0, 2, 3, 1), (c,)).view(n, -1)
    scores.transpose(1, 2).masked_fill(mask, 0).view(n, -1)

torch's kernels say in which order the dimensions of a result lie in memory, and Thunder writes some of them, where they are differentiated,
in operations that leave it as it was: a view that eager mode has is an error there.  A copy has the same entries, unless the program
writes into one of both.

    y = F.rms_norm(x.t(), (n,)); y.reshape(-1).zero_()

Torch has one operation for `rms_norm`, whose result is contiguous, and Thunder several, whose result lies as x does.  What is written into
the view would be missing in y, where that is a copy.
"""

from __future__ import annotations

import torch

from thunder_norm.tracing.locations import at_line_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.shared_memory.writes import writes
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors import torchex


def reshaping_results(trace: TraceCtx) -> TraceCtx:
    """The same program, with `torch.reshape` for each view of what it computes: a view wherever there is one.

    One that writes into tensors is left as it is: what it views has to be the same memory.
    """
    given = {p.name for p in trace.args if isinstance(p, TensorProxy)}
    if any(map(writes, trace.bound_symbols)) or not any(_is_view_of_result(bsym, given) for bsym in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    new.bound_symbols = [_reshaped(b) if _is_view_of_result(b, given) else b for b in trace.bound_symbols]
    return new


def contiguous_where_written(trace: TraceCtx) -> TraceCtx:
    """The same program, `rms_norm` contiguous as torch's is, if it writes into anything: where it is already, nothing is copied."""
    if not any(b.sym is ltorch.rms_norm for b in trace.bound_symbols) or not any(map(writes, trace.bound_symbols)):
        return trace
    new = from_trace(trace)
    for bsym in trace.bound_symbols:
        if bsym.sym is not ltorch.rms_norm:
            new.bound_symbols.append(bsym)
            continue
        with tracectx(new), scope(new) as recorded, at_line_of(new, bsym), langctx(Languages.TORCH):
            made = bsym.output.replace(name=None)
            named = variableify(ltorch.contiguous(made))
        new.bound_symbols.append(bsym.from_bsym_swap_proxies({variableify(bsym.output): made}, skip_inputs=True))
        new.bound_symbols += [b.from_bsym_swap_proxies({named: bsym.output}, skip_inputs=True) for b in recorded]
    return new


def _is_view_of_result(bsym: BoundSymbol, given: set[str]) -> bool:
    if bsym.sym is not torchex.view or not isinstance(bsym.args[0], TensorProxy) or bsym.args[0].name in given:
        return False
    return not isinstance(_sizes(bsym)[0], torch.dtype | dtypes.dtype)


def _reshaped(bsym: BoundSymbol) -> BoundSymbol:
    sizes = _sizes(bsym)
    shape = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else tuple(sizes)
    return bsym.from_bsym(sym=torchex.reshape, args=(bsym.args[0], shape), kwargs={}, subsymbols=())


def _sizes(bsym: BoundSymbol) -> tuple:
    """What a view is asked for: sizes, or a dtype."""
    return tuple(bsym.args[1:] or bsym.kwargs.values())
