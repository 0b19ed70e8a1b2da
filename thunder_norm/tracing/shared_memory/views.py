"""Which operations of a trace give a view of their first argument, or may hand that on as it is: what is written there is written into it.

Thunder's list lacks what its tensors have as attributes (``x.T``), what torch runs for it (``x.ravel()``) and what may do nothing
(``x.cpu()``): a write through one of these was lost where the program is differentiated, as no result depended on it.
"""

from __future__ import annotations

import functools

import torch

from thunder.core import update_aliases
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

_thunders = update_aliases._is_view_creation_op  # before `hooks` puts `makes_view` in its place
_PRIMS = (PrimIDs.BROADCAST_IN_DIM, PrimIDs.RESHAPE, PrimIDs.SHALLOW_COPY, PrimIDs.SLICE, PrimIDs.SQUEEZE, PrimIDs.TRANSPOSE)
RECORDED = "plain."  # what the names of operations of torch's on plain tensors begin with

# Operations that return the very tensor where there is nothing to do.
RETURNING_SELF = frozenset(
    "bfloat16 bool byte char conj contiguous cpu cuda dequantize double dropout float half int long real resolve_conj resolve_neg short to "
    "type type_as".split()
)
_DROPOUTS = {
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), False),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), True),
}  # and whether they drop anything where nobody says so
_OTHERS = frozenset("__getitem__ __iter__ __get__ atleast_1d atleast_2d atleast_3d broadcast_tensors to_dense".split())
SEVERAL = frozenset({"broadcast_tensors", "meshgrid"})  # give views of all of their arguments


def makes_view(bsym: BoundSymbol) -> bool:
    """Whether a result of an operation may lie in the memory of its first argument."""
    if _thunders(bsym) or bsym.sym.id in _PRIMS:
        return True
    name = bsym.sym.name.removeprefix(RECORDED)
    if name == bsym.sym.name and not (isinstance(bsym.sym.id, str) and bsym.sym.id.startswith(("torch.", "Tensor."))):
        return False
    if name in _DROPOUTS:
        return not _drops(name, bsym)
    return may_share_by_name(name) and _may_be_given(bsym, name)


def may_share_by_name(name: str) -> bool:
    """The same for an operation of torch's by its name alone."""
    return name in _OTHERS or name in RETURNING_SELF or name in _DROPOUTS or _is_view(name)


@functools.cache
def _is_view(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    schemas = () if packet is None else [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(r.alias_info is not None and not r.alias_info.is_write for schema in schemas for r in schema.returns)


def _drops(name: str, bsym: BoundSymbol) -> bool:
    given = dict(zip(("input", "p", "training"), bsym.args, strict=False)) | bsym.kwargs
    return bool(given.get("training", _DROPOUTS[name])) and bool(given.get("p", 0.5))


def _may_be_given(bsym: BoundSymbol, name: str) -> bool:
    """Whether an operation has a tensor to give a view of; of one that returns the very tensor where there is nothing to do, whether there was."""
    if name not in RETURNING_SELF:
        return any(isinstance(p, TensorProxy) for p in bsym.flat_proxy_args)  # none: ``as_tensor`` of a numpy array
    given, made = ([p for p in proxies if isinstance(p, TensorProxy)] for proxies in (bsym.flat_proxy_args, bsym.flat_proxy_outs))
    return bool(given) and any((p.dtype, p.device) == (given[0].dtype, given[0].device) for p in made)
