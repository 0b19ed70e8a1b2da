"""Forward mode: `jvp`, a program that pushes tangents along with its values.

``evaluate_jvp`` walks a flat program and emits, for each operation, its result and the tangent of its result into the trace that is
open.  A tangent of None is zero, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

import thunder_norm.functions.rules  # noqa: F401 - registers the rules
from thunder_norm.errors import DataDependentError, TransformError, TransformTypeError, with_details
from thunder_norm.functions.calls import check_differentiable, check_fits, check_result, constructor, split_aux
from thunder_norm.functions.opaque import derived, is_whole, operation_of
from thunder_norm.functions.programs import (
    Values,
    detach,
    flat_proxies,
    is_bookkeeping,
    is_detached,
    is_differentiable,
    outputs_of,
)
from thunder_norm.functions.registry import decomposed, jvp_rules, missing_rule
from thunder_norm.functions.transformed import Call, Transformed, shared
from thunder_norm.functions.wrappers_in_torchs import OfTorch, check_agrees
from thunder_norm.tracing.locations import at_line_of, location_of
from thunder_norm.tracing.recording import scope
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx


@langctx(Languages.TORCH)
def evaluate_jvp(
    trace: TraceCtx, primals: Sequence[Any], tangents: Sequence[TensorProxy | None], *, renew: bool = True
) -> tuple[tuple, tuple[TensorProxy | None, ...]]:
    """The results of a flat program at `primals`, and how fast they move when the primals move with speeds `tangents`.

    For a program f with arguments x: ``(f(x), (d/dt) f(x + t dx) at t = 0)``, in order of the program's results.  A tangent has the
    shape and dtype of its primal; None stands for zero on both sides.

    Args:
        trace: a flat program.
        primals: one value for each of ``trace.args``.
        tangents: one tangent, or None, for each of them.
        renew: whether results get new proxies; not if the program was recorded in the trace that is open, and runs there once.

    Raises:
        MissingTransformRuleError: an operation on the path has no rule, no decomposition and no implementation in torch.
        DataDependentError: the value of a moving tensor is needed as a number.
        TransformError: a rule returned a tangent of another shape than its result.
    """
    program = _Program(renew)
    for p, value, tangent in zip(trace.args, primals, tangents, strict=True):
        program.values[p] = value
        if tangent is not None:
            program.tangents[p] = tangent
    program.run(trace.bound_symbols)
    results = outputs_of(trace)
    return tuple(program.values.read(results)), tuple(program.tangents.get(p) if isinstance(p, Proxy) else None for p in results)


class _Program:
    """The values and the tangents of a program's proxies, while it runs."""

    def __init__(self, renew: bool) -> None:
        self.values = Values(renew=renew)
        self.tangents = Values()

    def run(self, bsyms: Sequence[BoundSymbol]) -> None:
        for bsym in bsyms:
            if is_bookkeeping(bsym) or (bsym.flat_proxy_outs and all(p in self.values for p in bsym.flat_proxy_outs)):
                continue
            moves = any(p in self.tangents for p in bsym.flat_proxy_args)
            if _is_identity(bsym):
                self.values[bsym.output] = self.values.read(bsym.args[0])
                if moves:
                    self.tangents[bsym.output] = self.tangents.get(bsym.args[0])
            elif moves and bsym.sym.id is prims.PrimIDs.ITEM:
                raise DataDependentError(
                    with_details(
                        "the value of a tensor that moves is needed as a number, in a function under jvp",
                        at=location_of(bsym),
                        why="a number has no tangent",
                        instead="keep it a tensor: x.sum() in place of x.sum().item()",
                    )
                )
            elif not moves or not any(map(is_differentiable, bsym.flat_proxy_outs)):
                parts = decomposed(bsym) if draws_numbers(bsym) else None  # Thunder would draw other numbers than torch
                self.values.copy(bsym) if parts is None else self.run(parts)
            else:
                self._push(bsym)

    def _push(self, bsym: BoundSymbol) -> None:
        rule = jvp_rules.find(bsym.sym)
        if rule is not None and not any(p in self.tangents for p in flat_proxies(bsym.kwargs)):
            self._write(bsym, lambda: rule(*self._dual(bsym.args), **self.values.read(bsym.kwargs)))
        elif (parts := decomposed(bsym)) is not None:
            self.run(parts)
        elif bsym.subsymbols and not is_whole(bsym):
            self.run(bsym.subsymbols)
        else:
            self._write(bsym, lambda: self._pushed_by_torch(bsym))

    def _dual(self, args: tuple) -> tuple[tuple, tuple]:
        """The values and the tangents of arguments."""
        return self.values.read(args), tree_map(lambda v: self.tangents.get(v) if isinstance(v, Proxy) else None, args)

    def _write(self, bsym: BoundSymbol, rule: Any) -> None:
        with at_line_of(get_tracectx(), bsym):
            with scope(get_tracectx()) as written:
                out, tangent = rule()
                results = tree_flatten(out)[0]
                tangents = [None] * len(results) if tangent is None else _flat_tangents(tangent)
                if len(tangents) != len(results):
                    raise TransformError(
                        with_details(
                            f"the jvp rule of {bsym.sym.id} returned {len(tangents)} tangents for {len(results)} results",
                            at=location_of(bsym),
                        )
                    )
                pairs = zip(results, tangents, strict=True)
                tangents = [_like(bsym, v, t) if t is not None and is_differentiable(v) else None for v, t in pairs]
            swaps = self.values.bind(bsym, out, written)
        for p, t in zip(tree_flatten(bsym.output)[0], tangents, strict=True):
            if t is not None and isinstance(p, Proxy):
                self.tangents[p] = swaps.get(variableify(t), t)
        if is_detached(bsym):
            detach(self.values.read(bsym.output), [self.tangents.get(p) for p in bsym.flat_proxy_outs])

    def _pushed_by_torch(self, bsym: BoundSymbol) -> tuple[Any, list]:
        operation = operation_of(bsym)
        if operation is None:
            raise missing_rule(bsym, "jvp", or_else="x.detach() if it is not to move")
        args, kwargs = self.values.read((bsym.args, bsym.kwargs))
        tangents = [self.tangents.get(p) for p in flat_proxies((bsym.args, bsym.kwargs))]
        made = iter(derived("jvp", operation)(args, kwargs, tuple(tangents)))
        outputs = tree_flatten(bsym.output)[0]
        out = [next(made) if isinstance(p, TensorProxy) else p for p in outputs]
        return out, [next(made) if is_differentiable(p) else None for p in outputs]


