"""In-place operations on the inner tensors of input wrappers: computed out of place, written back after the computation.

The computation stays a function of its inputs, which executors may reorder and fuse; the epilogue copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.aliasing import Place, lies_in, place
from thunder_norm.subclass.acquiring.autograd import may_have_history
from thunder_norm.subclass.acquiring.fallback import made_for
from thunder_norm.subclass.acquiring.functional_forms import rewritten
from thunder_norm.subclass.backward.differentiation import Joint
from thunder_norm.subclass.classes.jagged import is_jagged_class
from thunder_norm.subclass.classes.protocol import WrapperSpec, is_equal
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.crossing.boundary_passes import COPIED, Traces, pass_through_epilogue, results_and_received
from thunder_norm.subclass.recording.trace import REBIND
from thunder_norm.tracing.activity import propagate
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.shared_memory.aliases import share_elements, storage_address
from thunder_norm.tracing.shared_memory.histories import with_history
from thunder_norm.wrapper_classes import flattened, is_wrapper
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


class Written(NamedTuple):
    """An inner tensor of an input, and the value it has at the end of the program."""

    target: TensorProxy
    value: TensorProxy


def written_inputs(acquisition: Acquisition, trace: TraceCtx, given: Mapping[str, Sequence[TensorProxy]]) -> list[Written]:
    """The inner tensors of inputs that the program wrote into; `given` are those of each input, as the program got them.

    Raises:
        UnsupportedOpError: an operation put another tensor in the place of one, or changed what a class keeps besides.
    """
    _check_structures(acquisition, trace)
    now = {bsym.args[0].name: bsym for bsym in trace.bound_symbols if bsym.sym.id == REBIND.id}
    fakes_of_all = acquisition.fakes
    found: dict[str, Written] = {}
    for before, fake, _ in fakes_of_all.replaced.values():
        if fakes_of_all.is_given(fake) and before is fakes_of_all.first_proxy_of(fake):
            target = fakes_of_all.current(before)
            found[target.name] = Written(target, fakes_of_all.current(fakes_of_all.proxy_of(fake)))
    for name, bsym in now.items():
        wrapper, *leaves = bsym.args
        if name not in given:
            continue
        fakes = acquisition.wrappers.given[id(wrapper.fake)]
        if [*map(id, fakes)] != [*map(id, acquisition.wrappers.structures[id(wrapper.fake)][1])]:  # others are inside by now
            leaves = [fakes_of_all.current(fakes_of_all.proxy_of(fake)) for fake in fakes]
        found |= {
            target.name: Written(target, value) for target, value in zip(given[name], leaves, strict=True) if target is not value
        }
    return list(found.values())


def _check_structures(acquisition: Acquisition, trace: TraceCtx) -> None:
    """Refuse inputs of which an operation has changed more than the values inside: those of the call would keep the rest as it was."""
    for proxy in trace.args:
        if not isinstance(proxy, SubclassProxy) or is_jagged_class(type(proxy.fake)):  # nested tensors remember lengths
            continue
        spec = WrapperSpec.of(proxy.fake)
        (before, leaves), now = acquisition.wrappers.structures[id(proxy.fake)], spec.contexts
        if any(t is not leaf for t, leaf in zip(spec.leaves(proxy.fake), leaves, strict=False)):
            raise UnsupportedOpError(
                with_details(
                    f"an inner tensor of the input {proxy.name} ({type(proxy.fake).__name__}) is replaced by an operation",
                    why="the one of the call would keep what it has",
                    instead="use operations that return a new instance",
                )
            )
        if not is_equal(before, now):
            raise UnsupportedOpError(
                with_details(
                    f"the context of the input {proxy.name} ({type(proxy.fake).__name__}) is changed by an operation",
                    why="the one of the call would keep what it has: an epilogue writes into its tensors alone",
                    before=before,
                    after=now,
                    instead="use operations that return a new instance",
                )
            )


class Given(NamedTuple):
    """What a program is given."""

    tensors: Mapping[str, torch.Tensor]  # those of the call at hand that are arguments of the computation, by name
    wrappers: Mapping[str, SubclassProxy]  # by the names of their inner tensors


def is_recorded_plain(acquisition: Acquisition, fake: torch.Tensor) -> bool:
    """Whether a fake stands for a plain input, or one inside of a wrapper, that torch's autograd knows another history of since."""
    autograd = acquisition.autograd
    return autograd.is_running and acquisition.fakes.is_given(fake) and autograd.has_recorded(fake)


