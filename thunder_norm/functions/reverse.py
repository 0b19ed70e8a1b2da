"""Reverse mode: from a flat program to its results and the program that pulls cotangents back.

The operations of the forward program are written as they are, so they keep their names and lines.  Each operation that the inputs
reach has a rule, tried in this order: ours (`registry.vjp_rules`), Thunder's (`thunder_rules`), those of its parts, torch's
(`opaque`).  The backward of an operation is a flat program of its own, recorded with the forward and written, for each pullback anew, when a cotangent
arrives.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import thunder_norm.functions.rules  # noqa: F401 - registers the rules
from thunder_norm.errors import MissingTransformRuleError, ThunderNormError, TransformError, with_details
from thunder_norm.functions.derivatives import in_dtype_of
from thunder_norm.functions.opaque import is_opaque, is_whole, torch_vjp_rule
from thunder_norm.functions.programs import (
    anew,
    apart,
    described,
    is_differentiable,
    operations_of,
    outputs_of,
    program_of,
    replayed,
)
from thunder_norm.functions.readability import core, grouped
from thunder_norm.functions.registry import VjpRule, decomposed, missing_rule, vjp_rules
from thunder_norm.functions.thunder_rules import CONSTANT, thunders_rule
from thunder_norm.subclass.acquiring.fallback import fallback_executor
from thunder_norm.tracing.locations import at_line_of, location_of
from thunder_norm.tracing.recording import gradients_recorded, scope
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder_norm.tracing.tags import has_any_tag
from thunder_norm.tracing.torch_functions.random_numbers import draws_numbers
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx

_IGNORED = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.DEL, prims.PrimIDs.COMMENT)

_MANY = 4  # operations in the backward of a primitive that are worth a name of their own

Swaps = dict[Variable, Proxy]


@dataclass(frozen=True)
class Node:
    """The backward of one operation.

    Attributes:
        bsym: the operation, for its line.
        outs: its results that cotangents come for.
        inputs: its arguments that get gradients.
        backward: a flat program that takes a cotangent for each of `outs` and then `saved`, and returns a gradient for each of
            `inputs`.
        saved: what it needs of the forward program, by the forward program's proxies, as `outs` and `inputs` are.
        takes_missing: whether the cotangents of results that nothing uses are None, rather than zeros.
    """

    bsym: BoundSymbol
    outs: tuple[TensorProxy, ...]
    inputs: tuple[TensorProxy, ...]
    backward: TraceCtx
    saved: tuple[Proxy, ...]
    takes_missing: bool = False


@dataclass(frozen=True)
class Pullback:
    """Pulls cotangents of a program's results back to its inputs; written into the open trace at each call.

    Inputs and results go by the program's own proxies, so an input given twice, or captured as well, stays apart.
    """

    nodes: Sequence[Node]
    args: tuple[Any, ...]
    outs: tuple[Any, ...]
    primals: Swaps
    wrt: tuple[bool, ...]

    def __call__(self, cotangents: Sequence[TensorProxy | None]) -> tuple[TensorProxy | None, ...]:
        """The cotangents of the inputs, None where one is zero.

        A cotangent has the shape and dtype of its result; None stands for zero.
        """
        trace = get_tracectx()
        cotangent_of: dict[str, TensorProxy] = {}
        for out, ct in zip(self.outs, cotangents, strict=True):
            if ct is not None and isinstance(out, TensorProxy):
                _accumulate(cotangent_of, out, ct)
        for node in reversed(self.nodes):
            if any(o.name in cotangent_of for o in node.outs):
                with at_line_of(trace, node.bsym):
                    received = [cotangent_of.get(o.name) for o in node.outs]
                    if not node.takes_missing:
                        received = [self._zeros_like(o) if ct is None else ct for o, ct in zip(node.outs, received, strict=True)]
                    gradients = replayed(node.backward, [*received, *map(self._primal, node.saved)])
                    for target, gradient in zip(node.inputs, gradients, strict=True):
                        _accumulate(cotangent_of, target, gradient)
        return tuple(cotangent_of.get(a.name) if w else None for a, w in zip(self.args, self.wrt, strict=True))

    def _primal(self, p: Proxy) -> Proxy:
        return self.primals.get(variableify(p), p)

    def _zeros_like(self, p: TensorProxy) -> TensorProxy:
        return ltorch.zeros_like(self._primal(p))


def _accumulate(cotangent_of: dict[str, TensorProxy], target: TensorProxy, gradient: TensorProxy) -> None:
    known = cotangent_of.get(target.name)
    cotangent_of[target.name] = gradient if known is None else ltorch.add(known, gradient)


def evaluate_vjp(trace: TraceCtx, primals: Sequence[Any], wrt: Sequence[bool]) -> tuple[tuple[Any, ...], Pullback]:
    """Write the program into the open trace and return its results and its pullback.

    Args:
        trace: a flat program.
        primals: one value for each of ``trace.args``.
        wrt: for each of them, whether it is to get a cotangent.

    Raises:
        MissingTransformRuleError: an operation on the way has no rule.
        TransformError: a rule returned something that does not fit its operation.
    """
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
    return results, Pullback(reverse.nodes, tuple(trace.args), outs, swaps, tuple(wrt))


def pullback_of(scopes: Sequence[list[BoundSymbol]], inputs: Sequence[TensorProxy], outs: Sequence[TensorProxy]) -> Pullback:
    """The pullback of operations that are written already.

    What a backward needs of the inside of one is written into the open trace: its steps, once more.  Where it has drawn random numbers, or
    written into a tensor (running statistics), its steps take its place.

    Args:
        scopes: the operations in order; those that the inputs do not reach are constants.
        inputs: tensors that get cotangents: given to the operations, or made by them.
        outs: tensors that they made.

    Raises:
        MissingTransformRuleError: an operation on the way has no rule.
        TransformError: a rule returned something that does not fit its operation.
    """
    reverse = _Reverse(inputs, {}, (True,) * len(inputs))
    with gradients_recorded(
        True
    ):  # of the steps of an operation, where the program has left the block that recorded its derivatives
        for operations in scopes:
            operations[:] = [b for bsym in operations for b in reverse.follow(bsym)]
    return Pullback(reverse.nodes, tuple(inputs), tuple(outs), {}, (True,) * len(inputs))


class _Reverse:
    """A program while it is written: its backwards so far, and which of its tensors the inputs reach."""

    def __init__(self, args: Sequence[Proxy], primals: Swaps, wrt: Sequence[bool]):
        self.primals = primals
        self.nodes: list[Node] = []
        self.trace = get_tracectx()
        self.inputs = {a.name for a in args}
        self.active = {a.name for a, w in zip(args, wrt, strict=True) if w and is_differentiable(a)}

    def write(self, bsym: BoundSymbol) -> None:
        """Write one operation of the program."""
        with at_line_of(self.trace, bsym):
            forward, nodes = self.process(bsym)
            node = self.grouped(bsym, forward, nodes)
        if node is not None:
            forward, nodes = [bsym], [node]
        self.trace.peek_scope().extend(b.from_bsym_swap_proxies(self.primals, skip_output=True) for b in forward)
        self.nodes.extend(nodes)

    def follow(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        """Take in one operation that is written already; what stands in its place from now on."""
        with at_line_of(self.trace, bsym):
            forward, nodes = self.process(bsym)
        if any(o.name in self.inputs for o in bsym.flat_proxy_outs):  # where cotangents are to arrive, not pass through
            return [bsym]
        self.nodes.extend(nodes)
        if not nodes or forward == [bsym]:
            return [bsym]
        if any(draws_numbers(b) or copies_in(b) for b in forward):
            return forward
        outs = {o.name for o in bsym.flat_proxy_outs}
        # steps that a later derivative finds beside the operation itself, which consists of them
        anew_of = {
            variableify(o): TensorProxy(like=o, history=None) if isinstance(o, TensorProxy) else o
            for b in forward
            for o in b.flat_proxy_outs
        }
        inner = {v: o for v, o in anew_of.items() if v.proxy.name not in outs}
        self.nodes[-len(nodes) :] = [replace(n, saved=tuple(inner.get(variableify(p), p) for p in n.saved)) for n in nodes]
        self.trace.peek_scope().extend(b.from_bsym_swap_proxies(anew_of) for b in forward)
        return [bsym]

    def process(self, bsym: BoundSymbol) -> tuple[list[BoundSymbol], list[Node]]:
        """An operation of the program: what to write for it, and its backward."""
        if bsym.sym.id in _IGNORED:
            return [], []
        if _is_constant(bsym, self.active):
            parts = decomposed(bsym) if draws_numbers(bsym) else None  # Thunder would draw other numbers than torch
            return [bsym] if parts is None else parts, []
        rule = vjp_rules.find(bsym.sym)
        if rule is None and (parts := decomposed(bsym)) is not None:
            return self.process_parts(bsym, parts)
        rule = rule or rule_of(bsym, self.active)
        if rule is not None:
            return self.by_rule(bsym, rule)
        if not bsym.subsymbols:
            if not bsym.sym.is_prim and {p.name for p in bsym.flat_proxy_outs} <= {p.name for p in bsym.flat_proxy_args}:
                return [], []  # it did nothing
            raise missing_rule(bsym, "vjp", or_else="x.detach() if no gradient is to flow through it")
        try:
            return self.process_parts(bsym, bsym.subsymbols)
        except MissingTransformRuleError:
            rule = torch_vjp_rule(bsym, self.active)
            if rule is None:
                raise
            return self.by_rule(bsym, rule)

    def process_parts(self, bsym: BoundSymbol, parts: Sequence[BoundSymbol]) -> tuple[list[BoundSymbol], list[Node]]:
        """An operation by what it consists of."""
        forward: list[BoundSymbol] = []
        nodes: list[Node] = []
        for sub in parts:
            written, found = self.process(sub)
            forward.extend(written)
            nodes.extend(found)
        return ([bsym] if _is_enough(bsym, forward, nodes) else forward), nodes

    def by_rule(self, bsym: BoundSymbol, rule: VjpRule) -> tuple[list[BoundSymbol], list[Node]]:
        """What a rule writes for an operation, by the operation's own results, and the node for its backward."""
        if rule.check_active is not None:
            rule.check_active(bsym.args, self.active)
        with scope(self.trace) as written:
            result, saved = _forward_of(rule, bsym)
        outs = tuple(o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy))
        made = {variableify(m): o for m, o in zip(_checked_results(bsym, result), outs, strict=True) if m.name != o.name}
        self.active.update(o.name for o in outs if is_differentiable(o))
        inputs: list[TensorProxy] = []

        def pull(*cotangents: TensorProxy) -> Sequence[TensorProxy]:
            pairs = [(t, g) for t, g in _gradients_of(rule, bsym, saved, cotangents) if t.name in self.active]
            inputs.extend(t for t, _ in pairs)
            return [g for _, g in pairs]

        node = replace(_node(bsym, outs, inputs, pull, made), takes_missing=rule.takes_missing)
        forward = [b.from_bsym_swap_proxies(made) for b in written]
        return ([bsym] if _is_enough(bsym, forward, [node]) else forward), [node]

    def grouped(self, bsym: BoundSymbol, forward: list[BoundSymbol], nodes: list[Node]) -> Node | None:
        """The backward as one operation, where that reads better than its parts."""
        if not nodes or (forward != [bsym] and vjp_rules.find(bsym.sym) is not None):  # what a rule of ours saves is saved
            return None
        inputs = list({p.name: p for p in bsym.flat_proxy_args if p.name in self.active and isinstance(p, TensorProxy)}.values())
        outs = tuple(o for o in bsym.flat_proxy_outs if is_differentiable(o))
        pull = Pullback(nodes, tuple(inputs), outs, {}, (True,) * len(inputs))
        is_simple = core(bsym).sym.is_prim and isinstance(core(bsym).sym.id, prims.PrimIDs)
        found = grouped(bsym, forward, pull, inputs, _MANY if is_simple else len(inputs))
        return None if found is None else _node(bsym, outs, found.inputs, found.backward, {})


