"""What the operations of a trace write into."""

from __future__ import annotations

from thunder_norm.op_names import is_in_place
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.update_aliases import _is_inplace_op


def copies_in(bsym: BoundSymbol) -> list[BoundSymbol]:
    """The copies into tensors that an operation consists of: ``copy_(value, target)``."""
    if bsym.sym.id is prims.PrimIDs.COPY_:
        return [bsym]
    return [copy for sub in bsym.subsymbols for copy in copies_in(sub)]


def targets(bsym: BoundSymbol) -> list[TensorProxy]:
    """The tensors that an operation writes into: of its copies, and of those that Thunder leaves to torch the first argument."""
    found = [copy.args[1] for copy in copies_in(bsym)]
    if bsym.args and (_is_inplace_op(bsym) or _is_in_place_by_name(bsym)):
        first = bsym.args[0]
        found += first if isinstance(first, list | tuple) else [first]
    return [t for t in found if isinstance(t, TensorProxy)]


def writes(bsym: BoundSymbol) -> bool:
    """Whether an operation, or one that it consists of, writes into a tensor."""
    return bsym.sym.id is prims.PrimIDs.UPDATE_ALIASES or bool(targets(bsym)) or any(map(writes, bsym.subsymbols))


def _is_in_place_by_name(bsym: BoundSymbol) -> bool:
    name = bsym.sym.name.rpartition(".")[2]
    return not bsym.subsymbols and is_in_place(name) and bsym.sym.id is not prims.PrimIDs.COPY_
