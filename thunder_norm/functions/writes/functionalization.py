"""In-place operations of a program, as operations that make new tensors.

Thunder records ``y.add_(x)`` as an addition and a copy into y.  In a program that is to be transformed the copy is left out, and
what comes later uses the new value.  A copy into a view, ``y[0] += 1``, makes a new value of the tensor that it is a view of, and
other views of that tensor are taken again where they are used later.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.functions.opaque import Operation, symbol_for
from thunder_norm.functions.programs import flat_proxies, is_complex, is_differentiable
from thunder_norm.functions.registry import VjpRule, vjp_rules
from thunder_norm.functions.writes import refused_writes
from thunder_norm.functions.writes.aliasing import as_written, operation_of_view, parts_of_copies, views_in
from thunder_norm.functions.writes.plain_inputs import PlainInputs
from thunder_norm.tracing.locations import at_line_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.shared_memory.aliases import check_written_once
from thunder_norm.tracing.shared_memory.histories import current, history_of
from thunder_norm.tracing.shared_memory.writes import copies_in, is_recorded, stays_without_history
from thunder_norm.tracing.translation import all_for_torch
from thunder_norm.trees import flat_tensors, map_tensors
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, get_tracectx

# They return views whatever the strides of their argument, and no element twice: a change of the view is one of the argument.
_EXACT = frozenset(
    "H T adjoint diagonal getitem imag mH mT moveaxis movedim narrow permute ravel_view real select squeeze swapaxes "
    "swapdims t transpose unfold unsqueeze view view_as view_as_real view_as_complex __getitem__ "
    "Tensor_H Tensor_T Tensor_imag Tensor_mH Tensor_mT Tensor_real".split()
)

_OVERWRITING = frozenset({"copy_", "fill_", "zero_"})


def without_mutations(
    trace: TraceCtx, *, keeps_foreign: bool = False, has_histories: bool = True, recorded: Container[str] = ()
) -> TraceCtx:
    """The same program without copies into tensors.

    Args:
        trace: a flat program.
        keeps_foreign: leave copies into what the program did not make where they are.
        has_histories: whether anybody differentiates it: what is written without autograd does not change where gradients go.  Else
            results lie in memory as they did, views in that of their tensor.
        recorded: names of arguments that are to it as if it had made them; where it returns them, it returns what becomes of them.

    Raises:
        TransformError: it changes an argument or a tensor of the surroundings, unless they are left, or a tensor that may share
            memory with another.
        UnsupportedOpError: it writes into a view that has an element twice, or behind the back of autograd into what that needs.
    """
    if not any(copies_in(b) for b in trace.bound_symbols):
        return trace
    check_written_once(trace)
    trace = without_regions(trace)
    foreign = {p.name for p in trace.args if isinstance(p, Proxy) and p.name not in recorded}
    moved = {p.name for p in trace.args if isinstance(p, TensorProxy) and p.requires_grad} if keeps_foreign else set()
    views = [views_in(b) for b in trace.bound_symbols]
    memory = _Memory(
        foreign=foreign,
        moved=moved & foreign,
        of_its_own={p.name for p in trace.args if p.name in recorded},
        plain=PlainInputs(trace, views, moved, foreign) if keeps_foreign else None,
        ways=_ways_of_writing(trace, views) if keeps_foreign else set(),
        uses=Counter(name for b in trace.bound_symbols for name in {p.name for p in b.flat_proxy_args}),
        rewritten={c.args[1].name for b in trace.bound_symbols for c in copies_in(b)},
        has_histories=has_histories,
    )
    with scope(get_tracectx()) as kept:  # its names are different from those of the program's surroundings
        for bsym, found in zip(trace.bound_symbols, views, strict=True):
            with at_line_of(get_tracectx(), bsym):
                kept.extend(memory.without_copies(bsym, found))
    new = from_trace(trace)
    new.bound_symbols = kept
    new.names.update(p.name for b in kept for p in b.flat_proxy_outs)
    return new


def without_regions(trace: TraceCtx) -> TraceCtx:
    """The program with the parts of regions that write into what they make: what follows a write reads what was written."""
    new = from_trace(trace)
    new.bound_symbols = [part for b in trace.bound_symbols for part in _parts_of_region(b)]
    return new


def _parts_of_region(bsym: BoundSymbol) -> list[BoundSymbol]:
    is_operation = not isinstance(bsym.sym.id, str) or bsym.sym.id.startswith(("torch.", "Tensor."))
    made = {p.name for s in bsym.subsymbols for p in s.flat_proxy_outs}
    if is_operation or bsym.sym.executor is not None or made.isdisjoint(c.args[1].name for c in copies_in(bsym)):
        return [bsym]
    return [part for s in bsym.subsymbols for part in _parts_of_region(s)]


@dataclass(frozen=True)
class _View:
    """The operation that made a view, which of its results it is, and the tensor it is a view of."""

    bsym: BoundSymbol
    index: int
    base: TensorProxy

    def again(self, base: TensorProxy) -> Any:
        """Take the views of the operation again, of what their tensor is now."""
        args, kwargs = self.arguments(base)
        return self.bsym.sym(*args, **kwargs)

    def arguments(self, base: TensorProxy) -> tuple[tuple, dict]:
        """Those of the operation, with `base` in place of the tensor."""
        arguments = self.bsym.args, self.bsym.kwargs
        return tree_map(lambda v: base if isinstance(v, Proxy) and v.name == self.base.name else v, arguments)


@dataclass
class _Memory:
    """Which proxies of a program share memory, and what they stand for after the changes so far."""

    foreign: set[str]  # what the program did not make
    moved: set[str]  # what of that is differentiated
    of_its_own: set[str]  # arguments that are as if the program had made them
    plain: PlainInputs | None  # the rest of it, if copies into it stay
    ways: set[str]  # what the program writes into, and what that is a view of
    uses: Counter[str]  # how many operations take a tensor
    rewritten: set[str]  # names of tensors that are written somewhere
    has_histories: bool
    views: dict[str, _View] = field(default_factory=dict)
    same: dict[str, TensorProxy] = field(default_factory=dict)  # results of copies, and the tensors that they are
    values: dict[str, TensorProxy] = field(default_factory=dict)  # of tensors that were written, or taken again
    versions: dict[str, int] = field(default_factory=dict)  # how often a tensor was written, itself or through its views
    unclear: dict[str, tuple[_View, BoundSymbol]] = field(default_factory=dict)  # tensors that may have been changed, and by what
    seen: dict[str, int] = field(default_factory=dict)  # the version of the tensor that the value of a view is of
    writers: dict[str, BoundSymbol] = field(default_factory=dict)  # what wrote it last
    detached: dict[str, int] = field(default_factory=dict)  # the version that `detach_` began: views from before have it not
    histories: dict[str, TensorProxy] = field(default_factory=dict)  # of what was written without autograd: where gradients go

    def without_copies(self, bsym: BoundSymbol, views: dict[str, str]) -> Sequence[BoundSymbol]:
        """An operation, or what is left of one that copies into tensors; what it depends on is written first."""
        if self.plain is not None:
            self.plain.enter(bsym)
        self.note_inputs(bsym)
        self.note_views(bsym, views)
        copies = copies_in(bsym)
        if self.plain is not None and all(self._root(c.args[1]) in self.foreign for c in copies):
            return self.left_in_place(self.plain, bsym, copies)
        renamed = self.renamed(bsym)
        overwritten = self._overwritten(bsym, copies)
        for copy in copies:
            self.check_own(copy.args[1], bsym)
            if self.plain is not None:
                self.plain.check_seen(bsym, copy)
                self.plain.written(bsym, copy)
        written = {copy.output.name for copy in copies}
        get_tracectx().peek_scope().extend(
            b for b in parts_of_copies(renamed) if not any(p.name in written for p in b.flat_proxy_outs)
        )
        for copy in copies:
            source, target = copy.args[:2]
            value, is_detached = as_written(self.now(source), target), self._is_detaching(copy)
            is_broadcast = value.name != self.now(source).name  # each element of what is written has its own memory
            is_of_another = (self.is_of_another(source) or is_broadcast) and not is_detached
            is_unrecorded = not is_recorded(copy) or stays_without_history(bsym)
            is_apart = is_unrecorded or (self.plain is not None and self._is_detached(target))
            keeps_history = self.has_histories and is_apart and not is_detached and is_differentiable(value)
            whole = self._whole(target)
            before = self.now(whole) if keeps_history else None
            if self.tensor(target).name == whole.name and (not self.has_histories or whole.name in overwritten):
                value = _writer(_WHOLE.meta, _WHOLE, 0)(value, self.now(whole))[0]
            else:
                value = prims.clone(value) if is_of_another else self.kept(value)
            self.write(target, value, bsym)
            if before is not None and self._root(target) == whole.name:
                # what is written without autograd, maybe through a view from there, or into what is detached, changes nothing of
                # where gradients go
                self.values[whole.name] = current(before, self.values[whole.name])
                self.versions[whole.name] += 1
            if is_detached:
                self.detached[self._root(target)] = self.versions[self._root(target)]
            self.same[copy.output.name] = self.tensor(target)
        return []

    def _overwritten(self, bsym: BoundSymbol, copies: Sequence[BoundSymbol]) -> set[str]:
        """The tensors with a history of which an operation leaves nothing: their gradients are zero then, and not missing."""
        if self.plain is None or bsym.sym.name not in _OVERWRITING:
            return set()
        targets = [c.args[1].name for c in copies if is_recorded(c) and not self._is_detaching(c)]
        return {self.same[name].name if name in self.same else name for name in targets if self.plain.has_history(name)}

    def is_of_another(self, source: TensorProxy) -> bool:
        """Whether what is copied is, or is a view of, a tensor that is used besides: both may be written or returned."""
        return source.name in self.views or self.uses[source.name] > 1 or self._root(source) in self.foreign

    def note_inputs(self, bsym: BoundSymbol) -> None:
        """Have others stand for inputs that are written: copies, or, with the history that stays, others of the same memory."""
        for p in bsym.flat_proxy_args if bsym.sym.id is not prims.PrimIDs.UNPACK_TRIVIAL else ():
            if p.name in self.of_its_own and p.name not in self.values and isinstance(p, TensorProxy):
                self.values[p.name] = prims.clone(p)  # a backward that asks for it finds what it was
            if p.name in self.moved and p.name in self.ways and p.name not in self.histories and isinstance(p, TensorProxy):
                self.histories[p.name] = history_of(p)
                self.values[p.name] = current(self.histories[p.name], p)

    def left_in_place(self, plain: PlainInputs, bsym: BoundSymbol, copies: Sequence[BoundSymbol]) -> Sequence[BoundSymbol]:
        """An operation that writes into nothing but what the program did not make, if it writes.

        In torch what is written without autograd keeps its gradients; Thunder's copies have none.
        """
        is_way = any(p.name in self.ways for p in bsym.flat_proxy_outs)
        left = self.renamed(bsym, but=self.histories.keys() if copies or is_way else ())
        get_tracectx().peek_scope().append(plain.written_of_copies(left))
        for copy in copies:
            target, root = copy.args[1], self._root(copy.args[1])
            plain.written(bsym, copy)
            if root in self.moved:
                self.versions[root], self.writers[root] = self.versions.get(root, 0) + 1, bsym
                continue
            if self.tensor(target).name == root:
                self.same[copy.output.name] = self.tensor(target)
        for p in bsym.flat_proxy_outs if is_way and not copies else ():
            if p.name in self.views and self._root(p) in self.foreign:
                # otherwise Thunder takes it apart for its gradient, and it may be a copy: a diagonal
                p.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
            if p.name in self.views and self._root(p) in self.histories:
                self.seen[p.name] = -1  # what is read is taken of what there is now
        for copy in copies:
            self.foreign.add(copy.output.name)
            if self._root(copy.args[1]) in self.histories:
                self.same[copy.output.name] = self.tensor(copy.args[1])
        return []

    def _whole(self, p: TensorProxy) -> TensorProxy:
        """The tensor that a proxy is a view of in the end."""
        p = self.tensor(p)
        while p.name in self.views:
            p = self.tensor(self.views[p.name].base)
        return p

    def _is_detached(self, p: TensorProxy) -> bool:
        view = self.views.get(self.tensor(p).name)
        return view is not None and (view.bsym.sym.name == "detach" or self._is_detached(view.base))

    def _is_detaching(self, copy: BoundSymbol) -> bool:
        """Whether a copy is what `detach_` is written as: of what the tensor holds already, detached."""
        source, target = (self.tensor(p) for p in copy.args[:2])
        view = self.views.get(source.name)
        return view is not None and view.bsym.sym.name == "detach" and self.tensor(view.base).name == target.name

    def note_views(self, bsym: BoundSymbol, found: dict[str, str]) -> None:
        """Remember which results of an operation share memory with its arguments."""
        args = {p.name: p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)}
        outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
        for i, out in enumerate(outs):
            base = args.get(found.get(out.name, ""))
            if base is not None and out.name not in args:
                self.views[out.name] = _View(bsym, i, base)
                self.seen[out.name] = self.versions.get(self._root(out), 0)

    def tensor(self, p: TensorProxy) -> TensorProxy:
        """The tensor that a proxy is: the result of a copy is what was copied into."""
        return self.same.get(p.name, p)

    def _root(self, p: TensorProxy) -> str:
        return self._whole(p).name

    def now(self, p: TensorProxy) -> TensorProxy:
        """What a proxy stands for after the changes so far."""
        p = self.tensor(p)
        root = self._root(p)
        if root in self.unclear:
            view, writer = self.unclear[root]
            raise refused_writes.unclear(writer, view.bsym)
        if p.name == root:
            return self.values.get(p.name, p)
        if self.seen[p.name] != self.versions.get(root, 0):
            self._take_again(p, root)
        return self.values.get(p.name, p)

    def _take_again(self, p: TensorProxy, root: str) -> None:
        view = self.views[p.name]
        if self.seen[p.name] < self.detached.get(root, -1) and not self._is_detached(p):
            raise refused_writes.read_of_before(self.writers[root], view.bsym)
        if not _is_exact(view) and view.bsym.sym.name != "detach":
            raise refused_writes.unclear(self.writers.get(root, view.bsym), view.bsym)
        outs = flat_proxies(view.again(self.now(view.base)))
        for out, value in zip(flat_proxies(view.bsym.output), outs, strict=True):
            self.values[out.name] = ltorch.detach(value) if self._stays_without_history(out, root) else value
            self.seen[out.name] = self.versions.get(root, 0)

    def _stays_without_history(self, view: TensorProxy, root: str) -> bool:
        """Whether a view was taken without autograd, and does not notice the last change: it gets a history by one it notices."""
        writer = self.writers.get(root)
        if ProxyTag.DETACHED_AUTOGRAD_GRAPH not in view.tags or self.plain is None or writer is None:
            return False
        return all(self.plain.counter(c.args[1]) != self.plain.counter(view) for c in copies_in(writer))

    def write(self, target: TensorProxy, value: TensorProxy, bsym: BoundSymbol) -> None:
        """Let a tensor be `value`, and what it is a view of be what it is after that."""
        target = self.tensor(target)
        root = self._root(target)
        view = self.views.get(target.name)
        is_data = self.plain is not None and view is not None and view.bsym.sym.name == "detach"  # the history stays
        if view is not None and not is_data and not _is_exact(view):
            # of a copy, or of the tensor itself: then that must not be used any more
            self.unclear[root] = view, bsym
            del self.views[target.name]
            self.versions[target.name] = self.versions.get(root, 0)
            root, view = target.name, None
        if view is None:
            self.versions[root] = self.versions.get(root, 0) + 1
            self.writers[root] = bsym
        else:
            base = self.now(view.base)
            if is_data:
                whole = current(base, value) if self.has_histories else value
            else:
                whole = _written(view, base, value)
            self.write(view.base, whole, bsym)
        self.values[target.name] = value
        self.seen[target.name] = self.versions[self._root(target)]

    def kept(self, value: TensorProxy) -> TensorProxy:
        """A value under a name that will not stand for another one."""
        return prims.shallow_copy(value) if value.name in self.rewritten else value

    def renamed(self, bsym: BoundSymbol, but: Container[str] = ()) -> BoundSymbol:
        """An operation of what its arguments stand for; those that share memory with what is among `but` stay."""
        swaps: dict[Variable, Proxy] = {}
        is_return = bsym.sym.id is prims.PrimIDs.RETURN
        targets = {c.args[1].name for c in copies_in(bsym)}
        for p in bsym.flat_proxy_args:
            if not isinstance(p, TensorProxy) or self._root(p) in but:
                continue
            if p.name in targets and self._root(p) in self.foreign:
                continue
            if is_return and not self.has_histories:
                self._forget_written(self.tensor(p))
            is_input = is_return and self.tensor(p).name in self.histories  # the caller gets the very object back
            now = self.tensor(p) if is_input else self.now(p)
            if not is_return and self.plain is not None and self.plain.is_kept(p, bsym):
                now = prims.clone(now)
            if now is not p:
                swaps[variableify(p)] = now
        return bsym.from_bsym_swap_proxies(swaps, skip_output=not is_return)

    def _forget_written(self, p: TensorProxy) -> None:
        """Have a view be taken again, rather than be what was written into it, which lies elsewhere."""
        while p.name in self.views and self.seen[p.name]:
            self.seen[p.name] = -1
            p = self.tensor(self.views[p.name].base)

    def check_own(self, target: TensorProxy, bsym: BoundSymbol) -> None:
        """Refuse to change what the program did not make."""
        if self._root(target) in self.foreign:
            raise refused_writes.of_others(bsym)


def _is_exact(view: _View) -> bool:
    operation = operation_of_view(view.bsym)
    tensors = flat_proxies((view.bsym.args, view.bsym.kwargs))
    return view.bsym.sym.name in _EXACT and operation is not None and bool(tensors) and tensors[0].name == view.base.name


def _written(view: _View, base: TensorProxy, value: TensorProxy) -> TensorProxy:
    """`base` with `value` in the place of one of its views."""
    args, kwargs = view.arguments(base)
    return _writer(view.bsym.sym, operation_of_view(view.bsym), view.index)(value, *args, **kwargs)[0]


@functools.cache
def _writer(view: Symbol | Callable, operation: Operation, index: int) -> Symbol:
    def run(value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        base: torch.Tensor | None = None

        def with_base(t: torch.Tensor) -> torch.Tensor:
            nonlocal base
            if base is not None:
                return t
            base = t.clone()
            return base

        args, kwargs = map_tensors(with_base, args), map_tensors(with_base, kwargs)
        flat_tensors(operation.run(*args, **kwargs))[index].copy_(value)
        assert base is not None, "a view is one of a tensor"
        return (base,)

    def apart(value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():  # what is made anew has no history then, and nothing else is to be set apart
            return run(value, *all_for_torch(args), **all_for_torch(kwargs))

    def meta(value: TensorProxy, *args: Any, **kwargs: Any) -> tuple[TensorProxy, ...]:
        return (TensorProxy(like=flat_proxies((args, kwargs))[0], requires_grad=False),)

    def backward(saved: tuple, g: TensorProxy) -> list[tuple[TensorProxy, TensorProxy]]:
        value, args, kwargs = saved
        base = flat_proxies((args, kwargs))[0]
        g = _laid_out()(g) if isinstance(view, Symbol) and view.name in _OF_LAYOUTS else g
        args, kwargs = tree_map(lambda v: g if isinstance(v, Proxy) and v.name == base.name else v, (args, kwargs))
        pairs = []
        if is_differentiable(base):
            nothing = ltorch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device)
            pairs.append((base, symbol(nothing, *args, **kwargs)[0]))
        if is_differentiable(value):
            taken = flat_proxies(view(*args, **kwargs))[index]
            taken = ltorch.real(taken) if is_complex(taken) and not is_complex(value) else taken
            pairs.append((value, taken if taken.dtype == value.dtype else ltorch.to(taken, value.dtype)))
        return pairs

    rule = _WritersRule(lambda value, *args, **kwargs: (symbol(value, *args, **kwargs), (value, args, kwargs)), backward)
    symbol = symbol_for(Operation(f"write_{operation.name}", run, meta, apart=apart), rule)
    vjp_rules.add(symbol, rule)
    _compilable.add(symbol.id)
    return symbol


_compilable: set[Hashable] = set()  # ids of symbols


def is_of_written_view(symbol: Symbol) -> bool:
    """Whether a symbol gives a tensor anew, with other entries in the place of one of its views or for the gradient of that."""
    return symbol.id in _compilable


class _WritersRule(VjpRule):
    """What is written gets what its place gets, the tensor around it the rest: such a view is a choice of entries, or of parts of them.

    Of what was there before its form alone is needed, so that a loop that fills a tensor keeps none of its states.  Gradients come with the
    tensors they are for, as the base of a view may be given by name.
    """

    def paired(self, args: tuple, kwargs: dict, gradients: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return list(gradients)


# They are views of what lies in memory as their argument did, and a cotangent may lie otherwise.
_OF_LAYOUTS = frozenset("ravel_view view view_as view_as_complex view_as_real".split())


@functools.cache
def _laid_out() -> Symbol:
    def run(t: torch.Tensor) -> torch.Tensor:
        return t.clone(memory_format=torch.contiguous_format).resolve_conj()

    symbol = symbol_for(Operation("laid_out", run, lambda t: TensorProxy(like=t, requires_grad=False)))
    _compilable.add(symbol.id)
    return symbol


_WHOLE = Operation("tensor", lambda t: t, lambda t: t)  # as a view of itself: with its strides, whatever those of what is written


def _ways_of_writing(trace: TraceCtx, views: Sequence[dict[str, str]]) -> set[str]:
    """The tensors that a program writes into, and those that they are views of."""
    base: dict[str, str] = {}
    found: set[str] = set()
    for bsym, views_of_it in zip(trace.bound_symbols, views, strict=True):
        base |= views_of_it
        for copy in copies_in(bsym):
            base[copy.output.name] = name = copy.args[1].name
            while name not in found:
                found.add(name)
                name = base.get(name, name)
    return found
