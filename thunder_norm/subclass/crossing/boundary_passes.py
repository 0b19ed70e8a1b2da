"""Rewrites of the three traces of a program once only plain tensors cross between them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.crossing.boundary_operators import check_results
from thunder_norm.subclass.recording.trace import keep_only
from thunder_norm.tracing.activity import depended_on, depending
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.recording import declare_arguments
from thunder_norm.tracing.shared_memory.views import RETURNING_SELF
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

Traces = tuple[TraceCtx, TraceCtx, TraceCtx | None]


def bind_arguments(trace: TraceCtx, name: str, added: list[Proxy]) -> None:
    """Declare `trace.args` in the signature, and unpack those that are new."""
    declare_arguments(trace, name)
    with tracectx(trace):
        unpacks = [prims.unpack_trivial.bind(p, output=p, name=p.name) for p in added]
    trace.bound_symbols[:0] = unpacks


def results_and_received(computation: TraceCtx, epilogue: TraceCtx) -> list[tuple[Any, Any]]:
    """Each result of the computation beside the epilogue's argument that receives it: in the same order, under names of its own."""
    returned = computation.bound_symbols[-1].args[0]
    computed = returned["output"] if isinstance(returned, dict) else returned  # Thunder adds the arguments once it is acquired
    return list(zip(computed, epilogue.args[len(epilogue.args) - len(computed) :], strict=True))


def computing_only(trace: TraceCtx, outputs: Sequence[TensorProxy]) -> TraceCtx:
    """The computation of some of its outputs alone; its arguments are those they need."""
    *body, returned = trace.bound_symbols
    body = keep_only([b for b in body if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL], {p.name for p in outputs})
    made = {p.name for b in body for p in b.flat_proxy_outs}
    used = {p.name for b in body for p in b.flat_proxy_args} | {p.name for p in outputs} - made
    arguments = tuple({p.name: p for p in trace.args if p.name in used}.values())
    new = from_trace(trace)
    unpacks = [b for b in trace.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and b.output.name in used]
    kept = {**returned.args[0], "output": tuple(outputs), "flat_args": list(arguments)}
    new.bound_symbols = [*unpacks, *body, returned.from_bsym(args=(kept,))]
    new.args = arguments
    declare_arguments(new, "computation")
    new.set_provenance(TraceProvenance("Norms only"))
    return new


def without_inactive(traces: Traces, started: Mapping[str, bool]) -> Traces:
    """Have those inputs and results take part in autograd that torch's autograd would connect, and no others.

    Args:
        traces: of a program that Thunder is going to differentiate.
        started: the names of what has a history that starts in the program, and whether it starts there.

    Raises:
        UnsupportedOpError: one where it starts is returned, and another result depends on it.
    """
    return _with_fewer_gradients(detach_inactive(with_histories(_with_each_result_once(traces), started)))


def _with_each_result_once(traces: Traces) -> Traces:
    """Return no tensor twice under several names, which in-place operations leave of one: torch's autograd knows the last alone."""
    prologue, computation, epilogue = traces
    if epilogue is None:
        return traces
    first: dict[str, TensorProxy] = {}
    swaps: dict[Variable, TensorProxy] = {}
    kept = []
    for p, q in results_and_received(computation, epilogue):
        if isinstance(p, TensorProxy) and first.setdefault(p.name, q) is not q:
            swaps[variableify(q)] = first[p.name]
        else:
            kept.append(p)
    if not swaps:
        return traces
    returned = computation.bound_symbols[-1]
    new = from_trace(computation)
    new.bound_symbols = [*computation.bound_symbols[:-1], returned.from_bsym(args=({**returned.args[0], "output": tuple(kept)},))]
    receiving = from_trace(epilogue)
    receiving.args = tuple([q for q in epilogue.args if variableify(q) not in swaps])
    unpacks = (b for b in epilogue.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and variableify(b.output) in swaps)
    dropped = {id(b) for b in unpacks}
    receiving.bound_symbols = [b.from_bsym_swap_proxies(swaps) for b in epilogue.bound_symbols if id(b) not in dropped]
    declare_arguments(receiving, "epilogue")
    return prologue, new, receiving


