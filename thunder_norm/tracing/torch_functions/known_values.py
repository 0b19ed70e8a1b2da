"""Values that a program makes of numbers alone: ``torch.ones(n).all()`` decides nothing that a trace does not know.

In eager mode such a value is there to be asked for; while a trace is acquired the operations that made it are run when it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from thunder_norm.tracing.lookasides import look_up
from thunder_norm.tracing.shared_memory.memory import Memory
from thunder_norm.tracing.shared_memory.writes import targets
from thunder_norm.tracing.tags import has_any_tag
from thunder.core import devices, prims
from thunder.core.codeutils import SigInfo
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, do_raise, wrap
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy, Variable, variableify
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors import pythonex, torchex
from thunder.executors.passes import transform_for_execution
from thunder.torch import _torch_to_thunder_function_map

REPLACED = "_thunder_norm_replaced"  # the names of what `is_replaced`, where the acquisition at hand has some
_MAX_NUMEL = 1 << 20  # beyond, what decides is no mask or position
_READ: dict[Any, Callable[[torch.Tensor], Any]] = {
    bool: bool,
    int: int,
    float: float,
    operator.truth: bool,
    operator.not_: operator.not_,
    operator.index: operator.index,
    torch.Tensor.item: torch.Tensor.item,
    torch.Tensor.tolist: torch.Tensor.tolist,
    **{_torch_to_thunder_function_map[method]: method for method in (torch.Tensor.item, torch.Tensor.tolist)},
}


def lookaside(fn: Callable, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it asks for the value of a tensor that the program has made of numbers; None for all others."""
    read = look_up(_READ, fn)
    if read is None or len(args) != 1 or type(args[0].value) is not TensorProxy:
        return None
    value = value_of(args[0].value)
    if value is None:
        return None
    try:
        result = read(value)
    except (ValueError, RuntimeError) as e:  # it has more than one
        error = e
        return lambda _: do_raise(error)
    return lambda x: wrap(result, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[x.provenance]))


def is_replaced(value: Any) -> bool:
    """Whether it stands for a tensor that was written into, and is another value by now than that which the trace has under its name."""
    replaced = getattr(get_jit_ctx(), REPLACED, None)
    return replaced is not None and isinstance(value, TensorProxy) and value.name in replaced


def value_of(p: TensorProxy) -> torch.Tensor | None:
    """The value of a tensor of the trace at hand that is made of numbers alone; None if it is not, or may have been written into.

    Where numbers were written into it as well, and no view of it is involved, it is what was written.
    """
    if math.prod(p.shape) > _MAX_NUMEL or is_replaced(p):
        return None
    steps = list(steps_of(bsym for scope in get_jit_ctx().computation_trace.scopes for bsym in scope))
    asked = p
    program, p = _with_written(steps, asked)
    needed = list(_made_of([p], program))
    made = {o.name for bsym in needed for o in bsym.flat_proxy_outs}
    is_of_inputs = p.name not in made or any(a.name not in made for bsym in needed for a in bsym.flat_proxy_args)
    if is_of_inputs or not all(map(_is_of_numbers, needed)) or _may_be_other(asked, needed, program, steps):
        return None
    return _run(p, [_on_cpu(bsym) for bsym in reversed(needed)])


def _with_written(steps: list[BoundSymbol], p: TensorProxy) -> tuple[list[BoundSymbol], TensorProxy]:
    """The steps, and a tensor, with what was written into tensors in their place from then on."""
    swaps: dict[Variable, TensorProxy] = {}
    program = []
    for bsym in steps:
        program.append(bsym.from_bsym_swap_proxies(swaps, skip_output=True) if swaps else bsym)
        if _is_followed(bsym):
            written, target = bsym.args
            swaps[variableify(target)] = swaps.get(variableify(written), written)
    return program, swaps.get(variableify(p), p)


def _is_followed(bsym: BoundSymbol) -> bool:
    """Whether an operation writes the whole of a tensor, which is what was written from then on."""
    if bsym.sym.id is not prims.PrimIDs.COPY_:
        return False
    written, target = bsym.args
    return (written.shape, written.dtype) == (target.shape, target.dtype)  # else it becomes something else there


