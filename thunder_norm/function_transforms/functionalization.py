"""In-place operations of a program, as operations that make new tensors.

Thunder records ``y.add_(x)`` as an addition and a copy into y.  In a program that is to be transformed the copy is left out, and
what comes later uses the new value: the same, as long as y is the program's own and shares its memory with nothing else it uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

from thunder_norm.errors import TransformError, with_details
from thunder_norm.function_transforms.locations import location_of

VIEWS = frozenset(
    {
        prims.PrimIDs.BROADCAST_IN_DIM,
        prims.PrimIDs.RESHAPE,
        prims.PrimIDs.SLICE,
        prims.PrimIDs.SQUEEZE,
        prims.PrimIDs.TRANSPOSE,
        prims.PrimIDs.VIEW,
        prims.PrimIDs.SHALLOW_COPY,
        prims.PrimIDs.UNFOLD,
    }
)


def without_mutations(trace: TraceCtx) -> TraceCtx:
    """The same program without copies into tensors.

    Raises:
        TransformError: it changes an argument or a tensor of the surroundings, or a tensor that shares memory with another.
    """
    if not any(_copies(b) for b in trace.bound_symbols):
        return trace
    foreign = {p.name for p in trace.args if isinstance(p, Proxy)}
    base: dict[str, str] = {}  # of a view: the tensor it shares memory with
    same: dict[str, tuple[TensorProxy, ...]] = {}  # of a tensor that was written: all proxies that are this tensor
    swaps: dict[Variable, Proxy] = {}
    rewritten = {c.args[1].name for b in trace.bound_symbols for c in _copies(b)}
    new = from_trace(trace)
    kept: list[BoundSymbol] = []
    for i, bsym in enumerate(trace.bound_symbols):
        base |= _views(bsym)
        targets = [(b.args[1], b.args[0], b.output) for b in _copies(bsym)]
        renamed = bsym.from_bsym_swap_proxies(swaps, skip_output=True)
        if not targets:
            kept.append(renamed)
            continue
        for target, _, _ in targets:
            _check_own(target, foreign, base, bsym, trace.bound_symbols[i + 1 :])
        written = {b.output.name for b in _copies(bsym)}
        kept.extend(b for b in _flattened(renamed) if not any(p.name in written for p in b.flat_proxy_outs))
        for target, source, out in targets:
            value = swaps.get(variableify(source), source)
            if value.name in rewritten:  # its name will stand for another value, this tensor keeps the present one
                with tracectx(new):
                    kept.append(prims.shallow_copy.bind(value, output=(value := TensorProxy(like=value))))
            proxies = (*same.get(target.name, (target,)), out)
            same.update({p.name: proxies for p in proxies})
            swaps.update({variableify(p): value for p in proxies})
    new.bound_symbols = kept
    return new


def _copies(bsym: BoundSymbol) -> list[BoundSymbol]:
    if bsym.sym.id is prims.PrimIDs.COPY_:
        return [bsym]
    return [c for s in bsym.subsymbols for c in _copies(s)]


def _flattened(bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    """The parts of an operation that holds a copy; the operations without one stay whole."""
    if not _copies(bsym) or not bsym.subsymbols:
        return [bsym]
    return [b for s in bsym.subsymbols for b in _flattened(s)]


def _views(bsym: BoundSymbol) -> dict[str, str]:
    """The results of an operation that share memory with an argument, and with which."""
    if bsym.sym.id in VIEWS:
        return {o.name: a.name for o in bsym.flat_proxy_outs for a in bsym.flat_proxy_args[:1] if isinstance(a, TensorProxy)}
    inside: dict[str, str] = {}
    for sub in bsym.subsymbols:
        inside |= _views(sub)
    return {o.name: root for o in bsym.flat_proxy_outs if (root := _root(o.name, inside)) != o.name}


def _root(name: str, base: dict[str, str]) -> str:
    while name in base:
        name = base[name]
    return name


def _check_own(
    target: TensorProxy, foreign: set[str], base: dict[str, str], bsym: BoundSymbol, later: Sequence[BoundSymbol]
) -> None:
    root = _root(target.name, base)
    if root in foreign:
        raise TransformError(
            with_details(
                f"{bsym.sym.name} changes in place a tensor that the transformed function did not make",
                at=location_of(bsym),
                why="the transformed function must leave its arguments and the tensors around it alone",
                instead="use the operation that returns a new tensor, or clone first",
            )
        )
    if any(p.name != target.name and _root(p.name, base) == root for b in later for p in b.flat_proxy_args):
        raise TransformError(
            with_details(
                f"{bsym.sym.name} changes in place a tensor that is a view of another, or has views",
                at=location_of(bsym),
                why="the change of the other one would be lost",
                instead="use the operation that returns a new tensor, or clone first",
            )
        )
