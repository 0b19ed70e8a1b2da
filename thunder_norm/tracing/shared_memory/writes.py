"""What the operations of a trace write into."""

from __future__ import annotations

import torch

from thunder_norm.op_names import is_in_place
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op
from thunder.torch import _torch_to_thunder_function_map

# Running statistics have none in torch, whatever they are computed of.
_WITHOUT_HISTORY = frozenset(
    _torch_to_thunder_function_map[f].id for f in (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)
)


def copies_in(bsym: BoundSymbol) -> list[BoundSymbol]:
    """The copies into tensors that an operation consists of: ``copy_(value, target)``."""
    if bsym.sym.id is prims.PrimIDs.COPY_:
        return [bsym]
    found: list[BoundSymbol] = []
    for sub in bsym.subsymbols:
        if sub.subsymbols or sub.sym.id is prims.PrimIDs.COPY_:
            found += copies_in(sub)
    return found


def is_recorded(copy: BoundSymbol) -> bool:
    """Whether autograd records a copy: outside of `torch.no_grad`."""
    return bool(copy.kwargs.get("grad_enabled", copy.args[2] if len(copy.args) > 2 else True))


def stays_without_history(writer: BoundSymbol) -> bool:
    """Whether what an operation writes into gets no history by it."""
    return writer.sym.id in _WITHOUT_HISTORY


def recorded_copies(bsym: BoundSymbol) -> list[BoundSymbol]:
    """Those of its copies that give what they write into the history of what is written, if that has one."""
    if bsym.sym.id is prims.PrimIDs.COPY_:
        return [bsym] if is_recorded(bsym) else []
    return [] if stays_without_history(bsym) else [copy for sub in bsym.subsymbols for copy in recorded_copies(sub)]


def targets(bsym: BoundSymbol) -> list[TensorProxy]:
    """The tensors that an operation writes into: of its copies, and of those that Thunder leaves to torch the first argument."""
    found = [copy.args[1] for copy in copies_in(bsym)]
    if bsym.args and (_is_inplace_op(bsym) or _is_in_place_by_name(bsym)):
        first = bsym.args[0]
        found += first if isinstance(first, list | tuple) else [first]
    return [t for t in found if isinstance(t, TensorProxy)]


def writes(bsym: BoundSymbol) -> bool:
    """Whether an operation, or one that it consists of, writes into a tensor."""
    if bsym.sym.id is prims.PrimIDs.UPDATE_ALIASES or targets(bsym):
        return True
    for sub in bsym.subsymbols:
        if writes(sub):
            return True
    return False


def _is_in_place_by_name(bsym: BoundSymbol) -> bool:
    name = bsym.sym.name.rpartition(".")[2]
    return not bsym.subsymbols and is_in_place(name) and bsym.sym.id is not prims.PrimIDs.COPY_
