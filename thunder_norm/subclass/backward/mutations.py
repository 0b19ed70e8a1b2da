"""In-place operations on plain tensors, in programs with wrappers that are to be differentiated.

Thunder 0.2.6 differentiates some of them wrongly without a word: ``z = p * 2; z.mul_(q); (z * z).sum()`` loses q's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.recording.trace import FLATTEN
from thunder_norm.tracing.activity import propagate
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.shared_memory.memory import Memory
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.tracing.shared_memory.writes import copies_in, recorded_copies
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolInterface
from thunder.core.trace import TraceCtx
from thunder.core.update_aliases import _is_inplace_op


def check_mutations(trace: TraceCtx) -> None:
    """Refuse in-place operations that take part in what is differentiated; updates of buffers that end there, without a history, may stay.

    Raises:
        UnsupportedOpError: the target or the new value of an in-place operation depends on an input that requires grad.
    """
    inside = (p for b in trace.bound_symbols if b.sym.id == FLATTEN.id for p in b.output)
    inputs = [p for p in (*trace.args, *inside) if isinstance(p, TensorProxy)]
    active = {p.name for p in inputs if p.requires_grad}
    buffers = {p.name for p in inputs} - active
    for position, bsym in enumerate(trace.bound_symbols):
        if not active or bsym.sym.id == prims.PrimIDs.RETURN:
            return
        propagate(bsym, active)
        recorded = recorded_copies(bsym)
        for copy in copies_in(bsym):
            value, target, result = copy.args[0], copy.args[1], copy.output
            if {value.name, target.name, result.name}.isdisjoint(active):
                continue
            gets_history = value.name in active and any(copy is c for c in recorded)
            is_buffer = not gets_history and _origin(target, trace.bound_symbols[:position]) in buffers
            if not is_buffer or _is_used({target.name, result.name}, trace.bound_symbols[position + 1 :]):
                _refuse(bsym)


def is_missed(trace: TraceCtx, followed: Sequence[TensorProxy]) -> bool:
    """Whether a trace just acquired has writes of Thunder's that would be refused; torch's autograd takes what is `followed`, or may."""
    memory = Memory()
    for bsym in trace.bound_symbols:
        given = [p.name for p in bsym.flat_proxy_args]
        if given and (makes_view(bsym) or _is_inplace_op(bsym)):
            memory.join([given[0], *(p.name for p in bsym.flat_proxy_outs)])
    moving = [p for p in trace.args if isinstance(p, TensorProxy) and p.requires_grad]  # also behind the back of autograd
    places = {memory.root(p.name) for p in (*followed, *moving)}
    written = (target.name for bsym in trace.bound_symbols for _, target, _ in _copies(bsym))
    if any(memory.root(name) in places for name in written):
        return True
    try:
        check_mutations(trace)
    except UnsupportedOpError:
        return True
    return False


def check_newest(trace: TraceCtx, taken: Sequence[TensorProxy]) -> None:
    """Refuse in-place operations that change what a name in `taken` stands for: what takes it would not wait for them.

    Raises:
        UnsupportedOpError: there is one.
    """
    family: dict[str, set[str]] = {}  # the names of tensors in one memory
    made: dict[str, int] = {}
    written: list[tuple[int, str, BoundSymbolInterface]] = []
    for position, bsym in enumerate(trace.bound_symbols):
        made |= {p.name: position for p in bsym.flat_proxy_outs}
        related = [[old.name, new.name] for _, old, new in _copies(bsym)]
        written += [(position, old, bsym) for old, _ in related]
        if bsym.sym.id == prims.PrimIDs.UPDATE_ALIASES:
            related = [[p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)]]
        for names in related:
            together = set(names).union(*(family.get(name, ()) for name in names))
            family |= dict.fromkeys(together, together)
    for position, name, bsym in written:
        if any(p.name in family[name] and made.get(p.name, -1) < position for p in taken):
            _refuse(bsym, "it is a view of an inner tensor, taken where that was not known", "use the out-of-place operation")


def _copies(bsym: BoundSymbol) -> Iterator[tuple[TensorProxy, TensorProxy, TensorProxy]]:
    """(new value, target, result) of each copy into a tensor inside `bsym`."""
    for copy in copies_in(bsym):
        yield copy.args[0], copy.args[1], copy.output


def _origin(target: TensorProxy, earlier: Sequence[BoundSymbol]) -> str:
    """The name `target` had before the aliases that earlier in-place operations made, and before it was detached."""
    name = target.name
    for bsym in reversed(earlier):
        if bsym.sym.id == prims.PrimIDs.UPDATE_ALIASES:
            renamed = {new.name: old.name for old, new in zip(bsym.args[0], bsym.output, strict=True)}
        elif bsym.sym is ltorch.detach:  # ``t.data``
            renamed = {bsym.output.name: bsym.args[0].name}
        else:
            renamed = {result.name: old.name for _, old, result in _copies(bsym)}
        name = renamed.get(name, name)
    return name


def _is_used(names: set[str], later: Sequence[BoundSymbol]) -> bool:
    """Whether a tensor of one of the `names` is read, or returned to the program."""
    for bsym in later:
        is_finished = bsym.sym.id == prims.PrimIDs.RETURN and isinstance(bsym.args[0], dict)
        args = bsym.args[0]["output"] if is_finished else bsym.flat_proxy_args
        if names.isdisjoint(p.name for p in args if isinstance(p, TensorProxy)):
            continue
        if bsym.sym.id != prims.PrimIDs.UPDATE_ALIASES:
            return True
        names = names | {p.name for p in bsym.flat_proxy_outs}
    return False


def _refuse(
    bsym: BoundSymbol,
    why: str = "Thunder's gradients of in-place operations are not reliable",
    instead: str = "use the out-of-place operation, or torch.no_grad()",
) -> None:
    raise UnsupportedOpError(
        with_details(
            f"in-place {bsym.sym.name} on a plain tensor, in a differentiated program with wrapper subclasses",
            at=location_of(bsym),
            why=why,
            instead=instead,
        )
    )
