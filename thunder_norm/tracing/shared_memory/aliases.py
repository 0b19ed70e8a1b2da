"""Inputs that share memory, in a program that writes into one of them.

Thunder takes tensors of one storage for one tensor as soon as anything in the program is written in place: keys and values that are views
of one projection become the keys twice.  Here inputs stand for each other if they are the same elements in the same order, and one that
is written and holds some elements of another is refused; a guard sees that it stays so.
"""

from __future__ import annotations

import contextvars
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.shared_memory.views import makes_view
from thunder_norm.tracing.shared_memory.writes import targets
from thunder_norm.wrapper_classes import gives_its_class, is_of_users
from thunder.core import dtypes, prims
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, get_tracectx, tracectx
from thunder.core.update_aliases import _is_inplace_op
from thunder.torch import _syms_returning_views

_MOST_ELEMENTS = 2**26  # of a storage whose elements are compared one by one

_SAME = "same"
_MEET = "meet"


@dataclass
class _Aliases:
    """What the inputs of one acquisition share."""

    inputs: dict[int, tuple[Any, torch.Tensor]] = field(
        default_factory=dict
    )  # by the id of what their proxies have as history, and with it
    of_classes: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # of these, what is of a class derived from torch.Tensor that gives results its class
    groups: list[list[str]] = field(default_factory=list)  # the names of those that stand for each other
    refused: UnsupportedOpError | None = None  # where one that is written shares some of its elements, or a memory and no history


_current: contextvars.ContextVar[_Aliases | None] = contextvars.ContextVar("thunder_norm_input_aliases", default=None)
_ATTRIBUTE = "_thunder_norm_input_aliases"  # of compile data


@contextmanager
def noted() -> Iterator[None]:
    """Note the tensors that are met meanwhile."""
    found = _Aliases()
    token = _current.set(found)
    setattr(get_compile_data(), _ATTRIBUTE, found)
    try:
        yield
    finally:
        found.inputs.clear()
        found.of_classes.clear()
        _current.reset(token)


def note(x: torch.Tensor, history: Any) -> None:
    """Note an input tensor."""
    aliases = _current.get()
    if aliases is not None:
        aliases.inputs[id(history)] = history, x
        if is_of_users(type(x)):
            guards.note_at(history, "type", None, type(x))
        if gives_its_class(type(x)):
            aliases.of_classes[id(history)] = x


def noted_tensors() -> list[torch.Tensor]:
    """The input tensors that were met so far."""
    aliases = _current.get()
    return [] if aliases is None else [x for _, x in aliases.inputs.values()]


def noted_of_classes() -> dict[int, torch.Tensor]:
    """Of the inputs met so far those of a class that does not dispatch and gives results its class, by the id of what their proxies have as history."""
    aliases = _current.get()
    return {} if aliases is None else aliases.of_classes


def way_to(key: int) -> Any:
    """What the proxy of an input has as history, by its id."""
    aliases = _current.get()
    assert aliases is not None
    return aliases.inputs[key][0]


def storage_of(proxy: TensorProxy) -> int:
    """Where the memory begins of the tensor that an input is in the call at hand; 0 if nobody knows."""
    found = given_as(proxy)
    return 0 if found is None else storage_address(found)


def given_as(proxy: TensorProxy) -> torch.Tensor | None:
    """The tensor that an input is in the call at hand; None if nobody knows."""
    aliases = _current.get()
    found = None if aliases is None else aliases.inputs.get(id(proxy.history))
    return None if found is None else found[1]


def guard(prologue: TraceCtx, computation: TraceCtx) -> None:
    """Find out which inputs share memory with one that the program writes into, and let the prologue see that it stays so."""
    aliases = _current.get()
    assert aliases is not None
    real = {key: x for key, (_, x) in aliases.inputs.items()}
    given = [p for p in computation.args if type(p) is TensorProxy and id(p.history) in real]
    changed = written(computation)
    positions = [i for i, p in enumerate(given) if p.name in changed]
    if not positions:
        return
    found = _relations([real[id(p.history)] for p in given], positions)
    for (i, j), how in found.items():
        a, b = given[i], given[j]
        if how == _MEET:
            aliases.refused = _partly_one(a.name, b.name)
            break
        _join(aliases.groups, a.name, b.name)
        if torch.is_grad_enabled() and given_as(a) is not given_as(b) and (a.requires_grad or b.requires_grad):
            aliases.refused = _of_two_histories(a.name, b.name)

    def check(*tensors: torch.Tensor) -> None:
        if _relations(tensors, positions) != found:
            raise GuardError("inputs share memory in another way than when the trace was acquired")

    with tracectx(prologue):
        prologue.bound_symbols.insert(-1, bindable("check_shared_memory", check)(*given, output=None))


