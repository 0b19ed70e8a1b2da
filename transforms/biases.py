"""The transform that takes the addition of a bias out of the operation before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thunder_norm.checkpointing.regions import is_region, with_body
from thunder_norm.errors import TransformTypeError
from thunder_norm.functions.jitted import Watching
from thunder_norm.functions.missing_gradients import has_gradient_of_ours
from thunder_norm.tracing.recording import scope
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import NumberProxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.transforms.autocast import disable_autocast


class SplitBiasTransform(Watching):
    """Write operations that add a bias as the operation without one, and an addition.

    ``thunder.jit(model, transforms=[SplitBiasTransform()])`` changes the program, not its results:

    ==============================  ==================================================
    linear, convolution             ``f(x, W) + b``, b along the channels
    addmm                           ``beta b + alpha A B``
    addbmm                          ``beta b + alpha sum_i A_i B_i``
    baddbmm                         ``(beta b)_i + alpha A_i B_i``
    ==============================  ==================================================

    Convolutions are those of one, two and three dimensions, transposed ones included.  An operation without bias (also one with
    ``beta=0``, where torch ignores it) is left alone.  In float64 results are equal up to the order of additions.  It composes with
    the other transforms in any order, and gradients follow from the program that is written.

    >>> import torch
    >>> from thunder_norm.transforms import SplitBiasTransform
    >>> import thunder
    >>> jm = thunder.jit(torch.nn.Linear(3, 2), transforms=[SplitBiasTransform()])
    >>> _ = jm(torch.ones(1, 3))
    >>> [b.sym.name for b in thunder.last_traces(jm)[3].bound_symbols if not b.sym.is_prim]
    ['linear', 'add']

    Raises (when the jitted function is called):
        DataDependentError: the program needs the value of a tensor.
    """

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Rewrite the computation."""
        split = split_bias(computation_trace)
        prologue, computation, epilogue = super().transform_traces_pre_prologue(prologue_trace, split, epilogue_trace, **kwargs)
        if split is not computation_trace:
            computation.set_provenance(split.get_provenance())
        return prologue, computation, epilogue

    def __repr__(self) -> str:
        return "SplitBiasTransform()"


