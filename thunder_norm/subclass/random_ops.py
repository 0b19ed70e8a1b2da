"""Random operations in programs with wrappers draw the numbers that eager draws."""

from __future__ import annotations

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx


def check_random(trace: TraceCtx) -> None:
    """Refuse random operations without use, in a program that is to be differentiated.

    Thunder runs in the forward what its results need and everything else in the backward, so that later random operations would
    draw the numbers of earlier ones.

    Raises:
        UnsupportedOpError: a random operation draws numbers that the results do not depend on.
    """
    if not any(isinstance(p, TensorProxy) and p.requires_grad for p in trace.args):
        return
    needed: set[str] = set()
    for bsym in reversed(trace.bound_symbols):
        if bsym.sym.id == prims.PrimIDs.RETURN:
            needed.update(p.name for p in tree_flatten(bsym.args[0]["output"])[0] if isinstance(p, TensorProxy))
            continue
        _collect(bsym, needed, bsym)


def _collect(bsym: BoundSymbol, needed: set[str], top: BoundSymbol) -> None:
    """Add to `needed` what the needed outputs of `bsym` depend on."""
    if bsym.subsymbols:
        for sub in reversed(bsym.subsymbols):
            _collect(sub, needed, top)
        return
    if any(p.name in needed for p in bsym.flat_proxy_outs):
        needed.update(p.name for p in bsym.flat_proxy_args)
    elif has_tags(bsym, {prims.OpTags.RANDOM_OP}) and has_tags(bsym, {prims.OpTags.DONT_DCE}):
        line = top.source_positions.lineno if top.source_positions is not None else "?"
        raise UnsupportedOpError(
            with_details(
                f"{bsym.sym.name} in a differentiated program draws numbers that are not used",
                at=f"{top.source_filename}:{line}",
                why="it would be run too late, and the random operations after it would draw other numbers than in eager",
                instead="leave it out, or use its result",
            )
        )
