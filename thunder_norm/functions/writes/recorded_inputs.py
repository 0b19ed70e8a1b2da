"""Inputs whose history is another after a call: autograd has recorded what the program writes into them.

To the program that is differentiated such an input is a tensor of its own, with what was given for its first value; what it is in the end
is one more result.  The epilogue copies that into the input, which has its history from then on, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map

from thunder_norm.errors import UnsupportedOpError
from thunder_norm.functions.programs import flat_proxies
from thunder_norm.functions.writes.aliasing import end_of, operation_of_view, views_in
from thunder_norm.functions.writes.functionalization import without_regions
from thunder_norm.functions.writes.refused_writes import without_history
from thunder_norm.subclass.acquiring.autograd import may_have_history
from thunder_norm.subclass.crossing.boundary_passes import Traces, results_and_received
from thunder_norm.tracing.activity import propagate
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.recording import declare_arguments
from thunder_norm.tracing.shared_memory.aliases import given_as
from thunder_norm.tracing.shared_memory.histories import with_history
from thunder_norm.tracing.shared_memory.writes import copies_in, recorded_copies
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolInterface
from thunder.core.trace import TraceCtx, from_trace, tracectx


@dataclass(frozen=True)
class RecordedInputs:
    """The inputs of a program that get another history by it."""

    writers: Mapping[str, BoundSymbol]  # by the name of an input: the first operation that gives it one
    makers: Mapping[str, BoundSymbolInterface]  # of views
    bases: Mapping[str, str]  # what they are views of

    def __contains__(self, name: object) -> bool:
        return name in self.writers

    def of(self, name: str) -> str | None:
        """The input that a tensor of the program is, or a view of."""
        root = end_of(name, self.bases)
        return root if root in self.writers else None

    def viewed(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from an input to the view of it that the program has under a name.

        Raises:
            UnsupportedOpError: it is taken by what is no operation of torch's, or by tensors.
        """
        steps: list[Callable] = []
        while name in self.bases:
            if (maker := self.makers.get(name)) is not None:
                steps.append(self._step(maker, name))
            name = self.bases[name]

        def view(x: torch.Tensor) -> torch.Tensor:
            for step in reversed(steps):
                x = step(x)
            return x

        return view

    def _step(self, maker: BoundSymbolInterface, name: str) -> Callable:
        operation, base = operation_of_view(maker), self.bases[name]
        if operation is None or any(p.name != base for p in flat_proxies((maker.args, maker.kwargs))):
            raise without_history(self.writers[end_of(name, self.bases)], "an input, a view of which is returned")
        position = next(i for i, p in enumerate(flat_proxies(maker.output)) if p.name == name)

        def step(x: torch.Tensor) -> torch.Tensor:
            args, kwargs = tree_map(lambda v: x if isinstance(v, Proxy) else v, (maker.args, maker.kwargs))
            found = operation.run(*args, **kwargs)
            return found if isinstance(found, torch.Tensor) else found[position]

        return step


def _recorded_inputs(trace: TraceCtx, moved: set[str]) -> RecordedInputs:
    inputs = {p.name: p for p in trace.args if isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype)}
    active, changed, detached = set(moved), set[str](), set[str]()
    writers: dict[str, BoundSymbol] = {}
    makers: dict[str, BoundSymbolInterface] = {}
    bases: dict[str, str] = {}
    same: dict[str, str] = {}  # results of copies, and what was copied into
    for bsym in trace.bound_symbols:
        views, copies = views_in(bsym), copies_in(bsym)
        bases |= views
        makers |= dict.fromkeys(views, bsym)
        detached |= {out for out, of in views.items() if bsym.sym.name == "detach" or of in detached}
        same |= {copy.output.name: copy.args[1].name for copy in copies}
        bases |= same
        given = [p.name for p in bsym.flat_proxy_args]
        active |= {name for name in given if end_of(name, bases) in changed or end_of(name, same) in active} - detached
        propagate(bsym, active)
        for copy in recorded_copies(bsym):
            source, target = copy.args[0].name, copy.args[1].name
            root = end_of(target, bases)
            if target in detached:
                continue
            if source in active:
                changed.add(root)
            if root in inputs and (source in active or root in moved):
                _check_may_have_history(inputs[root], writers.setdefault(root, bsym))
    return RecordedInputs(writers, makers, bases)


