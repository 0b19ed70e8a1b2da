"""Sparse tensors: what stands for one in a trace is as if it was strided.

Products torch runs, and their gradients, where Thunder would permute a matrix that has no strides.  What asks how a tensor is stored is refused
where it is not known to be strided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory.aliases import given_as
from thunder_norm.tracing.shared_memory.views import RECORDED
from thunder.core.interpreter import WrappedValue, _interpret_call, do_raise
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

_PRODUCTS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, TensorProxy.__matmul__, torch.sparse.mm})
_KINDS = frozenset(map(type, _PRODUCTS))
_OF_TWO = frozenset({"bmm", "matmul", "mm", "mv", "spmm"})  # products, which are sparse where both operands are
_ASKING = frozenset(
    "_indices _nnz _sparse_sum _values ccol_indices coalesce col_indices crow_indices dense_dim indices is_coalesced row_indices sparse_dim "
    "sparse_mask values".split()
)
_COMPRESSING = frozenset({"to_sparse_bsc", "to_sparse_bsr", "to_sparse_csc", "to_sparse_csr"})
_NAMES = _ASKING | _COMPRESSING
_FUNCTIONS = frozenset(f for name in _NAMES for owner in (torch, torch.Tensor) if (f := getattr(owner, name, None)) is not None)
_FUNCTION_KINDS = frozenset(map(type, _FUNCTIONS))


def lookaside(fn: Any, args: tuple[WrappedValue, ...]) -> Callable | None:
    """What to call instead of `fn`, if it is the product of a sparse matrix that is given and another matrix, or is refused; None for others."""
    if len(args) == 2 and type(fn) in _KINDS and fn in _PRODUCTS:
        if fn is torch.sparse.mm or (_is_sparse(args[0].original_value) and getattr(args[1].value, "ndim", 0) == 2):
            return functools.partial(_interpret_call, torch.mm)
        return None
    if (name := _name_of(fn)) not in _NAMES:
        return None
    given = [a.value for a in args if isinstance(a.value, TensorProxy)]
    if given and (name in _COMPRESSING or any(map(may_be_sparse, given))):
        return lambda *_, **__: do_raise(refused(f"{name}()"))
    return None


def _name_of(fn: Any) -> str | None:
    """The name of a function of torch's, or of what Thunder has registered for it by its name."""
    if type(fn) is Symbol:
        return fn.name
    return fn.__name__ if type(fn) in _FUNCTION_KINDS and fn in _FUNCTIONS else None


def _is_sparse(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout is not torch.strided and t.ndim == 2


def may_be_sparse(proxy: TensorProxy) -> bool:
    """Whether a tensor is given in another layout, or may be computed in one, of what is."""
    makers = {p.name: b for scope in get_jit_ctx().computation_trace.scopes for b in scope for p in b.flat_proxy_outs}
    found: dict[str, bool] = {}

    def of(p: TensorProxy) -> bool:
        if p.name not in found:
            found[p.name] = False
            found[p.name] = of_made(p)
        return found[p.name]

    def of_made(p: TensorProxy) -> bool:
        given, bsym = None if p.history is None else given_as(p), makers.get(p.name)
        if given is not None or bsym is None:
            return given is not None and given.layout is not torch.strided
        name = bsym.sym.name.removeprefix(RECORDED)
        if name.startswith("to_sparse") or name == "to_dense":
            return name != "to_dense"
        operands = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
        return bool(operands) and (all if name in _OF_TWO else any)(map(of, operands))

    return of(proxy)


def refused(what: str) -> UnsupportedOpError:
    """The error for what asks how a tensor is stored that may be sparse."""
    return UnsupportedOpError(
        with_details(
            f"{what} of a sparse tensor, or of one that may be",
            at=location_of_user(),
            why="what stands for it in a trace has its shape and dtype, and is not known to have these entries and no others",
            instead="products, sums and to_dense() in the jitted function, and the rest outside of it",
        )
    )
