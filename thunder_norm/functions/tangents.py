"""jvp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from thunder_norm.errors import TransformError, TransformTypeError, with_details
from thunder_norm.functions.call import Call
from thunder_norm.functions.calls import constructor
from thunder_norm.functions.forward import evaluate_jvp
from thunder_norm.functions.gradients import split_aux
from thunder_norm.functions.transformed import Transformed, shared


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
        points, directions = tree_flatten(primals)[0], tree_flatten(tangents)[0]
        program = call.acquire(args=primals)
        inputs, speeds = [*points, *program.captured], [*directions, *[None] * len(program.captured)]
        outs, moved = evaluate_jvp(program.trace, inputs, speeds, renew=False)
        value, aux = split_aux(program.result(outs), self.has_aux, self.name)
        written = [ltorch.zeros_like(v) if t is None else t for v, t in zip(outs, moved, strict=True)]
        tangent, _ = split_aux(program.result(written), self.has_aux, self.name)
        _check_result(value)
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
        _check_pair(keystr(path), x, dx)


def _check_pair(path: str, x: Any, dx: Any) -> None:
    for v, what in ((x, "primals"), (dx, "tangents")):
        if not isinstance(v, TensorProxy):
            raise TransformTypeError(
                with_details(
                    f"jvp: {what}{path} is no tensor",
                    got=f"a {type(v).__name__}",
                    instead="torch.tensor(...) for a number; close over what does not move",
                )
            )
    if not dtypes.is_inexact_dtype(x.dtype):
        raise TransformTypeError(
            with_details(
                f"jvp: primals{path} is not floating point and cannot move",
                got=f"a tensor of {dtypes.to_torch_dtype(x.dtype)}, shape {tuple(x.shape)}",
                instead="close over it, or convert it with .to(torch.float32)",
            )
        )
    if tuple(x.shape) != tuple(dx.shape) or x.dtype != dx.dtype:
        raise TransformError(
            with_details(
                f"jvp: tangents{path} does not fit its primal",
                primal=f"{dtypes.to_torch_dtype(x.dtype)}, shape {tuple(x.shape)}",
                tangent=f"{dtypes.to_torch_dtype(dx.dtype)}, shape {tuple(dx.shape)}",
            )
        )


def _check_result(value: Any) -> None:
    leaves = tree_flatten(value)[0]
    for v in leaves:
        if not isinstance(v, TensorProxy):
            raise TransformTypeError(
                with_details(
                    "jvp needs a function that returns tensors",
                    got=f"a {type(v).__name__}",
                    instead="has_aux=True if it returns (tensors, aux)",
                )
            )


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
