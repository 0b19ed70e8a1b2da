"""The operations of a program that is differentiated, as what its backward uses of them needs them to be; see `differentiation`."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_norm.subclass.trace import OperationId
from thunder.core import prims
from thunder.core.symbol import BoundSymbol


def with_copies(names: set[str], bsyms: Sequence[BoundSymbol]) -> set[str]:
    """These names and those of their shallow copies, which are the same tensors when the program runs."""
    found = set(names)
    for bsym in bsyms:
        found |= with_copies(found, bsym.subsymbols)
        if bsym.sym.id == prims.PrimIDs.SHALLOW_COPY and bsym.args[0].name in found:
            found.add(bsym.output.name)
    return found


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