def _node(bsym: BoundSymbol, outs: tuple[TensorProxy, ...], inputs: Sequence[TensorProxy], pull: Any, made: Swaps) -> Node:
    """The node whose backward `pull` writes; `made` are the operation's own proxies for those that a rule made."""
    cotangents = anew(outs)
    backward = program_of(pull, cotangents, hoists=False)
    saved = tuple(made.get(variableify(p), p) for p in backward.args[len(outs) :])
    return Node(bsym, outs, tuple(inputs), backward, saved)


def _is_enough(bsym: BoundSymbol, forward: Sequence[BoundSymbol], nodes: Sequence[Node]) -> bool:
    """Whether the backwards need nothing that is made inside an operation, so that it can be written as it is."""
    inner = {p.name for b in forward for p in b.flat_proxy_outs} - {p.name for p in bsym.flat_proxy_outs}
    return not any(p.name in inner for n in nodes for p in n.saved)


def rule_of(bsym: BoundSymbol, active: Container[str]) -> VjpRule | None:
    """The rule for an operation that we have none for; None if it is to be taken apart."""
    if (
        is_opaque(bsym)
        or is_whole(bsym)
        or (bsym.sym.executor is fallback_executor and not has_any_tag(bsym, {prims.OpTags.RANDOM_OP}))
    ):
        return torch_vjp_rule(bsym, active)  # Thunder's rule asks torch's autograd, which cannot be transformed further
    found = thunders_rule(bsym)
    return torch_vjp_rule(bsym, active) if found is None and not bsym.subsymbols else found


