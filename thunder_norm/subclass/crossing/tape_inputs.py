"""The inputs that a tape is given, at hand where the results of a program leave it; see `tape`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from thunder_norm.subclass.acquiring import plain_values
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fakes import fake_of
from thunder_norm.subclass.acquiring.tape import Again, Constant, Tape
from thunder_norm.subclass.backward.differentiation import Joint
from thunder_norm.subclass.backward.followed import is_handed_back
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.crossing.boundary_operators import unflatten_operator
from thunder_norm.subclass.crossing.boundary_passes import Traces, bind_arguments, results_and_received
from thunder_norm.tracing.activity import depending
from thunder_norm.tracing.guarding.bindable import bindable
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


def tape_of(acquisition: Acquisition, trace: TraceCtx, joint: Joint) -> Tape | None:
    """The tape of an acquired program, if it computes all that the program returns with a gradient, from the inputs alone."""
    fakes = acquisition.fakes.by_name()
    returned = trace.bound_symbols[-1].args[0]["output"]
    results = {id(r.fake) for r in joint.results}
    if not results <= {id(fake_of(p, fakes)) for p in returned} or acquisition.has_changed_plain():
        return None
    active = depending(trace, {p.name for p in trace.args if isinstance(p, TensorProxy) and p.requires_grad})
    arguments = {p.name for p in trace.args if isinstance(p, TensorProxy)}  # handed back, these have gradients of their own
    computed = [p for p in returned if isinstance(p, TensorProxy) and (isinstance(p, SubclassProxy) or p.name not in arguments)]
    moved = [fake_of(p, fakes) for p in computed if p.name in active]
    if any(t is None or not (id(t) in results or is_handed_back(acquisition, t)) for t in moved):
        return None
    inputs = [p.fake for p in acquisition.wrappers.inputs()]
    inputs += [t for t, _ in acquisition.fakes.plain_inputs() if acquisition.fakes.is_given(t)]
    constant = functools.partial(_constant, acquisition, trace)
    is_whole = acquisition.tape.covers(inputs, [s.fake for s in joint.sources], [r.fake for r in joint.results], constant)
    return acquisition.tape if is_whole else None


def _constant(acquisition: Acquisition, trace: TraceCtx, fake: torch.Tensor) -> Constant | None:
    """How Thunder computes a plain tensor without a gradient from inputs of the program; None if it does not, or not each time the same."""
    fakes = acquisition.fakes
    proxy = fakes.first_proxy_of(fake)
    if id(fake) not in fakes.computed or proxy is None or fake.requires_grad:
        return None
    proxy = fakes.current(proxy)
    program = [b for b in trace.bound_symbols[:-1] if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    made = plain_values.made_of(proxy, program, lambda p: p.name)
    arguments = {p.name for p in trace.args if type(p) is TensorProxy}
    if any(p.name not in arguments for p in made.given) or not plain_values.are_the_same_each_time(made.operations, proxy):
        return None
    return Constant(fake, tuple(made.given), plain_values.compiled([proxy], made.operations, made.given))


def hand_on_inputs(traces: Traces, joint: Joint | None) -> Traces:
    """Have the prologue send the inputs of the tape to the epilogue, and the results there keep them for their gradients."""
    prologue, computation, epilogue = traces
    if joint is None or joint.tape is None or epilogue is None:
        return traces
    given = [_in_prologue(prologue, joint, fake) for fake in joint.tape.given]
    given += [_named_in_prologue(prologue, p) for p in joint.tape.given_for_constants]
    to_computation, to_epilogue = prologue.bound_symbols[-1].args[0]
    new_prologue = from_trace(prologue)
    returned = prologue.bound_symbols[-1].from_bsym(args=((to_computation, (*to_epilogue, *given)),))
    new_prologue.bound_symbols = [*prologue.bound_symbols[:-1], returned]
    new = from_trace(epilogue)
    for p in epilogue.args:  # they may have names of the computation's
        if not new.has_name(p.name):
            new.add_name(p.name)
    with tracectx(new):
        inputs = [TensorProxy(like=p) for p in given]
    unpacks = [b for b in epilogue.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b for b in epilogue.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    connecting, swaps = _connected(new, joint, joint.tape, results_and_received(computation, epilogue), inputs)
    rest = [_with_inputs(b.from_bsym_swap_proxies(swaps), joint, inputs) for b in rest]
    new.bound_symbols = [*unpacks, *connecting, *rest]
    new.args = (*epilogue.args[: len(to_epilogue)], *inputs, *epilogue.args[len(to_epilogue) :])
    bind_arguments(new, "epilogue", list(inputs))
    return new_prologue, computation, new


def _in_prologue(prologue: TraceCtx, joint: Joint, fake: torch.Tensor) -> TensorProxy:
    for bsym in prologue.bound_symbols:
        if isinstance(bsym.output, SubclassProxy) and bsym.output.fake is fake:
            return bsym.output
    return _named_in_prologue(prologue, joint.plain_input(fake))


def _named_in_prologue(prologue: TraceCtx, proxy: TensorProxy) -> TensorProxy:
    made = {p.name: p for bsym in prologue.bound_symbols for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)}
    # one that the computation does not take has another name there, from before it was called as the user's variable
    same = (p for p in made.values() if p.history is not None and p.history is proxy.history)
    return made[proxy.name] if proxy.name in made else next(same, proxy)


def _connected(
    trace: TraceCtx, joint: Joint, tape: Tape, results: Sequence[tuple], inputs: Sequence[TensorProxy]
) -> tuple[list[BoundSymbol], dict]:
    """What gives plain results the inputs, and what stands for these results then."""
    plain = [
        (q, fake)
        for p, q in results
        if (fake := joint.plain_results.get(p.name) if isinstance(p, TensorProxy) else None) is not None
    ]
    if not plain:
        return [], {}
    with tracectx(trace):
        passed = tuple([TensorProxy(like=q) for q, _ in plain])
    # the fakes themselves have a history, of the acquisition
    gradients = [functools.partial(tape.gradients, fake) for _, fake in plain]

    def connect(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = tensors[len(gradients) :]
        with torch.enable_grad():
            return tuple([Again.apply(g, t, *given) for g, t in zip(gradients, tensors, strict=False)])

    call = bindable("differentiable_again", connect)(*(q for q, _ in plain), *inputs, output=passed)
    return [call], {variableify(q): p for (q, _), p in zip(plain, passed, strict=True)}


def _with_inputs(bsym: BoundSymbol, joint: Joint, inputs: Sequence[TensorProxy]) -> BoundSymbol:
    """An operation that makes a wrapper with a gradient, given the inputs too."""
    made = bsym.output
    if not isinstance(made, SubclassProxy) or joint.result_of(made.fake) is None or not bsym.sym.name.startswith("unflatten_"):
        return bsym
    return unflatten_operator(made.fake, joint, joint.tape)(*bsym.args, *inputs, output=made)
