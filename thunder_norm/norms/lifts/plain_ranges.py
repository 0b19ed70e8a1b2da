"""Between which numbers the entries of plain tensors are in a trace, by the operations of Thunder's that made them.

A trace serves other values of its inputs, so nothing is read from them: ``(x > 0).float()``, ``x.new_zeros(n)`` and ``softmax(x)`` of a
plain x have the ranges that the operations give, by the rules that normed tensors have (`core/ranges.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.core import in_place
from thunder_norm.core.known_ranges import range_by_rule
from thunder_norm.core.ranges import Range, union
from thunder_norm.core.registry import NormedOp, find_op
from thunder_norm.op_names import op_key
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.writes import Writes
from thunder_norm.tracing.shared_memory.views import RETURNING_SELF, makes_view
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op

_BETWEEN_0_AND_1 = Range(0.0, 1.0)


class PlainRanges:
    """The ranges of the plain tensors of one acquisition, each found once."""

    def __init__(self, acquisition: Acquisition, writes: Writes):
        self._acquisition = acquisition
        self._writes = writes
        self._made_by: dict[str, BoundSymbol] = {}
        self._found: dict[str, Range | None] = {}
        self._written: dict[
            str, tuple[int, Range | None]
        ] = {}  # by what lies in the memory first: after how many writes, and what is there
        self._in_memory_of: dict[str, TensorProxy] = {}  # what a view is of, or what was written into
        self._num_followed = 0

    def of(self, t: torch.Tensor) -> Range | None:
        """Between which numbers the entries of a plain tensor are; None where that is not known."""
        if t.dtype is torch.bool:
            return _BETWEEN_0_AND_1
        proxy = self._acquisition.fakes.proxy_of(t)
        if proxy is None:
            return None
        return self._after_writes(t, proxy) if self._writes.into(t) else self._as_made(proxy)

    def _after_writes(self, t: torch.Tensor, proxy: TensorProxy) -> Range | None:
        """What the first tensor in that memory was made as, and whatever was written since: those of a part are in it too."""
        operations = self._writes.operations(t)
        first = self._first_in_memory(proxy)
        before = self._written.get(first.name)
        if before is not None and before[0] == len(operations):
            return before[1]
        targets = [p for b in operations if isinstance(p := b.flat_proxy_args[0], TensorProxy)]
        are_alike = all(p.dtype == first.dtype for p in (proxy, *targets)) and t.dtype.is_floating_point
        if len(targets) < len(operations) or not are_alike or any(self._first_in_memory(p) is not first for p in targets):
            return None
        found = self._as_made(first)
        for bsym in operations:
            self._written[first.name] = len(operations), found  # what a write reads of that memory
            new = None if found is None else self._by_write(bsym)
            found = None if new is None or found is None else union([found, new.rounded(t.dtype)])
        self._written[first.name] = len(operations), found
        return found

    def _first_in_memory(self, proxy: TensorProxy) -> TensorProxy:
        """What a tensor is a view of, or the result of a write into."""
        self._follow()
        while (before := self._in_memory_of.get(proxy.name)) is not None:
            proxy = before
        return proxy

    def _by_write(self, bsym: BoundSymbol) -> Range | None:
        """Between which numbers entries are that an operation in place has written."""
        args, kwargs = tree_map(self._given, (bsym.args, bsym.kwargs))
        if bsym.sym.id == "setitem_":
            return self._of_value(args[2])
        func = _function(bsym.sym.id)
        if func is torch.Tensor.copy_ or func is torch.Tensor.fill_:
            return self._of_value(args[1])
        if func is torch.Tensor.zero_:
            return Range(0.0, 0.0)
        out_of_place = None if func is None else in_place.functional(func)
        op = None if out_of_place is None else find_op(op_key(out_of_place))
        return None if op is None or op.range_rule is None else range_by_rule(op, args, kwargs)

    def _of_value(self, value: Any) -> Range | None:
        if isinstance(value, torch.Tensor):
            return self.of(value)
        return Range(float(value), float(value)) if isinstance(value, int | float) else None

    def _as_made(self, proxy: TensorProxy) -> Range | None:
        """Between which numbers the entries are of what an operation has made."""
        for name in self._unknown_before(proxy.name):
            self._found[name] = self._by_rule(self._made_by[name], name)
        return self._found.get(proxy.name)

    def _unknown_before(self, name: str) -> Iterator[str]:
        """What a tensor was made from, and itself at last, as far as operations made it and it has no range yet: each after its sources."""
        self._follow()
        stack, seen = [name], set()
        while stack:
            current = stack[-1]
            bsym = self._made_by.get(current)
            while bsym is not None and current not in self._found and _operation(bsym.sym.id) is None:
                bsym = self._step_to(current, bsym)
            if current in self._found or bsym is None:
                stack.pop()
            elif current in seen:
                stack.pop()
                yield current
            else:
                seen.add(current)
                stack += [p.name for p in bsym.flat_proxy_args if isinstance(p, TensorProxy) and p.name not in seen]

    def _follow(self) -> None:
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        for bsym in bsyms[self._num_followed :]:
            results = {p.name: bsym for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)}
            is_write = bool(_is_inplace_op(bsym))
            if not is_write:
                self._made_by |= results
            first = bsym.flat_proxy_args[0] if bsym.flat_proxy_args else None
            is_in_memory = is_write or makes_view(bsym) or bsym.sym.name in RETURNING_SELF
            if isinstance(first, TensorProxy) and is_in_memory and first.name not in results:
                self._in_memory_of |= dict.fromkeys(results, first)
        self._num_followed = len(bsyms)

    def _step_to(self, name: str, bsym: BoundSymbol) -> BoundSymbol | None:
        """The operation that made a tensor within another that has no rule: of ``mask.to(x)`` with a normed x, what it does to the mask."""
        within = {
            p.name: b for b in bsym.subsymbols if not _is_inplace_op(b) for p in b.flat_proxy_outs if isinstance(p, TensorProxy)
        }
        self._made_by |= within
        return within.get(name)

    def _by_rule(self, bsym: BoundSymbol, name: str) -> Range | None:
        """What the operation's rule says of its result, or of those of several that are no indices."""
        result = next(p for p in bsym.flat_proxy_outs if p.name == name)
        op, dtype = _operation(bsym.sym.id), self._acquisition.fake_of(result).dtype
        if op is None or not dtype.is_floating_point and len(bsym.flat_proxy_outs) > 1:
            return None
        args, kwargs = tree_map(self._given, (bsym.args, bsym.kwargs))
        if bsym.sym.id == "torch.Tensor.view" and args[0].dtype != dtype:  # other numbers, of the same bits
            return None
        found = range_by_rule(op, args, kwargs)
        if found is None or not dtype.is_floating_point:
            return found if found is not None and _holds(dtype, found) else None
        return found.rounded(dtype)

    def _given(self, value: Any) -> Any:
        if isinstance(value, TensorProxy):
            return self._acquisition.fake_of(value)
        return value.value if isinstance(value, NumberProxy) else value


def _holds(dtype: torch.dtype, found: Range) -> bool:
    """Whether integers of a dtype can be all numbers of a range; what is larger than the largest of them comes out as any of them."""
    if dtype is torch.bool or dtype.is_complex:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= found.low and found.high <= limits.max


@functools.cache
def _operation(symbol_id: Any) -> NormedOp | None:
    """The operation of torch that one of Thunder's is named after, if it has a rule for ranges."""
    if symbol_id is PrimIDs.CONVERT_ELEMENT_TYPE:  # what ``x.float()`` and ``x.to(dtype)`` are written as
        return find_op(op_key(torch.Tensor.to))
    found = _function(symbol_id)
    op = None if found is None else find_op(op_key(found))
    return None if op is None or op.range_rule is None else op


def _function(symbol_id: Any) -> Callable | None:
    """The function of torch's that an operation of Thunder's is named after."""
    if not isinstance(symbol_id, str):
        return None
    found: Any = torch
    for name in symbol_id.removeprefix("torch.").split("."):
        found = getattr(found, name, None)
    return found if callable(found) else None
