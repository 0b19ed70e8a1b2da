"""Programs with a backward part in torch's autograd.

``thunder.executors.torch_autograd`` makes two nodes, so that the gradients of large results can be freed while the backward part runs, with
a random tensor between them in each direction.  One node is enough where the results are small.

Thunder's nodes can be differentiated once: asked for a graph of the backward (``create_graph=True``) they give gradients without history,
without a word.  Those here leave the compiled backward part then: the program that Thunder differentiated is differentiated again, as a
function of its inputs and the cotangents (`functions/again.py` registers how).  They keep the inputs for that.

A program on plain tensors may have been made of one on others, wrappers say.  Then tensors without data stand among its inputs for the
gradients of these, and the node is connected with what they stand for (`Sources`): one node for the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder_norm.tracing.tags import OF_ANY_LENGTH, STANDS_FOR_GRADIENT
from thunder_norm.tracing.torch_functions import random_numbers
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

_MOST_BYTES = 2**24  # of results whose gradients may stay while the backward part runs
_SOURCES = "_thunder_norm_sources"

Gradients = Sequence[torch.Tensor | None]


class Sources(NamedTuple):
    """What gets the gradients that tensors without data stand for among the inputs of a program.

    Attributes:
        tensors: these, of any class.
        gradients: from the gradients of the tensors that stand for them, in a list that nobody else has, to theirs.
    """

    tensors: Sequence[torch.Tensor]
    gradients: Callable[[list[torch.Tensor | None]], Gradients]


def with_sources(stand_ins: Sequence[torch.Tensor], sources: Sources) -> tuple[torch.Tensor, ...]:
    """What a call gives its program: inputs tagged with `STANDS_FOR_GRADIENT`, which lie side by side."""
    first = stand_ins[0].detach()  # of this call
    setattr(first, _SOURCES, sources)
    return first, *stand_ins[1:]


class Run(NamedTuple):
    """What a program ran on.

    Attributes:
        inputs: of the computation, flat.
        versions: of each, before the program wrote into it, if it does; none if the pullback does not look at them.
        drawn_from: the states of generators, torch's and its own, if the program draws random numbers.
    """

    inputs: Sequence[Any]
    versions: Sequence[int]
    drawn_from: random_numbers.States | None


# From a run and cotangents of its results to gradients with a history, one for each input; `looks_at_versions` says whether it does.
Pullback = Callable[[Run, Gradients], Gradients]

_makers: list[Callable[[TraceCtx], Pullback]] = []


def makes_pullbacks(make: Callable[[TraceCtx], Pullback]) -> Callable[[TraceCtx], Pullback]:
    """Register what differentiates a computation trace for gradients that can be differentiated again."""
    _makers.append(make)
    return make


@dataclass(frozen=True)
class Backward:
    """The backward part of an entry.

    Attributes:
        compiled: of what was saved and the cotangents of the results; it empties both lists.
        pullback: the same with a history.
        zeros: of each result, which makes the gradient of one that is not asked for; None for what has none, or where shapes are those
            of a call.
        notes_start: whether the program draws random numbers or writes into tensors: what it starts from is to be noted.
        stand_ins: which inputs stand for gradients, see `Sources`.
        unreached: which inputs no gradient reaches: those that torch's autograd knows nothing of, whose hooks are not called.
        in_one_node: whether torch's autograd gets one node.
        generators: of the program's own, from which it draws.
        start: what was noted of a call: versions of the inputs, and states of generators.
    """

    compiled: Callable
    pullback: Pullback
    zeros: Sequence[Callable[[], torch.Tensor] | None] | None
    notes_start: bool
    stand_ins: slice | None = None
    unreached: tuple[int, ...] = ()
    in_one_node: bool = False
    generators: tuple[torch.Generator, ...] = ()
    start: tuple[list[int], random_numbers.States] | None = None

    @staticmethod
    def of(compiled: Callable, program: TraceCtx, forward: TraceCtx, backward: TraceCtx) -> Backward:
        """That of `program`, which Thunder differentiated, and which runs as `forward` and `backward`."""
        zeros, stand_ins, unreached = _zeros_of_results(forward), _stand_ins(forward), _unreached(backward)
        own_generators = random_numbers.own_generators(program.bound_symbols)
        notes_start = any(random_numbers.draws_numbers(b) or copies_in(b) for b in program.bound_symbols)
        if any(b.sym.is_fusion and random_numbers.draws_numbers(b) for b in forward.bound_symbols):
            return Backward(
                compiled,
                functools.partial(_refused, "it draws random numbers in a region of a compiler's"),
                zeros,
                False,
                stand_ins,
                unreached,
            )
        if not _makers:
            return Backward(
                compiled,
                functools.partial(_refused, "thunder_norm.transforms is not imported"),
                zeros,
                False,
                stand_ins,
                unreached,
            )
        return Backward(compiled, _makers[0](program), zeros, notes_start, stand_ins, unreached, generators=own_generators)

    def __call__(self, saved: Any, cotangents: Any) -> Any:
        return self.compiled(saved, cotangents)

    def as_one_node(self, shortened: Callable[[Callable], Callable] = lambda compiled: compiled) -> Backward:
        """The same, for results that are small; `shortened` makes what is called of what is compiled."""
        return replace(self, in_one_node=True, compiled=shortened(self.compiled))

    def run(self, inputs: Sequence[Any]) -> Run:
        """What the program has just run on."""
        if self.start is None:
            return Run(inputs, _versions(inputs) if getattr(self.pullback, "looks_at_versions", True) else (), None)
        return Run(inputs, *self.start)


def of_call(entry: Any, inputs: Sequence[Any]) -> Any:
    """A cache entry for the call that is about to run on these inputs."""
    backward = entry.backward_fn
    if type(backward) is Backward and backward.notes_start:
        return entry._replace(
            backward_fn=replace(backward, start=(_versions(inputs), random_numbers.states(backward.generators)))
        )
    return entry


def _refused(why: str, run: Run, cotangents: Gradients) -> Gradients:
    raise UnsupportedOpError(with_details("create_graph=True through a jitted program", why=why))


def has_small_results(trace: TraceCtx) -> bool:
    """Whether the gradients of what a computation with a backward part returns are small."""
    returned = trace.bound_symbols[-1].args[0]
    if not isinstance(returned, dict) or "flat_output" not in returned:
        return False
    sizes = [p.numel * p.dtype.bytes for p in returned["flat_output"] if isinstance(p, TensorProxy)]
    return sum(sizes) <= _MOST_BYTES


def _zeros_of_results(forward: TraceCtx) -> list[Callable[[], torch.Tensor] | None] | None:
    """What makes zeros like each result of a computation with a backward part; None where their shapes are those of a call."""
    if any(isinstance(p, TensorProxy) and OF_ANY_LENGTH in p.tags for p in _flat(forward, "flat_args")):
        return None
    return [
        functools.partial(
            torch.zeros, tuple(p.shape), dtype=dtypes.to_torch_dtype(p.dtype), device=devices.to_torch_device(p.device)
        )
        if isinstance(p, TensorProxy)
        else None
        for p in _flat(forward, "flat_output")
    ]


def _zeros_like(t: Any) -> Callable[[], torch.Tensor] | None:
    is_tensor = isinstance(t, torch.Tensor)
    return functools.partial(torch.zeros, t.shape, dtype=t.dtype, device=t.device) if is_tensor else None


def _stand_ins(forward: TraceCtx) -> slice | None:
    """Which inputs of a computation with a backward part are tagged with `STANDS_FOR_GRADIENT`."""
    found = [i for i, p in enumerate(_flat(forward, "flat_args")) if isinstance(p, TensorProxy) and STANDS_FOR_GRADIENT in p.tags]
    if not found:
        return None
    assert found == list(range(found[0], found[-1] + 1)), found
    return slice(found[0], found[-1] + 1)


def _unreached(backward: TraceCtx) -> tuple[int, ...]:
    """Which gradients a backward part does not have; none where it has none at all, as all results require grad."""
    gradients = backward.bound_symbols[-1].args[0]
    found = tuple(i for i, g in enumerate(gradients) if g is None)
    return found if len(found) < len(gradients) else ()


def _flat(forward: TraceCtx, what: str) -> Sequence[Any]:
    """``"flat_args"`` or ``"flat_output"`` of what a computation with a backward part gives to torch's autograd."""
    returned = forward.bound_symbols[-1].args[0]
    if isinstance(returned, tuple):
        returned = returned[0]
    return returned[what] if isinstance(returned, dict) else ()