def _partly_one(a: str, b: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"an in-place operation on an input that shares memory with another input ({a} and {b})",
            why="the trace does not say which elements of the other one change",
            instead="give copies (x.clone()), or write out of place",
        )
    )


def _of_two_histories(a: str, b: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"an in-place operation on an input that lies in the memory of another input ({a} and {b}), one of which requires grad",
            why="they have one value and two histories, and the trace has one tensor for both",
            instead="give the program one of them, or call it under torch.no_grad()",
        )
    )


def _join(groups: list[list[str]], a: str, b: str) -> None:
    group = next((g for g in groups if a in g or b in g), None)
    if group is None:
        groups.append([a, b])
    else:
        group.extend(n for n in (a, b) if n not in group)


def indices(trace: TraceCtx) -> list[list[int]] | None:
    """The positions among the arguments of `trace` of those that stand for each other; None if nobody knows.

    Raises:
        UnsupportedOpError: one that is written shares some of its elements with another, or is another with a history of its own.
    """
    aliases: _Aliases | None = getattr(get_compile_data(), _ATTRIBUTE, None)
    if aliases is None:
        return None
    if aliases.refused is not None:
        raise aliases.refused
    position = {p.name: i for i, p in enumerate(trace.args)}
    return [sorted(position[name] for name in group) for group in aliases.groups]


def with_results_named_as_written(trace: TraceCtx) -> TraceCtx:
    """A trace in which what a write returns goes by the name of the tensor that it writes into.

    Thunder takes the two for tensors of different memories: a write into a view of the one (``s = t.mul_(2); s[0].add_(1)``) is not seen in the
    other, and lost where the program is differentiated, as no result depends on it.
    """
    if not any(map(_is_inplace_op, trace.bound_symbols)):
        return trace
    swaps: dict[Variable, TensorProxy] = {}
    bsyms = []
    for bsym in trace.bound_symbols:
        bsyms.append(bsym.from_bsym_swap_proxies(swaps, skip_output=True) if swaps else bsym)
        results = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
        written = {t.name for t in targets(bsym)}
        if len(results) == 1 and _is_inplace_op(bsym) and bsym.args and written == {getattr(bsym.args[0], "name", None)}:
            target = bsym.args[0]
            if (target.shape, target.dtype) == (results[0].shape, results[0].dtype) and target.name != results[0].name:
                swaps[variableify(results[0])] = swaps.get(variableify(target), target)
    if not swaps:
        return trace
    new = from_trace(trace)
    new.bound_symbols = bsyms
    return new


def with_last_writes(trace: TraceCtx) -> TraceCtx:
    """A trace whose inputs are returned as they are after the last write into a view of them.

    Thunder gives a tensor another name at the next use after something was written into its memory.  Where none follows, the input that is
    returned does not depend on the write, and what the forward of a differentiated program does not need becomes a part of the backward.
    """
    families: dict[str, list[str]] = {}
    last: dict[int, TensorProxy] = {}  # by family: the result of the last write, if no name was made after it
    for bsym in trace.bound_symbols:
        if bsym.sym.id == prims.PrimIDs.UPDATE_ALIASES:
            given = {p.name for p in bsym.flat_proxy_args}
            for before, after in zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True):  # of several memories, perhaps
                _unite(families, [before.name, after.name])
                family = id(families[after.name])
                if family in last and last[family].name in given:
                    del last[family]
        elif _is_inplace_op(bsym) and bsym.flat_proxy_args:
            target = bsym.flat_proxy_args[0]
            results = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)] or [target]
            _unite(families, [target.name, results[0].name])
            last[id(families[target.name])] = results[0]
        elif makes_view(bsym):
            _unite(families, [p.name for p in (*bsym.flat_proxy_args[:1], *bsym.flat_proxy_outs)])
    return _returning_after(trace, {name: last[id(f)] for name, f in families.items() if id(f) in last})


