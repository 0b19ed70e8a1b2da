"""Bound symbols, copied and renamed without being taken apart where nothing of them changes; and dead code, by the names of proxies."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from thunder_norm.tracing.native.flattening import flatten, flatten_with_dataclass, leaves_of
from thunder_norm.tracing.replacement import Replacement
import thunder
from thunder.core import devices, dtypes, prims, trace_interpreter
from thunder.core.proxies import CollectionProxy, NumberProxy, Proxy, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_map, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.executors import passes, torch_compile
from thunder.transforms import autodiff

_original_swap = BoundSymbol.from_bsym_swap_proxies
_FIELDS = frozenset(f.name for f in dataclasses.fields(BoundSymbol) if f.name not in ("tags", "_line_no"))
_PROPERTIES = {name: v for name, v in vars(BoundSymbol).items() if isinstance(v, functools.cached_property)}
# What arguments and results are found out from does not change with these.
_BESIDE = frozenset({"header", "source_filename", "source_positions", "_call_ctx", "_import_ctx", "_object_ctx", "_executor"})
_MAKES_NOTHING = frozenset({prims.PrimIDs.COMMENT, prims.PrimIDs.PRINT, prims.PrimIDs.RETURN})


def from_bsym(self: BoundSymbol, **changes: Any) -> BoundSymbol:
    """A copy with these changes; what was found out of arguments and results is kept where they are."""
    new = object.__new__(BoundSymbol)
    if _BESIDE.issuperset(changes):
        to = self.__dict__ | changes
        to.pop("rhs", None)
        to["_line_no"] = None
    else:
        to = {name: value for name, value in self.__dict__.items() if name in _FIELDS} | changes
        to.setdefault("_line_no", None)
    new.__dict__ = to
    if type(to["args"]) is not tuple:
        to["args"] = tuple(to["args"])
    if "tags" not in changes:
        to["tags"] = self.tags.copy()
    if new.sym._bind_postprocess:
        new.sym._bind_postprocess(new)
    return new


class _Found:
    """A ``cached_property`` without a lock, which Python 3.11 takes for each of them."""

    def __init__(self, name: str, find: Callable[[BoundSymbol], Any]):
        self.name, self.find = name, find

    def __get__(self, bsym: BoundSymbol | None, owner: type | None = None) -> Any:
        if bsym is None:
            return self
        found = bsym.__dict__[self.name] = self.find(bsym)
        return found


def _flat_args(bsym: BoundSymbol) -> list[Any]:
    kwargs = bsym.kwargs
    given = (*bsym.args, *[kwargs[name] for name in sorted(kwargs)]) if kwargs else bsym.args  # a tree has names in order
    found = leaves_of(given)
    return bsym.flat_args_and_spec[0] if found is None else found


def _flat_outs(bsym: BoundSymbol) -> list[Any]:
    found = leaves_of((bsym.output,))
    return bsym.flat_outs_and_spec[0] if found is None else found


def _proxies(values: list[Any]) -> tuple[Proxy, ...]:
    return tuple([x for x in values if type(x) is TensorProxy or isinstance(x, Proxy)])


_NAMED = "_thunder_norm_named"
_FIND: dict[str, Callable[[BoundSymbol], Any]] = {name: v.func for name, v in _PROPERTIES.items()} | {
    "flat_args": _flat_args,
    "flat_outs": _flat_outs,
    "flat_proxy_args": lambda bsym: _proxies(bsym.flat_args),
    "flat_proxy_outs": lambda bsym: _proxies(bsym.flat_outs),
    "flat_variableified_proxy_args": lambda bsym: tuple(map(Variable, bsym.flat_proxy_args)),
    "flat_variableified_proxy_outs": lambda bsym: tuple(map(Variable, bsym.flat_proxy_outs)),
}


class _Swapped(NamedTuple):
    """The names that a map swaps, and by what it is seen that the map has no more of them since: dicts are in order."""

    swap_map: Any
    count: int
    last: Any
    names: set[str]


_swapped_before = _Swapped(None, 0, None, set())  # the same map swaps names of one operation after the other


def forget_names() -> None:
    """Let go of what was swapped last."""
    global _swapped_before
    _swapped_before = _Swapped(None, 0, None, set())


def _names_in(swap_map: dict[Variable, Proxy]) -> set[str]:
    """The names that a map swaps: to look for a variable in the map itself takes two functions of Python's."""
    global _swapped_before
    known, count, last = _swapped_before, len(swap_map), next(reversed(swap_map))
    if known.swap_map is not swap_map or known.count != count or known.last is not last:
        known = _swapped_before = _Swapped(swap_map, count, last, {variable.proxy.name for variable in swap_map})
    return known.names


