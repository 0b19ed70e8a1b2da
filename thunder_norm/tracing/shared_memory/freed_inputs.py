"""Regions of a compiler that let go of their inputs one after the other, as they use them.

A function of Python holds its arguments until it returns, and so does the program that calls it with names.  A region whose function has
an attribute `freeing`, the same as a function of a list that it empties, gets its inputs in a list where the program has no use for
some of them afterwards.  What a backward needs of its forward is freed layer by layer then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from thunder.core import codeutils, prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import del_last_used


def deleting_again(trace: TraceCtx, before: TraceCtx) -> TraceCtx:
    """A program made of another one, which deletes names after their last use; a backward empties the list of what was saved for it, as before."""
    return del_last_used(
        trace, clear_mutable_collections=any(b.sym.name == "clear_mutable_collection" for b in before.bound_symbols)
    )


def freeing_inputs(trace: TraceCtx) -> TraceCtx:
    """The same program, of which regions free their inputs; it deletes names after their last use already."""
    found = list(_freeing(trace.bound_symbols, set(trace.names)))
    if len(found) == len(trace.bound_symbols) and all(a is b for a, b in zip(found, trace.bound_symbols, strict=True)):
        return trace
    new = from_trace(trace)
    new.bound_symbols = found
    return new


def _freeing(bsyms: Sequence[BoundSymbol], names: set[str]) -> Iterator[BoundSymbol]:
    freed: set[str] = set()  # by the region just before
    for bsym, following in zip(bsyms, [*bsyms[1:], None], strict=True):
        if bsym.sym.id is prims.PrimIDs.DEL and freed:
            rest = [p for p in bsym.flat_proxy_args if p.name not in freed]
            if rest:
                yield prims.python_del.bind(*rest, output=None)
            freed = set()
            continue
        freed = set(getattr(bsym.sym.python_printer, "freed", ()))  # by an earlier pass, after which names were deleted anew
        if freed:
            yield bsym
            continue
        freed = _freed_by(bsym, following)
        yield _from_list(bsym, freed, names) if freed else bsym


def _freed_by(bsym: BoundSymbol, following: BoundSymbol | None) -> set[str]:
    """The names of the inputs that a region can free: none, if it is none or cannot."""
    if not bsym.sym.is_fusion or following is None or following.sym.id is not prims.PrimIDs.DEL:
        return set()
    calls = list(bsym._get_call_ctx().values())
    if len(calls) != 1 or not hasattr(calls[0], "freeing") or any(not isinstance(a, Proxy) for a in bsym.args):
        return set()
    return {p.name for p in bsym.flat_proxy_args} & {p.name for p in following.flat_proxy_args}


def _from_list(bsym: BoundSymbol, freed: set[str], names: set[str]) -> BoundSymbol:
    """The region, called with a list of its inputs after some of their names are deleted."""
    ((name, call),) = bsym._get_call_ctx().items()
    listed = f"{name}_inputs"
    while listed in names:
        listed += "_"

    def printer(bsym: BoundSymbol, outputs: Any, arguments: Any, _: Any) -> list[str]:
        inputs = [codeutils.prettyprint(a) for a in arguments]
        return [
            f"{listed} = [{', '.join(inputs)}]",
            f"del {', '.join(n for n in dict.fromkeys(inputs) if n in freed)}",
            f"{codeutils.prettyprint(outputs, literals_as_underscores=True)} = {name}({listed})",
        ]

    vars(printer)["freed"] = frozenset(freed)
    symbol = dataclasses.replace(bsym.sym, python_printer=printer)
    return bsym.from_bsym(sym=symbol, _call_ctx={name: call.freeing})