def _may_be_other(asked: TensorProxy, needed: list[BoundSymbol], program: list[BoundSymbol], steps: list[BoundSymbol]) -> bool:
    """Whether a write may have changed what is read after it in another way than `_with_written` has it: by a view, for instance."""
    writes = [(position, t.name) for position, bsym in enumerate(steps) for t in targets(bsym)]
    if not writes:
        return False
    is_needed = {id(bsym) for bsym in needed}
    place = memory_of(steps).root
    made = {o.name: position for position, bsym in reversed([*enumerate(steps)]) for o in bsym.flat_proxy_outs}
    reads = [(i, a.name) for i, bsym in enumerate(steps) if id(program[i]) in is_needed for a in bsym.flat_proxy_args]
    pending, seen = [*reads, (len(steps), asked.name)], set()
    while pending:
        at, name = pending.pop()
        if (at, name) in seen:
            continue
        seen.add((at, name))
        for position, target in writes:
            if place(target) != place(name) or not made.get(name, -1) < position < at:
                continue
            if target != name or not _is_followed(steps[position]):
                return True
            pending.append((position, steps[position].args[0].name))
    return False


def memory_of(steps: Iterable[BoundSymbol]) -> Memory:
    """Which tensors may share memory after these operations, as `steps_of` has them."""
    memory = Memory()
    for bsym in steps:
        if isinstance(bsym.sym.id, prims.PrimIDs) and bsym.sym.id.name not in MAY_BE_VIEWS:
            continue
        given = bsym.args[1:2] if bsym.sym.id is prims.PrimIDs.COPY_ else bsym.flat_proxy_args
        memory.join(p.name for p in (*given, *bsym.flat_proxy_outs))
    return memory


# primitives whose results may lie in the memory of what they take
MAY_BE_VIEWS = frozenset(
    "SHALLOW_COPY CONVERT_ELEMENT_TYPE DEVICE_PUT BROADCAST_IN_DIM RESHAPE SLICE SQUEEZE TRANSPOSE UNFOLD VIEW STRIDE_ORDER "
    "UPDATE_ALIASES REAL IMAG BITCAST COPY_ GET_GRAD PUT_GRAD EXOGENOUS_LIKE".split()
)


def steps_of(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """What operations are made of: of ``ones_like(x)`` the ones, which know nothing of x."""
    for bsym in bsyms:
        if bsym.subsymbols and bsym.sym.name not in _OF_ONE_STEP:
            yield from steps_of(bsym.subsymbols)
        elif {o.name for o in bsym.flat_proxy_outs} - {a.name for a in bsym.flat_proxy_args} or not bsym.flat_proxy_outs:
            yield bsym


def _on_cpu(bsym: BoundSymbol) -> BoundSymbol:
    """The same operation with values, if it is one on the meta device."""
    move = lambda v: devices.cpu if isinstance(v, devices.Device) and v.type == "meta" else v  # noqa: E731
    return bsym.from_bsym(args=tree_map(move, bsym.args), kwargs=tree_map(move, bsym.kwargs))


def _made_of(proxies: list[Any], program: list[BoundSymbol]) -> Iterator[BoundSymbol]:
    """The operations that some values come from, the last one first."""
    names = {p.name for p in proxies}
    for bsym in reversed(program):
        if any(o.name in names for o in bsym.flat_proxy_outs):
            names.update(a.name for a in bsym.flat_proxy_args)
            yield bsym


def _is_of_numbers(bsym: BoundSymbol) -> bool:
    """Whether an operation makes the same of the same each time: of what torch runs, which may be random, what is known to."""
    is_small = all(math.prod(o.shape) <= _MAX_NUMEL for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy))
    is_prim = isinstance(bsym.sym.id, prims.PrimIDs) and bsym.sym.id.name not in _OTHER_EACH_TIME
    return is_small and (is_prim or bsym.sym.name in _OF_TORCH | _OF_ONE_STEP) and not has_any_tag(bsym, {prims.OpTags.RANDOM_OP})


# steps that Thunder leaves to torch
_OF_TORCH = frozenset(
    "broadcast_tensors new_ones new_zeros new_full eye linspace tril triu bool int long float aten_linspace_default "
    "aten_logspace_default".split()
)
# Thunder's primitive of the first runs nowhere by itself, and those of the second make a copy where torch has a view.
_OF_ONE_STEP = frozenset({"lerp", "diagonal"})
_OTHER_EACH_TIME = ("EMPTY", "RANDINT", "RANDN", "UNIFORM", "UNIFORM_PHILOX", "MULTINOMIAL", "GET_AND_UPDATE_RNG_STATE")


def _run(p: TensorProxy, operations: list[BoundSymbol]) -> torch.Tensor:
    trace = TraceCtx()
    trace.args, trace.kwargs, trace._siginfo = (), {}, SigInfo("made_of_numbers")
    trace.names.update(o.name for bsym in operations for o in bsym.flat_proxy_outs)
    trace.bound_symbols = [*operations, prims.python_return.bind(p, output=None)]
    executable = transform_for_execution(trace, (torchex.ex, pythonex.ex))
    with torch.no_grad():
        return executable.python_callable()()
