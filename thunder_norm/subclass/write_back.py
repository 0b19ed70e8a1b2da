"""In-place operations on the inner tensors of input wrappers: computed out of place, written back after the computation.

The computation stays a function of its inputs, which executors may reorder and fuse; the epilogue copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquisition import Acquisition
from thunder_norm.subclass.activity import propagate
from thunder_norm.subclass.boundary_passes import Traces, pass_through_epilogue, results_and_received
from thunder_norm.subclass.fallback import made_for
from thunder_norm.subclass.functional_forms import rewritten
from thunder_norm.subclass.protocol import WrapperSpec
from thunder_norm.subclass.trace import REBIND
from thunder_norm.tracing.bindable import bindable
from thunder_norm.tracing.locations import location_of
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


class Written(NamedTuple):
    """An inner tensor of an input, and the value it has at the end of the program."""

    target: TensorProxy
    value: TensorProxy


def written_inputs(acquisition: Acquisition, trace: TraceCtx, given: Mapping[str, Sequence[TensorProxy]]) -> list[Written]:
    """The inner tensors of inputs that the program wrote into; `given` are those of each input, as the program got them.

    Raises:
        UnsupportedOpError: an operation put another tensor in the place of one.
    """
    now = {bsym.args[0].name: bsym for bsym in trace.bound_symbols if bsym.sym.id == REBIND.id}
    fakes_of_all = acquisition.fakes
    found: dict[str, Written] = {}
    for before, fake, _ in fakes_of_all.replaced.values():
        if fakes_of_all.is_given(fake) and before is fakes_of_all.first_proxy_of(fake):
            target = fakes_of_all.current(before)
            found[target.name] = Written(target, fakes_of_all.current(fakes_of_all.proxy_of(fake)))
    for name, bsym in now.items():
        wrapper, *leaves = bsym.args
        fakes = WrapperSpec.of(wrapper.fake).leaves(wrapper.fake)
        for target, value, fake in zip(given.get(name, leaves), leaves, fakes, strict=True):
            if target is not value:
                if id(fake) not in acquisition.fakes.inner:
                    raise UnsupportedOpError(
                        f"an inner tensor of the input {name} ({wrapper.fake.__class__.__name__}) is replaced"
                    )
                found[target.name] = Written(target, value)
    return list(found.values())


def write_back(traces: Traces, written: list[Written]) -> Traces:
    """Let the epilogue copy what was computed into the inputs, and the prologue check that this changes nothing else."""
    prologue, computation, epilogue = traces
    if epilogue is None:
        raise UnsupportedOpError("a function without an epilogue cannot write into its inputs")
    if torch.is_grad_enabled():
        check_values(computation, written)
    *body, returned = prologue.bound_symbols
    targets = [w.target for w in written]
    others = [p for p in computation.args if isinstance(p, TensorProxy) and all(p.name != t.name for t in targets)]
    checked = from_trace(prologue)
    with tracectx(checked):
        check = bindable("check_unshared", lambda *tensors: check_unshared(len(targets), *tensors))
        checked.bound_symbols = [*body, check(*targets, *others, output=None), returned]
    received = {p.name: q for p, q in results_and_received(computation, epilogue)}
    values = [received.pop(w.value.name) for w in written]
    others = [p for p in received.values() if isinstance(p, TensorProxy)]
    return pass_through_epilogue(
        (checked, computation, epilogue),
        (*values, *others),
        targets,
        "copy_into_inputs",
        lambda *tensors: copy_back(len(written), *tensors),
    )


def check_values(trace: TraceCtx, written: Sequence[Written]) -> None:
    """Refuse values that are to be differentiated: a copy after the computation has no history.

    What was written without autograd needs none: the input keeps the history that it has.

    Raises:
        UnsupportedOpError: a written value depends differentiably on an input that requires grad.
    """
    active = {p.name for p in trace.args if isinstance(p, TensorProxy) and p.requires_grad}
    makers = {p.name: b for bsym in trace.bound_symbols for b in _innermost(bsym) for p in b.flat_proxy_outs}
    recorded = [value for target, value in written if not _is_unrecorded(value.name, target.name, makers)]
    for bsym in trace.bound_symbols:
        propagate(bsym, active)
        for value in recorded:
            if value.name in active and any(p.name == value.name for p in bsym.flat_proxy_outs):
                _refuse(bsym)


def _innermost(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    for sub in bsym.subsymbols:
        yield from _innermost(sub)
    if not bsym.subsymbols:
        yield bsym


def _is_unrecorded(value: str, target: str, makers: Mapping[str, BoundSymbol]) -> bool:
    """Whether `value` is what `target` became by writing without autograd alone."""
    made = makers.get(value)
    if value == target or made is None:
        return value == target
    origin = made_for(made.sym)
    return origin is not None and origin.function is rewritten and _is_unrecorded(made.args[0].name, target, makers)


def _refuse(bsym: BoundSymbol) -> None:
    raise UnsupportedOpError(
        with_details(
            f"in-place {bsym.sym.name} on an input, of a value that depends on a tensor that requires grad",
            at=location_of(bsym),
            why="what is written into an input has no derivative here",
            instead="use the out-of-place operation, detach the value, or run under torch.no_grad()",
        )
    )


def check_unshared(num_written: int, *tensors: torch.Tensor) -> None:
    """No other input may lie in the memory of the first `num_written` tensors: it would change with them.

    Raises:
        UnsupportedOpError: one does.
    """
    owners: dict[int, int] = {}
    for position, t in enumerate(tensors):
        address = t.untyped_storage().data_ptr()
        owner = owners.setdefault(address, position) if address else position
        if owner < min(num_written, position):
            raise UnsupportedOpError(
                f"an inner tensor of shape {list(tensors[owner].shape)} that the program writes into shares its memory with "
                f"another input of shape {list(t.shape)}; pass a clone of it"
            )


def copy_back(num_written: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copy the first `num_written` of `tensors`, the values, into the last, the targets; returns targets and what is between.

    What is between are the other results.  One that lies in the memory of a target is an older value of it, from an operation
    that changed nothing (``x * 1``): it becomes a tensor of its own.
    """
    targets = tensors[-num_written:]
    memory = {t.untyped_storage().data_ptr() for t in targets}

    def own(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in memory:
            return t
        with torch.enable_grad():  # the epilogue runs without; results keep their history
            return t.clone()

    (*values_and_others,) = map(own, tensors[:-num_written])
    for value, target in zip(values_and_others[:num_written], targets, strict=True):
        target.copy_(value)
    return (*targets, *values_and_others[num_written:])
