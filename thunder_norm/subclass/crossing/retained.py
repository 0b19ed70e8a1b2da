"""Results that keep their gradients (``y.retain_grad()``): the very tensors that a call returns are told to."""

from __future__ import annotations

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fakes import fake_of
from thunder_norm.subclass.crossing.boundary_passes import Traces, results_and_received
from thunder_norm.tracing.guarding.bindable import bindable
from thunder.core.trace import from_trace


def keeping_gradients(acquisition: Acquisition, traces: Traces) -> Traces:
    """Have the epilogue of a program that is acquired tell its results; see `hooks_of_backward.check_retained` for which it may."""
    prologue, computation, epilogue = traces
    if epilogue is None or not acquisition.retained:
        return traces
    fakes = acquisition.fakes.by_name()
    received = {id(fake): q for p, q in results_and_received(computation, epilogue) if (fake := fake_of(p, fakes)) is not None}
    retained = {q.name: q for fake, _ in acquisition.retained if (q := received.get(id(fake))) is not None}
    if not retained:
        return traces
    new = from_trace(epilogue)
    *before, returned = epilogue.bound_symbols
    new.bound_symbols = [*before, bindable("retain_grad", _retain)(*retained.values(), output=None), returned]
    return prologue, computation, new


def _retain(*results: torch.Tensor) -> None:
    for t in results:
        t.retain_grad()
