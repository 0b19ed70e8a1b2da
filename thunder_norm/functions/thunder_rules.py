"""Thunder's gradient rules as rules of ours.

Thunder keeps them in private tables of ``thunder.core.transforms`` (0.2.6), in two forms, and this is the one place that reads them:

- ``_grad_fn_map``: a *joint* rule, which writes the forward and, between ``get_grad`` and ``put_grad``, the backward;
- ``augmented_forward_impls`` and ``backward_impls``: a pair, the second of which returns gradients for the tensors among the arguments.

They are for real numbers.  Those in `_LINEAR` are linear in each argument and right for complex numbers between two conjugations; no
other is used for complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_norm.errors import TransformError
from thunder_norm.functions.derivatives import conjugate, of_operand
from thunder_norm.functions.programs import apart, has_complex, is_differentiable
from thunder_norm.functions.registry import VjpRule
from thunder_norm.tracing.recording import backward_of_joint, scope
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx
from thunder.core.transforms import _grad_fn_map, augmented_forward_impls, backward_impls, nondifferentiable_vjp_symbols

Ids = prims.PrimIDs

# What has no derivative by Thunder's account.
CONSTANT: frozenset[Hashable] = frozenset(
    {*nondifferentiable_vjp_symbols, "torch.detach", "thunder_norm.detach", "torch.Tensor.item", Ids.ITEM}
)

_LINEAR = frozenset(
    {
        Ids.BROADCAST_IN_DIM,
        Ids.CAT,
        Ids.CLONE,
        Ids.COPY_,
        Ids.COPY_WITH_SETITEM,
        Ids.DEVICE_PUT,
        Ids.GATHER,
        Ids.INDEX_COPY,
        Ids.RESHAPE,
        Ids.SCATTER,
        Ids.SCATTER_ADD,
        Ids.SHALLOW_COPY,
        Ids.SQUEEZE,
        Ids.STRIDE_ORDER,
        Ids.SUM,
        Ids.TAKE,
        Ids.TAKE_ALONG_AXIS,
        Ids.TRANSPOSE,
        Ids.UPDATE_ALIASES,
        "torch.Tensor.contiguous",
        "torch.contiguous",
        "torch.cumsum",
        "torch.index_put",
        "torch.split",
        "torch.sum",
    }
)


def thunders_rule(bsym: BoundSymbol) -> VjpRule | None:
    """Thunder's rule for an operation, None if there is none that is right for its arguments."""
    joint, augmented = _grad_fn_map.get(bsym.sym.id), augmented_forward_impls.get(bsym.sym.id)
    if joint is not None:
        rule = _from_joint(joint)
    elif augmented is not None:
        rule = _from_pair(augmented, backward_impls[bsym.sym.id])
    else:
        return None
    if not has_complex((bsym.args, bsym.kwargs, bsym.output)):
        return rule
    return _between_conjugations(rule) if bsym.sym.id in _LINEAR else None


def one_gradient(symbol_id: Hashable, which: int, *given: Any) -> TensorProxy:
    """One of the gradients that the pair of an operation writes, with what it takes and not what the others take.

    Args:
        symbol_id: of the operation.
        which: the position of the argument.
        given: what the pair's forward saves, then the cotangents.
    """
    trace = get_tracectx()
    with scope(trace) as written:
        found = backward_impls[symbol_id](*given)[which]
    trace.peek_scope().extend(_split(written, {found.name})[0])
    return found


def joint_of(rule: VjpRule) -> Callable:
    """A rule of ours in Thunder's joint form, for Thunder's own differentiation."""

    def joint(*args: Any, **kwargs: Any) -> Any:
        result, saved = rule.forward(*args, **kwargs)
        flat, spec = tree_flatten(result)
        flat = apart(flat, tree_flatten((args, kwargs))[0])
        cotangents = [prims.get_grad(p) for p in flat if isinstance(p, TensorProxy)]
        for target, gradient in rule.paired(args, kwargs, rule.backward(saved, *cotangents)):
            prims.put_grad(target, gradient)
        return tree_unflatten(flat, spec)

    return joint


class _JointRule(VjpRule):
    """A joint rule: its backward is recorded with the forward, and says itself which tensor a gradient is for."""

    def paired(self, args: tuple, kwargs: dict, gradients: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        for target, _ in gradients:
            if isinstance(target, TensorProxy) and not is_differentiable(target):
                raise TransformError(f"Thunder's rule has a gradient for {target.name}, which is of {target.dtype}")
        return _of_operands(gradients)


def _from_joint(joint: Callable) -> VjpRule:
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, list[BoundSymbol]]]:
        trace = get_tracectx()
        with scope(trace) as written:
            result = joint(*args, **kwargs)
        of_result, others = _split(written, {p.name for p in tree_flatten(result)[0] if isinstance(p, Proxy)})
        trace.peek_scope().extend(of_result)
        return result, (result, others)

    def backward(saved: tuple[Any, list[BoundSymbol]], *cotangents: TensorProxy) -> list[tuple[Any, Any]]:
        result, others = saved
        tensors = [p for p in tree_flatten(result)[0] if isinstance(p, TensorProxy)]
        cotangent_of = {p.name: ct for p, ct in zip(tensors, cotangents, strict=True)}
        return list(backward_of_joint(others, cotangent_of))

    return _JointRule(forward, backward)


def _split(written: Sequence[BoundSymbol], results: set[str]) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """What a joint rule wrote: the operations that its results need, and all others."""
    needed = set(results)
    forward: list[BoundSymbol] = []
    backward: list[BoundSymbol] = []
    for b in reversed(written):
        is_marker = b.sym.id in (Ids.GET_GRAD, Ids.PUT_GRAD)
        if not is_marker and any(p.name in needed for p in b.flat_proxy_outs):
            needed.update(p.name for p in b.flat_proxy_args)
            forward.append(b)
        else:
            backward.append(b)
    return forward[::-1], backward[::-1]


class _PairRule(VjpRule):
    """A pair, whose backward returns a gradient for each argument, or for each differentiable tensor among them."""

    def paired(self, args: tuple, kwargs: dict, gradients: Any) -> list[tuple[Any, Any]]:
        gradients = tuple(gradients) if isinstance(gradients, Sequence) else (gradients,)
        if len(gradients) == len(args):
            return _of_operands(super().paired(args, kwargs, gradients))
        tensors = [p for p in tree_flatten((args, kwargs))[0] if is_differentiable(p)]
        return _of_operands([(t, g) for t, g in zip(tensors, gradients, strict=False) if g is not None])


def _from_pair(augmented: Callable, backward: Callable) -> VjpRule:
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple]:
        result, saved = augmented(*args, **kwargs)
        return result, saved

    return _PairRule(forward, lambda saved, *cotangents: backward(*saved, *cotangents))


def _of_operands(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(t, of_operand(g, t)) for t, g in pairs if isinstance(t, TensorProxy) and isinstance(g, TensorProxy)]


@dataclass(frozen=True)
class _Conjugated(VjpRule):
    """What a rule for real numbers is for complex ones, of an operation that is linear in each argument."""

    real: VjpRule = field(kw_only=True)

    def paired(self, args: tuple, kwargs: dict, gradients: Any) -> list[tuple[Any, Any]]:
        return [(target, conjugate(gradient)) for target, gradient in self.real.paired(args, kwargs, gradients)]


def _between_conjugations(rule: VjpRule) -> VjpRule:
    def backward(saved: Any, *cotangents: TensorProxy) -> Any:
        return rule.backward(saved, *map(conjugate, cotangents))

    return _Conjugated(rule.forward, backward, real=rule)
