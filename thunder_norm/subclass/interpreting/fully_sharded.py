"""Modules that ``torch.distributed.fsdp.fully_shard`` has wrapped: their parameters are gathered by operations of the trace.

Hooks around the module's ``forward`` do that in eager mode: they put whole parameters in the place of the sharded ones, and reduce the
gradients of these.  Here a hook only notes which parameters are the module's, and casts inputs and outputs as a policy of mixed precision says;
a parameter that is read after that is gathered, and its gradient, which each rank has of its own data, is summed, scattered and divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.interpreting.interpret import proxy_for_input
from thunder_norm.subclass.interpreting.operations import call
from thunder_norm.tracing.locations import location_of_user
from thunder.core.interpreter import WrappedValue, _interpret_call, do_raise
from thunder.core.proxies import ProxyTag, TensorProxy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HOOKS = ("FSDPState._pre_forward", "FSDPState._post_forward")
_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"


@dataclass(frozen=True)
class Gathering:
    """How the whole of a sharded parameter is made, and its gradient reduced.

    Attributes:
        parameter: the sharded one.
        dtype: of the whole; None for its own.
        reduce_dtype: of gradients while they are reduced; None for the dtype of the whole.
        divisor: of the sum of all ranks' gradients.
    """

    parameter: DTensor
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    divisor: float


def hook(acquisition: Acquisition, fn: FunctionType) -> Any:
    """What to call for a hook of a fully sharded module; None for all other functions."""
    if fn.__qualname__ not in _HOOKS or fn.__module__ != _MODULE:
        return None
    return _before(acquisition) if fn.__qualname__ == _HOOKS[0] else _after


def _before(acquisition: Acquisition) -> Any:
    def before(state: WrappedValue, module: WrappedValue, args: WrappedValue, kwargs: WrappedValue) -> Any:
        groups = _groups(state.value)
        error = next((e for group in groups if (e := _refusal(group)) is not None), None)
        if error is not None:
            return do_raise(acquisition.refuse(error))
        _interpret_call(_settings, state)  # guarded, as is all that the program reads
        for group in groups:
            found = (_gathering(group, p) for p in group.fsdp_params)
            acquisition.fully_sharded.update({id(one.parameter): one for one in found})
        return _interpret_call(_with_inputs, state, args, kwargs)

    return before


def _after(state: WrappedValue, module: WrappedValue, args: WrappedValue, output: WrappedValue) -> Any:
    return _interpret_call(_with_output, state, output)


def _with_inputs(state: Any, args: Any, kwargs: Any) -> Any:
    dtype = state._mp_policy.param_dtype if state._mp_policy.cast_forward_inputs else None
    return (args, kwargs) if dtype is None else (_cast(dtype, args), _cast(dtype, kwargs))


def _with_output(state: Any, output: Any) -> Any:
    dtype = state._mp_policy.output_dtype
    return output if dtype is None else _cast(dtype, output)


def _cast(dtype: torch.dtype, values: Any) -> Any:
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def _groups(state: Any) -> list[Any]:
    """The groups of parameters that a module's hook gathers; older torches have one, or None for a module without parameters."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _settings(state: Any) -> list[tuple]:
    """What can be set later, and changes what is done with gradients."""
    return [(g.reduce_grads, g.all_reduce_grads, g.gradient_divide_factor, g._all_reduce_hook) for g in _groups(state)]


def _gathering(group: Any, p: Any) -> Gathering:
    policy, size = p.mp_policy, p.sharded_param.device_mesh.size()
    divisor = size if group.gradient_divide_factor is None else group.gradient_divide_factor
    return Gathering(p.sharded_param, policy.param_dtype, policy.reduce_dtype, divisor)


def _refusal(group: Any) -> UnsupportedOpError | None:
    unusual = {
        "parameters that are DTensors": any(p.is_dtensor for p in group.fsdp_params),
        "an all-gather of the parameters' own": any(hasattr(_local(p), "fsdp_pre_all_gather") for p in group.fsdp_params),
        "dtypes chosen by a function": any(getattr(p.mp_policy, "param_dtype_override_fn", None) for p in group.fsdp_params),
        "gradients of a dtype of their own": any(
            getattr(p, "_has_sharded_grad_dtype_override", False) for p in group.fsdp_params
        ),
        "a hook of the reduction": group._all_reduce_hook is not None,
        "offloading": any(p.offload_to_cpu for p in group.fsdp_params),
        "gradients that are not reduced": not (group.reduce_grads and group.all_reduce_grads),
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


def _local(p: Any) -> torch.Tensor:
    return p.sharded_param._local_tensor


def gathered(acquisition: Acquisition, x: torch.Tensor, name: str | None, history: Any) -> TensorProxy:
    """What the program sees of a parameter: the whole of it."""
    parameter = proxy_for_input(acquisition, x, name, history)
    parameter.tags.add(ProxyTag.STATIC_MEMORY_LOCATION)  # as Thunder marks what it gets for a parameter
    how = acquisition.fully_sharded[id(x)]
    whole = call(acquisition, _gather, (parameter, how.dtype, how.reduce_dtype, how.divisor), {})
    acquisition.gathered.add(id(whole))
    return whole


def without_checks(acquisition: Acquisition, constraints: list[tuple]) -> list[tuple]:
    """What the prologue is to check, without what is no input: Thunder takes what was gathered for one."""
    return [c for c in constraints if not any(id(v) in acquisition.gathered for v in c[1:])]


def _gather(parameter: Any, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, divisor: float) -> torch.Tensor:
    from torch.distributed.tensor import Partial, Replicate

    ndim = parameter.device_mesh.ndim
    divided = _Divided.apply(parameter, divisor)
    whole = divided.redistribute(placements=[Replicate()] * ndim, forward_dtype=dtype, backward_dtype=reduce_dtype)
    return whole.to_local(grad_placements=[Partial()] * ndim)


class _Divided(torch.autograd.Function):
    """The identity; gradients, by then the sum over all ranks, are divided."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, divisor: float) -> torch.Tensor:
        ctx.divisor = divisor
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.divisor, None
