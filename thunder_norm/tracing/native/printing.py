"""Programs as text, which Thunder writes for each trace that it runs.

What stands for itself is not taken apart, and contexts are gathered and arguments made printable once for each program.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_norm.tracing.replacement import Replacement
from thunder.core import codeutils
from thunder.core.baseutils import ProxyInterface
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

_LITERALS = frozenset({bool, int, str, type(None)})
_original_to_printable = codeutils.to_printable


def _stands_for_itself(x: Any) -> bool:
    return type(x) in _LITERALS or isinstance(x, ProxyInterface)


def _to_printable(trace: Any, x: Any, *, import_ctx: dict | None = None, object_ctx: dict | None = None) -> Any:
    if _stands_for_itself(x):
        return x
    if type(x) is torch.Size:  # which Thunder writes as an object, by a name that nobody defines
        return tuple(x)
    if type(x) in (tuple, list) and all(map(_stands_for_itself, x)):
        return type(x)(x)
    if type(x) is dict and all(map(_stands_for_itself, x.values())):
        return dict(x)
    return _original_to_printable(trace, x, import_ctx=import_ctx, object_ctx=object_ctx)


def _gather_ctxs(self: BoundSymbol) -> tuple[dict, dict, dict]:
    return self.import_ctx(), self._get_call_ctx(), self._object_ctx  # which the first of them fills


@dataclass
class _Written:
    """A trace that becomes a function.

    Attributes:
        trace: that trace.
        contexts: of its operations, once they are gathered.
        printables: an operation and what was printed of it, by what that is and the operation's id.
    """

    trace: TraceCtx
    contexts: tuple[dict, ...] | None = None
    printables: dict[tuple[str, int], tuple[BoundSymbol, Any]] = field(default_factory=dict)


_written: ContextVar[_Written | None] = ContextVar("written", default=None)
_original_contexts = TraceCtx._gather_ctxs
_original_callable = TraceCtx.python_callable


def _python_callable(self: TraceCtx, **kwargs: Any) -> Callable:
    token = _written.set(_Written(self))
    try:
        return _original_callable(self, **kwargs)
    finally:
        _written.reset(token)


def _contexts(self: TraceCtx) -> tuple[dict, ...]:
    written = _written.get()
    if written is None or written.trace is not self:
        return _original_contexts(self)
    if written.contexts is None:
        written.contexts = _original_contexts(self)
    return tuple([dict(context) for context in written.contexts])  # they are added to


def _printed_once(name: str) -> property:
    """A property of operations that makes what they hold printable."""
    original = vars(BoundSymbol)[name].fget

    def printables(self: BoundSymbol) -> Any:
        written = _written.get()
        if written is None:
            return original(self)
        key = (name, id(self))
        found = written.printables.get(key)
        if found is None:
            found = written.printables[key] = (self, original(self))  # the operation lives as long as its id
        return found[1]

    return property(printables)


REPLACEMENTS = (
    Replacement(TraceCtx, "python_callable", _python_callable, "python_callable, which gathers contexts twice"),
    Replacement(TraceCtx, "_gather_ctxs", _contexts, "the same"),
    *(
        Replacement(BoundSymbol, name, _printed_once(name), f"{name}, which is asked for the context and for the text")
        for name in ("_out_printables", "_arg_printables", "_kwarg_printables")
    ),
    Replacement(codeutils, "to_printable", _to_printable, "to_printable, which flattens and unflattens each container"),
    Replacement(BoundSymbol, "gather_ctxs", _gather_ctxs, "gather_ctxs, which makes what is printed twice"),
)
