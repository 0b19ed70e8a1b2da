"""Flat programs, which the transforms work on: a trace that takes a tuple of proxies and returns a tuple of proxies.

What a program consists of, how one is recorded, and how it is run again inside the trace that is open: what the evaluators of all
transforms have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from thunder_norm.errors import TransformError, TransformLevelError, with_details
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.native.flattening import leaves_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.tags import has_any_tag
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import NumberProxy, Proxy, ProxyTag, TensorProxy, Variable, numberproxy, variableify
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx

# -- tensors and operations ---------------------------------------------------------------------------------------------


def flat_proxies(tree: Any) -> tuple[TensorProxy, ...]:
    """The tensor proxies in a tree, in order."""
    leaves = leaves_of(tree) if type(tree) is tuple or type(tree) is list else None
    return tuple([v for v in (tree_leaves(tree) if leaves is None else leaves) if isinstance(v, TensorProxy)])


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor that derivatives are defined for."""
    return isinstance(value, TensorProxy) and dtypes.is_inexact_dtype(value.dtype)


def is_like(p: TensorProxy, q: TensorProxy) -> bool:
    """Whether two proxies have the same shape, dtype and device."""
    return tuple(p.shape) == tuple(q.shape) and p.dtype == q.dtype and p.device == q.device


def is_complex(value: Any) -> bool:
    """Whether a value is a complex tensor."""
    return isinstance(value, TensorProxy) and dtypes.is_complex_dtype(value.dtype)


def has_complex(tree: Any) -> bool:
    """Whether there is a complex tensor among the leaves of a tree."""
    return any(map(is_complex, tree_leaves(tree)))


def described(p: TensorProxy) -> str:
    """``torch.float32, shape (2, 3)``, for messages."""
    return f"{dtypes.to_torch_dtype(p.dtype)}, shape {tuple(p.shape)}"


_BOOKKEEPING = frozenset(
    {
        prims.PrimIDs.UNPACK_TRIVIAL,
        prims.PrimIDs.UNPACK_SEQUENCE,
        prims.PrimIDs.UNPACK_EMPTY_DICT,
        prims.PrimIDs.UNPACK_KEY,
        prims.PrimIDs.RETURN,
        prims.PrimIDs.DEL,
        prims.PrimIDs.COMMENT,
    }
)


