"""Running what Thunder has written for plain tensors so far, changes in place included, on the inputs of the call at hand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from thunder_norm.op_names import PYTHONS_DTYPES
from thunder_norm.subclass.acquiring.fallback import is_kept, made_for
from thunder_norm.subclass.acquiring.sized import Sized
from thunder_norm.tracing.recording import declare_arguments
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.tracing.shared_memory.writes import targets
from thunder_norm.tracing.torch_functions.known_values import MAY_BE_VIEWS
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
from thunder.core import jit_ext, prims
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.update_aliases import _is_inplace_op
from thunder.executors import pythonex, torchex
from thunder.executors.passes import transform_for_execution


class Made(NamedTuple):
    """What a value of a program is made of, as it is at the end of it.

    Attributes:
        operations: those that it comes from, and those that write into what these read, in order.
        given: the tensors that they take from elsewhere.
        overwritten: where those of the latter lie that are written into, by operations that are there for what they return as well:
            the running statistics of a batch normalization.
    """

    operations: list[BoundSymbol]
    given: list[TensorProxy]
    overwritten: set[Any]


def made_of(
    p: TensorProxy | NumberProxy,
    program: Sequence[BoundSymbol],
    place: Callable[[Any], Any],
    written_into: Sequence[Collection[Any]] | None = None,
) -> Made:
    """What `p` is made of.

    From the last operation to the first: what an operation reads is what all writes before it have left, into views of it and into what
    it is a view of too.

    Args:
        p: of the trace at hand.
        program: its operations.
        place: where an input lies; two that may share memory lie in one place.
        written_into: what each operation writes into, where that is known.
    """
    written_into = [targets(bsym) for bsym in program] if written_into is None else written_into
    made_by: dict[str, BoundSymbol] = {}
    if any(written_into):
        views = filter(makes_view, _parts(program))  # of which some consist of operations that copy: a diagonal
        makers = (*_leaves(program), *views)
        made_by = {o.name: bsym for bsym in makers for o in bsym.flat_proxy_outs if not _hands_over(bsym)}
    wanted, found, overwritten = {p.name: p}, [], set()
    read = _memory(p, made_by, place) if made_by else set()
    for bsym, written in zip(reversed(program), reversed(written_into), strict=True):
        made = [o.name for o in bsym.flat_proxy_outs if o.name in wanted]
        if made and _hands_over(bsym):
            made = []
        if not made and not written:
            continue
        into = {where for t in written for where in _memory(t, made_by, place)}
        is_read = not into.isdisjoint(read)
        if not made and not is_read:
            continue
        found.append(bsym)
        overwritten |= into
        for name in made:
            del wanted[name]
        wanted |= {a.name: a for a in bsym.flat_proxy_args}
        if made_by:
            read = read.union(*(_memory(a, made_by, place) for a in bsym.flat_proxy_args))
    return Made(found[::-1], list(wanted.values()), overwritten)


class ProgramSoFar:
    """The operations of the trace that is being acquired, and which of them write into plain tensors."""

    def __init__(self) -> None:
        self._seen: list[BoundSymbol] = []
        self._written_into: list[Collection[Any]] = []  # by each of these
        self._writes: list[int] = []  # where they are

    @property
    def is_open(self) -> bool:
        """Whether it is still being acquired."""
        return jit_ext._jit_ctx.get(None) is not None

    def num_writes(self) -> int:
        """How many there are by now, or were when the acquisition ended."""
        if self.is_open:
            self._look()
        return len(self._writes)

    def made(self, p: TensorProxy | NumberProxy, place: Callable[[Any], Any], before: int | None = None) -> Made:
        """What `p` is made of, as `made_of` says it: now, or before the operation that writes after so many others have."""
        operations = self._look()
        if not all(map(operator.is_, operations, self._seen)):  # some were taken back
            for known in (self._seen, self._written_into, self._writes):
                known.clear()
            self._look()
        end = len(operations) if before is None or before >= len(self._writes) else self._writes[before]
        return made_of(p, operations[:end], place, self._written_into[:end])

    def _look(self) -> Sequence[BoundSymbol]:
        """All operations, with what the new ones write into."""
        operations = jit_ext.get_jit_ctx().computation_trace.bound_symbols
        for bsym in operations[len(self._seen) :]:
            written = targets(bsym)
            if written:
                self._writes.append(len(self._seen))
            self._seen.append(bsym)
            self._written_into.append(written)
        return operations


def _hands_over(bsym: BoundSymbol) -> bool:
    """Whether what it returns is given: an input that is named, or the inner tensors of one."""
    if bsym.sym.id in ("thunder_norm.flatten", "thunder_norm.parameter_norm"):
        return True
    given = {a.name for a in bsym.flat_proxy_args}
    return all(o.name in given for o in bsym.flat_proxy_outs)


def are_made_alike(a: TensorProxy, b: TensorProxy, written: Sequence[BoundSymbol]) -> bool:
    """Whether the same operations have made two tensors of the same ones, into none of which anything was written between them."""
    makers: dict[str, tuple[int, BoundSymbol, int]] = {}
    for place, bsym in enumerate(written):
        for part in _leaves([bsym]):
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
        is_one = f.sym.id == g.sym.id and at == other and len(given) == len(others) and are_the_same_each_time([f], p)
        return is_one and all(map(are_alike, given, others))

    return are_alike(a, b) and not any(map(_is_inplace_op, written[first:]))


def _leaves(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """What operations consist of in the end."""
    for bsym in bsyms:
        if bsym.subsymbols:
            yield from _leaves(bsym.subsymbols)
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
    if is_unwritten(bsym.sym.name) or bsym.sym.name in _FILLED:  # which take a tensor for its dtype and device
        return False
    if isinstance(bsym.sym.id, prims.PrimIDs):
        return bsym.sym.id.name in MAY_BE_VIEWS
    made = made_for(bsym.sym)
    func = None if made is None else made.function
    func = func.func if isinstance(func, Sized) else func
    return not isinstance(func, torch._ops.OpOverload) or any(r.alias_info is not None for r in func._schema.returns)


def are_the_same_each_time(bsyms: Sequence[BoundSymbol], result: Proxy) -> bool:
    """Whether operations run for a result draw no numbers, read no memory that nothing was written into, and only return tensors."""
    leaves = list(_leaves(bsyms))
    return not any(_is_of_one_run(part) and not _is_filled(part, leaves, result) for part in _parts(bsyms))


def _is_filled(bsym: BoundSymbol, leaves: Sequence[BoundSymbol], result: Proxy) -> bool:
    """Whether all of the memory that an operation returns is written before anything reads it: ``torch.empty(()).fill_(3)``."""
    made = made_for(bsym.sym)
    if not is_unwritten(bsym.sym.name) and (made is None or not is_unwritten(getattr(made.function, "__name__", ""))):
        return False
    return all(_is_written_first(o, leaves, result) for o in bsym.flat_proxy_outs)


def _is_written_first(made: TensorProxy, leaves: Sequence[BoundSymbol], result: Proxy) -> bool:
    """Whether every element of a tensor is written before anything reads it, as a whole or piece by piece: ``s[0] = h; s[1] = w``."""
    with _disable_current_modes():
        # which elements nothing was written into yet, of the tensor and of copies of it in which some are other
        unwritten = {made.name: torch.ones((), dtype=torch.bool, device="cpu").expand(made.shape)}
        for bsym in leaves:
            used = [a.name for a in bsym.flat_proxy_args if a.name in unwritten and bsym.sym.id is not prims.PrimIDs.SHAPE]
            if not used:
                continue
            given = [a.name if isinstance(a, Proxy) else None for a in bsym.args]
            if bsym.sym.id is prims.PrimIDs.COPY_WITH_SETITEM and used == given[:1] and _is_written_out(bsym.args[1]):
                left = unwritten[used[0]].clone()
                left[bsym.args[1]] = False
            elif bsym.sym.id is prims.PrimIDs.COPY_ and given[1] in unwritten:
                into = unwritten[given[1]]
                left = unwritten.get(given[0], torch.zeros_like(into))
                if left.shape != into.shape or bool((left & ~into).any()):
                    return False
                unwritten[given[1]] = left
            elif any(bool(unwritten[name].any()) for name in used):
                return False
            else:
                continue
            unwritten |= {o.name: left for o in bsym.flat_proxy_outs}
        return result.name not in unwritten or not unwritten[result.name].any()


def _is_written_out(key: Any) -> bool:
    """Whether an index is of numbers and slices of numbers alone, so that it says the same in each call."""
    if isinstance(key, (tuple, list)):
        return all(map(_is_written_out, key))
    if isinstance(key, slice):
        return all(map(_is_written_out, (key.start, key.stop, key.step)))
    return key is None or key is Ellipsis or type(key) in (int, bool)


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


_FILLED = frozenset("new_zeros new_ones new_full".split())
_UNWRITTEN = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())


def runnable(p: TensorProxy | NumberProxy, made: Made, place: Callable[[Any], Any]) -> Callable[..., Any] | None:
    """A function from tensors for what `p` is made of to that for `p`; None where several of these lie in memory that is written into.

    What is written into is a copy of what was given.
    """
    run = compiled([p], made.operations, made.given)
    places = [place(a) for a in made.given]
    copied = [where in made.overwritten for where in places]
    if any(is_copied and places.count(where) > 1 for is_copied, where in zip(copied, places, strict=True)):
        return None
    if not any(copied):
        return run
    return lambda *given: run(*(_copy(t) if is_copied else t for t, is_copied in zip(given, copied, strict=True)))


def _copy(t: torch.Tensor) -> torch.Tensor:
    """With the same strides, which say what is a view of what."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