def _named(bsym: BoundSymbol) -> tuple[list[str], list[str]] | None:
    """The names of all proxies that it takes and gives itself; None if there are collections among them."""
    found = bsym.__dict__.get(_NAMED)
    if found is not None:
        return found
    given, made = bsym.flat_proxy_args, bsym.flat_proxy_outs
    if not _COLLECTIONS.isdisjoint(map(type, given)) or not _COLLECTIONS.isdisjoint(map(type, made)):
        return None
    found = bsym.__dict__[_NAMED] = [p.name for p in given], [p.name for p in made]
    return found


_COLLECTIONS = frozenset({CollectionProxy, *CollectionProxy.__subclasses__()})


def _is_any_touched(bsyms: Sequence[BoundSymbol], names: set[str]) -> bool:
    """Whether anything that one of the symbols or its subsymbols names is among these."""
    for bsym in bsyms:
        named = _named(bsym)
        if named is None or not names.isdisjoint(named[0]) or not names.isdisjoint(named[1]):
            return True
        if bsym.subsymbols and _is_any_touched(bsym.subsymbols, names):
            return True
    return False


def _from_bsym_swap_proxies(
    self: BoundSymbol,
    swap_map: dict[Variable, Proxy],
    skip_inputs: bool = False,
    skip_output: bool = False,
    skip_subsymbols: bool = False,
) -> BoundSymbol:
    if not swap_map:
        return self
    named = _named(self)
    if named is None:
        return _original_swap(self, swap_map, skip_inputs, skip_output, skip_subsymbols)
    names = _names_in(swap_map)
    changes: dict[str, Any] = {}
    if not skip_inputs and not names.isdisjoint(named[0]):
        changes["args"], changes["kwargs"] = _swapped(self.args, swap_map, names), _swapped(self.kwargs, swap_map, names)
    if not skip_output and not names.isdisjoint(named[1]):
        changes["output"] = _swapped(self.output, swap_map, names)
    if skip_subsymbols or not self.subsymbols or not _is_any_touched(self.subsymbols, names):
        new = self.from_bsym(**changes)
        new.subsymbols = list(self.subsymbols)
        return new
    subsymbols = [s.from_bsym_swap_proxies(swap_map, skip_inputs, skip_output) for s in self.subsymbols]
    return self.from_bsym(subsymbols=subsymbols, **changes)


# What holds no proxy and is what optree takes for a leaf.
_LEAVES = frozenset({int, float, bool, str, complex, type(None), torch.dtype, torch.device, devices.Device})
_LEAVES |= {dtypes.bool_, dtypes.signedinteger, dtypes.unsignedinteger, dtypes.floating, dtypes.complexfloating}


def _swapped(tree: Any, swap_map: dict[Variable, Proxy], names: set[str]) -> Any:
    if isinstance(tree, Proxy):
        return _last(tree, swap_map) if tree.name in names else tree
    kind = type(tree)
    if kind in _LEAVES:
        return tree
    if kind is tuple:
        return tuple([_swapped(x, swap_map, names) for x in tree])
    if kind is list:
        return [_swapped(x, swap_map, names) for x in tree]
    if kind is dict:
        return {key: _swapped(x, swap_map, names) for key, x in tree.items()}
    leaves, spec = flatten_with_dataclass((tree,))  # in a tuple: alone, what it knows no leaf of would be an error
    return tree_unflatten([_last(x, swap_map) if isinstance(x, Proxy) else x for x in leaves], spec)[0]


def _last(proxy: Proxy, swap_map: dict[Variable, Proxy]) -> Proxy:
    """What stands for the proxy in the end."""
    seen = set()
    while (variable := Variable(proxy)) in swap_map and (following := swap_map[variable]) is not proxy:
        if proxy.name in seen:
            raise RuntimeError(f"Detected a cycle while swapping; the cycle includes {sorted(seen)}")
        seen.add(proxy.name)
        proxy = following
    return proxy


# -- dead code ----------------------------------------------------------------------------------------------------------