def _unite(families: dict[str, list[str]], names: Sequence[str]) -> None:
    """Make one family of the names and of those that they are of; the first one's stays itself."""
    found = next((families[n] for n in names if n in families), [])
    for name in names:
        family = families.get(name, [name])
        if family is not found:
            found += family
            families.update(dict.fromkeys(family, found))


def _returning_after(trace: TraceCtx, last: dict[str, TensorProxy]) -> TraceCtx:
    given = trace.bound_symbols[-1].args[0]
    late = [p for p in given["flat_args"] if isinstance(p, TensorProxy) and p.name in last and p.name != last[p.name].name]
    if not late:
        return trace
    new = from_trace(trace)
    new.bound_symbols = trace.bound_symbols[:-1]
    renamed = {}
    for p in late:
        with tracectx(new):
            aliases = tuple(TensorProxy(like=q, requires_grad=q.requires_grad) for q in (last[p.name], p))
        new.bound_symbols.append(prims.update_aliases.bind((last[p.name], p), output=aliases))
        renamed[variableify(p)] = aliases[1]
    new.bound_symbols.append(trace.bound_symbols[-1].from_bsym_swap_proxies(renamed))
    return new


def written_tensor(proxy: TensorProxy) -> TensorProxy:
    """The tensor that is called by another name since the program wrote into it: in eager mode they are one object."""
    for bsym in reversed(get_tracectx().bound_symbols):
        if _is_inplace_op(bsym) and any(p.name == proxy.name for p in bsym.flat_proxy_outs):
            proxy = bsym.flat_proxy_args[0]
    return proxy


def memory_of(proxy: TensorProxy) -> tuple[str, int | str]:
    """What a tensor has in common with those that may lie in the same memory, as far as the program has come."""
    for bsym in reversed(get_tracectx().bound_symbols):
        is_of_other = makes_view(bsym) or _is_inplace_op(bsym)
        if is_of_other and bsym.flat_proxy_args and any(p.name == proxy.name for p in bsym.flat_proxy_outs):
            proxy = bsym.flat_proxy_args[0]
    return "memory", storage_of(proxy) or proxy.name


def is_written(proxy: TensorProxy) -> bool:
    """Whether the program has written into a tensor so far."""
    return any(_is_inplace_op(b) and b.flat_proxy_args[0].name == proxy.name for b in get_tracectx().bound_symbols)


def is_view(proxy: TensorProxy) -> bool:
    """Whether a tensor was made as a view of another, whatever the strides of that."""
    return any(sym in _syms_returning_views for sym in _makers(proxy))


def is_detached(proxy: TensorProxy) -> bool:
    """Whether a tensor was made by ``detach()``: it lies in the memory of another, and is no view of it for torch."""
    return any(sym.id == "torch.detach" for sym in _makers(proxy))


def _makers(proxy: TensorProxy) -> Iterator[Symbol]:
    made = (b for b in get_tracectx().bound_symbols if any(p.name == proxy.name for p in b.flat_proxy_outs))
    return (b.sym for b in made if not any(p.name == proxy.name for p in b.flat_proxy_args))


def check_written_once(trace: TraceCtx) -> None:
    """Refuse a write into a view that has an element twice (windows that overlap, what was expanded), or that is a copy in Thunder.

    Torch refuses the first too, or lets the order of its loops decide.

    Raises:
        UnsupportedOpError: there is one.
    """
    unlike: dict[str, str] = {}  # such views, and what made them
    conjugates: list[tuple[str, str]] = []  # of which tensor, and which
    for i, bsym in enumerate(trace.bound_symbols):
        name = next((p.name for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)), "")
        if _is_inplace_op(bsym):
            if name in unlike:
                raise _without_place(bsym, unlike[name])
            of_it = {view for base, view in conjugates if base == name}
            if of_it and any(p.name in of_it for b in trace.bound_symbols[i + 1 :] for p in b.flat_proxy_args):
                raise _without_place(bsym, "conj")
        made = bsym.sym.name.rpartition(".")[2]
        if made == "conj":
            conjugates += [(name, p.name) for p in bsym.flat_proxy_outs if p.name != name]
        source = made if _is_unlike(bsym, made) else unlike.get(name) if makes_view(bsym) else None
        if source is not None and made not in ("contiguous", "reshape", "flatten"):  # of such a view they are copies
            unlike.update((p.name, source) for p in bsym.flat_proxy_outs)