def _is_identity(bsym: BoundSymbol) -> bool:
    """Whether an operation returns what it is given, and reverse mode may see that."""
    if bsym.sym.id not in (prims.PrimIDs.SHALLOW_COPY, prims.PrimIDs.CONVERT_ELEMENT_TYPE) or is_detached(bsym):
        return False
    a, out = bsym.args[0], bsym.output
    return isinstance(a, TensorProxy) and isinstance(out, TensorProxy) and a.dtype == out.dtype


def _flat_tangents(tangent: Any) -> list:
    """The tangents in what a rule returned; None counts."""
    return [t for item in tangent for t in _flat_tangents(item)] if isinstance(tangent, tuple | list) else [tangent]


def _like(bsym: BoundSymbol, value: TensorProxy, tangent: TensorProxy) -> TensorProxy:
    """A tangent in the shape and dtype of its value: Thunder leaves the broadcast of a 0-dim operand to the kernel."""
    if tangent.dtype != value.dtype:
        tangent = ltorch.to(tangent, value.dtype)
    if tuple(tangent.shape) == tuple(value.shape):
        return tangent
    if tangent.ndim == 0:
        return prims.broadcast_in_dim(tangent, tuple(value.shape), ())
    raise TransformError(
        with_details(
            f"the jvp rule of {bsym.sym.id} returned a tangent of another shape than its result",
            tangent=tuple(tangent.shape),
            result=tuple(value.shape),
            at=location_of(bsym),
        )
    )


# -- the transform -----------------------------------------------------------------------------------------------------


class Jvp(Transformed):
    """A function of (primals, tangents): the function's result at the primals, and the tangent of the result."""

    name = "jvp"

    def __init__(self, function: Callable, has_aux: bool = False):
        super().__init__(function)
        self.has_aux = has_aux

    def emit(self, call: Call) -> Any:
        """Write values and tangents."""
        primals, tangents = call.args
        _check_arguments(primals, tangents)
        points, directions = tree_leaves(primals), tree_leaves(tangents)
        program = call.acquire(args=primals, moved=[True] * len(flat_proxies(primals)))
        if isinstance(call.function, OfTorch):
            check_agrees(self.name, primals, program.trace, list(zip(points, program.trace.args, strict=False)))
        inputs, speeds = [*points, *program.captured], [*directions, *[None] * len(program.captured)]
        outs, moved = evaluate_jvp(program.trace, inputs, speeds, renew=False)
        value, aux = split_aux(program.result(outs), self.has_aux, self.name)
        written = [ltorch.zeros_like(v) if t is None else t for v, t in zip(outs, moved, strict=True)]
        tangent, _ = split_aux(program.result(written), self.has_aux, self.name)
        check_result(value, self.name)
        return (value, tangent, aux) if self.has_aux else (value, tangent)


def _check_arguments(primals: Any, tangents: Any) -> None:
    for given, what in ((primals, "primals"), (tangents, "tangents")):
        if not isinstance(given, tuple | list):
            raise TransformTypeError(
                with_details(f"jvp: {what} must be a tuple, one entry for each argument", got=f"a {type(given).__name__}")
            )
    if not primals:
        raise TransformError("jvp needs at least one primal")
    points, spec = tree_flatten_with_path(tuple(primals))
    directions, other = tree_flatten_with_path(tuple(tangents))
    if spec != other:
        raise TransformError(with_details("jvp: primals and tangents differ in structure", primals=spec, tangents=other))
    for (path, x), (_, dx) in zip(points, directions, strict=True):
        check_differentiable(x, f"jvp: primals{keystr(path)}", "move", "close over what does not move")
        check_fits(dx, x, f"jvp: tangents{keystr(path)}", "primal")


def jvp(function: Callable, primals: tuple, tangents: tuple, *, has_aux: bool = False) -> Any:
    """The result of a function, and how fast it moves when its arguments move.

    ``out, tangent = jvp(f, (x,), (dx,))``: ``tangent = J dx`` with J the Jacobian of f at x.

    Args:
        function: takes floating point tensors, in tuples, lists and dicts if it likes.
        primals: its arguments, a tuple.
        tangents: their tangents, with their structure, shapes and dtypes.
        has_aux: `function` returns ``(out, aux)``; the result is then ``(out, tangent, aux)``.

    Raises:
        TransformError: tangents do not fit their primals.
        TransformTypeError: a primal is no floating point tensor, or the result no tensor.

    >>> import torch
    >>> jvp(torch.sin, (torch.zeros(2),), (torch.tensor([1.0, 2.0]),))
    (tensor([0., 0.]), tensor([1., 2.]))
    """
    return _pushforward(function, has_aux)(primals, tangents)


@constructor
def _pushforward(function: Callable, has_aux: bool) -> Jvp:
    return shared(Jvp, function, has_aux)