def _forward_of(rule: VjpRule, bsym: BoundSymbol) -> tuple[Any, Any]:
    try:
        found = rule.forward(*bsym.args, **bsym.kwargs)
    except ThunderNormError:
        raise
    except Exception as e:
        raise _failed(bsym, "forward", e) from e
    if not isinstance(found, Sequence) or len(found) != 2:
        raise _misfit(bsym, "forward must return a pair (result, what backward needs)", got=f"a {type(found).__name__}")
    result, saved = found
    return [v for v in apart(tree_flatten(result)[0], bsym.flat_proxy_args) if isinstance(v, TensorProxy)], saved


def _checked_results(bsym: BoundSymbol, made: Sequence[TensorProxy]) -> Sequence[TensorProxy]:
    outs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
    if len(made) != len(outs):
        raise _misfit(bsym, f"forward returns {len(made)} results, the operation {len(outs)}")
    for m, o in zip(made, outs, strict=True):
        if tuple(m.shape) != tuple(o.shape) or m.dtype != o.dtype:
            raise _misfit(bsym, "forward returns another result than the operation", got=described(m), expected=described(o))
    return made


def _gradients_of(
    rule: VjpRule, bsym: BoundSymbol, saved: Any, cotangents: Sequence[TensorProxy]
) -> list[tuple[TensorProxy, TensorProxy]]:
    """The differentiable arguments that get a gradient, each with it."""
    try:
        pairs = rule.paired(bsym.args, bsym.kwargs, rule.backward(saved, *cotangents))
    except TransformError as e:
        raise _failed(bsym, "backward", e) from e
    except ThunderNormError:
        raise
    except Exception as e:
        raise _failed(bsym, "backward", e) from e
    found = []
    for target, gradient in pairs:
        if not isinstance(gradient, TensorProxy):
            raise _misfit(bsym, "backward returns something else than a tensor or None", got=f"a {type(gradient).__name__}")
        if not isinstance(target, TensorProxy):
            raise _misfit(
                bsym, "backward returns a gradient for an argument that is no tensor", argument=f"a {type(target).__name__}"
            )
        if not dtypes.is_inexact_dtype(target.dtype):
            continue
        if tuple(gradient.shape) != tuple(target.shape):
            raise _misfit(
                bsym,
                "backward returns a gradient of another shape than its argument",
                gradient=tuple(gradient.shape),
                argument=tuple(target.shape),
            )
        found.append((target, in_dtype_of(gradient, target)))
    return found


def _is_constant(bsym: BoundSymbol, active: set[str]) -> bool:
    """Whether nothing of the inputs reaches the results differentiably."""
    if not any(p.name in active for p in bsym.flat_proxy_args):
        return True
    outs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
    if not any(dtypes.is_inexact_dtype(o.dtype) for o in outs):
        return True
    return bsym.sym.id in CONSTANT or any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in outs)


def _misfit(bsym: BoundSymbol, what: str, **details: Any) -> TransformError:
    return TransformError(with_details(f"the vjp rule of {bsym.sym.id}: {what}", **details, at=location_of(bsym)))


def _failed(bsym: BoundSymbol, which: str, error: Exception) -> TransformError:
    text = str(error) if isinstance(error, TransformError) else f"{type(error).__name__}: {error}"
    return TransformError(with_details(f"the vjp rule of {bsym.sym.id}: {which} fails", error=text, at=location_of(bsym)))
