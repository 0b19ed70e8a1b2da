"""What a backward gets from its forward."""

from __future__ import annotations

from thunder_norm.tracing.guarding.bindable import executor
from thunder.core import prims
from thunder.core.proxies import CollectionProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx

_SAVED = "saved_for_backward"


def _release(saved: list) -> None:
    saved[0].clear()  # tensors; then what else was saved


_release_saved = executor.register_operator("release_saved", meta=lambda saved: None, fn=_release, tags=(prims.OpTags.DONT_DCE,))


def releasing_saved(trace: TraceCtx) -> TraceCtx:
    """The same program; a backward that uses nothing of what its forward saved lets go of it, which Thunder asserts it has.

    Relies on ``ThunderFunction.backward``: ``assert not saved_tensors_list`` after the call of a backward whose first argument is
    ``[saved tensors, other values]``, unpacked and cleared by the operations that Thunder writes for what is used.
    """
    signature = trace.siginfo().args
    if not signature or signature[0][0] != _SAVED or any(b.kwargs.get("name") == _SAVED for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    new.names.discard(_SAVED)
    with tracectx(new):
        saved = CollectionProxy(signature[0][1], name=_SAVED)
    new.bound_symbols = [
        prims.unpack_trivial.bind(saved, name=_SAVED, output=saved),
        _release_saved.bind(saved, output=None),
        *trace.bound_symbols,
    ]
    return new
