"""Where in the user's program a bound symbol comes from: found while Thunder acquires the trace, carried on by tags.

Thunder notes the innermost line, which for a linear layer is in torch/nn/modules/linear.py.  Its interpreter knows the whole stack: from
that come the user's own line and the module whose forward runs.  Tags of a bound symbol go to what replaces it, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from thunder_norm.profiling.rows import Place
from thunder_norm.tracing.whereabouts import Names, modules_in
from thunder_norm.user_code import is_users, shown_line
from thunder.core.interpreter import get_interpreterruntimectx
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class Origin(NamedTuple):
    """The tag of a bound symbol: the number of the user's operation, and its place."""

    number: int
    place: Place


class Watch:
    """Notes the place of each operation while a trace is acquired.

    Args:
        tick: called at each operation.
    """

    def __init__(self, tick: Callable[[], None]):
        self._tick = tick
        self._pending: tuple[list[BoundSymbol], int, Place] | None = None
        self._count = 0
        self._names = Names()

    def attach(self, trace: TraceCtx) -> None:
        """Watch the trace that an acquisition writes: it is told the line of each operation before that is recorded, and none at the end."""
        tell = trace.set_current_source_location

        def told(filename: str | None, positions: Any) -> None:
            tell(filename, positions)
            self._tag_pending()
            if filename is None:
                del trace.set_current_source_location  # type: ignore[attr-defined]
                return
            scope = trace.peek_scope()
            if scope is not None:
                self._pending = scope, len(scope), self._place()
            self._tick()

        trace.set_current_source_location = told

    def _tag_pending(self) -> None:
        if self._pending is None:
            return
        scope, start, place = self._pending
        self._pending = None
        for bsym in scope[start:]:
            _tag(bsym, Origin(self._count, place))
            self._count += 1

    def _place(self) -> Place:
        frames = get_interpreterruntimectx().frame_stack[::-1]
        users = next((f for f in frames if is_users(f.code.co_filename)), None)
        location = None
        if users is not None:
            location = shown_line(users.code.co_filename, users.positions.lineno if users.positions is not None else None)
        modules = list(modules_in(frames))
        return Place(self._names.of(modules[0], modules[-1]) if modules else "", location or "")


def _tag(bsym: BoundSymbol, origin: Origin) -> None:
    if not any(isinstance(t, Origin) for t in bsym.tags):  # what is inside a region has its own
        bsym.tags.add(origin)  # type: ignore[arg-type]
    for sub in bsym.subsymbols:
        _tag(sub, origin)


def origin_of(bsym: BoundSymbol) -> Origin | None:
    """The origin of a bound symbol of any later trace, if it still has one."""
    found = [t for t in bsym.tags if isinstance(t, Origin)]
    if found:
        return min(found)
    for sub in bsym.subsymbols:
        origin = origin_of(sub)
        if origin is not None:
            return origin
    return None


def origins(trace: TraceCtx) -> Iterator[tuple[BoundSymbol, Origin | None]]:
    """Each bound symbol with its origin; one without has that of its neighbour, which computes for the same operation."""
    last: Origin | None = None
    for bsym in trace.bound_symbols:
        last = origin_of(bsym) or last
        yield bsym, last
