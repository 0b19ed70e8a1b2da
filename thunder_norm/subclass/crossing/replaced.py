"""In-place operations on plain tensors that torch's autograd follows, or that write wrappers into them: computed out of place.

The program's names mean the new value.  It goes on with the proxy it has; every operation on it is met by the interpreter, which takes what its tensor is by then.  Only what
the program returns is left to be put right.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils._pytree import tree_map

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.op_names import METADATA
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fakes import num_made
from thunder_norm.subclass.acquiring.integer_values import GIVEN_AGAIN
from thunder_norm.subclass.crossing.boundary_passes import Traces
from thunder_norm.subclass.recording.trace import UNFLATTEN, OperationId
from thunder_norm.tracing.recording import declare_arguments
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import from_trace
from thunder.core.update_aliases import _is_inplace_op

_NO_OPERATIONS = frozenset({prims.PrimIDs.UNPACK_TRIVIAL, UNFLATTEN.id, GIVEN_AGAIN.id})


def returning_current(acquisition: Acquisition, traces: Traces) -> Traces:
    """The traces with what tensors became in the place of what they were when the program got hold of them.

    Raises:
        UnsupportedOpError: an operation uses such a tensor unseen, and would take its old value.
    """
    fakes, stand_ins = acquisition.fakes, acquisition.stand_ins.values()
    if not (fakes.replaced or stand_ins):
        return traces
    prologue, computation, epilogue = traces
    since = {fakes.current(r.proxy).name: r.position for r in fakes.replaced.values()}
    since |= {fakes.current(s.proxy).name: s.position for s in stand_ins}
    are_written_too = {fakes.current(s.proxy).name for s in stand_ins if s.is_written_too}
    position = 0
    for bsym in computation.bound_symbols[:-1]:
        before, position = position, position + num_made([bsym])
        if isinstance(bsym.sym.id, OperationId) or bsym.sym.id in _NO_OPERATIONS or _asks_for_metadata(bsym):
            continue
        if bsym.sym.id == prims.PrimIDs.UPDATE_ALIASES:  # the same tensors by other names
            for old, new in zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True):
                since |= {new.name: since[old.name]} if old.name in since else {}
                are_written_too |= {new.name} if old.name in are_written_too else set()
            continue
        if _is_inplace_op(bsym) and bsym.flat_proxy_args[0].name in are_written_too:
            continue
        for p in bsym.flat_proxy_args:
            if before >= since.get(p.name, math.inf):
                line = bsym.source_positions.lineno if bsym.source_positions is not None else "?"
                raise UnsupportedOpError(
                    with_details(
                        f"{bsym.sym.name} on a tensor that was changed in place before",
                        at=f"{bsym.source_filename}:{line}",
                        why="the operation was not met, and would take the old value",
                        instead="use the out-of-place operation",
                    )
                )
    new = [(r.proxy, fakes.proxy_of(r.fake)) for r in fakes.replaced.values()] + [
        (s.proxy, acquisition.by_now(s.proxy)) for s in stand_ins
    ]
    swaps = {variableify(fakes.current(before)): fakes.current(after) for before, after in new}
    for bsym in computation.bound_symbols:
        if bsym.sym.id == prims.PrimIDs.UPDATE_ALIASES:
            pairs = zip(map(variableify, bsym.flat_proxy_args), map(variableify, bsym.flat_proxy_outs), strict=True)
            swaps |= {new: swaps[old] for old, new in pairs if old in swaps and new not in swaps}
    computation = from_trace(traces[1])
    *body, returned = traces[1].bound_symbols
    (results,) = returned.args
    given = {k: v for k, v in swaps.items() if k.proxy.name not in are_written_too}
    swapped = {
        name: tree_map(lambda p, by=by: _swapped(p, by), results[name]) for name, by in (("output", swaps), ("flat_args", given))
    }
    computation.bound_symbols = [*body, returned.from_bsym(args=({**results, **swapped},))]
    if epilogue is not None:
        epilogue = from_trace(traces[2])
        epilogue.args = tuple(swaps.get(variableify(p), p) for p in traces[2].args)
        epilogue.bound_symbols = [b.from_bsym_swap_proxies(swaps) for b in traces[2].bound_symbols]
        declare_arguments(epilogue, "epilogue")
    return prologue, computation, epilogue


def _asks_for_metadata(bsym: BoundSymbol) -> bool:
    """Whether it asks for what a write leaves as it is (``a.dim()``, as recurrent cells do)."""
    return bsym.sym.name in METADATA and not any(isinstance(p, TensorProxy) for p in bsym.flat_proxy_outs)


def _swapped(p: Any, swaps: dict[Any, Proxy]) -> Any:
    return swaps.get(variableify(p), p) if isinstance(p, Proxy) else p
