"""``thunder.transforms.cudagraph``: what a CUDA graph replays."""

from __future__ import annotations

from typing import Any

from thunder_norm.tracing.guarding.value_kinds import is_number_of_tensors
from thunder_norm.tracing.hooks.participants import has_part
from thunder_norm.tracing.hooks.replaced import replaces
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.transforms import cudagraph

_original_can_fuse = cudagraph.CUDAGraphTransform.can_fuse


@replaces(cudagraph.CUDAGraphTransform, "can_fuse", "self", "bsym", lines="generate_fused_trace: return self.can_fuse(bsym)")
def _can_fuse(self: cudagraph.CUDAGraphTransform, bsym: BoundSymbol) -> Any:
    """Not what touches a tensor on the CPU, or a number that is another in each call: replayed, they would be as in the call that was recorded."""
    return _original_can_fuse(self, bsym) and not (
        has_part() and any(map(_changes, (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)))
    )


def _changes(p: Any) -> bool:
    return is_number_of_tensors(p) or (isinstance(p, TensorProxy) and p.device.devicetype is DeviceType.CPU)