def split_bias(trace: TraceCtx) -> TraceCtx:
    """The same program with biases added by operations of their own; the trace itself if it has none.

    Operations inside composites (of wrapper subclasses, of checkpointed regions) are split too.

    Raises:
        TransformTypeError: no trace of Thunder's.
    """
    if not isinstance(trace, TraceCtx):
        raise TransformTypeError(f"split_bias rewrites a trace of Thunder's, got {type(trace).__name__}")
    if not any(_has_bias(b) for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    with tracectx(new), disable_autocast():  # what autocast does has been written down already
        new.bound_symbols = [b for bsym in trace.bound_symbols for b in _split(new, bsym)]
    new.set_provenance(TraceProvenance("Biases added by operations of their own"))
    return new


class _Parts(NamedTuple):
    """An operation taken apart: what computes the rest, the bias, and what it is multiplied by."""

    rest: Callable[[], Any]
    bias: TensorProxy
    beta: Any = 1
    bias_shape: tuple[int, ...] | None = None  # to be added with, if it is not the bias's own


def _has_bias(bsym: BoundSymbol) -> bool:
    return _parts(bsym) is not None or any(_has_bias(s) for s in bsym.subsymbols)


def _split(trace: TraceCtx, bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    """What stands for `bsym` in the new program."""
    if not _has_bias(bsym):
        return [bsym]
    parts = _parts(bsym)
    if parts is None:
        subsymbols = [s for sub in bsym.subsymbols for s in _split(trace, sub)]
        if has_gradient_of_ours(bsym):  # what is written has others
            return subsymbols
        return [with_body(bsym, subsymbols) if is_region(bsym) else bsym.from_bsym(subsymbols=subsymbols)]
    if _casts(bsym):  # autocast has chosen a dtype for each step
        return [s for sub in bsym.subsymbols for s in _split(trace, sub)]
    trace.set_current_source_location(bsym.source_filename, bsym.source_positions)
    with scope(trace) as written:
        out = _sum(parts)
    (expected,) = bsym.flat_proxy_outs
    names = {variableify(out): expected}
    return [b.from_bsym_swap_proxies(names) for b in written]


def _sum(parts: _Parts) -> TensorProxy:
    rest, bias = parts.rest(), parts.bias
    rest = rest[0] if isinstance(rest, tuple) else rest
    if parts.bias_shape is not None:
        bias = ltorch.reshape(bias, parts.bias_shape)
    if parts.beta != 1:
        bias = ltorch.mul(bias, parts.beta)
    if bias.ndim == 0:  # Thunder does not broadcast CPU scalars, and then adds up no gradient for them
        bias = ltorch.expand(bias, rest.shape)
    return ltorch.add(rest, bias)


def _casts(bsym: BoundSymbol) -> bool:
    return any(s.sym.id is prims.PrimIDs.CONVERT_ELEMENT_TYPE for s in bsym.subsymbols)


# -- the operations that may have a bias ------------------------------------------------------------------------------


def _parts(bsym: BoundSymbol) -> _Parts | None:
    """An operation with a bias, taken apart; None for all others."""
    take_apart = _OPERATIONS.get(bsym.sym.id)
    return None if take_apart is None else take_apart(bsym)


def _argument(bsym: BoundSymbol, position: int, *names: str) -> Any:
    if position < len(bsym.args):
        return bsym.args[position]
    return next((bsym.kwargs[n] for n in names if n in bsym.kwargs), None)


def _without_bias(bsym: BoundSymbol) -> Callable[[], Any]:
    args = (*bsym.args[:2], None, *bsym.args[3:]) if len(bsym.args) > 2 else bsym.args
    kwargs = bsym.kwargs | {"bias": None} if "bias" in bsym.kwargs else bsym.kwargs
    return lambda: bsym.sym(*args, **kwargs)


def _linear(bsym: BoundSymbol) -> _Parts | None:
    bias = _argument(bsym, 2, "bias")
    return None if bias is None else _Parts(_without_bias(bsym), bias)


def _convolution(bsym: BoundSymbol) -> _Parts | None:
    parts = _linear(bsym)
    if parts is None:
        return None
    spatial = _argument(bsym, 1, "weight").ndim - 2  # the input may have no batch dimension
    return parts._replace(bias_shape=(*parts.bias.shape, *(1,) * spatial))


def _matrix_product(product: Callable[[TensorProxy, TensorProxy], TensorProxy]) -> Callable[[BoundSymbol], _Parts | None]:
    def take_apart(bsym: BoundSymbol) -> _Parts | None:
        bias, a, b = _argument(bsym, 0, "input"), _argument(bsym, 1, "mat1", "batch1"), _argument(bsym, 2, "mat2", "batch2")
        alpha, beta = (_number(bsym.kwargs.get(name, 1)) for name in ("alpha", "beta"))
        if beta == 0 or not all(isinstance(p, TensorProxy) for p in (bias, a, b)):
            return None

        def rest() -> TensorProxy:
            result = product(a, b)
            return result if alpha == 1 else ltorch.mul(result, alpha)

        return _Parts(rest, bias, beta)

    return take_apart


def _number(value: Any) -> Any:
    return value.value if isinstance(value, NumberProxy) else value


def _sum_of_products(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    return ltorch.sum(ltorch.bmm(a, b), 0, dtype=to_torch_dtype(a.dtype))  # a sum of int32 would be int64


_OPERATIONS: dict[Any, Callable[[BoundSymbol], _Parts | None]] = {
    "torch.nn.functional.linear": _linear,
    prims.PrimIDs.LINEAR: _linear,
    **{f"torch.nn.functional.conv{d}d": _convolution for d in (1, 2, 3)},
    **{f"torch.nn.functional.conv_transpose{d}d": _convolution for d in (1, 2, 3)},
    "torch.convolution": _convolution,
    prims.PrimIDs.CONVOLUTION: _convolution,
    "aten_convolution_default": _convolution,  # how a transposed one on the insides of a wrapper is recorded
    "torch.addmm": _matrix_product(ltorch.matmul),
    "torch.addbmm": _matrix_product(_sum_of_products),
    "torch.baddbmm": _matrix_product(ltorch.matmul),
}
