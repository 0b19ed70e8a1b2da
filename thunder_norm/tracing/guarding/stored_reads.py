"""Prologues that read what an argument stores: ``d[k]`` is a method of the program's where the class of `d` has one of its own."""

from __future__ import annotations

from typing import Any

from thunder_norm.tracing.guarding import stored
from thunder_norm.tracing.guarding.bindable import bindable
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

_NOTHING = object()


def reading_stored(prologue: TraceCtx, fn: Any, args: tuple, kwargs: dict) -> TraceCtx:
    """The prologue with reads by the builtin class's method, where the class of a container has one of its own."""
    values = _Values(fn, args, kwargs)
    is_own = [stored.has_own(type(values.before(b)), "__getitem__") for b in prologue.bound_symbols]
    if not any(is_own):
        return prologue
    new = from_trace(prologue)
    with tracectx(new):
        new.bound_symbols = [_reading(b) if is_read else b for b, is_read in zip(prologue.bound_symbols, is_own, strict=True)]
    return new


def _reading(bsym: BoundSymbol) -> BoundSymbol:
    return bindable("read_stored", stored.item)(*bsym.args, output=bsym.output)


class _Values:
    """What the variables of a prologue hold in the call that it is made for."""

    def __init__(self, fn: Any, args: tuple, kwargs: dict):
        self._fn = fn
        self._found: dict[str, Any] = {"args": args, "kwargs": kwargs}

    def before(self, bsym: BoundSymbol) -> Any:
        """What the variable that an operation reads from holds; what it makes of it is known from then on."""
        kind = bsym.sym.id
        if kind is PrimIDs.UNPACK_FUNCTION_OBJ:
            self._found[bsym.output.name] = self._fn
        if kind not in (PrimIDs.UNPACK_GETITEM, PrimIDs.UNPACK_ATTR, PrimIDs.UNPACK_THUNDER_MODULE):
            return _NOTHING
        source = self._found.get(getattr(bsym.args[0], "name", ""), _NOTHING)
        if source is not _NOTHING:
            self._found[bsym.output.name] = _made(kind, source, bsym.args[1:])
        return source if kind is PrimIDs.UNPACK_GETITEM else _NOTHING


def _made(kind: PrimIDs, source: Any, key: tuple[Any, ...]) -> Any:
    if kind is PrimIDs.UNPACK_THUNDER_MODULE:
        return source
    if type(key[0]) not in (str, int):
        return _NOTHING
    try:
        return stored.item(source, key[0]) if kind is PrimIDs.UNPACK_GETITEM else getattr(source, key[0])
    except Exception:  # noqa: BLE001 - the program's; the prologue meets it too
        return _NOTHING