def dce(trace: TraceCtx, needed_proxies: set[Variable] | None = None) -> TraceCtx:
    """The trace without what nothing needs of it; `needed_proxies` are needed too, and all that are found are added there."""
    started = time.perf_counter_ns()
    producers = _producers(trace.bound_symbols)
    needed = {p.name for p in flatten(trace.output)[0] if isinstance(p, Proxy)}
    found = [] if needed_proxies is None else [v.proxy for v in needed_proxies]
    needed.update(p.name for p in found)
    kept = []
    for bsym in reversed(trace.bound_symbols):
        is_needed = has_tag(bsym, prims.OpTags.DONT_DCE)
        for p in bsym.flat_proxy_outs:
            if p.name in needed and ((made := producers[p.name]) is bsym or made == bsym):
                is_needed = True
                break
        if is_needed:
            _remove_noop_subsymbols(bsym)
            kept.append(bsym)
            found += bsym.flat_proxy_args
            needed.update([p.name for p in bsym.flat_proxy_args])
    if needed_proxies is not None:
        needed_proxies.update(variableify(p) for p in (*found, *flatten(trace.output)[0]) if isinstance(p, Proxy))
    new = from_trace(trace)
    new.bound_symbols = _without_repeated_numbers(reversed(kept))
    milliseconds = (time.perf_counter_ns() - started) // 1000000
    new.set_provenance(TraceProvenance(f"Dead Code Elimination (took {milliseconds} milliseconds)"))
    return new


def has_tag(bsym: BoundSymbol, tag: Any) -> bool:
    """Whether the symbol or one of its subsymbols has the tag."""
    of_symbol, own = bsym.sym.tags, bsym.tags  # most have none, and an empty set asks for a hash too
    if of_symbol and tag in of_symbol or own and tag in own:
        return True
    for inner in bsym.subsymbols:
        if has_tag(inner, tag):
            return True
    return False


def _remove_noop_subsymbols(bsym: BoundSymbol) -> None:
    kept = []
    for inner in bsym.subsymbols:
        if not inner.subsymbols and not inner.sym.is_prim:
            continue
        if not inner.flat_proxy_outs and not has_tag(bsym, prims.OpTags.DONT_DCE):
            continue
        _remove_noop_subsymbols(inner)
        kept.append(inner)
    bsym.subsymbols = kept


def _producers(bsyms: Iterable[BoundSymbol]) -> dict[str, BoundSymbol]:
    """For each name the first symbol that gives it and does not take it."""
    found: dict[str, BoundSymbol] = {}
    for bsym in bsyms:
        if bsym.sym.id in _MAKES_NOTHING:
            continue
        given: list[str] | None = None
        for p in bsym.flat_proxy_outs:
            if p.name not in found:
                given = [a.name for a in bsym.flat_proxy_args] if given is None else given
                if p.name not in given:
                    found[p.name] = bsym
    return found


def _without_repeated_numbers(bsyms: Iterable[BoundSymbol]) -> list[BoundSymbol]:
    """Numbers that are given again are constants; what gives nothing else is not there again."""
    seen: set[str] = set()

    def kept(x: Any) -> Any:
        if not isinstance(x, NumberProxy):
            return x
        if x.name in seen:
            return x.value
        seen.add(x.name)
        return x

    new = []
    for bsym in bsyms:
        results = bsym.flat_outs
        numbers = [x for x in results if isinstance(x, NumberProxy)]
        if len(numbers) == len(results) and all(x.name in seen for x in numbers):
            continue
        new.append(bsym.from_bsym(output=tree_map(kept, bsym.output)) if numbers else bsym.from_bsym())
    return new


# -- containers of proxies ----------------------------------------------------------------------------------------------

_original_safe_map_flat = trace_interpreter.safe_map_flat


def _safe_map_flat(f: Any, *args: Sequence) -> Any:
    if all(type(a) is list and len(a) == len(args[0]) and all(isinstance(x, TensorProxy) for x in a) for a in args):
        return tuple(map(f, *args))
    return _original_safe_map_flat(f, *args)


def _tree_map(f: Any, tree: Any, *rests: Any) -> Any:
    if rests:
        return tree_map(f, tree, *rests)
    if isinstance(tree, TensorProxy):
        return f(tree)
    if type(tree) is tuple and all(isinstance(x, TensorProxy) for x in tree):
        return tuple(map(f, tree))
    return tree_map(f, tree)


REPLACEMENTS = (
    Replacement(BoundSymbol, "from_bsym", from_bsym, "BoundSymbol.from_bsym, of which everything is found out again"),
    Replacement(BoundSymbol, "from_bsym_swap_proxies", _from_bsym_swap_proxies, "the same, of what the map has nothing of too"),
    *(
        Replacement(BoundSymbol, name, _Found(name, find), "the same, under a lock, and by a tree")
        for name, find in _FIND.items()
    ),
    Replacement(trace_interpreter, "safe_map_flat", _safe_map_flat, "safe_map_flat of lists of tensors"),
    *(
        Replacement(module, "dce", dce, "dce, which goes through maps of proxies")
        for module in (thunder, passes, autodiff, torch_compile)
    ),
    Replacement(trace_interpreter, "tree_map", _tree_map, "tree_map of one tensor or a tuple of tensors"),
)
