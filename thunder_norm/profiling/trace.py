"""The programs that Thunder runs, forward and backward: one row for each bound symbol of the execution traces.

They are replayed line by line on tensors without data, so that views share storages, ``del`` frees them and executors' own functions run.
A fusion is replayed as the operations in it, and counts as one kernel.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import ProfileError, UnsupportedOpError, with_details
from thunder_norm.profiling import flops, shapes
from thunder_norm.profiling.memory import Kind, nbytes, tensors_of
from thunder_norm.profiling.places import Origin, origins
from thunder_norm.profiling.recorder import Recorder, Step
from thunder_norm.profiling.rows import NOWHERE, Phase, Place
from thunder_norm.profiling.stand_ins import StandIns
from thunder_norm.tracing.translation import empty_for
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import dce
from thunder.executors.passes import transform_for_execution
from thunder.executors.pythonex import ex as python_executor
from thunder.executors.torchex import ex as torch_executor

_TENSORS_OF_MODULES: dict[Any, Kind] = {prims.PrimIDs.UNPACK_PARAMETER: "parameter", prims.PrimIDs.UNPACK_BUFFER: "buffer"}
_UNPACKS = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.COMMENT)
_BOOKKEEPING = (prims.PrimIDs.DEL, prims.PrimIDs.UNPACK_SEQUENCE, "clear_mutable_collection")


def record(
    forward: TraceCtx,
    backward: TraceCtx | None,
    inputs: Sequence[tuple[Any, Kind]],
    *,
    stand_ins: StandIns,
    recorder: Recorder,
    tick: Callable[[], None],
) -> dict[str, int]:
    """Replay a forward trace on stand-ins of its inputs, and the backward trace on what it returns.

    Returns the bytes that are there before: parameters, buffers and inputs.

    Raises:
        UnsupportedOpError: an operation needs values.
    """
    with stand_ins.mode, torch.no_grad(), torch.random.fork_rng(devices=[]):
        given = []
        for v, kind in inputs:
            given.append(stand_ins.of(v) if isinstance(v, torch.Tensor) else v)
            if isinstance(v, torch.Tensor):
                recorder.memory.see(given[-1], kind)
        resident = recorder.memory.resident()
        replay = _Replay(recorder, tick, {})
        names = [p.name for p in forward.args]
        if len(names) != len(given):
            raise ProfileError(f"the trace takes {len(names)} inputs, got {len(given)}")
        env = dict(zip(names, given, strict=True))
        del given
        result = replay.run(forward, env, "forward")
        if backward is None:
            return resident
        data, saved = result
        del result
        for t in tensors_of(saved[0]):
            recorder.save(t)
        output = data["flat_output"] if "flat_output" in data else data["output"]
        del data
        with recorder, recorder.step("ones_like", "backward", NOWHERE) as step:
            cotangents = [torch.ones_like(t) if isinstance(t, torch.Tensor) else None for t in output]
            step.finish(recorder.memory, (), cotangents)
        saved_for_backward = [list(saved[0]), list(saved[1])]
        del saved
        given_gradients = tuple(cotangents)  # who calls the backward keeps them
        env = {"saved_for_backward": saved_for_backward, "cotangents": cotangents}
        del saved_for_backward, cotangents
        gradients = replay.run(backward, env, "backward")
        del gradients, output, given_gradients
        return resident


def tensors_of_module(prologue: TraceCtx) -> dict[str, tuple[str, Kind]]:
    """The parameters and buffers that a prologue takes from a module, by the names of their proxies, which may be any of the program's."""
    return {
        b.output.name: (b.args[1], _TENSORS_OF_MODULES[b.sym.id])
        for b in prologue.bound_symbols
        if b.sym.id in _TENSORS_OF_MODULES
    }


class _Replay:
    """Runs the lines of a trace in a namespace."""

    def __init__(self, recorder: Recorder, tick: Callable[[], None], numbers: dict[int, int]):
        self.recorder, self.tick = recorder, tick
        self.numbers = numbers  # of the last forward step for each operation of the user's

    def run(self, trace: TraceCtx, env: dict[str, Any], phase: Phase) -> Any:
        """What the trace returns; `env` is emptied as the trace says."""
        context = _context(trace)
        with tracectx(trace):
            for bsym, origin in origins(trace):
                if bsym.sym.id in _UNPACKS:
                    continue
                if bsym.sym.id == prims.PrimIDs.RETURN:
                    return tree_map(
                        lambda p: env[p.name] if isinstance(p, Proxy) else p, bsym.args[0] if len(bsym.args) == 1 else bsym.args
                    )
                if bsym.sym.id in _BOOKKEEPING:
                    _execute(bsym, context, env)
                    continue
                self._step(bsym, origin, context, env, phase)
                self.tick()
        raise ProfileError("the trace returns nothing")

    def _step(self, bsym: BoundSymbol, origin: Origin | None, context: dict, env: dict[str, Any], phase: Phase) -> None:
        place = origin.place if origin is not None else _own_place(bsym)
        derivative_of = self.numbers.get(origin.number) if origin is not None and phase == "backward" else None
        args = [env[p.name] for p in bsym.flat_proxy_args if p.name in env]
        with self.recorder.step(bsym.sym.name, phase, place, derivative_of) as step:
            if bsym.sym.is_fusion:
                step.is_fused = True
                _replay_fusion(bsym, env, self.recorder, step)
            else:
                _run(bsym, place, context, env, self.recorder, step)
            results = [env[p.name] for p in bsym.flat_proxy_outs if p.name in env]
            step.flops = _rule_for(bsym, env, results)
            step.finish(self.recorder.memory, args, results)
            del args, results
        if origin is not None and phase == "forward":
            self.numbers[origin.number] = len(self.recorder.steps) - 1


