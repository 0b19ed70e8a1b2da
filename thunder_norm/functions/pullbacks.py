"""vjp: the result of a function, and a function that pulls cotangents back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.functions.call import Call
from thunder_norm.functions.calls import constructor
from thunder_norm.functions.gradients import Differentiated, split_aux
from thunder_norm.functions.programs import outputs_of, program_of, replayed
from thunder_norm.functions.reverse import evaluate_vjp
from thunder_norm.functions.transformed import Transformed, shared


@dataclass(frozen=True)
class _Cotangent:
    """What a cotangent must look like."""

    shape: tuple[int, ...]
    dtype: Any


class PullbackProgram(Transformed):
    """The backward of one program: a function of the cotangents and of what the forward program saved."""

    name = "vjp"

    def __init__(self, trace: TraceCtx, expected: list[_Cotangent | None], out_spec: TreeSpec, in_spec: TreeSpec):
        super().__init__(_no_function)
        self.trace = trace
        self.expected = expected
        self.out_spec = out_spec
        self.in_spec = in_spec

    def emit(self, call: Call) -> Any:
        """Write the backward once more."""
        cotangents, saved = call.args
        leaves = self.checked(cotangents)
        return tree_unflatten(replayed(self.trace, [*leaves, *saved]), self.in_spec)

    def checked(self, cotangents: Any) -> list[TensorProxy]:
        """The cotangents of the floating point results.

        Raises:
            TransformError: they do not fit the results.
        """
        given, spec = tree_flatten_with_path(cotangents)
        if spec != self.out_spec:
            raise TransformError(
                with_details("vjp: cotangents and result differ in structure", result=self.out_spec, cotangents=spec)
            )
        found = []
        for (path, ct), e in zip(given, self.expected, strict=True):
            if e is None:
                continue
            if not isinstance(ct, TensorProxy):
                raise TransformTypeError(
                    with_details(f"vjp: the cotangent{keystr(path)} is no tensor", got=f"a {type(ct).__name__}")
                )
            if tuple(ct.shape) != e.shape or dtypes.to_torch_dtype(ct.dtype) != e.dtype:
                raise TransformError(
                    with_details(
                        f"vjp: the cotangent{keystr(path)} does not fit its result",
                        result=f"{e.dtype}, shape {e.shape}",
                        cotangent=f"{dtypes.to_torch_dtype(ct.dtype)}, shape {tuple(ct.shape)}",
                    )
                )
            found.append(ct)
        return found


class _Forward(Transformed):
    """The result of a function, what its backward needs, and a key to it in `pullbacks`."""

    name = "vjp"

    def __init__(self, function: Callable, has_aux: bool):
        super().__init__(function)
        self.has_aux = has_aux
        self.pullbacks: dict[int, PullbackProgram] = {}

    def emit(self, call: Call) -> Any:
        if not call.args:
            raise TransformError(with_details("vjp needs at least one primal", instead="vjp(f, x)"))
        inputs = Differentiated(call, tuple(range(len(call.args))))
        program = call.acquire()
        num_captured = len(program.captured)
        _check_result(split_aux(program.result(outputs_of(program.trace)), self.has_aux, self.name)[0])
        outs, pullback = evaluate_vjp(program.trace, [*call.tensors, *program.captured], [*inputs.wrt, *[False] * num_captured])
        result, aux = split_aux(program.result(outs), self.has_aux, self.name)
        leaves, out_spec = tree_flatten(result)
        floating = [dtypes.is_inexact_dtype(v.dtype) for v in leaves]
        fresh = [TensorProxy(like=v, history=None) for v, f in zip(leaves, floating, strict=True) if f]
        rest = [None] * (len(outs) - len(leaves))

        def back(*cotangents: TensorProxy) -> Sequence[TensorProxy]:
            given = iter(cotangents)
            found = pullback([*(next(given) if f else None for f in floating), *rest])
            return tree_flatten(inputs.collected(found))[0]

        trace = program_of(back, fresh)
        expected = [
            _Cotangent(tuple(v.shape), dtypes.to_torch_dtype(v.dtype)) if f else None
            for v, f in zip(leaves, floating, strict=True)
        ]
        key = len(self.pullbacks)
        self.pullbacks[key] = PullbackProgram(trace, expected, out_spec, tree_flatten(call.args)[1])
        return result, aux, tuple(trace.args[len(fresh) :]), key


class Pullback:
    """Pulls cotangents of a result back: ``pullback(cotangents)`` is a tuple with a gradient for each primal."""

    def __init__(self, program: PullbackProgram, saved: tuple[Any, ...]):
        self._program = program
        self._saved = saved

    def __call__(self, cotangents: Any) -> Any:
        """The gradients of the primals for cotangents with the structure, shapes and dtypes of the result."""
        return self._program(cotangents, self._saved)


def vjp(function: Callable, *primals: Any, has_aux: bool = False) -> Any:
    """The result of a function, and a function that pulls cotangents back to its arguments.

    ``out, pullback = vjp(f, x)``; ``pullback(ct)`` is the tuple ``(J^T ct,)`` with J the Jacobian of f at x, one entry for each
    primal.  It may be called any number of times, and be transformed itself.

    Args:
        function: takes and returns floating point tensors, in tuples, lists and dicts if it likes.
        primals: its arguments.
        has_aux: `function` returns ``(out, aux)``; the result is then ``(out, pullback, aux)``.

    Raises:
        TransformError: (the pullback) cotangents do not have the structure, shapes and dtypes of the result.
        TransformTypeError: a primal, or the result, is no floating point tensor.

    >>> import torch
    >>> out, pullback = vjp(torch.sin, torch.zeros(2))
    >>> out, pullback(torch.tensor([1.0, 2.0]))
    (tensor([0., 0.]), (tensor([1., 2.]),))
    """
    forward = _forward_of(function, has_aux)
    out, aux, saved, key = forward(*primals)
    pullback = Pullback(forward.pullbacks[key], saved)
    return (out, pullback, aux) if has_aux else (out, pullback)


@constructor
def _forward_of(function: Callable, has_aux: bool) -> _Forward:
    return shared(_Forward, function, has_aux)


def _no_function(*args: Any) -> Any:
    raise NotImplementedError


def _check_result(result: Any) -> None:
    for path, v in tree_flatten_with_path(result)[0]:
        if not isinstance(v, TensorProxy):
            raise TransformTypeError(
                with_details(
                    "vjp needs a function that returns tensors",
                    got=f"a {type(v).__name__} at result{keystr(path)}",
                    instead="has_aux=True if it returns (tensors, aux)",
                )
            )
