"""In traces: constants that a program writes normed tensors into; see `written_constants` for eager programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.core import registry
from thunder_norm.core.context import current_environment
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.subclass import operations
from thunder_norm.subclass.acquisition import StandIn
from thunder_norm.subclass.proxy import SubclassProxy
from thunder.core import prims
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy

if TYPE_CHECKING:
    from thunder_norm.norms.normed_mode import NormAcquisition


def with_current(acquisition: NormAcquisition, fn: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Arguments with what stands for constants by now that normed tensors were written into, or are to be by this operation.

    None where there is nothing to replace.
    """
    target = args[0] if args else None
    if registry.is_mutation(fn, kwargs) and _has_normed((args[1:], kwargs)) and _may_be_written(acquisition, target):
        normed = operations.call(acquisition, written_constant, (target,), {})
        acquisition.stand_ins[target.name] = StandIn(target, normed, len(get_jit_ctx().computation_trace.bound_symbols))
    leaves = tree_flatten((args, kwargs))[0]
    if not any(isinstance(v, TensorProxy) and v.name in acquisition.stand_ins for v in leaves):
        return None

    def current(v: Any) -> Any:
        found = acquisition.stand_ins.get(v.name) if isinstance(v, TensorProxy) else None
        return v if found is None else found.wrapper

    return tree_map(current, (args, kwargs))


def written_constant(t: torch.Tensor) -> NormedTensor:
    """What stands for a constant from here on."""
    return current_environment().written_constant(t)  # type: ignore[attr-defined]


def _has_normed(tree: Any) -> bool:
    return any(isinstance(v, SubclassProxy) and isinstance(v.fake, NormedTensor) for v in tree_flatten(tree)[0])


def _may_be_written(acquisition: NormAcquisition, proxy: Any) -> bool:
    """Whether a normed tensor can stand for it: the program made it, and used it for nothing, a view of it say, that would not know."""
    if not isinstance(proxy, TensorProxy) or isinstance(proxy, SubclassProxy) or proxy.name in acquisition.stand_ins:
        return False
    fake = acquisition.fake_of(proxy)
    if not has_norm(fake) or acquisition.lifting.concerns(fake):
        return False
    made = False
    for bsym in (b for scope in get_jit_ctx().computation_trace.scopes for b in scope):
        if any(p.name == proxy.name for p in bsym.flat_proxy_args):
            return False
        made = made or (bsym.sym.id != prims.PrimIDs.UNPACK_TRIVIAL and any(p.name == proxy.name for p in bsym.flat_proxy_outs))
    return made
