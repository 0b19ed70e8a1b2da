"""Torch's values for Thunder's, and Thunder's for torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from thunder_norm.trees import ATOMS, map_leaves
from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, TensorProxy


def for_torch(value: Any) -> Any:
    """Torch's dtype, device or number for Thunder's, anything else as it is."""
    if isinstance(value, dtypes.dtype):
        return dtypes.to_torch_dtype(value)
    if isinstance(value, NumberProxy):
        return value.value
    return devices.to_torch_device(value) if isinstance(value, devices.Device) else value


def all_for_torch(tree: Any) -> Any:
    """The same tree with torch's values for Thunder's; in a call of a program, where nearly all are torch's already."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([v if type(v) in _TORCHS else all_for_torch(v) for v in tree])
    if kind is dict:
        return {k: all_for_torch(v) for k, v in tree.items()}
    return tree if kind in _TORCHS else map_leaves(for_torch, tree)


_TORCHS = ATOMS | {torch.Tensor, torch.nn.Parameter}


def empty_for(proxy: TensorProxy) -> torch.Tensor:
    """A tensor with the metadata of a proxy, its values undefined."""
    return torch.empty(tuple(proxy.shape), dtype=for_torch(proxy.dtype), device=for_torch(proxy.device))


def proxy_like(t: torch.Tensor, *, requires_grad: bool = False, tags: set | None = None) -> TensorProxy:
    """A new plain proxy with the metadata of a tensor."""
    device, dtype = devices.to_device(t.device), dtypes.to_dtype(t.dtype)
    return TensorProxy(shape=sizes(t.shape), device=device, dtype=dtype, requires_grad=requires_grad, tags=tags)


def sizes(shape: Iterable[Any]) -> tuple[int, ...]:
    """A shape in numbers: of sizes that are symbols, those of the call at hand."""
    return tuple([n if type(n) is int else n.node.hint for n in shape])
