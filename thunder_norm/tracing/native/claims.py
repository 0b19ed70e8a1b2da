"""Executors claim operations: each that one executes becomes its symbol with the results it has, which are not inferred again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from thunder_norm.tracing.native import bound_symbols
from thunder_norm.tracing.native.bound_symbols import has_tag
from thunder_norm.tracing.native.flattening import flatten
from thunder_norm.tracing.replacement import Replacement
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import DistParallelType, Proxy, TensorProxy, Variable
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.utils import sequencify
from thunder.distributed.prims import PrimIDs as DistributedPrimIDs
from thunder.executors import passes
from thunder.extend import Executor, FusionExecutor, OperatorExecutor, get_always_executors

_original_for_execution = passes.transform_for_execution
_original = passes._transform_for_operator_executor_execution
_TRIAL = "apply_transforms_and_build_cache_entry"


def _transform_for_operator_executor_execution(trace: TraceCtx, executors_list: Sequence[Executor]) -> TraceCtx:
    if not _is_known(trace):
        return _original(trace, executors_list)
    # thunder/__init__.py:565 looks for collectives that wait in what comes out, and drops it
    if sys._getframe(1).f_code.co_name == _TRIAL and not any(map(_is_collective, trace.bound_symbols)):
        return trace
    started = time.perf_counter_ns()
    new = _Claims(trace, executors_list).claimed()
    milliseconds = (time.perf_counter_ns() - started) // 1000000
    new.set_provenance(TraceProvenance(f"Transform for operator executor execution (took {milliseconds} milliseconds)"))
    return new


def _is_known(trace: TraceCtx) -> bool:
    """Whether shapes and dtypes are what was inferred: nobody but us changed the trace, and nothing is sharded."""
    compiled = get_compile_data()
    return (
        compiled is not None
        and all(type(t).__module__.partition(".")[0] == "thunder_norm" for t in compiled.transforms)
        and not getattr(compiled.fn, "use_ddp", False)
        and not any(isinstance(p, TensorProxy) and p.distparallel_type is not DistParallelType.NONE for p in trace.args or ())
    )


def _is_collective(bsym: BoundSymbol) -> bool:
    return isinstance(bsym.sym.id, DistributedPrimIDs) or any(map(_is_collective, bsym.subsymbols))


class _Claims:
    """One pass over a trace, as Thunder's, but that results of what an executor claims keep their names."""

    def __init__(self, trace: TraceCtx, executors: Sequence[Executor]):
        self.trace, self.executors = trace, executors
        self.new = from_trace(trace)
        self.swaps: dict[Variable, Proxy] = {}

    def claimed(self) -> TraceCtx:
        """The new trace."""
        with tracectx(self.new):
            waiting = list(reversed(self.trace.bound_symbols))
            while waiting:
                waiting += reversed(self._claim(waiting.pop()))
        return self.new

    def _claim(self, bsym: BoundSymbol) -> Sequence[BoundSymbol]:
        """Add what is executed for it; or give what it consists of, to be claimed in its stead."""
        if bsym.sym.python_impl is not None or bsym.sym.id == prims.PrimIDs.GET_GRAD:
            self._add(bsym, bsym)
            return ()
        for ex in self.executors:
            is_operator = isinstance(ex, OperatorExecutor)
            if not (ex.can_execute(bsym) if is_operator else isinstance(ex, FusionExecutor) and ex.can_fuse(bsym)):
                continue
            transform = ex.get_execution_transform(bsym)
            if transform is not None:
                self._run(transform, bsym)
            elif not is_operator:
                self._add(bsym, bsym)
            elif _is_inferred(symbol := ex.implmap[bsym.sym.id].symbol, bsym):
                subsymbols = [] if symbol.is_prim else [bsym]  # its meta function is the operation
                made = symbol.bind(*bsym.args, output=bsym.output, subsymbols=subsymbols, **bsym.kwargs)
                made.tags.update(bsym.tags)
                self._add(made, bsym)
            else:
                self._run(symbol, bsym)
            return ()
        if bsym.sym.executor is not None:
            self._add(bsym, bsym)
            return ()
        if bsym.sym.is_prim:
            raise RuntimeError(f"Failed to find an executor for bound symbol {bsym=}")
        if has_tag(bsym, BoundSymbolTag.BACKWARD):
            for s in bsym.subsymbols:
                s.tags.add(BoundSymbolTag.BACKWARD)
        return bsym.subsymbols

    def _add(self, made: BoundSymbol, bsym: BoundSymbol) -> None:
        new = made.from_bsym_swap_proxies(self.swaps)
        if new is made:
            new = made.from_bsym(source_filename=bsym.source_filename, source_positions=bsym.source_positions)
        else:
            new.source_filename, new.source_positions = bsym.source_filename, bsym.source_positions
        self.new.bound_symbols.append(new)

    def _run(self, function: Any, bsym: BoundSymbol) -> None:
        """Add what the function records; what the operation gave is called as there from here on."""
        self.new.push_scope([])
        result = function(*bsym.args, **bsym.kwargs)
        recorded = self.new.pop_scope()
        olds, news = (flatten(list(sequencify(x)))[0] for x in (bsym.output, result))
        if len(olds) != len(news):
            raise RuntimeError(f"{bsym.sym.name} has {len(olds)} results, and what executes it {len(news)}")
        for old, new in zip(olds, news, strict=True):
            if isinstance(old, Proxy) and isinstance(new, Proxy) and old.name != new.name:
                self.swaps[Variable(old)] = new
                new.tags.update(old.tags)
        for made in recorded:
            made.tags.update(bsym.tags)
            self._add(made, bsym)


def _is_inferred(symbol: Symbol, bsym: BoundSymbol) -> bool:
    """Whether the symbol of an executor would infer what is known of the operation: by its meta function, or of tensors alone."""
    has_tensors_only = all(x is None or isinstance(x, TensorProxy) for x in bsym.flat_outs)
    return has_tensors_only and (symbol.meta is bsym.sym or symbol.is_prim)


# -- the passes around it -----------------------------------------------------------------------------------------------


def _transform_for_execution(trace: TraceCtx, executors_list: Sequence[Executor]) -> TraceCtx:
    if not _is_known(trace):
        return _original_for_execution(trace, executors_list)
    started = time.perf_counter_ns()
    new = bound_symbols.dce(trace)
    new = bound_symbols.dce(_transform_for_operator_executor_execution(new, executors_list))
    for ex in executors_list:
        if isinstance(ex, FusionExecutor):
            new = ex.fusion_pass(new)
    new = _transform_for_operator_executor_execution(new, get_always_executors())
    milliseconds = (time.perf_counter_ns() - started) // 1000000
    new.set_provenance(TraceProvenance(f"Transform for execution (took {milliseconds} milliseconds)"))
    return new


REPLACEMENTS = (
    Replacement(
        passes,
        "_transform_for_operator_executor_execution",
        _transform_for_operator_executor_execution,
        "the same, which runs the meta function of each claimed operation",
    ),
    Replacement(passes, "transform_for_execution", _transform_for_execution, "the same, with a second dce between two"),
)
