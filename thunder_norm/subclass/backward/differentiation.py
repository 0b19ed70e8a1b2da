"""Gradients of wrappers that require grad themselves, as PyTorch defines them.

While the trace is acquired torch's autograd runs on the fakes.  At the end `differentiate` lets it run backwards, which dispatches
the formulas of torch's operations to the classes again, and records what reaches inner tensors.  The operations of the program are
constants for Thunder's own automatic differentiation; one last operation, `torch_autograd`, hands the results on and has what was
recorded as its gradient, so Thunder compiles, fuses and saves tensors as for any other operation.

A gradient may be of another class, or have another number of inner tensors, than what it belongs to: an int8 weight has a plain
gradient, a plain bias added to a wrapper has a wrapper as gradient.  So *carriers* stand between torch's autograd and Thunder's:
tensors without data, one for each inner tensor of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.effects import is_effect
from thunder_norm.subclass.acquiring.fakes import fake_of
from thunder_norm.subclass.acquiring.tape import Tape
from thunder_norm.subclass.backward.followed import check_followed, outputs_of
from thunder_norm.subclass.backward.gradients import Carriers, Result, Segment, Source, Structure, is_like, leaves_of
from thunder_norm.subclass.backward.hooks_of_backward import check_hooks, check_retained
from thunder_norm.subclass.backward.joint_operations import (
    carrier,
    computed_from,
    encoded,
    own,
    with_copies,
    with_outputs,
    with_plain_sums,
)
from thunder_norm.subclass.backward.made_leaves import reached_leaves
from thunder_norm.subclass.backward.mutations import check_newest
from thunder_norm.subclass.backward.refused_backward import refused_backward, untraceable_backward
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording.aten import captured
from thunder_norm.subclass.recording.record import Recorder, recording
from thunder_norm.subclass.recording.trace import OperationId, composite
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.tags import STANDS_FOR_GRADIENT
from thunder_norm.tracing.translation import proxy_like
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

# What the last operation is called: whether there is a tape for gradients that are differentiated again.
_WITH_TAPE, _WITHOUT_TAPE = "torch_autograd", "once_by_torch_autograd"


def has_tape(bsym: BoundSymbol) -> bool | None:
    """Of the last operation, whether there is a tape; None for all others."""
    return True if bsym.sym.name.startswith(_WITH_TAPE) else False if bsym.sym.name.startswith(_WITHOUT_TAPE) else None


@dataclass
class Joint:
    """What torch's autograd would do in the backward through an acquired program."""

    acquisition: Acquisition
    sources: list[Source]
    results: list[Result]
    segments: list[Segment]
    tape: Tape | None = None  # what gradients that are differentiated again are computed with
    connected: dict[str, str] = field(default_factory=dict)  # what the computation returns for results, by their names
    plain_results: dict[str, torch.Tensor] = field(default_factory=dict)  # fakes, by the names of what the computation returns
    made_leaves: list[torch.Tensor] = field(default_factory=list)  # sources that are no inputs, see `made_leaves`
    kept: tuple[
        TensorProxy, ...
    ] = ()  # what the backward needs of inputs as they were, which the computation returns to have it computed

    def result_of(self, fake: torch.Tensor) -> Result | None:
        """The entry of an output, if it gets a gradient."""
        return next((r for r in self.results if r.fake is fake), None)

    def plain_input(self, fake: torch.Tensor) -> TensorProxy:
        """The argument of the finished program that a plain fake stands for."""
        fakes = self.acquisition.fakes
        first = fakes.first_proxy_of(fake)  # as it was given, whatever was written into it since
        return fakes.current(fakes.proxy_of(fake) if first is None else first)

    # -- the trace ----------------------------------------------------------------------------------------------------

    def _used(self) -> list[torch.Tensor]:
        """The fakes of the program that the backward uses."""
        made = {id(t) for s in self.segments for r in s.log for t in r.outputs}
        made |= {id(t) for r in self.results for t in r.tangent.carried}
        needed = [t for s in self.segments for r in s.log for t in r.inputs]
        needed += [t for s in self.sources for t in s.gradient.carried]
        shapes = [f.shape for r in self.results if r.uses_carriers for f in r.tangent.carried]
        needed += self.acquisition.lengths.tensors_for(shapes)
        return list({id(t): t for t in needed if id(t) not in made and self._proxy(t) is not None}.values())

    def _proxy(self, t: torch.Tensor) -> TensorProxy | None:
        found = self.acquisition.autograd.intermediates.get(id(t))
        return found.proxy if found is not None else self.acquisition.fakes.proxy_of(t)

    def anchor_sources(self, arguments: Sequence[Any], trace: TraceCtx) -> tuple[TensorProxy, ...]:
        """Decide what stands for each input in Thunder's autograd; returns the carriers, which `trace` is to take.

        Raises:
            UnsupportedOpError: a tensor that is not an argument has a gradient that is a wrapper.
        """
        given = {p.name for p in arguments if isinstance(p, TensorProxy)}
        for source in self.sources:
            if source.uses_carriers:
                with tracectx(trace):
                    source.anchors = tuple(
                        proxy_like(f, requires_grad=True, tags={STANDS_FOR_GRADIENT}) for f in source.gradient.carried
                    )
            else:
                source.anchors = (self.plain_input(source.fake),)
            if source.uses_carriers and not is_wrapper(source.fake) and self.plain_input(source.fake).name not in given:
                raise UnsupportedOpError(
                    with_details(
                        "the gradient of a tensor computed before the first wrapper is a wrapper",
                        instead="give the wrapper to the function as an argument, or as a parameter of its module",
                    )
                )
        return tuple(a for s in self.sources if s.uses_carriers for a in s.anchors)

    def opening(self, wrappers: Mapping[int, TensorProxy]) -> tuple[Callable, list[TensorProxy], tuple[TensorProxy, ...]] | None:
        """What makes the carriers of inputs: a function, what it is called with, and what it returns.

        `wrappers` are the prologue's proxies of input wrappers, and of leaves that it makes, by the identity of their fakes.
        """
        sources = [s for s in self.sources if s.uses_carriers]
        gradients = [s.gradient for s in sources]
        inputs = [wrappers[id(s.fake)] if is_wrapper(s.fake) else self.plain_input(s.fake) for s in sources]
        anchors = tuple(a for s in sources for a in s.anchors)
        return (Carriers(gradients), inputs, anchors) if sources else None

    def result_carriers(self) -> list[tuple[torch.Tensor, tuple[TensorProxy, ...]]]:
        """The carriers of each result that has some, in the order in which the computation returns them."""
        return [(r.fake, r.anchors) for r in self.results if r.uses_carriers]

    def write(
        self,
        trace: TraceCtx,
        executor: Any,
        returned: Sequence[Any],
        outputs: Sequence[TensorProxy],
        inner: dict[str, tuple[TensorProxy, ...]],
        arguments: Sequence[Any],
        values: Sequence[TensorProxy],
        targets: Sequence[TensorProxy],
    ) -> tuple[TensorProxy, ...]:
        """Write the last operation of the program, after those of `trace`.

        Args:
            trace: the lowered computation without its return.
            executor: what the operation is registered with.
            returned: what the program returns, wrappers included.
            outputs: its plain tensors, each once.
            inner: the inner proxies of wrappers, by name.
            arguments: what the computation takes.
            values: what is to be copied into inputs.
            targets: the inner tensors of these, or the inputs themselves.

        Returns:
            What the computation returns: `outputs`, connected, then the carriers of results, and what is kept.
        """
        named = (p.name for p in (*arguments, *values) if isinstance(p, TensorProxy))
        given = with_copies({*named, *self._without_gradient(returned, inner)}, trace.bound_symbols)
        anchored = self._anchor_results(returned, inner, given)
        results = iter(self._write_operation(trace, executor, list(anchored.values()), given))
        connected = {name: next(results) for name in anchored}
        self.connected = {name: p.name for name, p in connected.items()}
        self.plain_results = {connected[n].name: f for f, n in self._plain(returned) if n in connected}
        for result in (r for r in self.results if r.uses_carriers):
            result.anchors = tuple(next(results) for _ in result.tangent.carried)
        carriers = (p for _, found in self.result_carriers() for p in found)
        connected_outputs = (connected.get(p.name, p) if isinstance(p, TensorProxy) else p for p in outputs)
        changed = computed_from({p.name for p in targets}, trace.bound_symbols)
        changed -= {p.name for p in arguments if isinstance(p, TensorProxy)}
        saved = (self.acquisition.fakes.current(self._proxy(t)) for t in self._used()) if targets else ()
        with tracectx(trace), scope(trace) as made:  # a tensor that is returned twice has the derivatives of one place only
            self.kept = tuple(map(own, {p.name: p for p in saved if p.name in changed}.values()))
        trace.bound_symbols = with_outputs([*trace.bound_symbols, *made])
        return *connected_outputs, *carriers, *self.kept

    def _without_gradient(self, returned: Sequence[Any], inner: dict[str, tuple[TensorProxy, ...]]) -> set[str]:
        """The names of what is returned for results that get no gradient: an inner tensor of another one that does, perhaps."""
        fakes = self.acquisition.fakes.by_name()
        pairs = [
            pair
            for p in returned
            if isinstance(p, TensorProxy) and ((fake := fake_of(p, fakes)) is None or self.result_of(fake) is None)
            for pair in (zip(leaves_of(fake), inner[p.name], strict=True) if isinstance(p, SubclassProxy) else [(fake, p)])
        ]
        return {q.name for leaf, q in pairs if leaf is None or self.result_of(leaf) is None}

    def _plain(self, returned: Sequence[Any]) -> list[tuple[torch.Tensor, str]]:
        """The plain results that get a gradient, with the names of their proxies."""
        fakes = self.acquisition.fakes.by_name()
        found = [(fake_of(p, fakes), p.name) for p in returned if isinstance(p, TensorProxy) and not isinstance(p, SubclassProxy)]
        return [(fake, name) for fake, name in found if fake is not None and self.result_of(fake) is not None]

    def _anchor_results(
        self, returned: Sequence[Any], inner: dict[str, tuple[TensorProxy, ...]], arguments: set[str]
    ) -> dict[str, TensorProxy]:
        """Decide what stands for each result in Thunder's autograd; returns the output proxies that do, by name."""
        proxies: dict[int, tuple[TensorProxy, ...]] = {}
        fakes = self.acquisition.fakes.by_name()
        for p in returned:
            fake = fake_of(p, fakes)
            if fake is not None:
                proxies.setdefault(id(fake), inner[p.name] if isinstance(p, SubclassProxy) else (p,))
            if isinstance(p, SubclassProxy):
                for leaf, q in zip(leaves_of(p.fake), inner[p.name], strict=True):
                    proxies.setdefault(id(leaf), (q,))
        anchored: dict[str, TensorProxy] = {}
        self.results.sort(key=lambda r: is_wrapper(r.fake))  # a plain result cannot have carriers
        for result in self.results:
            leaves = proxies[id(result.fake)]
            if is_wrapper(result.fake):  # an inner tensor that is returned elsewhere too, or an argument, cannot stand for this
                result.uses_carriers |= any(p.name in anchored or p.name in arguments for p in leaves)
            if not result.uses_carriers:
                anchored |= {p.name: p for p in leaves}
        self.results.sort(key=lambda r: r.uses_carriers)
        return anchored

    def _write_operation(
        self, trace: TraceCtx, executor: Any, anchored: Sequence[TensorProxy], arguments: set[str]
    ) -> tuple[TensorProxy, ...]:
        used = self._used()
        saved = [self.acquisition.fakes.current(self._proxy(t)) for t in used]
        anchors = [a for s in self.sources for a in s.anchors]
        counts = len(anchored), len(anchors)
        are_given = [p.name in arguments for p in anchored]

        def forward(*args: TensorProxy) -> tuple[TensorProxy, ...]:
            results = [own(p) if given else prims.shallow_copy(p) for p, given in zip(args, are_given, strict=False)]
            env = {id(t): p for t, p in zip(used, args[sum(counts) :], strict=True)}
            for result in (r for r in self.results if r.uses_carriers):
                results.extend(carrier(f, self.acquisition.lengths, env) for f in result.tangent.carried)
            return tuple(results)

        def grad(*args: TensorProxy) -> tuple[TensorProxy, ...]:
            results = forward(*args)
            tangents = [t for r in self.results if not r.uses_carriers for t in r.tangent.carried]
            tangents += [t for r in self.results if r.uses_carriers for t in r.tangent.carried]
            env = {id(t): p for t, p in zip(used, args[sum(counts) :], strict=True)}
            env |= {id(t): encoded(prims.get_grad(p), t) for t, p in zip(tangents, results, strict=True)}
            self._write_backward(env)
            given = set(map(id, used))  # Thunder keeps what an operation of the backward takes, not what is a gradient as it is
            for p, t in zip(args[counts[0] : sum(counts)], (t for s in self.sources for t in s.gradient.carried), strict=True):
                gradient = env[id(t)] if id(t) in env else captured(t)
                prims.put_grad(p, own(gradient) if id(t) in given else gradient)
            return results

        operation = executor.register_operator(_WITH_TAPE if self.tape else _WITHOUT_TAPE, like=forward)
        executor.register_implementation(operation, execution_transform=forward, grad_transform=grad)
        check_newest(trace, [*anchored, *anchors, *saved])
        with tracectx(trace), scope(trace) as written:
            results = operation(*anchored, *anchors, *saved)
        trace.bound_symbols.extend(written)
        return results

    def _write_backward(self, env: dict[int, TensorProxy]) -> None:
        wanted = {id(t) for s in self.sources for t in s.gradient.carried}
        later = [
            wanted | {id(t) for s in self.segments[i + 1 :] for r in s.log for t in r.inputs} for i in range(len(self.segments))
        ]
        for segment, needed in zip(self.segments, later, strict=True):
            log = with_plain_sums(segment.log, needed)
            made = {id(t): t for r in log for t in r.outputs}
            turns = {id(r.outputs[0]) for r in log if is_effect(r.func)}
            outputs = [t for i, t in made.items() if i in needed or i in turns]
            inputs = {id(t): t for r in log for t in r.inputs if id(t) in env}
            inside = {id(t) for r in log for t in r.inputs} | {id(t) for t in outputs}
            if not outputs:
                continue
            of_segment = OperationId("backward", segment.name)
            symbol, _ = composite(of_segment, log, list(inputs.values()), outputs, inside, is_detached=True)
            for t, p in zip(outputs, symbol(*(env[i] for i in inputs)), strict=True):
                env[id(t)] = p


