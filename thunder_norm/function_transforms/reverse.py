"""Reverse mode: from a flat program to its results and the program that pulls cotangents back.

The operations of the forward program are written as they are, so they keep their names and lines.  Each operation that the inputs
reach has a rule, tried in this order: ours (`registry.vjp_rules`), Thunder's for its id, its parts, one derived from torch.func.
What a rule computes for the way back is written when a cotangent arrives, under the line of the operation it belongs to.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, get_tracectx
from thunder.core.transforms import _grad_fn_map, augmented_forward_impls, backward_impls, nondifferentiable_vjp_symbols

import thunder_norm.function_transforms.decompositions  # noqa: F401 - registers them
import thunder_norm.function_transforms.vjp_rules  # noqa: F401 - registers the rules
from thunder_norm.errors import MissingTransformRuleError, TransformError, with_details
from thunder_norm.function_transforms.acquisition import operations_of, outputs_of, scope
from thunder_norm.function_transforms.grouping import grouped
from thunder_norm.function_transforms.locations import at_line_of, location_of
from thunder_norm.function_transforms.opaque import flat_proxies, torch_vjp_rule
from thunder_norm.function_transforms.readability import core
from thunder_norm.function_transforms.registry import VjpRule, decompositions, vjp_rules
from thunder_norm.function_transforms.replay import is_differentiable
from thunder_norm.subclass.fallback import fallback_executor

_CONSTANT = frozenset(
    {*nondifferentiable_vjp_symbols, "torch.detach", "torch.Tensor.detach", "torch.Tensor.item", prims.PrimIDs.ITEM}
)
_IGNORED = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.DEL, prims.PrimIDs.COMMENT)

_MANY = 4  # operations on the way back of a primitive that are worth a name of their own

Swaps = dict[Variable, Proxy]


@dataclass
class Node:
    """One operation on the way back: what its rule wrote, with ``get_grad`` and ``put_grad`` where cotangents go in and out."""

    bsym: BoundSymbol
    outs: tuple[TensorProxy, ...]
    backward: list[BoundSymbol]


@dataclass
class Pullback:
    """Pulls cotangents of a program's results back to its inputs; written into the open trace at each call.

    Inputs and results go by the program's own proxies, so an input given twice, or captured as well, stays apart.
    """

    nodes: list[Node]
    args: tuple[Any, ...]
    outs: tuple[Any, ...]
    primals: Swaps
    wrt: tuple[bool, ...]
    _is_used: bool = field(default=False)

    def __call__(self, cotangents: Sequence[TensorProxy | None]) -> tuple[TensorProxy | None, ...]:
        """The cotangents of the inputs, None where one is zero.

        A cotangent has the shape and dtype of its result; None stands for zero.
        """
        trace = get_tracectx()
        cotangent_of: dict[str, TensorProxy] = {}
        for out, ct in zip(self.outs, cotangents, strict=True):
            if ct is not None and isinstance(out, TensorProxy):
                _accumulate(cotangent_of, out, ct)
        renew, self._is_used = self._is_used, True
        for node in reversed(self.nodes):
            if any(o.name in cotangent_of for o in node.outs):
                with at_line_of(trace, node.bsym):
                    _write_back(trace, node, cotangent_of, dict(self.primals), renew)
        return tuple(cotangent_of.get(a.name) if w else None for a, w in zip(self.args, self.wrt, strict=True))


def evaluate_vjp(trace: TraceCtx, primals: Sequence[Any], wrt: Sequence[bool] | None = None) -> tuple[tuple[Any, ...], Pullback]:
    """Write the program into the open trace and return its results and its pullback.

    Args:
        trace: a flat program.
        primals: one value for each of ``trace.args``.
        wrt: for each of them, whether it is to get a cotangent; all by default.

    Raises:
        MissingTransformRuleError: an operation on the way has no rule.
    """
    wrt = tuple([True] * len(primals) if wrt is None else wrt)
    swaps = {
        variableify(a): p
        for a, p in zip(trace.args, primals, strict=True)
        if isinstance(a, Proxy) and not (isinstance(p, Proxy) and a.name == p.name)
    }
    reverse = _Reverse(trace.args, swaps, wrt)
    for bsym in operations_of(trace):
        reverse.write(bsym)
    outs = outputs_of(trace)
    results = tuple(swaps.get(variableify(v), v) if isinstance(v, Proxy) else v for v in outs)
    return results, Pullback(reverse.nodes, tuple(trace.args), outs, swaps, wrt)


class _Reverse:
    def __init__(self, args: Sequence[Proxy], primals: Swaps, wrt: Sequence[bool]):
        self.primals = primals
        self.nodes: list[Node] = []
        self.trace = get_tracectx()
        self.active = {
            a.name
            for a, w in zip(args, wrt, strict=True)
            if w and isinstance(a, TensorProxy) and dtypes.is_inexact_dtype(a.dtype)
        }

    def write(self, bsym: BoundSymbol) -> None:
        """Write one operation of the program."""
        with at_line_of(self.trace, bsym):
            forward, nodes = self.process(bsym)
            backward = self.grouped(bsym, forward, nodes)
        if backward is not None:
            outs = tuple(o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy))
            forward, nodes = [bsym], [Node(bsym, outs, backward)]
        self.trace.peek_scope().extend(b.from_bsym_swap_proxies(self.primals, skip_output=True) for b in forward)
        self.nodes.extend(nodes)

    def process(self, bsym: BoundSymbol) -> tuple[list[BoundSymbol], list[Node]]:
        """An operation of the program: what to write for it, and its way back."""
        if bsym.sym.id in _IGNORED:
            return [], []
        if _is_constant(bsym, self.active):
            return [bsym], []
        check = getattr(bsym.sym.id, "check_active", None)
        if check is not None:
            check(bsym, self.active)
        parts = self.decomposed(bsym)
        node = None if parts else self.by_rule(bsym)
        if node is not None:
            return node
        parts = parts or bsym.subsymbols
        if not parts:
            if not bsym.sym.is_prim and {p.name for p in bsym.flat_proxy_outs} <= {p.name for p in bsym.flat_proxy_args}:
                return [], []  # it did nothing
            raise _missing_rule(bsym)
        forward: list[BoundSymbol] = []
        nodes: list[Node] = []
        for sub in parts:
            written, found = self.process(sub)
            forward.extend(written)
            nodes.extend(found)
        inner = {p.name for b in forward for p in b.flat_proxy_outs} - {p.name for p in bsym.flat_proxy_outs}
        if not any(p.name in inner for n in nodes for p in _used(n)):
            return [bsym], nodes
        return forward, nodes

    def grouped(self, bsym: BoundSymbol, forward: list[BoundSymbol], nodes: list[Node]) -> list[BoundSymbol] | None:
        """The way back as one operation, where that reads better than its parts."""
        if not nodes or (forward != [bsym] and vjp_rules.find(bsym.sym) is not None):  # what a rule of ours saves is saved
            return None
        inputs = list({p.name: p for p in bsym.flat_proxy_args if p.name in self.active and isinstance(p, TensorProxy)}.values())
        outs = tuple(o for o in bsym.flat_proxy_outs if is_differentiable(o))

        def pull(cotangents: Sequence[TensorProxy]) -> tuple[TensorProxy | None, ...]:
            return Pullback(nodes, tuple(inputs), outs, {}, (True,) * len(inputs))(cotangents)

        is_simple = core(bsym).sym.is_prim and isinstance(core(bsym).sym.id, prims.PrimIDs)
        return grouped(bsym, forward, pull, inputs, _MANY if is_simple else len(inputs))

    def decomposed(self, bsym: BoundSymbol) -> Sequence[BoundSymbol]:
        """An operation in others, where it has no rule of its own and we know how; its results have the same names."""
        decomposition = decompositions.find(bsym.sym)
        if decomposition is None or vjp_rules.find(bsym.sym) is not None:
            return ()
        with scope(self.trace) as written:
            result = decomposition(*bsym.args, **bsym.kwargs)
        pairs = zip(flat_proxies(result), flat_proxies(bsym.output), strict=True)
        renamed = {variableify(made): out for made, out in pairs}
        return [b.from_bsym_swap_proxies(renamed) for b in written]

    def by_rule(self, bsym: BoundSymbol) -> tuple[list[BoundSymbol], list[Node]] | None:
        rule = joint_rule(bsym)
        if rule is None:
            return None
        with scope(self.trace) as written:
            result = rule(*bsym.args, **bsym.kwargs)
        made = [p for p in tree_flatten(result)[0] if isinstance(p, Proxy)]
        outs = list(bsym.flat_proxy_outs)
        if len(made) != len(outs):
            raise TransformError(
                with_details(
                    f"the vjp rule of {bsym.sym.id} returns {len(made)} results, the operation {len(outs)}", at=location_of(bsym)
                )
            )
        renamed = {variableify(m): o for m, o in zip(made, outs, strict=True) if m.name != o.name}
        written = [b.from_bsym_swap_proxies(renamed) for b in written]
        forward, backward = _split(written, {o.name for o in outs})
        tensors = tuple(o for o in outs if isinstance(o, TensorProxy))
        self.active.update(o.name for o in tensors if dtypes.is_inexact_dtype(o.dtype))
        node = Node(bsym, tensors, backward)
        if not {p.name for p in _used(node)} & {p.name for b in forward for p in b.flat_proxy_outs} - {o.name for o in outs}:
            forward = [bsym]
        return forward, [node]


def joint_rule(bsym: BoundSymbol) -> Callable | None:
    """The rule for an operation, as a function that writes its forward and, between get_grad and put_grad, its way back."""
    ours = vjp_rules.find(bsym.sym)
    if ours is not None:
        return joint_of(ours)
    if bsym.sym.executor is fallback_executor and not has_tags(bsym, {prims.OpTags.RANDOM_OP}):
        return torch_vjp_rule(bsym)  # torch's autograd, which its own rule asks, cannot be transformed further
    thunders = _grad_fn_map.get(bsym.sym.id)
    if thunders is not None:
        return thunders
    augmented = augmented_forward_impls.get(bsym.sym.id)
    if augmented is None or _is_opaque(bsym):
        return None if bsym.subsymbols else torch_vjp_rule(bsym)
    backward = backward_impls[bsym.sym.id]
    return _joint(augmented, lambda saved, *cts: backward(*saved, *cts))


def joint_of(rule: VjpRule) -> Callable:
    """A rule in two functions as one that writes its forward and, between get_grad and put_grad, its way back."""
    return _joint(rule.forward, lambda saved, *cotangents: rule.backward(saved, *cotangents))


def _is_opaque(bsym: BoundSymbol) -> bool:
    """Whether Thunder's rule for an operation is derived from torch's autograd: it cannot be differentiated further."""
    rule = augmented_forward_impls.get(bsym.sym.id)
    return getattr(rule, "__qualname__", "").startswith("augmented_forward_adaptor")


def _joint(forward: Callable, backward: Callable) -> Callable:
    def rule(*args: Any, **kwargs: Any) -> Any:
        given = {p.name for p in tree_flatten((args, kwargs))[0] if isinstance(p, Proxy)}
        result, saved = forward(*args, **kwargs)
        flat, spec = tree_flatten(result)
        flat = [prims.shallow_copy(p) if isinstance(p, TensorProxy) and p.name in given else p for p in flat]
        cotangents = [prims.get_grad(p) for p in flat if isinstance(p, TensorProxy)]
        gradients = backward(saved, *cotangents)
        _put(_in_order(forward, args, kwargs, gradients), gradients)
        return tree_unflatten(flat, spec)

    return rule


def _in_order(forward: Callable, args: tuple, kwargs: dict, gradients: Any) -> tuple:
    """The arguments that gradients are for: those by keyword, and those left out, at their places where there is one for each."""
    if not isinstance(gradients, Sequence) or len(gradients) == len(args):
        return args
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError:
        return args
    bound.apply_defaults()
    return bound.args if len(gradients) == len(bound.args) else args


def _put(args: Sequence[Any], gradients: Any) -> None:
    """Give the gradients that a rule returned to the arguments: one each, or one for each tensor among them."""
    if isinstance(gradients, Mapping):
        raise TransformError("a vjp rule returns its gradients in the order of the arguments, not by name")
    gradients = tuple(gradients) if isinstance(gradients, Sequence) else (gradients,)
    if len(gradients) != len(args):
        remaining = iter(gradients)
        gradients = tuple(next(remaining, None) if _is_tensors(a) else None for a in args)
    for a, g in zip(args, gradients, strict=True):
        if isinstance(a, TensorProxy) and isinstance(g, TensorProxy):
            prims.put_grad(a, g)
        elif isinstance(a, Sequence) and isinstance(g, Sequence):
            _put(a, g)


def _is_tensors(a: Any) -> bool:
    if isinstance(a, Sequence) and not isinstance(a, str):
        return bool(a) and all(_is_tensors(v) for v in a)
    return isinstance(a, TensorProxy) and dtypes.is_inexact_dtype(a.dtype)


def _is_constant(bsym: BoundSymbol, active: set[str]) -> bool:
    """Whether nothing of the inputs reaches the results differentiably."""
    if not any(p.name in active for p in bsym.flat_proxy_args):
        return True
    outs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
    if not any(dtypes.is_inexact_dtype(o.dtype) for o in outs):
        return True
    return bsym.sym.id in _CONSTANT or any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in outs)


def _split(written: Sequence[BoundSymbol], results: set[str]) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """What a rule wrote: the operations that its results need, and all others."""
    needed = set(results)
    forward: list[BoundSymbol] = []
    backward: list[BoundSymbol] = []
    for b in reversed(written):
        is_marker = b.sym.id in (prims.PrimIDs.GET_GRAD, prims.PrimIDs.PUT_GRAD)
        if not is_marker and any(p.name in needed for p in b.flat_proxy_outs):
            needed.update(p.name for p in b.flat_proxy_args)
            forward.append(b)
        else:
            backward.append(b)
    return forward[::-1], backward[::-1]


def _used(node: Node) -> list[Proxy]:
    """What the way back of an operation uses of what is there already."""
    return [p for b in node.backward if b.sym.id is not prims.PrimIDs.GET_GRAD for p in _values(b)]


def _values(b: BoundSymbol) -> list[Proxy]:
    args = b.args[1:] if b.sym.id is prims.PrimIDs.PUT_GRAD else (b.args, b.kwargs)
    return [p for p in tree_flatten(args)[0] if isinstance(p, Proxy)]


def _write_back(trace: TraceCtx, node: Node, cotangent_of: dict[str, TensorProxy], swaps: Swaps, renew: bool) -> None:
    for b in node.backward:
        if b.sym.id is prims.PrimIDs.GET_GRAD:
            (out,) = b.args
            swaps[variableify(b.output)] = cotangent_of[out.name] if out.name in cotangent_of else _zeros_like(out, swaps)
        elif b.sym.id is prims.PrimIDs.PUT_GRAD:
            target, gradient = b.args
            _accumulate(cotangent_of, target, swaps.get(variableify(gradient), gradient))
        else:
            b = b.from_bsym_swap_proxies(swaps, skip_output=True)
            trace.peek_scope().append(renewed(b, swaps) if renew else at_current_line(trace, b))


def _zeros_like(p: TensorProxy, swaps: Swaps) -> TensorProxy:
    return ltorch.zeros_like(swaps.get(variableify(p), p))


def at_current_line(trace: TraceCtx, b: BoundSymbol) -> BoundSymbol:
    """The same bound symbol, as recorded for the statement that the trace is at."""
    return b.from_bsym(source_filename=trace._current_source_filename, source_positions=trace._current_source_positions)


def renewed(b: BoundSymbol, swaps: Swaps) -> BoundSymbol:
    """The same operation with new proxies for everything it makes, which `swaps` learns."""
    made = {variableify(p): p for s in _all(b) for p in s.flat_proxy_outs}
    given = {p.name for p in b.flat_proxy_args}
    fresh = {v: TensorProxy(like=p) for v, p in made.items() if isinstance(p, TensorProxy) and p.name not in given}
    for v, p in fresh.items():
        p.tags.update(made[v].tags)
    swaps.update(fresh)
    return b.from_bsym_swap_proxies(fresh)


def _all(b: BoundSymbol) -> list[BoundSymbol]:
    return [b, *(x for s in b.subsymbols for x in _all(s))]


def _accumulate(cotangent_of: dict[str, TensorProxy], target: TensorProxy, gradient: TensorProxy) -> None:
    if not isinstance(gradient, TensorProxy):
        gradient = ltorch.full_like(target, gradient)
    gradient = _like(gradient, target)
    known = cotangent_of.get(target.name)
    cotangent_of[target.name] = gradient if known is None else ltorch.add(known, gradient)


def _like(gradient: TensorProxy, target: TensorProxy) -> TensorProxy:
    """A gradient with the shape and dtype of what it belongs to.

    Thunder takes a 0-dim CPU tensor in an elementwise operation for a number, and its rules give it a gradient of the full shape;
    what belongs to it is the sum.  Equally a gradient may lack dimensions that its rule did not write down.
    """
    shape, wanted = tuple(gradient.shape), tuple(target.shape)
    if shape != wanted:
        extra = len(shape) - len(wanted)
        if extra >= 0:
            summed = tuple(i for i, n in enumerate(shape) if i < extra or (wanted[i - extra] == 1 and n != 1))
            if summed:
                gradient = ltorch.sum(gradient, summed) if len(summed) < len(shape) else ltorch.sum(gradient)
        if tuple(gradient.shape) != wanted:
            fits = math.prod(shape) == math.prod(wanted)
            gradient = ltorch.reshape(gradient, wanted) if fits else ltorch.expand(gradient, wanted)
    return gradient if gradient.dtype == target.dtype else ltorch.to(gradient, dtypes.to_torch_dtype(target.dtype))


def _missing_rule(bsym: BoundSymbol) -> MissingTransformRuleError:
    name = f"thunder.core.prims.{bsym.sym.name}" if isinstance(bsym.sym.id, prims.PrimIDs) else repr(bsym.sym.id)
    return MissingTransformRuleError(
        with_details(
            f"{bsym.sym.name} has no vjp rule",
            operation=str(bsym.sym.id),
            at=location_of(bsym),
            to_add_one=f"thunder_norm.transforms.register_vjp({name})(forward, backward); see CONTRIBUTING.md",
            or_else="x.detach() if no gradient is to flow through it",
        )
    )