def _without_place(writer: BoundSymbol, source: str) -> UnsupportedOpError:
    is_repeated = source != "conj"
    return UnsupportedOpError(
        with_details(
            f"an in-place operation on a result of {source}"
            + (", which has elements of a tensor more than once" if is_repeated else ", or on the tensor that it is a view of"),
            at=location_of(writer),
            why="what is written is computed first, and copied then: one element cannot have several values"
            if is_repeated
            else "in a trace it is a tensor of its own",
            instead=f"write into a copy: x.{source}(...).clone()",
        )
    )


def _is_unlike(bsym: BoundSymbol, made: str) -> bool:
    given = next((p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)), None)
    if given is None:
        return False
    if made == "unfold":
        dim, size, step = next((b.args[1:] for b in (bsym, *bsym.subsymbols) if len(b.args) == 4), (0, 0, 0))
        return size > step and bsym.flat_proxy_outs[0].shape[dim % max(given.ndim, 1)] > 1
    if made == "conj":
        return dtypes.is_complex_dtype(given.dtype)
    is_larger = any(isinstance(p, TensorProxy) and math.prod(p.shape) > math.prod(given.shape) for p in bsym.flat_proxy_outs)
    return made in ("expand", "expand_as", "broadcast_to") and is_larger


def written(trace: TraceCtx) -> set[str]:
    """The tensors of a program that an operation writes into, and those that are views of the same."""
    groups: dict[str, set[str]] = {}
    changed: set[str] = set()
    for bsym in trace.bound_symbols:
        changed.update(p.name for p in targets(bsym))
        tensors = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
        if tensors and makes_view(bsym):
            group = groups.setdefault(tensors[0].name, {tensors[0].name})
            for p in bsym.flat_proxy_outs:
                group |= groups.get(p.name, {p.name})
            groups.update(dict.fromkeys(group, group))
    return changed.union(*(groups[name] for name in changed if name in groups))


def _relations(tensors: Sequence[torch.Tensor], written: Sequence[int]) -> dict[tuple[int, int], str]:
    """How those at the positions `written` share elements with others; pairs that share none are left out."""
    storages = [storage_address(t) for t in tensors]
    found: dict[tuple[int, int], str] = {}
    if len(set(storages)) == len(storages):
        return found
    for i, j in itertools.product(written, range(len(tensors))):
        if i != j and storages[i] and storages[i] == storages[j]:
            how = _relation(tensors[i], tensors[j])
            if how is not None:
                found[i, j] = how
    return found


def storage_address(t: torch.Tensor) -> int:
    """Where its memory begins; 0 if it has none of its own."""
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return t.untyped_storage().data_ptr() if is_plain and t.layout is torch.strided and t.device.type != "meta" else 0


def _relation(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if not a.numel() or not b.numel():
        return None
    if a.dtype == b.dtype and a.storage_offset() == b.storage_offset():
        if a.shape == b.shape and a.stride() == b.stride():
            return _SAME
        if a.numel() == b.numel() and a.is_contiguous() and b.is_contiguous():
            return _SAME
    return _MEET if share_elements(a, b) else None


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors in one storage, with data or without, have an element in common; where that takes long to say, whether they may."""
    if not a.numel() or not b.numel():
        return False
    (first, last), (other_first, other_last) = reach(a), reach(b)
    if last <= other_first or other_last <= first:
        return False
    if a.dtype != b.dtype or (a.is_contiguous() and b.is_contiguous()) or last // a.element_size() > _MOST_ELEMENTS:
        return True
    with _disable_current_modes():
        taken = torch.zeros(max(last, other_last) // a.element_size(), dtype=torch.bool)
        taken.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
        return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def reach(t: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.storage_offset() * t.element_size(), (t.storage_offset() + span) * t.element_size()