def starts_late(acquisition: Acquisition, trace: TraceCtx) -> bool:
    """Whether what Thunder computed before torch's autograd ran has a wrapper as gradient; `trace` has just been acquired."""
    computed = [t for t in acquisition.autograd.sources.values() if not acquisition.is_input(t)]
    outputs = outputs_of(acquisition, trace.bound_symbols[-1].flat_proxy_args, acquisition.fakes.by_name()) if computed else []
    if not outputs:
        return False
    try:
        with recording(acquisition) as recorder, torch.no_grad():
            tangents = [Structure.of(_tangent_like(acquisition, t), "a result").decoded() for t in outputs]
            gradients = acquisition.run(
                recorder, torch.autograd.grad, (outputs, computed, tangents), {"allow_unused": True, "retain_graph": True}
            )
            found = [Source(t, Structure.of(g, "an input")) for t, g in zip(computed, gradients, strict=True) if g is not None]
    except Exception:  # noqa: BLE001 - `differentiate` meets it again, and says so
        return False
    return any(source.uses_carriers for source in found)


def differentiate(acquisition: Acquisition, trace: TraceCtx) -> Joint | None:
    """Let torch's autograd run backwards on the fakes of an acquired program; None if no input gets a gradient.

    Raises:
        UnsupportedOpError: something of the program does not go through torch's autograd.
    """
    fakes = acquisition.fakes.by_name()
    check_followed(acquisition, trace, fakes)
    returned = trace.bound_symbols[-1].args[0]["output"]
    outputs = outputs_of(acquisition, returned, fakes)
    check_retained(acquisition, outputs)
    leaves = reached_leaves(acquisition, [t for p in returned if (t := fake_of(p, fakes)) is not None], outputs)
    for leaf in leaves:
        acquisition.autograd.note_made_leaf(leaf)
    sources = [*acquisition.autograd.sources.values(), *leaves]
    if not outputs or not sources:
        return None
    structures = [Structure.of(_tangent_like(acquisition, t), f"a result of class {type(t).__name__}") for t in outputs]
    try:
        check_hooks(acquisition, outputs)
        found, segments = _backward(acquisition, outputs, sources, structures)
        acquisition.autograd.check_known(t for s in segments for r in s.log for t in r.inputs)
    except Exception as e:
        if acquisition.lengths.is_on:  # for which it is, perhaps
            raise
        # the forward is right whatever the class says to an operation of the backward
        found, segments = refused_backward(acquisition, sources, structures, e)
    results = [
        Result(fake, structure, is_wrapper(fake) and not is_like(structure.leaves, leaves_of(fake)))
        for fake, structure in zip(outputs, structures, strict=True)
    ]
    made = [s.fake for s in found if any(s.fake is leaf for leaf in leaves)]
    return Joint(acquisition, found, results, [s for s in segments if s.log], made_leaves=made) if found else None