def _context(trace: TraceCtx) -> dict[str, Any]:
    """What the lines of a trace mention besides its variables."""
    imports, called, objects = trace._gather_ctxs()
    return {"torch": torch, **imports, **called, **objects}  # every program imports torch, which its lines have dtypes of


def _execute(bsym: BoundSymbol, context: dict, env: dict[str, Any]) -> None:
    """Run the line that the generated program has for a bound symbol."""
    lines = bsym.python(indent=0)
    exec("\n".join(lines), {**context, **bsym._object_ctx}, env)  # printing names the objects in a line


def _run(bsym: BoundSymbol, place: Place, context: dict, env: dict[str, Any], recorder: Recorder, step: Step) -> None:
    """Run an operation; one of an executor's own that needs data is known by what the trace says of its results."""
    args, kwargs = _arguments(bsym, env)
    is_given, result = shapes.apply(bsym.sym.id, args, kwargs)
    if is_given:
        _stand_for(bsym, env, tree_leaves(result), recorder, step)
        return
    try:
        with recorder:
            _execute(bsym, context, env)
    except Exception as e:
        outs = bsym.flat_proxy_outs
        is_own = bsym.sym.executor not in (None, torch_executor, python_executor)
        if is_own and outs and all(isinstance(p, TensorProxy) for p in outs):
            _stand_for(bsym, env, [empty_for(p) for p in outs], recorder, step)
        elif isinstance(e, _NEEDS_VALUES):
            raise UnsupportedOpError(
                with_details(
                    f"{bsym.sym.name} needs the values of its arguments, and a profile has none", at=place.location or None
                )
            ) from e
        else:
            raise


_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


def _stand_for(bsym: BoundSymbol, env: dict[str, Any], results: list[Any], recorder: Recorder, step: Step) -> None:
    """Take `results` for those of an operation."""
    recorder.stand_for(bsym.sym.name, step, [env[p.name] for p in bsym.flat_proxy_args if p.name in env], results)
    env.update({p.name: t for p, t in zip(bsym.flat_proxy_outs, results, strict=True)})


def _arguments(bsym: BoundSymbol, env: dict[str, Any]) -> tuple[tuple, dict]:
    return tree_map(lambda p: env.get(p.name) if isinstance(p, Proxy) else p, (tuple(bsym.args), dict(bsym.kwargs)))


def _rule_for(bsym: BoundSymbol, env: dict[str, Any], results: list[Any]) -> int | None:
    """What a rule says for the symbol, for the one that an executor claimed, or for the torch function that it stands for."""
    out = results[0] if len(results) == 1 else tuple(results)
    while True:
        args, kwargs = _arguments(bsym, env)
        for op in (bsym.sym.id, _function_of(bsym.sym.id)):
            found = flops.own_flops(op, args, kwargs, out)
            if found is not None:
                return found
        if len(bsym.subsymbols) != 1:
            return None
        (bsym,) = bsym.subsymbols


@functools.cache
def _function_of(symbol_id: Any) -> Any:
    """The torch function that one of Thunder's symbols stands for: its id says which."""
    if not isinstance(symbol_id, str) or not symbol_id.startswith("torch."):
        return None
    return functools.reduce(lambda owner, name: getattr(owner, name, None), symbol_id.split(".")[1:], torch)


def _own_place(bsym: BoundSymbol) -> Place:
    positions = bsym.source_positions
    if bsym.source_filename is None or positions is None:
        return NOWHERE
    text = linecache.getline(bsym.source_filename, positions.lineno or 0).strip()
    return Place("", f"{bsym.source_filename}:{positions.lineno}:  {text}")


def _replay_fusion(bsym: BoundSymbol, env: dict[str, Any], recorder: Recorder, step: Step) -> None:
    """Run what a fusion computes, operation by operation, outside the accounting of memory: inside a fusion nothing is stored."""
    trace = TraceCtx()
    trace.args = list(bsym.flat_proxy_args)
    for p in trace.args:
        trace.add_name(p.name)
    with tracectx(trace):
        for p in trace.args:
            prims.unpack_trivial(p, name=p.name)
        trace.bound_symbols.extend(bsym.subsymbols)
        prims.python_return(tuple(bsym.flat_proxy_outs))
    trace = transform_for_execution(dce(trace), (torch_executor, python_executor))
    inside = Recorder(recorder.count)
    arguments = {p.name: env[p.name] for p in bsym.flat_proxy_args}
    local = dict(arguments)
    context = _context(trace)
    with tracectx(trace), inside, inside.step("fusion", step.phase, step.place) as inner:
        for b in trace.bound_symbols:
            if b.sym.id not in (*_UNPACKS, prims.PrimIDs.RETURN):
                _execute(b, context, local)
        inner.finish(inside.memory, (), ())
    step.kernels = inner.kernels
    results = {p.name: local[p.name] for p in bsym.flat_proxy_outs}
    env.update(results)
    for t in tensors_of(list(results.values())):
        block, is_new = recorder.memory.see(t)
        if is_new:
            step.made.append(block)
    step.boundary = (sum(map(nbytes, tensors_of(list(arguments.values())))), sum(map(nbytes, tensors_of(list(results.values())))))
