"""Between which numbers the entries of plain tensors are in a trace, by the operations of Thunder's that made them.

A trace serves other values of its inputs, so nothing is read from them: ``(x > 0).float()``, ``x.new_zeros(n)`` and ``softmax(x)`` of a
plain x have the ranges that the operations give, by the rules that normed tensors have (`core/ranges.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from thunder_norm.core.known_ranges import range_by_rule
from thunder_norm.core.ranges import Range
from thunder_norm.core.registry import NormedOp, find_op
from thunder_norm.op_names import op_key
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.writes import Writes
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
        self._num_followed = 0

    def of(self, t: torch.Tensor) -> Range | None:
        """Between which numbers the entries of a plain tensor are; None where that is not known, or where it was written into."""
        if t.dtype is torch.bool:
            return _BETWEEN_0_AND_1
        proxy = self._acquisition.fakes.proxy_of(t)
        if proxy is None or self._writes.into(t):
            return None
        for name in self._unknown_before(proxy.name):
            self._found[name] = self._by_rule(self._made_by[name], name)
        return self._found.get(proxy.name)

    def _unknown_before(self, name: str) -> Iterator[str]:
        """What a tensor was made from, and itself at last, as far as operations made it and it has no range yet: each after its sources."""
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        for bsym in bsyms[self._num_followed :]:
            if not _is_inplace_op(bsym):
                self._made_by |= {p.name: bsym for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)}
        self._num_followed = len(bsyms)
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
    if not isinstance(symbol_id, str):
        return None
    found: Any = torch
    for name in symbol_id.removeprefix("torch.").split("."):
        found = getattr(found, name, None)
    op = find_op(op_key(found)) if callable(found) else None
    return None if op is None or op.range_rule is None else op