def _backward(
    acquisition: Acquisition, outputs: list[torch.Tensor], sources: list[torch.Tensor], structures: list[Structure]
) -> tuple[list[Source], list[Segment]]:
    """What each node of torch's autograd graph did, and the inputs that got a gradient."""
    segments = [Segment("tangents")]
    found = []
    with recording(acquisition) as recorder, torch.no_grad():
        try:
            tangents = [s.decoded() for s in structures]
            _follow_nodes(outputs, recorder, segments)
            gradients = acquisition.run(
                recorder,
                torch.autograd.grad,
                (outputs, [acquisition.autograd.start_of(t) for t in sources], tangents),
                {"allow_unused": True, "retain_graph": False},
            )
        except Exception as e:
            if "backward through the graph a second time" in str(e):
                raise  # torch's own error, in each backward: the program has freed the graph
            raise untraceable_backward(segments[-1].name, recorder.last_on_wrappers, e) from e
        segments[-1:] = _closed(segments[-1:], recorder)
        segments.append(Segment("gradients"))
        for fake, gradient in zip(sources, gradients, strict=True):
            if gradient is not None:
                found.append(Source(fake, Structure.of(gradient, "an input", fake)))
        segments[-1:] = _closed(segments[-1:], recorder)
    return found, segments


def _tangent_like(acquisition: Acquisition, t: torch.Tensor) -> torch.Tensor:
    """A fake for the gradient of an output: like `torch.ones_like`, or plain where its class has none."""
    with torch.no_grad(), acquisition.fakes.mode:
        if is_wrapper(t):
            try:
                return torch.ones_like(t.detach())
            except Exception:  # noqa: BLE001 - whatever the class says to an operation it does not have
                pass
        return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _follow_nodes(outputs: Sequence[torch.Tensor], recorder: Recorder, segments: list[Segment]) -> None:
    """Start a new segment whenever a node of the autograd graph of `outputs` starts."""

    def started(name: str) -> Callable[[Any], None]:
        def start(_: Any) -> None:
            segments[-1:] = _closed(segments[-1:], recorder)
            segments.append(Segment(name))

        return start

    seen = set()
    pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        node.register_prehook(started(node.name().removesuffix("Backward0").removesuffix("Backward1").split("::")[-1]))
        pending.extend(n for n, _ in node.next_functions if n is not None)


def _closed(last: list[Segment], recorder: Recorder) -> list[Segment]:
    """The last segment with what was recorded since it started."""
    for segment in last:
        segment.log, recorder.log = recorder.log, []
    return last
