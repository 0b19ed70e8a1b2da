"""What programs really take: FLOPs, saved bytes and peak memory as torch itself measures them on a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten


def attention_flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of q k^T and of its product with v, for each head."""
    batch, heads, queries, width = q_shape
    keys, out_width = k_shape[2], v_shape[3]
    return 2 * batch * heads * queries * keys * (width + out_width)


def attention_backward_flops(grad_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """The product q k^T anew, and two products for the gradients of each of both."""
    batch, heads, queries, width = q_shape
    keys, out_width = k_shape[2], v_shape[3]
    return 2 * batch * heads * queries * keys * (3 * width + 2 * out_width)


def convolution_backward_flops(
    grad: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *args: Any,
    **kwargs: Any,
) -> int:
    """For each gradient that is wanted, one multiplication and addition for each use of a weight in the forward."""
    *_, mask = args
    places = math.prod((x if transposed else grad)[2:])
    return (mask[0] + mask[1]) * 2 * grad[0] * places * math.prod(weight)


# torch's counter has no formula for the CPU's attention kernel, and a wrong one for the gradient of grouped kernels.
FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    aten.convolution_backward: convolution_backward_flops,
}


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def outputs(result: Any) -> list[torch.Tensor]:
    return [t for t in tensors(tuple(result.values()) if isinstance(result, dict) else result) if t.requires_grad]


def backward(result: Any) -> None:
    found = outputs(result)
    torch.autograd.backward(found, [torch.ones_like(t) for t in found])


def flops(run: Callable[[], Any]) -> tuple[int, int]:
    """Forward and backward, by torch's counter."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as forward:
        result = run()
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as derivative:
        backward(result)
    return forward.get_total_flops(), derivative.get_total_flops()


def saved_bytes(run: Callable[[], Any], without: Any) -> int:
    """Storages that autograd saves, each once, but for those of the tensors in `without`."""
    not_counted = {t.untyped_storage().data_ptr() for t in tensors(without)}
    found: dict[int, int] = {}
    kept = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        kept.append(t)  # so that no address is used twice
        if storage.data_ptr() not in not_counted:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    del result
    return sum(found.values())


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that the CPU's allocator has handed out at any time of a run, beyond what there was before."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profiler:
        result = run()
        del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        live += e.nbytes()
        peak = max(peak, live)
    return peak