def with_histories(traces: Traces, started: Mapping[str, bool]) -> Traces:
    """Let results require grad that depend differentiably on nothing but what the program has started histories of, which lead nowhere."""
    _, computation, epilogue = traces
    if epilogue is None or not started:
        return traces
    moved = depending(computation, set(started))
    active = depending(computation, {p.name for p in computation.args if isinstance(p, TensorProxy) and p.requires_grad})
    results = [(p, q) for p, q in results_and_received(computation, epilogue) if isinstance(p, TensorProxy) and p.name in moved]
    leaves = {name for name, is_leaf in started.items() if is_leaf}
    for p, _ in results:
        others = {q.name for q, _ in results} - {p.name}
        if p.name in leaves and not others.isdisjoint(depending(computation, {p.name})):
            raise UnsupportedOpError(
                with_details(
                    "a tensor that the program made, and called requires_grad_() of, is returned beside what is computed from it",
                    name=p.name,
                    why="outside it has no gradients of that",
                    instead="give it to the function as an argument",
                )
            )
    unconnected = [(p.name in leaves, q) for p, q in results if p.name in leaves or p.name not in active]
    if not unconnected:
        return traces
    are_leaves, outputs = zip(*unconnected, strict=True)

    def connect(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return tuple([_started(t, is_leaf) for t, is_leaf in zip(tensors, are_leaves, strict=True)])

    return pass_through_epilogue(traces, outputs, (), "started", connect)


def _started(t: torch.Tensor, is_leaf: bool) -> torch.Tensor:
    return t.detach().requires_grad_() if is_leaf else _Started.apply(t.detach(), torch.empty((), requires_grad=True))


class _Started(torch.autograd.Function):
    """A history that starts here."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None


def _with_fewer_gradients(traces: Traces) -> Traces:
    """Ask for no gradient of inputs that no result depends on: torch has none, Thunder has zeros."""
    prologue, computation, epilogue = traces
    inputs = {p.name for p in computation.args if isinstance(p, TensorProxy) and p.requires_grad}
    returned = computation.bound_symbols[-1]
    results = [p.name for p in returned.flat_proxy_args if isinstance(p, TensorProxy)]
    given = {p.name for p in computation.args}
    handed_back = {p.name for p in tree_flatten(returned.args[0]["output"])[0] if isinstance(p, Proxy)}
    active = depending(computation, inputs)
    used = depended_on(computation, {name for name in results if name in active and (name not in given or name in handed_back)})
    idle = inputs - used
    if not idle:
        return traces

    with tracectx(TraceCtx()):  # in the computation itself the names are taken
        idle = {p.name: p.replace(requires_grad=False) for p in computation.args if p.name in idle}
    new = from_trace(computation)
    new.args = tuple([idle.get(p.name, p) for p in computation.args])
    flat_args = [idle.get(p.name, p) if isinstance(p, Proxy) else p for p in returned.args[0]["flat_args"]]
    new.bound_symbols = [
        *computation.bound_symbols[:-1],
        returned.from_bsym(args=({**returned.args[0], "flat_args": flat_args},)),
    ]
    return prologue, new, epilogue


def detach_inactive(traces: Traces) -> Traces:
    """Let results that depend differentiably on no input come out without gradient: Thunder connects all that it returns.

    Inputs that are handed back come out as they are, be it by an operation that has nothing to do (``x.contiguous()``).
    """
    _, computation, epilogue = traces
    inputs = [p for p in computation.args if isinstance(p, TensorProxy)]
    active = depending(computation, {p.name for p in inputs if p.requires_grad})
    if epilogue is None or not any(p.requires_grad for p in inputs):
        return traces
    given = _names_of_inputs(computation, inputs)
    constant = [
        (p, q)
        for p, q in results_and_received(computation, epilogue)
        if isinstance(p, TensorProxy) and p.name not in active | given and dtypes.is_inexact_dtype(p.dtype)
    ]
    if not constant:
        return traces
    may_be_given = _handed_on(computation, given)
    detach = functools.partial(_detached, [p.name in may_be_given for p, _ in constant])
    return pass_through_epilogue(traces, tuple([q for _, q in constant]), (), _DETACHED, detach)


def _names_of_inputs(computation: TraceCtx, inputs: Sequence[TensorProxy]) -> set[str]:
    """What inputs are called, also after something was written into them."""
    found = {p.name for p in inputs}
    for bsym in computation.bound_symbols:
        if bsym.sym.id is prims.PrimIDs.UPDATE_ALIASES:
            found |= {q.name for p, q in zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True) if p.name in found}
        found |= {
            copy.output.name for copy in copies_in(bsym) if copy.args[1].name in found
        }  # also inside of what has a gradient of ours
    return found


def _handed_on(computation: TraceCtx, names: set[str]) -> set[str]:
    """These names, and those of what operations return that return these tensors themselves where there is nothing to do."""
    found = set(names)
    for bsym in computation.bound_symbols:
        if bsym.sym.name in RETURNING_SELF and bsym.flat_proxy_args and bsym.flat_proxy_args[0].name in found:
            found.update(p.name for p in bsym.flat_proxy_outs)
    return found


def _detached(may_be_given: Sequence[bool], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple([t if m and not t.requires_grad else t.detach() for t, m in zip(tensors, may_be_given, strict=True)])


_DETACHED, COPIED = "detached", "copy_into_inputs"  # what `pass_through_epilogue` adds to epilogues


def of_values_alone(epilogue: TraceCtx) -> TraceCtx:
    """The epilogue before `detach_inactive` and `write_back`, for callers that connect results themselves, or have no data."""
    new = from_trace(epilogue)
    swaps: dict = {}
    for b in epilogue.bound_symbols:
        if b.sym.name.startswith((_DETACHED, COPIED)):
            swaps |= {variableify(made): given for made, given in zip(b.flat_proxy_outs, b.flat_proxy_args, strict=False)}
        else:
            new.bound_symbols.append(b.from_bsym_swap_proxies(swaps, skip_output=True) if swaps else b)
    return new


def of_constants(computation: TraceCtx, inputs: Sequence[Any]) -> TraceCtx:
    """A computation for calls without autograd, of `inputs` that do not require grad: there is nothing for Thunder to differentiate.

    It would keep what a backward needs, and leave out what is written into a view of what the program computes.
    """
    inputs = [p for p in inputs if isinstance(p, TensorProxy) and p.requires_grad]
    if not inputs:
        return computation
    constants = {p.name: copy.copy(p) for p in inputs}
    for p in constants.values():
        p._requires_grad = False
    new = from_trace(computation)
    new.args = tuple([constants.get(p.name, p) if isinstance(p, TensorProxy) else p for p in computation.args])
    swaps = {variableify(p): constants[p.name] for p in inputs}
    new.bound_symbols = [b.from_bsym_swap_proxies(swaps) for b in computation.bound_symbols]
    return new


def check_what_leaves(traces: Traces) -> Traces:
    """Let the epilogue look at what the computation returns: nothing that stands for a tensor may be among it."""
    prologue, computation, epilogue = traces
    count = len(tree_flatten(computation.bound_symbols[-1].args[0]["output"])[0])
    if epilogue is None or not count:
        return traces
    results = [p for p in epilogue.args[len(epilogue.args) - count :] if isinstance(p, TensorProxy)]
    new = from_trace(epilogue)
    unpacks = [b for b in epilogue.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b for b in epilogue.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    new.bound_symbols = [*unpacks, check_results(*results), *rest]
    return prologue, computation, new


def pass_through_epilogue(
    traces: Traces,
    outputs: tuple[TensorProxy, ...],
    given: Sequence[Any],
    name: str,
    function: Callable[..., tuple[torch.Tensor, ...]],
) -> Traces:
    """Replace, in the epilogue, the computed `outputs` by ``function(*outputs, *given)``.

    `given` are inputs of the computation; they become further arguments of the epilogue.
    """
    prologue, computation, epilogue = traces
    new_prologue = from_trace(prologue)
    (to_computation, to_epilogue) = prologue.bound_symbols[-1].args[0]
    returned = prologue.bound_symbols[-1].from_bsym(args=((to_computation, (*to_epilogue, *given)),))
    new_prologue.bound_symbols = [*prologue.bound_symbols[:-1], returned]

    new = from_trace(epilogue)
    swaps, inputs = {}, []
    for p in (*epilogue.args, *(o for b in epilogue.bound_symbols for o in b.flat_proxy_outs)):
        if isinstance(p, Proxy) and not new.has_name(p.name):
            new.add_name(p.name)  # those of what the computation returns are its own
    with tracectx(new):
        for p in given:
            inputs.append(TensorProxy(like=p) if isinstance(p, TensorProxy) else p)
        passed = tuple(TensorProxy(like=p) for p in outputs)
    swaps = {variableify(p): q for p, q in zip(outputs, passed, strict=True)}
    unpacks = [b for b in epilogue.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b.from_bsym_swap_proxies(swaps) for b in epilogue.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    call = bindable(name, function)(*outputs, *inputs, output=passed)
    new.bound_symbols = [*unpacks, call, *rest]
    # the epilogue takes what the prologue sends it first, then what the computation returns
    new.args = (*epilogue.args[: len(to_epilogue)], *inputs, *epilogue.args[len(to_epilogue) :])
    bind_arguments(new, "epilogue", inputs)
    return new_prologue, computation, new
