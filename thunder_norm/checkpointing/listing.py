"""The text of a program with its checkpointed regions as functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from thunder_norm.checkpointing.regions import is_region
from thunder_norm.functions.missing_gradients import has_gradient_of_ours
from thunder_norm.tracing.locations import location_of
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx


def with_functions(trace: TraceCtx) -> str:
    """The program as Python, each region a function of its name, defined before it is called."""
    with tracectx(trace):
        returned = next(b for b in trace.bound_symbols if b.sym.id is PrimIDs.RETURN)
        results = returned.args[0]["output"] if isinstance(returned.args[0], dict) else returned.args[0]
        body = [b for b in trace.bound_symbols if b.sym.id not in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN)]
        arguments = [p for p in trace.args if isinstance(p, Proxy)]
        return "\n".join([*_regions(body), *_function("computation", arguments, body, _listed(results))])


def _regions(bsyms: Sequence[BoundSymbol]) -> Iterator[str]:
    for bsym in bsyms:
        yield from _regions(bsym.subsymbols)
        if is_region(bsym):
            outs = ", ".join(p.name for p in bsym.flat_proxy_outs)
            yield from _function(bsym.sym.name, bsym.flat_proxy_args, bsym.subsymbols, outs)
            yield ""


def _function(name: str, arguments: Sequence[Proxy], bsyms: Sequence[BoundSymbol], results: str) -> Iterator[str]:
    yield f"def {name}({', '.join(p.name for p in arguments)}):"
    yield from (f'  # {p.name}: "{p.type_string()}"' for p in arguments if isinstance(p, TensorProxy))
    location = None
    for bsym in _as_written(bsyms):
        if location_of(bsym) not in (None, location):
            location = location_of(bsym)
            yield f"  # {location}"
        yield from bsym.python(indent=1, print_depth=1)
    yield f"  return {results}"


def _as_written(bsyms: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    """The operations, with those that have gradients of ours as what they consist of, which has a name in Python."""
    for bsym in bsyms:
        if has_gradient_of_ours(bsym):
            yield from _as_written(bsym.subsymbols)
        else:
            yield bsym


def _listed(results: Any) -> str:
    if isinstance(results, Proxy):
        return results.name
    return f"({''.join(f'{_listed(v)}, ' for v in results).rstrip()})" if isinstance(results, (tuple, list)) else repr(results)
