"""The backward of an operation that consists of several, as one operation: ``layer_norm_backward``.

It is written as one bound symbol whose parts are the operations of the backward, so executors and further transforms look inside and
readers need not.  What it needs of the forward's inside it computes again from the operation's arguments and results, as torch's own
formulas do; where that would be costly, or would draw numbers, the operation is taken apart instead.

Torch has kernels for some of them: one call where their formulas are five to fifteen.  Each is a symbol that consists of its formula,
and is carried out by torch's kernel where no executor looks inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder_norm.functions.programs import flat_program, is_differentiable, replayed
from thunder_norm.functions.readability import BackwardId, tidied
from thunder_norm.tracing.recording import print_without_module, scope
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol, has_tags
from thunder.core.trace import get_tracectx
from thunder.core.utils import get_computation_dtype
from thunder.executors import torchex

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


# -- those that torch has kernels for -----------------------------------------------------------------------------------


def _with_kernel(kernel: Callable) -> Callable[[Callable], Symbol]:
    """Make a symbol of a formula, carried out by `kernel`."""

    def make(formula: Callable) -> Symbol:
        name = formula.__name__
        meta = langctx(Languages.TORCH)(formula)
        symbol = Symbol(name=name, meta=meta, id=f"thunder_norm.{name}", _bind_postprocess=print_without_module)
        operation = torchex.ex.register_operator(f"torch_{name}", like=symbol, fn=kernel)
        torchex.ex.register_implementation(symbol, operation, checker=torchex._always_executable)
        return symbol

    return make


def _softmax_kernel(g: torch.Tensor, out: torch.Tensor, dim: int) -> torch.Tensor:
    return torch._softmax_backward_data(g, out, dim, out.dtype)


@_with_kernel(_softmax_kernel)
def softmax_backward(g: TensorProxy, out: TensorProxy, dim: int) -> TensorProxy:
    """``y (g - sum(g y))`` for ``y = softmax(x, dim)``; g and y have one shape and dtype."""
    return ltorch.mul(out, ltorch.sub(g, ltorch.sum(ltorch.mul(out, g), dim, True)))


def _gelu_kernel(g: torch.Tensor, a: torch.Tensor, approximate: str) -> torch.Tensor:
    g, a = torch.broadcast_tensors(g, a)  # oneDNN, which runs it in single precision, broadcasts nothing
    return torch.ops.aten.gelu_backward(g, a, approximate=approximate)


@_with_kernel(_gelu_kernel)
def gelu_backward(g: TensorProxy, a: TensorProxy, approximate: str) -> TensorProxy:
    """``g (P(x) + x p(x))`` with the normal distribution's P and density p, or what the tanh approximation makes of it."""
    if approximate == "tanh":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        square = ltorch.mul(a, a)
        t = ltorch.tanh(ltorch.mul(ltorch.mul(a, ltorch.add(ltorch.mul(square, cubic), 1.0)), scale))
        inner = ltorch.mul(ltorch.add(ltorch.mul(square, 3 * cubic), 1.0), scale)
        slope = ltorch.mul(ltorch.mul(a, ltorch.sub(1.0, ltorch.mul(t, t))), inner)
        return ltorch.mul(g, ltorch.mul(ltorch.add(ltorch.add(t, 1.0), slope), 0.5))
    probability = ltorch.add(ltorch.mul(ltorch.erf(ltorch.mul(a, math.sqrt(0.5))), 0.5), 0.5)
    density = ltorch.mul(ltorch.exp(ltorch.mul(ltorch.mul(a, a), -0.5)), 1 / math.sqrt(2 * math.pi))
    return ltorch.mul(g, ltorch.add(probability, ltorch.mul(a, density)))


def _standardized_kernel(
    g: torch.Tensor, a: torch.Tensor, normalized_shape: Sequence[int], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, mean, rstd = torch.native_layer_norm(a, normalized_shape, None, None, eps)
    wanted = [True, False, False]
    to_a, _, _ = torch.ops.aten.native_layer_norm_backward(g, a, normalized_shape, mean, rstd, None, None, wanted)
    return to_a, out


@_with_kernel(_standardized_kernel)
def standardize_backward(
    g: TensorProxy, a: TensorProxy, normalized_shape: Sequence[int], eps: float
) -> tuple[TensorProxy, TensorProxy]:
    """Of ``y = (x - mean(x)) r`` with ``r = 1 / sqrt(var(x) + eps)``: ``r (g - mean(g) - y mean(g y))``, and y.

    Means are over the last dimensions, those of `normalized_shape`.
    """
    dims = tuple(range(a.ndim - len(normalized_shape), a.ndim))
    dtype, precise = a.dtype, get_computation_dtype(a.dtype)
    g, a = ltorch.to(g, precise), ltorch.to(a, precise)
    variance, mean = ltorch.var_mean(a, dims, correction=0, keepdim=True)
    r = ltorch.rsqrt(ltorch.add(variance, eps))
    out = ltorch.mul(ltorch.sub(a, mean), r)
    along = ltorch.mul(out, ltorch.mean(ltorch.mul(g, out), dims, True))
    to_a = ltorch.mul(ltorch.sub(ltorch.sub(g, ltorch.mean(g, dims, True)), along), r)
    return ltorch.to(to_a, dtype), ltorch.to(out, dtype)
