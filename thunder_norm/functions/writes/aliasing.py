"""Which proxies of a program lie in the memory of others, and where the program copies into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Number
from typing import Any

import torch

from thunder_norm.functions.opaque import Operation, operation_of, views_of
from thunder_norm.tracing.shared_memory.histories import CURRENT, HISTORY
from thunder_norm.tracing.shared_memory.writes import copies_in
from thunder_norm.tracing.torch_functions.torch_semantics import unfold
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

VIEWS = frozenset(
    {
        prims.PrimIDs.BROADCAST_IN_DIM,
        prims.PrimIDs.RESHAPE,
        prims.PrimIDs.SLICE,
        prims.PrimIDs.SQUEEZE,
        prims.PrimIDs.TRANSPOSE,
        prims.PrimIDs.VIEW,
        prims.PrimIDs.SHALLOW_COPY,
        prims.PrimIDs.UNFOLD,
    }
)


def as_written(value: TensorProxy, target: TensorProxy) -> TensorProxy:
    """What a copy of `value` leaves in `target`, to whose shape it is broadcast."""
    return value if value.shape == target.shape else ltorch.expand(value, tuple(target.shape))


def parts_of_copies(bsym: BoundSymbol) -> Sequence[BoundSymbol]:
    """The parts of an operation that holds a copy; the operations without one stay whole."""
    if not copies_in(bsym) or not bsym.subsymbols:
        return [bsym]
    return [b for s in bsym.subsymbols for b in parts_of_copies(s)]


def views_in(bsym: BoundSymbol) -> dict[str, str]:
    """The results of an operation that share memory with an argument, and with which."""
    if bsym.sym.id in VIEWS:
        return {o.name: a.name for o in bsym.flat_proxy_outs for a in bsym.flat_proxy_args[:1] if isinstance(a, TensorProxy)}
    if _selects(bsym):
        return {o.name: bsym.args[0].name for o in bsym.flat_proxy_outs}
    inside = views_of(bsym)
    for sub in bsym.subsymbols:
        inside |= views_in(sub)
    return {o.name: root for o in bsym.flat_proxy_outs if (root := end_of(o.name, inside)) != o.name}


def in_memory_of(bsym: BoundSymbol) -> dict[str, str]:
    """The results of an operation that lie in the memory of an argument, and of which."""
    if bsym.sym.id is prims.PrimIDs.UPDATE_ALIASES:
        return {out.name: p.name for out, p in zip(bsym.flat_proxy_outs, bsym.flat_proxy_args, strict=True)}
    if bsym.sym.id in (HISTORY.id, CURRENT.id):
        return {bsym.output.name: bsym.args[-1].name}
    return views_in(bsym)


def writes_into(bsyms: Iterable[BoundSymbol], root: dict[str, str]) -> Iterator[tuple[str, BoundSymbol]]:
    """The tensors whose memory operations write into, and the copies.

    Args:
        bsyms: the operations, in order.
        root: by name, in whose memory a tensor lies; gets what lies in the memory of one of these.
    """
    for bsym in bsyms:
        root.update({out: root[base] for out, base in in_memory_of(bsym).items() if base in root})
        if bsym.sym.id is prims.PrimIDs.COPY_:
            if bsym.args[1].name in root:
                root[bsym.output.name] = root[bsym.args[1].name]
                yield root[bsym.output.name], bsym
        elif copies_in(bsym):
            yield from writes_into(bsym.subsymbols, root)


def roots_of(trace: TraceCtx) -> dict[str, str]:
    """The tensors that a program takes, each in memory of its own."""
    return {p.name: p.name for p in trace.args if isinstance(p, TensorProxy)}


def _squeeze(tensor: torch.Tensor, dim: Any = None) -> torch.Tensor:
    return tensor.squeeze() if dim is None else tensor.squeeze(dim)


# As torch calls what Thunder has with other arguments: primitives in the attributes of its tensors, and operations
_WITH_ITS_ARGUMENTS = {
    prims.PrimIDs.TRANSPOSE: torch.permute,
    prims.PrimIDs.SQUEEZE: torch.squeeze,
    "torch.permute": torch.Tensor.permute,
    "torch.squeeze": _squeeze,
    unfold.id: torch.Tensor.unfold,
}


def operation_of_view(bsym: BoundSymbol) -> Operation | None:
    """The operation that makes a view, as torch calls it; None if torch is not what runs it."""
    function = _WITH_ITS_ARGUMENTS.get(bsym.sym.id)
    return operation_of(bsym) if function is None else Operation(bsym.sym.name, function, bsym.sym.meta)


_OF_MASKS = (dtypes.bool8, dtypes.uint8)


def _selects(bsym: BoundSymbol) -> bool:
    """Whether an operation is ``x[i]`` with an integer in a tensor without dimensions: torch's is a view, Thunder computes a copy."""
    if bsym.sym.name not in ("getitem", "__getitem__") or len(bsym.args) != 2 or not isinstance(bsym.args[0], TensorProxy):
        return False
    keys = bsym.args[1] if isinstance(bsym.args[1], tuple | list) else (bsym.args[1],)
    tensors = [k for k in keys if isinstance(k, TensorProxy)]
    is_basic = all(k is None or k is ... or isinstance(k, TensorProxy | Number | NumberProxy | slice) for k in keys)
    return (
        bool(tensors)
        and is_basic
        and not any(isinstance(k, bool) for k in keys)
        and all(t.ndim == 0 and t.dtype in dtypes.integer_dtypes and t.dtype not in _OF_MASKS for t in tensors)
    )


def end_of(name: str, base: dict[str, str]) -> str:
    """Where one comes to by `base` in the end."""
    while name in base:
        name = base[name]
    return name
