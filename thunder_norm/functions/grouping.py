"""The backward of an operation that consists of several, as one operation: ``layer_norm_backward``.

It is written as one bound symbol whose parts are the operations of the backward, so executors and further transforms look inside and
readers need not.  What it needs of the forward's inside it computes again from the operation's arguments and results, as torch's own
formulas do; where that would be costly, or would draw numbers, the operation is taken apart instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol, has_tags
from thunder.core.trace import get_tracectx

from thunder_norm.functions.programs import flat_program, is_differentiable, replayed
from thunder_norm.functions.readability import BackwardId, tidied
from thunder_norm.tracing.recording import print_without_module, scope

Ids = prims.PrimIDs

_COSTLY = frozenset({Ids.MATMUL, Ids.LINEAR, Ids.CONVOLUTION, Ids.SORT, Ids.TOPK, Ids.EMBEDDING})


class Grouped(NamedTuple):
    """One operation for a backward: ``backward(*cotangents)`` writes it and returns the gradients of `inputs`."""

    inputs: tuple[TensorProxy, ...]
    backward: Callable[..., Sequence[TensorProxy]]


def grouped(
    bsym: BoundSymbol,
    forward: Sequence[BoundSymbol],
    pull: Callable[[Sequence[TensorProxy]], Sequence[TensorProxy | None]],
    inputs: Sequence[TensorProxy],
    threshold: int,
) -> Grouped | None:
    """The backward of `bsym` as one operation; None if it is better taken apart.

    Args:
        bsym: the operation.
        forward: what its rules write for the forward.
        pull: writes the gradients of `inputs` for cotangents of the differentiable results.
        inputs: the arguments that get a gradient.
        threshold: how many operations are worth one of their own.
    """
    outs = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
    known = {o.name for o in outs}
    again = [b for b in forward if not {p.name for p in b.flat_proxy_outs} <= known]
    if any(_must_not_run_again(b) for b in again):
        return None
    cotangents = [TensorProxy(like=o, history=None) for o in outs if is_differentiable(o)]
    with scope(get_tracectx()) as written:
        written.extend(again)
        gradients = pull(cotangents)
        kept, gradients = tidied(written, tuple(gradients))
    if len(kept) <= threshold:
        return None
    made = {p.name for b in kept for p in b.flat_proxy_outs}
    used = {p.name for b in kept for p in b.flat_proxy_args} | {g.name for g in gradients if g is not None}
    saved = tuple(o for o in outs if o.name in used)
    given = {p.name for p in (*cotangents, *saved, *bsym.flat_proxy_args)}
    if used - made - given:
        return None
    mask = tuple(g is not None for g in gradients), tuple(o.name in used for o in outs)
    symbol = _symbol(bsym, mask, kept, ((*cotangents, *saved, *bsym.args), bsym.kwargs), gradients)

    def backward(*received: TensorProxy) -> Sequence[TensorProxy]:
        results = symbol(*received, *saved, *bsym.args, **bsym.kwargs)
        return results if isinstance(results, tuple) else (results,)

    return Grouped(tuple(p for p, g in zip(inputs, gradients, strict=True) if g is not None), backward)


def _symbol(bsym: BoundSymbol, mask: tuple, kept: Sequence[BoundSymbol], arguments: tuple, gradients: Sequence[Any]) -> Symbol:
    formal = [p for p in tree_flatten(arguments)[0] if isinstance(p, Proxy)]
    program = flat_program(formal, kept, [g for g in gradients if g is not None])

    def meta(*args: Any, **kwargs: Any) -> Any:
        actual = [p for p in tree_flatten((args, kwargs))[0] if isinstance(p, Proxy)]
        results = replayed(program, actual)
        return results if len(results) > 1 else results[0]

    name = f"{bsym.sym.name}_backward"
    return Symbol(name=name, meta=meta, id=BackwardId(bsym.sym.id or bsym.sym.name, mask), _bind_postprocess=print_without_module)


def _must_not_run_again(b: BoundSymbol) -> bool:
    if b.sym.id in _COSTLY or has_tags(b, {prims.OpTags.RANDOM_OP, prims.OpTags.DONT_DCE}):
        return True
    if not b.subsymbols and not b.sym.is_prim:
        return True
    if b.sym.is_prim and not isinstance(b.sym.id, prims.PrimIDs):
        return True
    return any(_must_not_run_again(s) for s in b.subsymbols)