def _materialized(all_zeros: Sequence[Callable[[], torch.Tensor] | None], cotangents: Gradients) -> Gradients | None:
    """Zeros in place of the gradients that are not asked for; None if none is, as torch's autograd may come here all the same."""
    if all(t is not None for t in cotangents):
        return cotangents
    if all(t is None for t in cotangents):
        return None
    return [zeros() if t is None and zeros is not None else t for t, zeros in zip(cotangents, all_zeros, strict=True)]


@dataclass(slots=True)
class _Call:
    """One call of a program: what its nodes have in common.

    Attributes:
        backward: of the program.
        zeros: of each result, see `Backward`.
        other: what the backward part needs and is no tensor.
        run: what the program ran on; None when torch has let go of it.
        sources: among what the nodes are connected with.
        given: what was saved, and the cotangents, on their way from the second of two nodes to the first; None if the second has done
            it all.
    """

    backward: Backward
    zeros: Sequence[Callable[[], torch.Tensor] | None]
    other: Any
    run: Run | None
    sources: Sources | None = None
    given: tuple | None = None

    def connected(self, results: Sequence[Any]) -> Sequence[Any]:
        """What the nodes of some results are connected with.

        Raises:
            UnsupportedOpError: the inputs do not say whose gradients they stand for.
        """
        assert self.run is not None
        inputs, place = self.run.inputs, self.backward.stand_ins
        if place is None:
            if not self.backward.unreached:
                return inputs
            returned, connected = set(map(id, results)), list(inputs)
            for i in self.backward.unreached:
                if id(inputs[i]) not in returned:
                    connected[i] = None
            return connected
        self.sources = getattr(inputs[place.start], _SOURCES, None)
        if self.sources is None:
            raise UnsupportedOpError(
                with_details(
                    "gradients through a program on wrapper subclasses",
                    why="its inputs were replaced by others on their way into the computation",
                )
            )
        return [*inputs[: place.start], *self.sources.tensors, *inputs[place.stop :]]

    def compiled(self, saved: list, cotangents: list) -> Gradients:
        """Gradients for what the nodes are connected with; both lists are emptied."""
        if self.sources is None:
            return self.backward.compiled([saved, self.other], cotangents)
        return self._of_sources(list(self.backward.compiled([saved, self.other], cotangents)))

    def differentiated(self, cotangents: Gradients) -> Gradients:
        """The same with a history."""
        if self.run is None:
            raise RuntimeError(
                "trying to backward through a jitted function a second time, after its inputs were freed: retain_graph=True"
            )
        found = self.backward.pullback(self.run, cotangents)
        return found if self.sources is None else self._of_sources(list(found))

    def _of_sources(self, found: list[torch.Tensor | None]) -> Gradients:
        place = self.backward.stand_ins
        assert place is not None and self.sources is not None
        own, found[place] = found[place], []
        found[place.start : place.start] = self.sources.gradients(own)
        return found

    def free(self) -> None:
        """Let go of the inputs if torch lets go of what it saved."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.run = None


def _versions(tensors: Sequence[Any]) -> list[int]:
    try:
        return [t._version for t in tensors]
    except (AttributeError, RuntimeError):  # a number; a tensor made in inference mode
        return [t._version if isinstance(t, torch.Tensor) and not t.is_inference() else 0 for t in tensors]


def _unviewed(saved: Sequence[Any]) -> tuple:
    # a view of a result that is saved would keep the result, and with it this node, for good: github.com/pytorch/pytorch/issues/94990
    return tuple([t.detach() if isinstance(t, torch.Tensor) and t._base is not None else t for t in saved])


class _Program(torch.autograd.Function):
    """Results that were computed already, with the backward part of their program."""

    @staticmethod
    def forward(ctx: Any, call: _Call, saved: tuple, results: tuple, constant: tuple, *connected: Any) -> tuple:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_connected = call, len(connected)
        ctx.save_for_backward(*_unviewed(saved))
        if constant:
            ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple:
        call = ctx.call
        cotangents = _materialized(call.zeros, given)
        if cotangents is None:
            found = (None,) * ctx.num_connected
        elif torch.is_grad_enabled():
            found = call.differentiated(cotangents)
        else:
            saved = list(ctx.saved_tensors)
            ctx.maybe_clear_saved_tensors()  # the backward part frees each when it has used it
            found = call.compiled(saved, list(cotangents))
        call.free()
        return (None, None, None, None, *found)


def _between_nodes() -> torch.Tensor:
    """What the first node gives to the second, and its gradient: in which anomaly detection looks for NaN, in the modes of each."""
    return torch.empty(0, dtype=torch.float32, device="cpu")


class _First(torch.autograd.Function):
    """The node that runs the backward part: when it does nobody else holds the gradients of results."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *connected: Any) -> torch.Tensor:
        ctx.call, ctx.num_connected = call, len(connected)
        return _between_nodes()

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple:
        given, ctx.call.given = ctx.call.given, None
        if given is None:
            return (None,) * (1 + ctx.num_connected)
        saved, cotangents = given
        del given
        return (None, *ctx.call.compiled(saved, cotangents))


