"""One tensor under several names, in modules and arguments, as one input of the program.

Thunder has an input for each name, as the program reads them: torch's autograd gets a gradient for each, and adds them in a pass over
memory of its own, which for the table of a vocabulary that is its head as well is more than a layer takes.  With one input the gradients
are added where they are made.  And where the program writes into the tensor, what it reads by another name is what was written, with the
history that the tensor has.
"""

from __future__ import annotations

import torch

from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.provenances import is_parameter_of_module
from thunder_norm.tracing.recording import declare_arguments
from thunder_norm.tracing.shared_memory import aliases
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.trace import TraceCtx, from_trace, tracectx


def joined(prologue: TraceCtx, computation: TraceCtx, *, parameters: bool) -> tuple[TraceCtx, TraceCtx]:
    """The traces of a program just acquired, in which what is one tensor is one input, where that matters.

    It does for tensors that require grad and that the program writes into, which would have a history under each name.  A guard sees
    that those that are joined stay one.

    Args:
        prologue: what finds the inputs.
        computation: the program.
        parameters: whether to join parameters of modules that nothing is written into, too.
    """
    named: dict[int, list[TensorProxy]] = {}  # by the tensor
    for p in computation.args if torch.is_grad_enabled() else ():
        real = aliases.given_as(p) if type(p) is TensorProxy and p.requires_grad else None
        if real is not None:
            named.setdefault(id(real), []).append(p)
    tied = [inputs for inputs in named.values() if len(inputs) > 1]
    written = aliases.written(computation) if tied else set()
    same = {  # the input that each of the others is
        p.name: inputs[0]
        for inputs in tied
        if (parameters and all(is_parameter_of_module(p.history) for p in inputs))
        or not written.isdisjoint(p.name for p in inputs)
        for p in inputs[1:]
    }
    if not same:
        return prologue, computation
    return _sent_once(prologue, same), _received_once(computation, same)


def _sent_once(prologue: TraceCtx, same: dict[str, TensorProxy]) -> TraceCtx:
    *body, returned = prologue.bound_symbols
    to_computation, to_epilogue = returned.args[0]
    others = [p for p in to_computation if isinstance(p, Proxy) and p.name in same]
    kept = tuple(p for p in to_computation if not (isinstance(p, Proxy) and p.name in same))
    pairs = [same[p.name] for p in others], others

    def check(*tensors: torch.Tensor) -> None:
        count = len(tensors) // 2
        if any(a is not b for a, b in zip(tensors[:count], tensors[count:], strict=True)):
            raise GuardError("tensors that were one when the trace was acquired are two")

    new = from_trace(prologue)
    with tracectx(new):
        looks = bindable("check_tied_inputs", check)(*pairs[0], *pairs[1], output=None)
    new.bound_symbols = [*body, looks, returned.from_bsym(args=((kept, to_epilogue),))]
    return new


def _received_once(computation: TraceCtx, same: dict[str, TensorProxy]) -> TraceCtx:
    swaps = {variableify(p): same[p.name] for p in computation.args if p.name in same}
    unpacks = prims.PrimIDs.UNPACK_TRIVIAL
    new = from_trace(computation)
    new.bound_symbols = [
        b.from_bsym_swap_proxies(swaps) for b in computation.bound_symbols if not (b.sym.id is unpacks and b.output.name in same)
    ]
    new.args = tuple(p for p in computation.args if p.name not in same)
    declare_arguments(new, "computation")
    return new
