"""Running what Thunder has written for plain tensors so far on the inputs of the call at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.subclass.fallback import is_kept, made_for
from thunder_norm.subclass.sized import Sized
from thunder_norm.tracing.random_numbers import draws_numbers
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.update_aliases import _is_inplace_op
from thunder.executors import pythonex, torchex
from thunder.executors.passes import transform_for_execution


def made_of(p: TensorProxy | NumberProxy, program: Sequence[BoundSymbol]) -> tuple[list[BoundSymbol], list[TensorProxy]]:
    """The operations of a program that `p` comes from, in order, and the tensors that these are given."""
    wanted, found = {p.name: p}, []
    for bsym in reversed(program):
        made = [o.name for o in bsym.flat_proxy_outs if o.name in wanted]
        if made and not _hands_over(bsym):
            found.append(bsym)
            for name in made:
                del wanted[name]
            wanted |= {a.name: a for a in bsym.flat_proxy_args}
    return found[::-1], list(wanted.values())


def _hands_over(bsym: BoundSymbol) -> bool:
    """Whether what it returns is given: an input that is named, or the inner tensors of one."""
    if bsym.sym.id in ("thunder_norm.flatten", "thunder_norm.parameter_norm"):
        return True
    given = {a.name for a in bsym.flat_proxy_args}
    return all(o.name in given for o in bsym.flat_proxy_outs)


def is_written(p: TensorProxy | NumberProxy, program: Sequence[BoundSymbol], place: Callable[[Any], Any]) -> bool:
    """Whether a program may have written into `p`, or into what it is computed from, so that it is another by now.

    Args:
        p: of the trace at hand.
        program: its operations.
        place: where an input lies; two that may share memory lie in one place.
    """
    targets = [t for bsym in program for t in _targets(bsym)]
    if not targets:
        return False
    made_by = {o.name: bsym for bsym in leaves(program) for o in bsym.flat_proxy_outs if not _hands_over(bsym)}
    read = {a.name: a for bsym in made_of(p, program)[0] for a in bsym.flat_proxy_args} | {p.name: p}
    written = {where for t in targets for where in _memory(t, made_by, place)}
    return any(not written.isdisjoint(_memory(a, made_by, place)) for a in read.values())


def are_made_alike(a: TensorProxy, b: TensorProxy, written: Sequence[BoundSymbol]) -> bool:
    """Whether the same operations have made two tensors of the same ones, into none of which anything was written between them."""
    makers: dict[str, tuple[int, BoundSymbol, int]] = {}
    for place, bsym in enumerate(written):
        for part in leaves([bsym]):
            for index, p in enumerate(part.flat_proxy_outs):
                makers.setdefault(p.name, (place, part, index))
    first = len(written)

    def are_alike(p: Any, q: Any) -> bool:
        nonlocal first
        if not isinstance(p, Proxy) or not isinstance(q, Proxy):
            return type(p) is type(q) and p == q
        if p.name == q.name:
            return True
        if p.name not in makers or q.name not in makers:
            return False
        (i, f, at), (j, g, other) = makers[p.name], makers[q.name]
        first = min(first, i, j)
        given, others = tree_leaves((f.args, f.kwargs)), tree_leaves((g.args, g.kwargs))
        is_one = f.sym.id == g.sym.id and at == other and len(given) == len(others) and are_the_same_each_time([f])
        return is_one and all(map(are_alike, given, others))

    return are_alike(a, b) and not any(map(_is_inplace_op, written[first:]))


def _targets(bsym: BoundSymbol) -> list[Any]:
    """The tensors that an operation writes into."""
    copied = [part.args[1] for part in _parts([bsym]) if part.sym.id is prims.PrimIDs.COPY_]
    first = bsym.args[0] if _is_inplace_op(bsym) and bsym.args else ()
    return copied + [t for t in (first if isinstance(first, list | tuple) else (first,)) if isinstance(t, TensorProxy)]


def leaves(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """What operations consist of in the end."""
    for bsym in bsyms:
        if bsym.subsymbols:
            yield from leaves(bsym.subsymbols)
        else:
            yield bsym


def _memory(p: Any, made_by: Mapping[str, BoundSymbol], place: Callable[[Any], Any]) -> set[Any]:
    """What a tensor may share memory with, up to the inputs: itself, what it is a view of, and so on."""
    found, pending = set(), [p]
    while pending:
        p = pending.pop()
        if p.name in found:
            continue
        found.add(p.name)
        bsym = made_by.get(p.name)
        if bsym is None:
            found.add(place(p))
        elif _may_return_view(bsym):
            pending.extend(a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy))
    return found


def _may_return_view(bsym: BoundSymbol) -> bool:
    if isinstance(bsym.sym.id, prims.PrimIDs):
        return bsym.sym.id.name in _MAY_BE_VIEWS
    made = made_for(bsym.sym)
    func = None if made is None else made.function
    func = func.func if isinstance(func, Sized) else func
    return not isinstance(func, torch._ops.OpOverload) or any(r.alias_info is not None for r in func._schema.returns)


_MAY_BE_VIEWS = frozenset(
    "SHALLOW_COPY CONVERT_ELEMENT_TYPE DEVICE_PUT BROADCAST_IN_DIM RESHAPE SLICE SQUEEZE TRANSPOSE UNFOLD VIEW STRIDE_ORDER "
    "UPDATE_ALIASES REAL IMAG BITCAST COPY_ GET_GRAD PUT_GRAD EXOGENOUS_LIKE".split()
)


def are_the_same_each_time(bsyms: Iterable[BoundSymbol]) -> bool:
    """Whether operations draw no random numbers, read no memory that nothing was written into, and do no more than return tensors."""
    return not any(map(_is_of_one_run, _parts(bsyms)))


def _parts(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    for bsym in bsyms:
        yield bsym
        yield from _parts(bsym.subsymbols)


def _is_of_one_run(bsym: BoundSymbol) -> bool:
    made = made_for(bsym.sym)
    if draws_numbers(bsym) or is_unwritten(bsym.sym.name):
        return True
    return made is not None and (is_kept(made.function) or is_unwritten(getattr(made.function, "__name__", "")))


def is_unwritten(name: str) -> bool:
    """Whether an operation of this name returns memory into which nothing was written."""
    return name.partition(".")[0] in _UNWRITTEN


_UNWRITTEN = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())


def compiled(p: TensorProxy | NumberProxy, operations: list[BoundSymbol], inputs: list[TensorProxy]) -> Callable[..., Any]:
    """A function from tensors for `inputs` to that for `p`, every operation run by torch."""
    trace = TraceCtx()
    trace.args, trace.kwargs = tuple(inputs), {}
    trace._siginfo = SigInfo("plain_values")
    trace._siginfo.args = [(a.name, None) for a in inputs]
    trace.names.update(o.name for bsym in _parts(operations) for o in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args))
    with tracectx(trace):
        for a in inputs:
            prims.unpack_trivial(a, name=a.name)
        trace.bound_symbols.extend(operations)
        prims.python_return(p)
    return transform_for_execution(trace, (torchex.ex, pythonex.ex)).python_callable()


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def as_tensor(number: complex) -> torch.Tensor:
    """A number as a tensor without dimensions, as exactly as Python has it."""
    return torch.tensor(number, dtype=_DTYPES[type(number)])
