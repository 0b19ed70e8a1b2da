"""Modules that ``torch.distributed.fsdp.fully_shard`` has wrapped: their parameters are gathered by operations of the trace.

Hooks around the module's ``forward`` do that in eager mode: they put whole parameters in the place of the sharded ones, and reduce the
gradients of these.  Here a hook only notes which parameters are the module's; one that is read after that is gathered, and its gradient, which
each rank has of its own data, is averaged and scattered.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.interpreting.interpret import proxy_for_input
from thunder_norm.subclass.interpreting.operations import call
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, _interpret_call, do_raise
from thunder.core.proxies import ProxyTag, TensorProxy

_HOOKS = ("FSDPState._pre_forward", "FSDPState._post_forward")
_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def hook(acquisition: Acquisition, fn: FunctionType) -> Any:
    """What to call for a hook of a fully sharded module; None for all other functions."""
    if fn.__qualname__ not in _HOOKS or fn.__module__ != _MODULE:
        return None
    return _before(acquisition) if fn.__qualname__ == _HOOKS[0] else _after


def _before(acquisition: Acquisition) -> Any:
    def before(state: WrappedValue, module: WrappedValue, args: WrappedValue, kwargs: WrappedValue) -> Any:
        groups = _groups(state.value)
        parameters = [p for group in groups for p in group.fsdp_params]
        error = next((e for group in groups if (e := _refusal(group)) is not None), None)
        if error is not None:
            return do_raise(acquisition.refuse(error))
        acquisition.fully_sharded.update({id(p.sharded_param): p.sharded_param for p in parameters})
        return _interpret_call(lambda args, kwargs: (args, kwargs), args, kwargs)

    return before


def _after(state: WrappedValue, module: WrappedValue, args: WrappedValue, output: WrappedValue) -> Any:
    return output


def _groups(state: Any) -> list[Any]:
    """The groups of parameters that a module's hook gathers; older torches have one, or None for a module without parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _refusal(group: Any) -> UnsupportedOpError | None:
    policies = [p.mp_policy for p in group.fsdp_params]
    unusual = {
        "a mesh of several dimensions": any(p.sharded_param.device_mesh.ndim != 1 for p in group.fsdp_params),
        "mixed precision": any(m.param_dtype or m.reduce_dtype or m.output_dtype for m in policies),
        "offloading": any(p.offload_to_cpu for p in group.fsdp_params),
        "gradients that are not reduced": not (group.reduce_grads and group.all_reduce_grads),
        "a divisor of gradients": group.gradient_divide_factor is not None,
        "parameters that are gathered already": any(p.sharded_state.name != "SHARDED" for p in group.fsdp_params),
    }
    found = [name for name, is_so in unusual.items() if is_so]
    if not found:
        return None
    return UnsupportedOpError(
        with_details(
            f"a module of fully_shard with {', '.join(found)}",
            at=location_of_user(),
            instead="module.reshard() before the call" if "gathered" in found[-1] else "fully_shard(module, mesh=...) alone",
        )
    )


def gathered(acquisition: Acquisition, x: torch.Tensor, name: str | None, history: Any) -> TensorProxy:
    """What the program sees of a parameter: the whole of it."""
    parameter = proxy_for_input(acquisition, x, name, history)
    parameter.tags.add(ProxyTag.STATIC_MEMORY_LOCATION)  # as Thunder marks what it gets for a parameter
    whole = call(acquisition, _gather, (parameter,), {})
    acquisition.gathered.add(id(whole))
    return whole


def without_checks(acquisition: Acquisition, constraints: list[tuple]) -> list[tuple]:
    """What the prologue is to check, without what is no input: Thunder takes what was gathered for one."""
    return [c for c in constraints if not any(id(v) in acquisition.gathered for v in c[1:])]


def _gather(parameter: Any) -> torch.Tensor:
    from torch.distributed.tensor import Partial, Replicate

    whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return _Averaged.apply(whole, 1 / parameter.device_mesh.size())


class _Averaged(torch.autograd.Function):
    """The identity; gradients, whose sum over all ranks is taken, are divided by their number."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None
