"""Inputs that autograd has seen written into: after the call they have the history of what was written, as in eager mode.

Plain ones, and what is inside of wrappers, are copied as all inputs that are written (`write_back`).  For their history they are results
as well: the epilogue makes another wrapper of what was written, with its gradients, and hands its history on to the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import may_have_history, view_root
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.crossing.boundary_passes import Traces
from thunder_norm.subclass.crossing.write_back import is_recorded_plain
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.recording import declare_arguments
from thunder_norm.tracing.shared_memory.histories import with_history
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


def recorded_inputs(acquisition: Acquisition) -> list[SubclassProxy]:
    """The input wrappers that have another history than they were given with.

    Raises:
        UnsupportedOpError: one of them has views among the inputs, which would have it too.
    """
    inputs = acquisition.wrappers.inputs()
    recorded = [p for p in inputs if acquisition.autograd.has_recorded(p.fake)]
    roots = [id(view_root(acquisition.fakes.real_input(p))) for p in inputs] if recorded else []
    for p in recorded:
        if roots.count(id(view_root(acquisition.fakes.real_input(p)))) > 1:
            raise UnsupportedOpError(
                with_details(
                    f"{p.name}, a {type(p.fake).__name__}, is written into, and another input is a view of it, or of what it is a view of",
                    why="what is written has a history that the other one would get too",
                    instead="take the view inside the jitted function, or write under torch.no_grad()",
                )
            )
    return recorded


def returning_recorded(acquisition: Acquisition, traces: Traces) -> Traces:
    """Have the computation return the inputs with another history, and the prologue check that they may have one."""
    prologue, computation, epilogue = traces
    recorded = recorded_inputs(acquisition) if acquisition.autograd.is_running else []
    plain = [fake for fake in acquisition.fakes.written.values() if is_recorded_plain(acquisition, fake)]
    if not (recorded or plain):
        return traces
    if epilogue is None:
        raise UnsupportedOpError("a function without an epilogue cannot write into its inputs")
    *body, returned = computation.bound_symbols
    given = returned.args[0]
    in_trace = {id(p.fake): p for p in computation.args if isinstance(p, SubclassProxy)}
    missing: list[TensorProxy] = [in_trace[id(p.fake)] for p in recorded if all(p.fake is not _fake(q) for q in given["output"])]
    returned_names = {p.name for p in given["output"] if isinstance(p, TensorProxy)}
    values = [acquisition.fakes.current(p) for p in map(acquisition.fakes.proxy_of, plain) if p is not None]
    missing += [p for p in values if p.name not in returned_names]
    new = from_trace(computation)
    new.bound_symbols = [*body, returned.from_bsym(args=({**given, "output": (*given["output"], *missing)},))]
    new_epilogue = from_trace(epilogue)
    new_epilogue.args = (*epilogue.args, *missing)
    unpacks = [prims.unpack_trivial.bind(p, output=p, name=p.name) for p in missing]
    new_epilogue.bound_symbols = [*unpacks, *epilogue.bound_symbols]
    declare_arguments(new_epilogue, "epilogue")
    return _guarded(prologue, recorded), new, new_epilogue


def _fake(p: Any) -> torch.Tensor | None:
    return p.fake if isinstance(p, SubclassProxy) else None


def _guarded(prologue: TraceCtx, recorded: Sequence[SubclassProxy]) -> TraceCtx:
    """The prologue with a check that autograd may record a write: of what is no leaf, and no view of one, that requires grad."""
    inputs = [p for b in prologue.bound_symbols if any(_fake(p := b.output) is q.fake for q in recorded)]
    if not inputs:
        return prologue
    new = from_trace(prologue)
    with tracectx(new):
        check = bindable("check_may_have_history", _check_may_have_history)(*inputs, output=None)
    new.bound_symbols = [*prologue.bound_symbols[:-1], check, prologue.bound_symbols[-1]]
    return new


def _check_may_have_history(*wrappers: torch.Tensor) -> None:
    for x in wrappers:
        with torch._C.DisableTorchFunctionSubclass():
            if not may_have_history(x):
                raise GuardError("a leaf that requires grad is written into")


def handing_on(made: BoundSymbol, given: TensorProxy, result: TensorProxy) -> BoundSymbol:
    """The operation of the epilogue that gives the input `given` the history of a wrapper `made` there; it returns the input."""
    return bindable("with_history", with_history)(given, made.output, output=result)
