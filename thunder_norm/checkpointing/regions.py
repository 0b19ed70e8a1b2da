"""Regions of a program that are computed again in the backward, instead of having their insides kept.

A region is one composite bound symbol, ``t5 = checkpoint_0(x, t_w)``, with the operations of the region as its subsymbols; regions
inside it are ``checkpoint_0_0``, ``checkpoint_0_1``, ...  Executed without gradients it is its subsymbols.  Its gradient rule runs it
forward, keeps nothing but its inputs (and the states of the random generators it draws from), and in the backward writes the region
again, followed by the backward that Thunder derives for it; regions inside are differentiated by the same rule, level by level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from thunder_norm.checkpointing.replays import REGION, Memory, located_at, replayable, with_effects
from thunder_norm.functions.missing_gradients import differentiated_inside
from thunder_norm.functions.programs import is_differentiable, with_a_dimension_between
from thunder_norm.functions.writes.aliasing import roots_of, writes_into
from thunder_norm.subclass.acquiring.integer_values import GIVEN_AGAIN
from thunder_norm.subclass.crossing.turns import with_all_draws
from thunder_norm.tracing.activity import end_at_detached
from thunder_norm.tracing.recording import declare_arguments, print_without_module
from thunder_norm.tracing.shared_memory.histories import CURRENT, HISTORY
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, get_tracectx, tracectx
from thunder.core.transforms import register_grad
from thunder.transforms.autodiff import grad_transform_on_trace


class Region:
    """The body of a region, under names of its own.

    Attributes:
        name: ``checkpoint_0_1``.
        args: the proxies it uses and does not make.
        bsyms: its operations.
        outs: what the rest of the program uses of what it makes.
        changing: of what it uses, by name, what lies in memory that is written while it runs, or later; see `noting_changes`.
    """

    def __init__(
        self,
        name: str,
        bsyms: Sequence[BoundSymbol],
        outs: Iterable[Proxy],
        changing: Mapping[str, Memory] = MappingProxyType({}),
    ):
        self.name = name
        self.changing = changing
        self.bsyms = tuple(bsyms)
        self.outs = tuple(outs)
        made = {p.name for b in bsyms for p in b.flat_proxy_outs}
        used = [p for b in bsyms for p in b.flat_proxy_args if p.name not in made]
        self.args = tuple({p.name: p for p in used}.values())

    @staticmethod
    def of(bsym: BoundSymbol) -> Region:
        """The region that a bound symbol stands for, under the names it has in its trace."""
        region = bsym.kwargs["region"]
        changing = {
            p.name: region.changing[q.name] for p, q in zip(bsym.args, region.args, strict=True) if q.name in region.changing
        }
        return Region(bsym.sym.name, bsym.subsymbols, bsym.flat_proxy_outs, changing)

    def symbol(self) -> BoundSymbol:
        """The region as one bound symbol, under the names it has now."""
        bsyms, outs = _attached(self.bsyms, self.outs)
        output = outs[0] if len(outs) == 1 else tuple(outs)
        region = Region(self.name, bsyms, outs, self.changing)
        return _symbol(self.name).bind(*region.args, output=output, subsymbols=list(bsyms), region=region)

    def copied(self, args: Sequence[Any]) -> tuple[list[BoundSymbol], list[Proxy]]:
        """The operations for other arguments and the results, under new names of the open trace."""
        names: dict[Variable, Proxy] = {variableify(p): a for p, a in zip(self.args, args, strict=True)}
        bsyms = renamed(self.bsyms, names)
        return bsyms, [names[variableify(p)] for p in self.outs]


def with_body(bsym: BoundSymbol, subsymbols: Sequence[BoundSymbol]) -> BoundSymbol:
    """The region that a bound symbol stands for, with other operations that make the same results."""
    new = Region(bsym.sym.name, subsymbols, bsym.flat_proxy_outs, Region.of(bsym).changing).symbol()
    return located_at(new, bsym)


differentiated_inside(REGION, with_body)


def edge(name: str, is_first: bool) -> BoundSymbol:
    """What stands before the first operation of a region, or after the last, while the program is acquired; see `grouped`."""
    return (_BEGINS if is_first else _ENDS).bind(name, output=None)


def _edge(name: str) -> Symbol:
    return Symbol(name=name, id=f"thunder_norm.{name}", meta=lambda name: None, tags=(prims.OpTags.DONT_DCE,))


_BEGINS, _ENDS = _edge("region_begins"), _edge("region_ends")


# written where a region is the first to use an input: no operation, and where the gradients of an input go that is written without autograd
_OF_THE_PROGRAM = frozenset({GIVEN_AGAIN.id, HISTORY.id, CURRENT.id})


def grouped(trace: TraceCtx, replaced: Set[str] = frozenset()) -> TraceCtx:
    """A program just acquired, with what is between the edges of a region as its region; those that have but a beginning are none.

    Args:
        trace: the program.
        replaced: its arguments that are given other memory once it has run.
    """
    ending = {b.args[0] for b in trace.bound_symbols if b.sym.id == _ENDS.id}
    levels: list[tuple[BoundSymbol | None, list[BoundSymbol]]] = [(None, [])]
    outside = {p.name for p in trace.args if isinstance(p, Proxy)}
    changing = {p.name: Memory(p.name, p.requires_grad) for p in trace.args if p.name in replaced}
    new = from_trace(trace)
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if bsym.sym.id in _OF_THE_PROGRAM and outside.issuperset(p.name for p in bsym.flat_proxy_args):
                levels[0][1].append(bsym)
                outside.update(p.name for p in bsym.flat_proxy_outs)
            elif bsym.sym.id == _BEGINS.id:
                if bsym.args[0] in ending:
                    levels.append((bsym, []))
            elif bsym.sym.id == _ENDS.id:
                first, inside = levels.pop()
                outs = {p.name: p for b in inside for p in b.flat_proxy_outs}
                levels[-1][1].append(located_at(Region(first.args[0], inside, outs.values(), changing).symbol(), first))
            else:
                levels[-1][1].append(bsym)
    ((_, new.bound_symbols),) = levels
    return new


def finished(trace: TraceCtx) -> TraceCtx:
    """The program with each region giving out all that the program around it uses, and nothing else.

    What a region computes may get out by other ways than its result: a list it appends to, an attribute it sets.
    """
    if not any(_has_region(b) for b in trace.bound_symbols):
        return trace
    trace = _waiting_for_writes(trace)
    end_at_detached(trace)  # before results of regions are, see `_attached`
    new = from_trace(trace)
    with tracectx(new):
        new.bound_symbols = _finished(trace.bound_symbols, set())
    new.set_provenance(TraceProvenance("Checkpointed regions"))
    return noting_changes(new)


def _waiting_for_writes(trace: TraceCtx) -> TraceCtx:
    """A program that returns, or waits with a result for, what its regions write into its arguments.

    As ``thunder.core.update_aliases`` has it where there are no regions: what the forward does not return is put off until the backward.
    """
    root = roots_of(trace)
    last: dict[str, BoundSymbol] = {}  # by argument
    of_regions: dict[str, BoundSymbol] = {}  # by result
    for bsym in trace.bound_symbols:
        for name, copy in writes_into([bsym], root):
            last[name] = copy
            if _has_region(bsym):
                of_regions[copy.output.name] = copy
    if not of_regions:
        return trace
    given = {p.name: p for p in trace.args if p.name in last and last[p.name].output.name in of_regions}
    whole = {name: now for name, p in given.items() if tuple((now := last[name].output).shape) == tuple(p.shape)}
    *body, returned = trace.bound_symbols
    values = returned.args[0]
    flat_args = [whole.get(root.get(p.name, ""), p) if isinstance(p, TensorProxy) else p for p in values["flat_args"]]
    new = from_trace(trace)
    new.bound_symbols = [*body, returned.from_bsym(args=({**values, "flat_args": flat_args},))]
    done = {p.name for p in whole.values()} | {copy.args[1].name for copy in of_regions.values()}  # returned, or written again
    return with_all_draws(new, *(copy.output for name, copy in of_regions.items() if name not in done))


def noting_changes(trace: TraceCtx) -> TraceCtx:
    """The program with regions that know which of their arguments are in memory that is written when they are computed again."""
    root = roots_of(trace)
    given = {p.name: p for p in trace.args if isinstance(p, TensorProxy)}
    written = {name: i for i, bsym in enumerate(trace.bound_symbols) for name, _ in writes_into([bsym], root)}  # where last
    replaced = {m.root for bsym in trace.bound_symbols if is_region(bsym) for m in bsym.kwargs["region"].changing.values()}
    written |= dict.fromkeys(replaced, len(trace.bound_symbols))
    if not written:
        return trace
    new = from_trace(trace)
    new.bound_symbols = list(trace.bound_symbols)
    for i, bsym in enumerate(trace.bound_symbols):
        if is_region(bsym):
            region = Region.of(bsym)
            changed = {p.name: root[p.name] for p in region.args if written.get(root.get(p.name, ""), -1) >= i}
            region.changing = {name: Memory(of, given[of].requires_grad) for name, of in changed.items()}
            new.bound_symbols[i] = located_at(region.symbol(), bsym)
    return new


def names_in(bsyms: Sequence[BoundSymbol]) -> set[str]:
    """The names of all that operations make, at any depth."""
    return {p.name for b in bsyms for p in b.flat_proxy_outs}.union(*(names_in(b.subsymbols) for b in bsyms))


def _finished(bsyms: Sequence[BoundSymbol], wanted: set[str]) -> list[BoundSymbol]:
    found: list[BoundSymbol] = []
    for bsym in reversed(bsyms):
        if is_region(bsym):
            outs = {p.name: p for p in _made_in(bsym) if p.name in wanted}
            inside = _finished(bsym.subsymbols, set(outs))
            if not outs:  # nothing to compute again; what is left may have effects
                found.extend(reversed(inside))
                wanted.update(p.name for b in inside for p in b.flat_proxy_args)
                continue
            region, taken_away = _with_dimensions(Region(bsym.sym.name, inside, outs.values(), Region.of(bsym).changing))
            found.extend(taken_away)
            bsym = located_at(region.symbol(), bsym)
        found.append(bsym)
        wanted.update(p.name for p in bsym.flat_proxy_args)
    return found[::-1]


def _with_dimensions(region: Region) -> tuple[Region, list[BoundSymbol]]:
    """The region with one dimension in place of none in its results, and what takes it away."""
    scalars = [p for p in region.outs if is_differentiable(p) and p.ndim == 0]
    if not scalars or sum(map(is_differentiable, region.outs)) == 1:
        return region, []
    made, outs, taken_away = with_a_dimension_between(region.outs)
    inner = {variableify(p): _another(p) for p in scalars}
    return Region(
        region.name, [b.from_bsym_swap_proxies(inner) for b in (*region.bsyms, *made)], outs, region.changing
    ), taken_away


def _made_in(bsym: BoundSymbol) -> Iterator[Proxy]:
    """What the operations of a region make, those of the regions inside it included."""
    for sub in bsym.subsymbols:
        yield from _made_in(sub) if is_region(sub) else sub.flat_proxy_outs


def _has_region(bsym: BoundSymbol) -> bool:
    return is_region(bsym) or any(map(_has_region, bsym.subsymbols))


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol stands for a region."""
    return bsym.sym.id == REGION


