"""``thunder.core.baseutils``, ``codeutils`` and ``trace``: what a program's values are written as in a trace."""

from __future__ import annotations

import enum
import weakref
from typing import Any

from thunder_norm.tracing.hooks.participants import has_part
from thunder_norm.tracing.hooks.replaced import replaces
from thunder.core import baseutils, codeutils
from thunder.core.trace import TraceCtx

_original_is_collection = baseutils.is_collection
_original_marked = codeutils._qm
_original_name = TraceCtx.make_object_name
# of flags in programs that we have a part in: these are printed later as well
_classes: weakref.WeakSet[type] = weakref.WeakSet()


@replaces(
    baseutils,
    "is_collection",
    "x",
    lines="to_printable: if baseutils.is_collection(x): flat, spec = tree_flatten(x, namespace='')",
)
def _is_collection(x: Any) -> bool:
    """Whether a value is written with what is in it: a flag of ``enum`` is not, although it has members, and nobody may say so to Thunder."""
    return _original_is_collection(x) and not (isinstance(x, enum.Flag) and _is_ours(type(x)))


def _is_ours(kind: type) -> bool:
    if kind not in _classes and has_part():
        _classes.add(kind)
    return kind in _classes


@replaces(TraceCtx, "make_object_name", "self", "x", lines="add_object: val = ContextObject(self.make_object_name(x), x)")
def _object_name(self: TraceCtx, x: Any) -> str:
    """The name of a value in the program's text; several flags in one have a name that is none in Python, and get a number alone."""
    is_unnamed = isinstance(x, enum.Enum) and not (x.name or "").isidentifier() and has_part()
    return self._make_name(is_object_name=True) if is_unnamed else _original_name(self, x)


class _Written(str):
    """What is written for a value in a tuple, list or dict."""

    __slots__ = ()
    __repr__ = str.__str__


@replaces(codeutils, "_qm", "s", "quote_markers", lines="prettyprint: unflattened_str.replace(f\"{_quote_marker}'\", '')")
def _marked(s: str, quote_markers: bool) -> str:
    """What is written of a collection has in it what is written of each of its values: Thunder's own has it quoted, and once more escaped."""
    return _Written(s) if quote_markers and has_part() else _original_marked(s, quote_markers)