def write_back(acquisition: Acquisition, traces: Traces, written: list[Written], given: Given, joint: Joint | None) -> Traces:
    """Let the epilogue copy what was computed into the inputs, and the prologue check that they share memory as they do now.

    Plain inputs get the history of what is written into them, if autograd records it.

    Raises:
        UnsupportedOpError: what is written changes an input that the program did not know to be in the same memory, or autograd records
            what is written into what is inside of a wrapper, or into a leaf that requires grad.
    """
    prologue, computation, epilogue = traces
    if epilogue is None:
        raise UnsupportedOpError("a function without an epilogue cannot write into its inputs")
    is_recorded = (
        _recorded(acquisition, computation, written, given, joint) if torch.is_grad_enabled() else [False] * len(written)
    )
    recorded = [w for w, is_one in zip(written, is_recorded, strict=True) if is_one]
    computation = _of_copies(computation, recorded, is_differentiated=joint is None)
    *body, returned = prologue.bound_symbols
    targets = [w.target for w in written]
    others = [p for p in computation.args if isinstance(p, TensorProxy) and p.name in given.tensors]
    compared = list({p.name: p for p in (*targets, *others)}.values())
    shared = relations([given.tensors[p.name] for p in compared], len(targets))
    _check_known(acquisition, compared, shared)

    def check(*tensors: torch.Tensor) -> None:
        if relations(tensors, len(targets)) != shared:
            raise GuardError("inputs share memory in another way than when the trace was acquired")
        if not all(may_have_history(t) for t, recorded in zip(tensors, is_recorded, strict=False) if recorded):
            raise GuardError("a leaf that requires grad is written into")

    checked = from_trace(prologue)
    with tracectx(checked):
        checked.bound_symbols = [*body, bindable("check_shared_memory", check)(*compared, output=None), returned]
    received = {p.name: q for p, q in results_and_received(computation, epilogue) if isinstance(q, TensorProxy)}
    connected = {} if joint is None else joint.connected
    values = [received.pop(connected.get(w.value.name, w.value.name)) for w in written]
    views = _views(acquisition, list(received), written)
    wrappers = list({p.name: p for t in targets if (p := given.wrappers.get(t.name)) is not None}.values())
    return pass_through_epilogue(
        (checked, computation, epilogue),
        (*values, *received.values()),
        (*targets, *wrappers),
        COPIED,
        lambda *tensors: copy_back(is_recorded, views, *tensors),
    )


def _recorded(
    acquisition: Acquisition, trace: TraceCtx, written: Sequence[Written], given: Given, joint: Joint | None
) -> Sequence[bool]:
    """Which of the inputs that are written get another history.

    Raises:
        UnsupportedOpError: one of which it is inside of a wrapper, or a leaf that requires grad.
    """
    fakes = acquisition.fakes.by_name()
    found = [joint is not None and is_recorded_plain(acquisition, fakes[w.target.name]) for w in written]
    others = [w for w, recorded in zip(written, found, strict=True) if not recorded]
    for value, writer in _differentiated(trace, others).items():
        i = next(i for i, w in enumerate(written) if w.value.name == value)
        target = written[i].target.name
        if joint is not None or target in given.wrappers or not may_have_history(given.tensors[target]):
            _refuse(writer)
        found[i] = True
    return found


def _of_copies(computation: TraceCtx, recorded: Sequence[Written], *, is_differentiated: bool) -> TraceCtx:
    """The computation whose arguments are what they were to Thunder's autograd: what becomes of them is a result with a history.

    A backward that needs what they were has a copy, if it is Thunder that differentiates the program.
    """
    if not recorded:
        return computation
    given = {w.value.name: w.target for w in recorded}
    *body, returned = computation.bound_symbols
    flat_args = [given.get(p.name, p) if isinstance(p, TensorProxy) else p for p in returned.args[0]["flat_args"]]
    new = from_trace(computation)
    if is_differentiated:
        with tracectx(new), scope(new) as copies:
            swaps = {variableify(w.target): prims.clone(w.target) for w in recorded}
        unpacks = [b for b in body if b.sym.id is prims.PrimIDs.UNPACK_TRIVIAL]
        rest = [b.from_bsym_swap_proxies(swaps, skip_output=True) for b in body if b.sym.id is not prims.PrimIDs.UNPACK_TRIVIAL]
        body = [*unpacks, *copies, *rest]
    new.bound_symbols = [*body, returned.from_bsym(args=({**returned.args[0], "flat_args": flat_args},))]
    return new


def _differentiated(trace: TraceCtx, written: Sequence[Written]) -> dict[str, BoundSymbol]:
    """The values that depend differentiably on an input that requires grad, and what makes them.

    What was written without autograd does not count: the input keeps the history that it has.
    """
    active = {p.name for p in trace.args if isinstance(p, TensorProxy) and p.requires_grad}
    makers = {p.name: b for bsym in trace.bound_symbols for b in _innermost(bsym) for p in b.flat_proxy_outs}
    recorded = [value.name for target, value in written if not _is_unrecorded(value.name, target.name, makers)]
    found = {}
    for bsym in trace.bound_symbols:
        propagate(bsym, active)
        made = {p.name for p in bsym.flat_proxy_outs} & active
        found |= {name: bsym for name in recorded if name in made}
    return found


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


