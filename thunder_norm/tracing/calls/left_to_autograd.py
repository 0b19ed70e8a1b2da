"""Programs that are one layer of torch's and nothing else: torch's autograd records them, as in eager mode.

Torch has a kernel for a whole layer (`torch.lstm`), and records in the forward what its gradient needs.  A node of ours around it would
have its backward part ask torch's engine for a second run, inside of the one that called it, and make zeros for the gradients of
results that nobody has used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from thunder.core import dtypes, prims
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace

_IGNORED = (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.DEL, prims.PrimIDs.COMMENT)
_CONSTANTS = ("full", "zeros")  # the states that a layer begins with

_layers: dict[Hashable, Callable] = {}


def records(symbol: Symbol, run: Callable) -> None:
    """Say that a symbol, of (wanted, args, kwargs), has torch's autograd record ``run(*args, **kwargs)``, whose results it returns second."""
    _layers[symbol.id] = run


def left_to_autograd(forward: TraceCtx) -> Callable | None:
    """A computation with a backward part as one without, whose results have torch's own history; None if it is more than a layer."""
    *others, last = [b for b in forward.bound_symbols if b.sym.id not in _IGNORED]
    layers = [b for b in others if b.sym.id in _layers]
    if len(layers) != 1 or last.sym.id is not prims.PrimIDs.RETURN or not isinstance(last.args[0], dict):
        return None
    (layer,) = layers
    wanted, args, kwargs = layer.args
    returned = last.args[0]["flat_output"]
    constants = [b for b in others if b is not layer]
    made = {p.name for p in _tensors(layer.output[1])}
    if not (
        all(not b.flat_proxy_args and b.sym.name in _CONSTANTS for b in constants)
        and all(
            isinstance(p, TensorProxy) and p.name in made and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in p.tags for p in returned
        )
        and _moves_what_requires_grad(forward, (args, kwargs), wanted)
    ):
        return None
    name = f"recorded_{layer.sym.name}"
    symbol = Symbol(name=name, id=name, meta=None, is_prim=True, executor=layer.sym.executor)
    new = from_trace(forward)
    new.bound_symbols = [
        *(b for b in forward.bound_symbols if b.sym.id is prims.PrimIDs.UNPACK_TRIVIAL),
        *constants,
        BoundSymbol(symbol, args, kwargs, layer.output[1], _call_ctx={name: _layers[layer.sym.id]}),
        prims.python_return.bind(last.args[0]["output"], output=None),
    ]
    return new.python_callable(include_decorators=False)


def _tensors(tree: Any) -> list[TensorProxy]:
    return [p for p in tree_flatten(tree)[0] if isinstance(p, TensorProxy)]


def _moves_what_requires_grad(forward: TraceCtx, arguments: Any, wanted: Sequence[bool]) -> bool:
    """Whether the tensors whose gradients a layer is asked for are those of its arguments that require grad as inputs of the program."""
    given = {p.name for p in forward.args if isinstance(p, TensorProxy) and p.requires_grad}
    floating = [p for p in _tensors(arguments) if dtypes.is_inexact_dtype(p.dtype)]
    return [p.name in given for p in floating] == list(wanted)
