"""Gradients of jitted programs that can be differentiated again.

Thunder compiles the backward part of a program with it.  When somebody asks for a graph of the backward (``create_graph=True``) the
program that Thunder differentiated becomes a function under our transforms: its `vjp` at the inputs of the call, compiled when it is
first asked for, is what gives the gradients, and torch's autograd gets their history, to any order, as for `grad` of a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_norm.errors import TransformError, with_details
from thunder_norm.functions.acquisition import Call
from thunder_norm.functions.missing_gradients import has_gradient_of_ours
from thunder_norm.functions.programs import flat_program, is_bookkeeping, is_differentiable, operations_of, outputs_of, replayed
from thunder_norm.functions.transformed import Transformed
from thunder_norm.functions.writes.aliasing import end_of, parts_of_copies, views_in
from thunder_norm.functions.writes.functionalization import without_mutations
from thunder_norm.subclass.backward.differentiation import has_tape
from thunder_norm.subclass.recording.trace import keep_only
from thunder_norm.tracing.calls.differentiated import Gradients, Run, makes_pullbacks
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.tags import has_any_tag
from thunder_norm.tracing.torch_functions import random_numbers
from thunder_norm.tracing.torch_functions.random_numbers import count_draws, draws_numbers
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx


class _Program(Transformed):
    """A program that was acquired already, as a function of its inputs."""

    name = "create_graph=True"

    def __init__(self, program: TraceCtx):
        super().__init__(_no_function)
        self.program = program

    def emit(self, call: Call) -> Any:
        """Write the program once more."""
        return replayed(self.program, call.args)


@makes_pullbacks
class Again:
    """The pullback of a computation trace, with a history.

    Args:
        trace: the computation as Thunder differentiated it.

    Attributes:
        looks_at_versions: whether it asks for the versions that inputs had.
    """

    def __init__(self, trace: TraceCtx):
        self._trace = trace
        self.looks_at_versions = not any(map(has_tape, trace.bound_symbols))  # else the results have their gradients from a tape
        self._positions: list[int] = []  # of the inputs that the program needs
        self._is_random = False
        self._program: _Program | None = None

    def __call__(self, run: Run, cotangents: Gradients) -> Gradients:
        """The gradients of the inputs.

        Raises:
            TransformError: the program cannot be run again.
            RuntimeError: an input was changed in place since, as torch's autograd has it.
        """
        if not self.looks_at_versions:
            return [None] * len(run.inputs)
        if self._program is None:
            self._program = self._prepared()
        needed = [run.inputs[i] for i in self._positions]
        if any(t._version != run.versions[i] for i, t in zip(self._positions, needed, strict=True) if not t.is_inference()):
            raise RuntimeError(
                "an input of a jitted function was modified by an inplace operation, in the call that is differentiated with "
                "create_graph=True or after it"
            )
        # torch's autograd hands on zeros without memory too, which no program takes
        of_results = tuple(
            g.clone() if g._is_zerotensor() else g
            for g, p in zip(cotangents, _results(self._trace), strict=True)
            if is_differentiable(p)
        )
        with random_numbers.restored(run.drawn_from if self._is_random else None):
            found, *_ = self._program.backward(of_results, False, *needed)
        gradients: list[torch.Tensor | None] = [None] * len(run.inputs)
        for i, gradient in zip(self._positions, found, strict=True):
            gradients[i] = gradient
        return gradients

    def _prepared(self) -> _Program:
        differentiable = [p for p in _results(self._trace) if is_differentiable(p)]
        body = [part for b in self._trace.bound_symbols if not is_bookkeeping(b) for part in _parts(b)]
        kept = keep_only(body, {p.name for p in differentiable})
        kept, differentiable = _without_writes(self._trace.args, kept, differentiable)
        self._is_random = any(map(draws_numbers, kept))
        if self._is_random and sum(map(count_draws, kept)) < sum(map(count_draws, body)):
            raise _refused(next(b for b in body if draws_numbers(b)), "not all numbers that it draws are in its results")
        for bsym in kept:
            _check_can_be_run_again(bsym)
        made = {p.name for b in kept for p in b.flat_proxy_outs}
        used = {p.name for b in kept for p in b.flat_proxy_args} | {p.name for p in differentiable} - made
        inputs = [(i, p) for i, p in enumerate(self._trace.args) if isinstance(p, TensorProxy) and p.name in used]
        self._positions = [i for i, _ in inputs]
        return _Program(flat_program([p for _, p in inputs], kept, differentiable))


def _parts(bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    """The operations that are run again, or not: of a batch norm, what its running statistics become is no part of the result."""
    return bsym.subsymbols if has_gradient_of_ours(bsym) else parts_of_copies(bsym)


def _without_writes(
    given: Sequence[Any], body: Sequence[BoundSymbol], results: Sequence[TensorProxy]
) -> tuple[Sequence[BoundSymbol], Sequence[TensorProxy]]:
    """A program that writes into nothing: one on wrappers still writes into plain tensors that it made.

    Raises:
        TransformError: it uses what it has written into one of `given`, or whether a write is one into another tensor is not clear.
    """
    copies = [b for b in body if b.sym.id is prims.PrimIDs.COPY_]
    if not copies:
        return body, results
    # Thunder has given tensors new names after each write; without them a write is one into what is read later
    renewed = [b for b in body if b.sym.id is prims.PrimIDs.UPDATE_ALIASES]
    former = {variableify(o): a for b in renewed for a, o in zip(b.flat_proxy_args, b.flat_proxy_outs, strict=True)}
    same = {o.proxy.name: p.name for o, p in former.items()} | {b.output.name: b.args[1].name for b in copies}
    base = same | {o: a for b in body for o, a in views_in(b).items()}
    inputs = {p.name for p in given if isinstance(p, TensorProxy)}
    for bsym in copies:
        if end_of(bsym.args[1].name, base) in inputs:
            raise _refused(bsym, "it uses what it has written into an input")
    program = flat_program([p for p in given if isinstance(p, TensorProxy)], [b for b in body if b not in renewed], results)
    program.bound_symbols = [b.from_bsym_swap_proxies(former) for b in program.bound_symbols]
    with tracectx(from_trace(program)):
        functional = without_mutations(program)
    return operations_of(functional), outputs_of(functional)


def _results(trace: TraceCtx) -> list[Any]:
    """What a computation returns, flat, as torch's autograd gets it."""
    return tree_flatten(trace.bound_symbols[-1].args[0]["output"])[0]


def _check_can_be_run_again(bsym: BoundSymbol) -> None:
    if _has_effect(bsym):
        raise _refused(bsym, "it does more than return tensors")
    if has_tape(bsym) is False:
        raise _refused(bsym, "it has more than operations on wrappers between its inputs and results")


def _refused(bsym: BoundSymbol, why: str) -> TransformError:
    return TransformError(
        with_details(
            f"create_graph=True through a jitted program with {bsym.sym.name}",
            at=location_of(bsym),
            why=f"gradients that can be differentiated again need the program to be run again, and {why}",
            instead="call the function without thunder.jit where its gradients are differentiated",
        )
    )


def _has_effect(bsym: BoundSymbol) -> bool:
    if has_any_tag(bsym, {prims.OpTags.RANDOM_OP}):
        return False
    return has_any_tag(bsym, {prims.OpTags.DONT_DCE}) or any(map(_has_effect, bsym.subsymbols))


def _no_function(*args: Any) -> Any:
    raise NotImplementedError