def relations(tensors: Sequence[torch.Tensor], num_written: int) -> dict[tuple[int, int], tuple]:
    """How the first `num_written` tensors lie in memory beside others that they have elements in common with, by positions."""
    addresses = [storage_address(t) for t in tensors]
    if len(set(addresses)) == len(addresses):  # as a rule
        return {}
    pairs = itertools.combinations(range(len(tensors)), 2)
    return {
        (i, j): (tensors[j].data_ptr() - tensors[i].data_ptr(), tensors[i].stride(), tensors[j].stride())
        for i, j in pairs
        if i < num_written and addresses[i] and addresses[i] == addresses[j] and share_elements(tensors[i], tensors[j])
    }


def _check_known(acquisition: Acquisition, inputs: Sequence[TensorProxy], shared: Iterable[tuple[int, int]]) -> None:
    fakes = acquisition.fakes.by_name()
    for i, j in shared:
        one, other = fakes.get(inputs[i].name), fakes.get(inputs[j].name)
        if one is None or other is None or one.untyped_storage()._cdata != other.untyped_storage()._cdata:
            raise UnsupportedOpError(
                with_details(
                    f"an input of shape {list(inputs[i].shape)} that the program writes into shares its memory with "
                    f"another input of shape {list(inputs[j].shape)}",
                    why="both are plain tensors, or one is none of the arguments, parameters and buffers",
                    instead="pass a clone of it",
                )
            )


class _View(NamedTuple):
    """Where a result lies in an input, and the strides of the input for which that is so."""

    target: int
    stride: tuple[int, ...]
    place: Place  # from the first element of the input on

    def taken(self, target: torch.Tensor, computed: torch.Tensor, is_recorded: bool) -> torch.Tensor:
        """The view of the input; what was computed where the input lies in another way, or the view would lose its gradient."""
        if (computed.requires_grad and not is_recorded) or target.stride() != self.stride:
            return computed
        shape, stride, offset = self.place
        if target.requires_grad and not computed.requires_grad:  # the view is one without history: ``x.detach()``
            target = target.detach()
        with torch.enable_grad():
            return target.as_strided(shape, stride, target.storage_offset() + offset)


def _views(acquisition: Acquisition, results: Sequence[str], written: Sequence[Written]) -> list[_View | None]:
    """For each result where it lies in an input that is written into, if it does."""
    fakes = acquisition.fakes.by_name()
    targets = [fakes[w.target.name] for w in written]

    def view(name: str) -> _View | None:
        fake = fakes.get(name)
        proxy = None if fake is None else acquisition.fakes.proxy_of(fake)
        if fake is None or proxy is None or acquisition.fakes.current(proxy).name != name:
            return None
        for i, target in enumerate(targets):
            if fake is not target and lies_in(fake, target):
                within = place(fake)
                return _View(i, target.stride(), within._replace(offset=within.offset - target.storage_offset()))
        return None

    return list(map(view, results))


def copy_back(is_recorded: Sequence[bool], views: Sequence[_View | None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copy values into inputs; returns what these are then, and the other results.

    A result that is a view of an input is one again.  Another one that lies in the memory of an input is an older value of it, from
    an operation that changed nothing: it becomes a tensor of its own.

    Args:
        is_recorded: of each value, whether the input gets its history.
        views: where each of the results lies, if it lies in an input.
        tensors: the values, the results, the inputs that are written, and wrappers around these, which autograd is to know as written.
    """
    num_written = len(is_recorded)
    targets = list(tensors[num_written + len(views) :][:num_written])
    wrappers = tensors[2 * num_written + len(views) :]
    memory = {t.untyped_storage().data_ptr() for t in targets}

    def own(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in memory:
            return t
        with torch.enable_grad():  # the epilogue runs without; results keep their history
            return t.clone()

    values = tuple(map(own, tensors[:num_written]))
    results = tensors[num_written:][: len(views)]
    results = tuple([own(t) if view is None else t for t, view in zip(results, views, strict=True)])
    for i, (value, target) in enumerate(zip(values, targets, strict=True)):
        target.copy_(value)
        if is_recorded[i] and value.requires_grad:
            targets[i] = with_history(target, value)
    note_writes(wrappers)
    taken = (
        t if v is None else v.taken(targets[v.target], t, is_recorded[v.target]) for t, v in zip(results, views, strict=True)
    )
    return (*targets, *taken)


def note_writes(wrappers: Iterable[torch.Tensor]) -> None:
    """Let autograd know that wrappers were written into, as it does of inner tensors: a backward that needs what they were is an error."""
    for x in wrappers:
        with torch._C.DisableTorchFunctionSubclass():
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
        note_writes(t for t in flattened(x)[0].values() if isinstance(t, torch.Tensor) and is_wrapper(t))
