"""Programs as text, which Thunder writes for each trace that it runs: what stands for itself is not taken apart, contexts are gathered once."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.tracing.replacement import Replacement
from thunder.core import codeutils
from thunder.core.baseutils import ProxyInterface
from thunder.core.symbol import BoundSymbol

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


REPLACEMENTS = (
    Replacement(codeutils, "to_printable", _to_printable, "to_printable, which flattens and unflattens each container"),
    Replacement(BoundSymbol, "gather_ctxs", _gather_ctxs, "gather_ctxs, which makes what is printed twice"),
)