def _check_may_have_history(p: TensorProxy, writer: BoundSymbol) -> None:
    given = given_as(p)
    if given is not None and not may_have_history(given):
        raise without_history(writer, "a leaf that requires grad, or a view of one", "torch refuses it too")


def handing_on(traces: Traces, moved: set[str]) -> tuple[Traces, Collection[str]]:
    """Have a program return the inputs that have another history after it, last, and the epilogue write that into them.

    Args:
        traces: a program that is differentiated.
        moved: the names of its inputs that require grad.

    Returns:
        The traces, and the names of these inputs.

    Raises:
        UnsupportedOpError: one is a leaf that requires grad, or a view of one; a view of one is returned that cannot be taken again.
    """
    prologue, computation, epilogue = traces
    if not any(map(copies_in, computation.bound_symbols)):
        return traces, ()
    recorded = _recorded_inputs(without_regions(computation), moved)
    if not recorded.writers:
        return traces, ()
    if epilogue is None:
        raise UnsupportedOpError("a function without an epilogue cannot write into its inputs")
    inputs = [p for p in computation.args if p.name in recorded]
    results = results_and_received(computation, epilogue)
    sent = epilogue.args[: len(epilogue.args) - len(results)]
    seen = [(p, q) for p, q in results if isinstance(p, TensorProxy) and recorded.of(p.name) is not None]
    kept = [(p, q) for p, q in results if all(q is not other for _, other in seen)]

    *body, returned = computation.bound_symbols
    new = from_trace(computation)
    new.bound_symbols = [*body, returned.from_bsym(args=((*(p for p, _ in kept), *inputs),))]

    writing = from_trace(epilogue)
    with tracectx(writing):
        given, became, written = ([TensorProxy(like=p, requires_grad=False) for p in inputs] for _ in range(3))
        views = [TensorProxy(like=q, requires_grad=False) for _, q in seen]
    write = bindable("written_into_inputs", _writer(inputs, [p for p, _ in seen], recorded))
    swaps = {variableify(q): view for (_, q), view in zip(seen, views, strict=True)}
    writing.args = (*sent, *given, *(q for _, q in kept), *became)
    writing.bound_symbols = [
        *(prims.unpack_trivial.bind(p, output=p, name=p.name) for p in writing.args),
        write(*given, *became, output=(*written, *views)),
        *(b.from_bsym_swap_proxies(swaps) for b in epilogue.bound_symbols if b.sym.id is not prims.PrimIDs.UNPACK_TRIVIAL),
    ]
    declare_arguments(writing, "epilogue")
    return (_sending(prologue, inputs), new, writing), recorded.writers.keys()


def _writer(inputs: Sequence[TensorProxy], views: Sequence[TensorProxy], recorded: RecordedInputs) -> Callable:
    """What takes inputs, and what becomes of them, and gives the inputs and their views."""
    places = [next(i for i, p in enumerate(inputs) if p.name == recorded.of(view.name)) for view in views]
    take = [recorded.viewed(view.name) for view in views]

    def write(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, became = tensors[: len(inputs)], tensors[len(inputs) :]
        with torch.enable_grad():
            written = [_written(x, value) for x, value in zip(given, became, strict=True)]
            return (*written, *[view(written[i]) for i, view in zip(places, take, strict=True)])

    return write


def _written(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.copy_(value)
    if value.requires_grad:
        return with_history(x, value)
    return x.detach_() if x.requires_grad else x


def _sending(prologue: TraceCtx, inputs: Sequence[TensorProxy]) -> TraceCtx:
    """The prologue, which gives inputs to the epilogue too, if autograd may record what is written into them."""
    to_computation, to_epilogue = prologue.bound_symbols[-1].args[0]
    returned = prologue.bound_symbols[-1].from_bsym(args=((to_computation, (*to_epilogue, *inputs)),))
    new = from_trace(prologue)
    with tracectx(new):
        check = bindable("check_may_have_history", _check_given)(*inputs, output=None)
    new.bound_symbols = [*prologue.bound_symbols[:-1], check, returned]
    return new


def _check_given(*inputs: torch.Tensor) -> None:
    if not all(map(may_have_history, inputs)):
        raise GuardError("a leaf that requires grad is written into")
