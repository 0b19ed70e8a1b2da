"""In traces: constants that a program writes normed tensors into; see `written_constants` for eager programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.core import registry
from thunder_norm.core.context import current_environment
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.subclass import operations
from thunder_norm.subclass.acquisition import Acquisition, StandIn
from thunder_norm.subclass.proxy import SubclassProxy
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


def with_current(
    acquisition: Acquisition, concerns: Callable[[torch.Tensor], bool], fn: Callable, args: tuple, kwargs: dict
) -> tuple[tuple, dict] | None:
    """Arguments with what stands for constants by now that normed tensors were written into, or are to be by this operation.

    None where there is nothing to replace.

    Args:
        acquisition: the one at hand.
        concerns: whether a fake is a parameter, or was made of parameters alone: such a one is no constant.
        fn: the operation.
        args: its arguments, with proxies for tensors.
        kwargs: its keyword arguments.
    """
    target = args[0] if args else None
    if registry.is_mutation(fn, kwargs) and _has_normed((args[1:], kwargs)) and _may_be_written(acquisition, concerns, target):
        made_by = _made_by(target)
        if made_by is None:
            return None
        lift = without_values if made_by.sym.name.startswith("empty") else written_constant
        normed = operations.call(acquisition, lift, (target,), {})
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


def without_values(t: torch.Tensor) -> NormedTensor:
    """The same for a tensor that nothing was written into yet: zeros, as one must do with anything."""
    environment = current_environment()
    return environment.written_constant(environment.run_real(torch.zeros_like, (t,), {}))  # type: ignore[attr-defined]


def _has_normed(tree: Any) -> bool:
    return any(isinstance(v, SubclassProxy) and isinstance(v.fake, NormedTensor) for v in tree_flatten(tree)[0])


def _may_be_written(acquisition: Acquisition, concerns: Callable[[torch.Tensor], bool], proxy: Any) -> bool:
    """Whether it is a plain tensor of numbers that no normed tensor stands for yet."""
    if not isinstance(proxy, TensorProxy) or isinstance(proxy, SubclassProxy) or proxy.name in acquisition.stand_ins:
        return False
    fake = acquisition.fake_of(proxy)
    return has_norm(fake) and not concerns(fake)


def _made_by(proxy: TensorProxy) -> BoundSymbol | None:
    """What made a tensor of numbers alone that was used for nothing, a view of it say, that would not know; else None."""
    found = None
    for bsym in (b for scope in get_jit_ctx().computation_trace.scopes for b in scope):
        if any(p.name == proxy.name for p in bsym.flat_proxy_args):
            return None
        if any(p.name == proxy.name for p in bsym.flat_proxy_outs):
            found = bsym
    if found is None or found.sym.id == prims.PrimIDs.UNPACK_TRIVIAL:
        return None
    looks_at_values = found.sym not in _LIKE and any(isinstance(p, TensorProxy) for p in found.flat_proxy_args)
    return None if looks_at_values else found


# what takes a tensor for its shape, type and device alone
_LIKE = (
    ltorch.zeros_like, ltorch.ones_like, ltorch.full_like, ltorch.empty_like, ltorch.new_zeros, ltorch.new_ones, ltorch.new_full, ltorch.new_empty
)  # fmt: skip