class _Second(torch.autograd.Function):
    """The node that torch hands the gradients of results to."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, call: _Call, saved: tuple, results: tuple, *connected: Any) -> tuple:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_connected = call, len(connected)
        ctx.save_for_backward(*_unviewed(saved))
        return results

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple:
        call = ctx.call
        cotangents = _materialized(call.zeros, given)
        first, found = None, (None,) * ctx.num_connected
        if cotangents is not None and torch.is_grad_enabled():
            found = call.differentiated(cotangents)
        elif cotangents is not None:
            call.given = list(ctx.saved_tensors), list(cotangents)
            ctx.maybe_clear_saved_tensors()
            first = _between_nodes()
        call.free()
        return (first, None, None, None, *found)


def connect(
    backward: Backward, inputs: Sequence[Any], results: tuple, saved: tuple, other: Any, is_differentiable: Sequence[bool] | None
) -> None:
    """Have torch's autograd differentiate results that were computed already.

    Args:
        backward: of the program.
        inputs: of the program, flat.
        results: of the program, flat; they get the history.
        saved: tensors that the backward part needs.
        other: what else it needs.
        is_differentiable: of each result, whether it gets a history; None if all do.
    """
    zeros = backward.zeros
    if zeros is None:
        zeros = tuple(map(_zeros_like, results))
    call = _Call(backward, zeros, other, backward.run(inputs))
    connected = call.connected(results)
    if backward.in_one_node and is_differentiable is None and torch.is_grad_enabled():  # most calls
        _Program.apply(call, saved, results, (), *connected)
        return
    with torch.enable_grad():
        if backward.in_one_node or is_differentiable is not None:
            constant = tuple([t for t, d in zip(results, is_differentiable or (), strict=False) if not d])
            _Program.apply(call, saved, results, constant, *connected)
            return
        _Second.apply(_First.apply(call, *connected), call, saved, results, *connected)
