"""Readable names for what is inside wrappers.

An input wrapper x with inner tensors a and b gives ``x_a`` and ``x_b``; a result keeps Thunder's ``t7``, and those of its inner tensors
that have a role are called by it: ``n7`` where the acquisition says so of an attribute.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording.trace import FLATTEN, LEAF, UNFLATTEN
from thunder_norm.tracing.recording import declare_arguments
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.trace import TraceCtx, from_trace, tracectx


def with_readable_names(
    acquisition: Acquisition, computation: TraceCtx, epilogue: TraceCtx | None
) -> tuple[TraceCtx, TraceCtx | None]:
    """The two traces with inner tensors renamed; the prologue does not mention them yet."""
    taken = {p.name for b in computation.bound_symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)} | set(computation.names)
    kept = {p.name for p in computation.args if isinstance(p, Proxy)}
    renamed: dict[Variable, Proxy] = {}
    fresh = {prefix: itertools.count() for prefix in acquisition.roles.values()}
    for proxy, wanted in _wishes(acquisition, computation):
        variable = variableify(proxy)
        if variable in renamed or proxy.name in kept:
            continue
        names = (f"{wanted}{i}" for i in fresh[wanted]) if wanted in fresh else _numbered(wanted)
        name = next(n for n in names if n not in taken)
        taken.add(name)
        with tracectx(computation):
            renamed[variable] = proxy.replace(name=name)
    acquisition.fakes.readable_names = {variable.proxy.name: p for variable, p in renamed.items()}
    if not renamed:
        return computation, epilogue
    if epilogue is not None:
        epilogue = _swapped(epilogue, renamed)
        declare_arguments(epilogue, "epilogue")
    return _swapped(computation, renamed), epilogue


def _wishes(acquisition: Acquisition, trace: TraceCtx) -> Iterator[tuple[TensorProxy, str]]:
    for bsym in trace.bound_symbols:
        if bsym.sym.id == FLATTEN.id:
            (wrapper,) = bsym.args
            spec = acquisition.wrappers.spec_of(wrapper)
            for p, leaf in zip(bsym.output, spec.leaf_names(), strict=True):
                yield p, f"{wrapper.name}_{leaf}"
        elif bsym.sym.id == LEAF.id:
            base = "t_" + re.sub(r"\W", "_", bsym.args[0])
            for p, role in zip(bsym.output, acquisition.roles, strict=False):
                yield p, f"{base}_{role}"
        elif bsym.sym.id == UNFLATTEN.id and isinstance(bsym.output, SubclassProxy):
            # an operation in place may have given it a leaf more since
            for p, leaf in zip(bsym.args, WrapperSpec.of(bsym.output.fake).leaf_names(), strict=False):
                role = acquisition.roles.get(leaf)
                if role is not None:
                    yield p, role
        else:
            yield from acquisition.wished_names(bsym)


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{i}" for i in itertools.count(1))


def _swapped(trace: TraceCtx, renamed: dict[Variable, Proxy]) -> TraceCtx:
    new = from_trace(trace)
    new.args = tuple(renamed.get(variableify(p), p) if isinstance(p, Proxy) else p for p in trace.args)
    new.bound_symbols = [b.from_bsym_swap_proxies(renamed) for b in trace.bound_symbols]
    used = {p.name for b in new.bound_symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
    for p in renamed.values():
        if p.name in used and not new.has_name(p.name):
            new.add_name(p.name)
    return new
