"""Implementations and gradients of an executor's own for one operation of one class.

An operation on a wrapper is one composite bound symbol, whose id is the class and the operation.  Thunder asks its executors for
implementations and gradient rules by id; here is how to register them, and how a gradient rule takes part in a program that
torch's autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.recording.record import Recorded, Recorder, Step
from thunder_norm.subclass.recording.trace import OperationId, name_of_operation
from thunder_norm.tracing.recording import backward_of_joint, scope
from thunder_norm.trees import flat_tensors
from thunder_norm.wrapper_classes import is_wrapper
import thunder.torch as ltorch
from thunder.core.compile_data import get_compile_data
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx
from thunder.extend import OperatorExecutor


def register_implementation(
    executor: OperatorExecutor,
    cls: type[torch.Tensor],
    operation: Callable | str,
    *,
    execution_transform: Callable,
    grad_transform: Callable | None = None,
) -> OperationId:
    """Let `executor` run ``operation`` on wrappers of exactly class `cls` in its own way, and differentiate it.

    All functions take the inner tensors that the operation uses, as Thunder's proxies, in the order of the operation's arguments
    (each once; numbers are constants of the operation), and return a tuple of the inner tensors of its result.

    Args:
        executor: goes into ``thunder.jit(executors=[executor])``.
        cls: the class of the first wrapper among the operation's arguments.
        operation: a function of torch or a method of its tensors, or its name as traces show it.
        execution_transform: computes the result with Thunder's symbols, or the executor's own.
        grad_transform: the same, and its backward: ``thunder.core.prims.get_grad`` of each result, ``put_grad`` to each input.
            It goes before torch's formula and before derivatives of what the class does.

    Returns:
        The id of the operation's bound symbols.
    """
    found = OperationId(cls, operation if isinstance(operation, str) else name_of_operation(operation))
    executor.register_implementation(found, execution_transform=execution_transform, grad_transform=grad_transform)
    return found


def grad_rule(operation: OperationId) -> Callable | None:
    """The gradient rule that an executor of the current compilation has for an operation."""
    for executor in get_compile_data().executors_list:
        implementation = executor.implmap.get(operation)
        if implementation is not None and implementation.grad_transform is not None:
            return implementation.grad_transform
    return None


def run_with_rule(rule: Callable, recorder: Recorder, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an operation on fakes so that torch's autograd takes the executor's rule for its backward."""
    flat, spec = tree_flatten((args, kwargs))
    tensors = [v for v in flat if isinstance(v, torch.Tensor)]

    def call(*given: torch.Tensor) -> Any:
        remaining = iter(given)
        values = [next(remaining) if isinstance(v, torch.Tensor) else v for v in flat]
        own_args, own_kwargs = tree_unflatten(values, spec)
        return fn(*own_args, **own_kwargs)

    return _Ruled.apply(rule, recorder, call, *tensors)


def _leaves(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return WrapperSpec.of(t).leaves(t) if is_wrapper(t) else (t,)


class _Ruled(torch.autograd.Function):
    """An operation whose backward is one recorded step: the executor's rule."""

    @staticmethod
    def forward(ctx: Any, rule: Callable, recorder: Recorder, call: Callable, *tensors: torch.Tensor) -> Any:
        start = len(recorder.log)
        result = call(*tensors)
        used = {id(t) for r in recorder.log[start:] for t in r.inputs}
        leaves = {id(t): t for x in tensors for t in _leaves(x) if id(t) in used}
        ctx.rule, ctx.tensors, ctx.leaves, ctx.result = rule, tensors, list(leaves.values()), result
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        for grad, result in zip(grads, flat_tensors(ctx.result), strict=True):
            if [t.shape for t in _leaves(grad)] != [t.shape for t in _leaves(result)]:
                raise UnsupportedOpError(
                    with_details(
                        "an executor's gradient rule cannot take this gradient",
                        got=type(grad).__name__,
                        expected=f"inner tensors like those of the {type(result).__name__} it belongs to",
                    )
                )
        recorder = next(m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder))
        with recorder.paused():
            made = [torch.empty_like(t) if t.is_floating_point() else None for t in ctx.leaves]
        step = RuleStep(ctx.rule, [t is not None for t in made])
        cotangents = [t for grad in grads for t in _leaves(grad)]
        outputs = tuple(t for t in made if t is not None)
        recorder.log.append(Recorded(step, (tuple(ctx.leaves), tuple(cotangents)), {}, outputs, outputs))
        grad_of = {id(t): g for t, g in zip(ctx.leaves, made, strict=True)}
        return None, None, None, *(_gradient(x, grad_of) for x in ctx.tensors)


def _gradient(x: torch.Tensor, grad_of: dict[int, torch.Tensor | None]) -> torch.Tensor | None:
    found = tuple(grad_of.get(id(t)) for t in _leaves(x))
    if any(g is None for g in found):
        return None
    return WrapperSpec.of(x).build(found) if is_wrapper(x) else found[0]


class RuleStep(Step):
    """A recorded operation that is written by running an executor's gradient rule."""

    def __init__(self, rule: Callable, has_gradient: Sequence[bool]):
        self.rule, self.has_gradient = rule, has_gradient

    def emit(self, inputs: tuple[TensorProxy, ...], cotangents: tuple[TensorProxy, ...]) -> tuple[TensorProxy, ...]:
        """Write the rule's backward into the current trace: its gradients with respect to differentiable `inputs`.

        What the backward uses of the forward is computed again.
        """
        with scope(get_tracectx()) as written:
            results = self.rule(*inputs)
        given = {p.name: g for p, g in zip(tree_flatten(results)[0], cotangents, strict=True)}
        gradients: dict[str, TensorProxy] = {}
        for target, gradient in backward_of_joint(written, given):
            known = gradients.get(target.name)
            gradients[target.name] = gradient if known is None else ltorch.add(known, gradient)
        return tuple(
            gradients[p.name] if p.name in gradients else ltorch.zeros_like(p)
            for p, wanted in zip(inputs, self.has_gradient, strict=True)
            if wanted
        )
