"""The operations of a program that is differentiated, as what its backward uses of them needs them to be; see `differentiation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thunder_norm.subclass.recording.trace import OperationId
from thunder.core import prims
from thunder.core.symbol import BoundSymbol


def with_copies(names: set[str], bsyms: Sequence[BoundSymbol]) -> set[str]:
    """These names, those of their shallow copies and of what they are such copies of: the same tensors when the program runs."""
    copies = list(_shallow_copies(bsyms))
    found = set(names)
    while more := {name for pair in copies if not found.isdisjoint(pair) for name in pair} - found:
        found |= more
    return found


def _shallow_copies(bsyms: Sequence[BoundSymbol]) -> Iterator[tuple[str, str]]:
    for bsym in bsyms:
        if bsym.sym.id == prims.PrimIDs.SHALLOW_COPY:
            yield bsym.args[0].name, bsym.output.name
        yield from _shallow_copies(bsym.subsymbols)


def computed_from(names: set[str], bsyms: Sequence[BoundSymbol]) -> set[str]:
    """These names and those of all that is computed from them, inside of composites too."""
    found = set(names)
    for bsym in bsyms:
        if any(p.name in found for p in bsym.flat_proxy_args):
            found |= computed_from(found, bsym.subsymbols) | (
                {p.name for p in bsym.flat_proxy_outs} if not bsym.subsymbols else set()
            )
    return found


def with_outputs(bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Composites that return everything made inside them which later operations use."""
    used: set[str] = set()
    found = []
    for bsym in reversed(bsyms):
        if isinstance(bsym.sym.id, OperationId):
            made = {p.name: p for sub in bsym.subsymbols for p in sub.flat_proxy_outs}
            own = {p.name for p in bsym.flat_proxy_outs}
            more = tuple(p for name, p in made.items() if name in used and name not in own)
            if more:
                bsym = bsym.from_bsym(output=(*bsym.flat_proxy_outs, *more))
        used.update(p.name for p in bsym.flat_proxy_args)
        found.append(bsym)
    return found[::-1]