class Written(NamedTuple):
    """What Thunder wrote for a value.

    Attributes:
        proxy: of the value.
        made: what it is made of.
        as_tensor: what a run of that returns, as a tensor.
    """

    proxy: TensorProxy | NumberProxy
    made: Made
    as_tensor: Callable[[Any], torch.Tensor]

    @property
    def may_be_joined(self) -> bool:
        """Whether nothing is written into on the way: what another value is made of can run beside."""
        return not self.made.overwritten and not any(map(targets, self.made.operations))


def joined(values: Sequence[Written]) -> tuple[Callable[..., tuple[torch.Tensor, ...]], list[TensorProxy]]:
    """A function to all of some values that may be joined, each operation run once, and the tensors that it takes."""
    operations = {id(bsym): bsym for value in values for bsym in value.made.operations}
    given = {p.name: p for value in values for p in value.made.given}
    run = compiled([value.proxy for value in values], list(operations.values()), list(given.values()))

    def together(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([value.as_tensor(found) for value, found in zip(values, run(*tensors), strict=True)])

    return together, list(given.values())


def compiled(
    wanted: Sequence[TensorProxy | NumberProxy], operations: list[BoundSymbol], inputs: list[TensorProxy]
) -> Callable[..., Any]:
    """A function from tensors for `inputs` to what is wanted, a tuple if that is not one, every operation run by torch."""
    trace = TraceCtx()
    trace.args, trace.kwargs = tuple(inputs), {}
    declare_arguments(trace, "plain_values")
    trace.names.update(o.name for bsym in _parts(operations) for o in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args))
    with tracectx(trace):
        for a in inputs:
            prims.unpack_trivial(a, name=a.name)
        trace.bound_symbols.extend(operations)
        prims.python_return(wanted[0] if len(wanted) == 1 else tuple(wanted))
    return transform_for_execution(trace, (torchex.ex, pythonex.ex)).python_callable()


def as_tensor(number: complex) -> torch.Tensor:
    """A number as a tensor without dimensions, as exactly as Python has it."""
    return torch.tensor(number, dtype=PYTHONS_DTYPES[type(number)])