def renamed(bsyms: Sequence[BoundSymbol], names: dict[Variable, Proxy]) -> list[BoundSymbol]:
    """Copies of operations with `names` put in, and new names (added to `names`) for all that they make."""
    for bsym in bsyms:
        _name_anew(bsym, names)
    return [_substituted(b, names) for b in bsyms]


def _substituted(bsym: BoundSymbol, names: dict[Variable, Proxy]) -> BoundSymbol:
    """Thunder's own follows chains: where x stands for y and y for z, it puts z for x."""

    def put(v: Any) -> Any:
        return names.get(variableify(v), v) if isinstance(v, Proxy) else v

    return bsym.from_bsym(
        args=tree_map(put, bsym.args),
        kwargs=tree_map(put, bsym.kwargs),
        output=tree_map(put, bsym.output),
        subsymbols=[_substituted(s, names) for s in bsym.subsymbols],
    )


def _name_anew(bsym: BoundSymbol, names: dict[Variable, Proxy]) -> None:
    for p in bsym.flat_proxy_outs:
        if variableify(p) not in names:
            names[variableify(p)] = _another(p)
    for sub in bsym.subsymbols:
        _name_anew(sub, names)


def _attached(bsyms: Sequence[BoundSymbol], outs: Sequence[Proxy]) -> tuple[Sequence[BoundSymbol], Sequence[Proxy]]:
    """Thunder takes an operation for constant if any of its results is detached: let none of a region's be."""
    detached = {variableify(p) for p in outs if ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags}
    if not detached or len(detached) == len(outs):
        return bsyms, outs
    inner = {v: _another(v.proxy) for v in detached}
    for p in outs:
        p.tags.discard(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    copies = [prims.shallow_copy.bind(inner[variableify(p)], output=p) for p in outs if variableify(p) in inner]
    return [*(b.from_bsym_swap_proxies(inner) for b in bsyms), *copies], outs


def _another(p: Proxy) -> Proxy:
    """A proxy like `p` under a new name."""
    new = p.replace(name=None, history=None)
    new.tags.update(p.tags)
    return new


# -- the symbol -------------------------------------------------------------------------------------------------------


def _symbol(name: str) -> Symbol:
    register_grad(REGION, _rule)
    return Symbol(name=name, id=REGION, meta=_meta, python_printer=_print, _bind_postprocess=print_without_module)


def _meta(*args: Any, region: Region) -> Any:
    bsyms, outs = region.copied(args)
    get_tracectx().peek_scope().extend(bsyms)
    return outs[0] if len(outs) == 1 else tuple(outs)


def _print(bsym: BoundSymbol, outs: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    names = ", ".join(p.name for p in bsym.flat_proxy_outs)
    called = ", ".join(p.name for p in bsym.flat_proxy_args)
    return f"{names if isinstance(bsym.output, Proxy) else f'({names},)'} = {bsym.sym.name}({called})"


# -- the gradient -----------------------------------------------------------------------------------------------------


def _rule(*args: Any, region: Region) -> Any:
    trace = get_tracectx()
    bsyms, outs = region.copied(args)
    changing = {a.name: region.changing[p.name] for p, a in zip(region.args, args, strict=True) if p.name in region.changing}
    first, outs, again, outs_again, copied = replayable(bsyms, outs, with_body, changing)
    trace.peek_scope().extend(first)
    outs = with_effects(first, outs)
    wanted = [i for i, p in enumerate(outs) if is_differentiable(p)]
    cotangents = [prims.get_grad(outs[i]) for i in wanted]
    second = Region(region.name, *_made_anew(again, [outs_again[i] for i in wanted]))
    kept = names_in(first)  # states, and numbers that are drawn once, which no gradient goes to
    for p, gradient in zip(second.args, _write_backward(second, cotangents), strict=True):
        p = copied.get(p.name, p)
        if gradient is not None and p.name not in kept:
            prims.put_grad(p, gradient)
    return outs[0] if len(outs) == 1 else tuple(outs)


def _made_anew(bsyms: list[BoundSymbol], outs: Sequence[Proxy]) -> tuple[list[BoundSymbol], list[Proxy]]:
    """Results that were an argument, or another result, before what is written in place was left out become copies."""
    made = {p.name for b in bsyms for p in b.flat_proxy_outs}
    results: list[Proxy] = []
    for p in outs:
        if p.name in made and all(p.name != q.name for q in results):
            results.append(p)
            continue
        results.append(_another(p))
        bsyms = [*bsyms, prims.shallow_copy.bind(p, output=results[-1])]
    return bsyms, results


def _write_backward(region: Region, cotangents: Sequence[TensorProxy]) -> list[TensorProxy | None]:
    """Write the region again, and its backward, to the open trace; returns the gradients of its arguments."""
    joint = grad_transform_on_trace(as_trace(region))
    (returned,) = joint.bound_symbols[-1].args
    names: dict[Variable, Proxy] = {variableify(p): p for p in region.args}
    of = {p.name: g for p, g in zip(returned["fw_flat_out"], cotangents, strict=True)}
    body = []
    for bsym in joint.bound_symbols[:-1]:
        if bsym.sym.id is PrimIDs.GET_GRAD:
            names[variableify(bsym.output)] = of[bsym.args[0].name]
        elif bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL:
            body.append(bsym)
    get_tracectx().peek_scope().extend(renamed(body, names))
    return [names.get(variableify(g), g) if isinstance(g, Proxy) else None for g in returned["output"]]


def as_trace(region: Region) -> TraceCtx:
    """A region as a program that takes what it uses; all of that requires grad."""
    trace = TraceCtx()
    trace.names.update(names_in(region.bsyms))
    with tracectx(trace):
        trace.args = tuple(_requiring_grad(p) for p in region.args)
        declare_arguments(trace, region.name)
        for p in trace.args:
            prims.unpack_trivial(p, name=p.name)
        trace.bound_symbols.extend(region.bsyms)
        prims.python_return({"output": tuple(region.outs), "flat_args": list(trace.args)})
    return trace


def _requiring_grad(p: Proxy) -> Proxy:
    if is_differentiable(p):
        return p.replace(requires_grad=True)
    get_tracectx().add_name(p.name)
    return p