def is_bookkeeping(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol computes nothing: it unpacks, returns, or switches a mode whose effect its neighbours show."""
    tags = bsym.sym.tags or ()
    return bsym.sym.id in _BOOKKEEPING or prims.OpTags.CTX_MANAGER_ENTER_EXIT_OP in tags


def is_detached(bsym: BoundSymbol) -> bool:
    """Whether an operation stands where gradients are disabled, so that reverse mode takes its results for constants."""
    return any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags for p in bsym.flat_proxy_outs)


def detach(*trees: Any) -> None:
    """Have reverse mode take these results for constants."""
    for p in tree_flatten(trees)[0]:
        if isinstance(p, TensorProxy):
            p.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)


def apart(results: Iterable[Any], given: Iterable[Any]) -> list[Any]:
    """The results of an operation, each tensor among them its own: one that was given, or comes twice, has a cotangent for each place."""
    seen = {p.name for p in given if isinstance(p, TensorProxy)}
    own = []
    for p in results:
        is_seen = isinstance(p, TensorProxy) and p.name in seen
        own.append(prims.shallow_copy(p) if is_seen else p)
        if isinstance(p, TensorProxy):
            seen.add(p.name)
    return own


# -- programs -----------------------------------------------------------------------------------------------------------


def outputs_of(trace: TraceCtx) -> tuple[Any, ...]:
    """What a flat program returns."""
    return tuple(trace.bound_symbols[-1].args[0])


def operations_of(trace: TraceCtx) -> list[BoundSymbol]:
    """What a flat program computes: its bound symbols without the return."""
    return list(trace.bound_symbols[:-1])


def reaches(trace: TraceCtx, source: Proxy, outs: Iterable[Any]) -> bool:
    """Whether any of `outs` is computed from `source`, by the steps that the operations of the program consist of."""
    found = {source.name}

    def follow(bsyms: Iterable[BoundSymbol]) -> None:
        for bsym in bsyms:
            if bsym.subsymbols:
                follow(bsym.subsymbols)
            elif any(p.name in found for p in bsym.flat_proxy_args):
                found.update(p.name for p in bsym.flat_proxy_outs)

    follow(operations_of(trace))
    return any(isinstance(v, Proxy) and v.name in found for v in outs)


def anew(proxies: Iterable[Any]) -> list[Any]:
    """Proxies like these, of tensors or of numbers of tensors, for the arguments of a program."""
    return [
        TensorProxy(like=p, history=None) if isinstance(p, TensorProxy) else numberproxy(p.python_type, None) for p in proxies
    ]


def flat_program(args: Sequence[Proxy], bsyms: Sequence[BoundSymbol], outs: Sequence[Any]) -> TraceCtx:
    """A flat program made of these parts."""
    trace = TraceCtx()
    trace.args = tuple(args)
    trace.bound_symbols = list(bsyms)
    for b in _with_parts(bsyms):  # parts become operations of their own where one is taken apart
        trace.names.update(p.name for p in b.flat_proxy_outs)
    trace.names.update(p.name for p in args if isinstance(p, Proxy))
    trace.bound_symbols.append(prims.python_return.bind(tuple(outs), output=()))
    return trace


def with_a_dimension_between(outs: Iterable[Any]) -> tuple[list[BoundSymbol], list[Any], list[BoundSymbol]]:
    """Results of operations with one dimension in place of none, for the trace that is open: nobody asks for a cotangent of what is not used.

    Of a result whose cotangent a rule asks for and that nobody differentiates Thunder writes ``zeros(*shape)``: ``torch.zeros()``, an error.

    Returns:
        What gives differentiable results that dimension, the results then, and what takes it away, under the names that they had.
    """
    outs, trace = list(outs), get_tracectx()
    with langctx(Languages.TORCH):
        with scope(trace) as made:
            between = [ltorch.reshape(p, (1,)) if is_differentiable(p) and p.ndim == 0 else p for p in outs]
        with scope(trace) as taken_away:
            named = {variableify(ltorch.reshape(b, ())): p for b, p in zip(between, outs, strict=True) if b is not p}
    return made, between, [b.from_bsym_swap_proxies(named) for b in taken_away]


def _with_parts(bsyms: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    for b in bsyms:
        yield b
        yield from _with_parts(b.subsymbols)


def program_of(write: Callable[..., Sequence[Any]], args: Sequence[TensorProxy], *, hoists: bool = True) -> TraceCtx:
    """What `write`, called with `args`, writes, as a flat program: it takes `args` and everything else that is used.

    `write` returns proxies or None; the program returns the proxies.  With `hoists`, what does not depend on `args` is no part of the
    program: it is written into the open trace, once.
    """
    trace = get_tracectx()
    with scope(trace) as bsyms:
        outs = [p for p in write(*args) if isinstance(p, Proxy)]
    dependent = {p.name for p in args}
    inside = []
    for b in bsyms:
        if not hoists or any(p.name in dependent for p in b.flat_proxy_args):
            dependent.update(p.name for p in b.flat_proxy_outs)
            inside.append(b)
        else:
            trace.peek_scope().append(b)
    made = {p.name for b in inside for p in b.flat_proxy_outs} | {p.name for p in args}
    needed = without_dead_code(inside, {p.name for p in outs})
    captured = {p.name: p for p in (*(p for b in needed for p in b.flat_proxy_args), *outs) if p.name not in made}
    return flat_program([*args, *captured.values()], needed, outs)


def without_dead_code(bsyms: Sequence[BoundSymbol], needed: set[str]) -> list[BoundSymbol]:
    """The operations that make something named in `needed`, or something those use; and draws, which change what is drawn later."""
    needed = set(needed)
    kept = []
    for b in reversed(bsyms):
        is_used = any(p.name in needed for p in b.flat_proxy_outs)
        if is_used or has_any_tag(b, {prims.OpTags.DONT_DCE}) or draws_numbers(b):
            needed.update(p.name for p in b.flat_proxy_args)
            kept.append(b)
    return kept[::-1]


# -- running one again --------------------------------------------------------------------------------------------------


class Values:
    """The values that the proxies of a program stand for in the trace that is open.

    With `renew` results get new proxies, as they must in another trace than the program's own, or the second time; without, they
    keep those of the program, and with them the names that the user gave them.

    Raises TransformLevelError for a tensor that the program neither takes nor makes.
    """

    def __init__(self, *, renew: bool = True) -> None:
        self.renew = renew
        self._values: dict[str, Any] = {}

    def __contains__(self, proxy: Proxy) -> bool:
        return proxy.name in self._values

    def __setitem__(self, proxy: Proxy, value: Any) -> None:
        self._values[proxy.name] = value

    def get(self, proxy: Any) -> Any:
        """The value of a proxy, None if it has none; anything else stands for itself."""
        return self._values.get(proxy.name) if isinstance(proxy, Proxy) else proxy

    def read(self, tree: Any) -> Any:
        """`tree` with every proxy replaced by its value."""
        return tree_map(self._read, tree)

    def _read(self, leaf: Any) -> Any:
        if not isinstance(leaf, Proxy) or (leaf.name not in self._values and isinstance(leaf, NumberProxy)):
            return leaf
        if leaf.name not in self._values and isinstance(leaf, TensorProxy):
            raise TransformLevelError(
                with_details(
                    f"the tensor {leaf.name} belongs to another function transform than the one that uses it",
                    shape=tuple(leaf.shape),
                    why="a value must not outlive the call of the transformed function that made it, except as its result",
                )
            )
        return self._values.get(leaf.name, leaf)

    def bind(self, bsym: BoundSymbol, made: Any, written: list[BoundSymbol]) -> dict[Variable, Proxy]:
        """Take `made`, by what is `written` for it, for the results of `bsym`, and write that into the open trace.

        Returns which proxies of what was written were replaced by those of the program.
        """
        outputs, made = tree_flatten(bsym.output)[0], tree_flatten(made)[0]
        if len(outputs) != len(made):
            raise TransformError(
                with_details(
                    f"a rule for {bsym.sym.id} returned {len(made)} results, the operation returns {len(outputs)}",
                    at=location_of(bsym),
                )
            )
        kept: dict[Variable, Proxy] = {}
        new = {p.name for b in written for p in b.flat_proxy_outs}
        for p, v in zip(outputs, made, strict=True):
            if isinstance(p, TensorProxy) and isinstance(v, TensorProxy):
                if not self.renew and v.name in new and is_like(p, v):
                    kept.setdefault(variableify(v), p)
                    v = kept[variableify(v)]
                self._values[p.name] = v
            elif isinstance(p, Proxy):
                self._values[p.name] = v
        get_tracectx().peek_scope().extend(b.from_bsym_swap_proxies(kept) for b in written)
        return kept

    def copy(self, bsym: BoundSymbol) -> None:
        """Do an operation again, as it is, on the values of its arguments.

        The bound symbol is copied: its meta function, which may be slow or hold on to what it saw first, is not run again.
        """
        get_tracectx().peek_scope().append(self._copied(bsym))

    def _copied(self, bsym: BoundSymbol) -> BoundSymbol:
        args, kwargs = self.read(bsym.args), self.read(bsym.kwargs)
        subsymbols = [self._copied(sub) for sub in bsym.subsymbols]
        for p in bsym.flat_proxy_outs:
            if p.name not in self._values:
                self._values[p.name] = renewed(p) if self.renew else p
        return bsym.from_bsym(args=args, kwargs=kwargs, output=self.read(bsym.output), subsymbols=subsymbols)


_AUTOMATIC_NAME = re.compile(r"[a-z]+\d+(_\d+)?")  # what Thunder calls a proxy that the program gave no name


def renewed(proxy: Proxy) -> Proxy:
    """A new proxy with the same metadata, and the same name where it is free and was given by the program."""
    name = None if _AUTOMATIC_NAME.fullmatch(proxy.name) else proxy.name
    if name is not None and get_tracectx().has_name(name):
        name = None
    new = proxy.replace(name=name, history=None)
    new.tags.update(proxy.tags)
    return new


def replayed(program: TraceCtx, actual: Sequence[Any]) -> tuple[Any, ...]:
    """Write a flat program into the open trace once more, with new proxies."""
    values = Values()
    for p, v in zip(program.args, actual, strict=True):
        values[p] = v
    for b in operations_of(program):
        values.copy(b)
    return values.read(outputs_of(program))


def renewed_program(program: TraceCtx) -> TraceCtx:
    """The same flat program with proxies of its own: a program is written once."""
    return program_of(lambda *args: replayed(program, args), anew(program.args), hoists=False)
