"""How torch groups tensors for its operations on lists, which it does in C: `torch.nn.utils.clip_grad_norm_`, `torch.nn.utils.get_total_norm`."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.tracing.lookasides import instead_of
from thunder.core import interpreter as thunders
from thunder.core.interpreter import WrappedValue, wrap_const


@instead_of(torch._C._group_tensors_by_device_and_dtype)
def _group(lists: WrappedValue, with_indices: WrappedValue | None = None) -> Any:
    return thunders._interpret_call(_grouped, lists, wrap_const(False) if with_indices is None else with_indices)


def _grouped(lists: list[list[Any]], with_indices: bool) -> dict[tuple[Any, Any], tuple[list[list[Any]], list[int]]]:
    """By device and dtype of the tensors of the first list, those of each list, and where they stand."""
    groups: dict[tuple[Any, Any], tuple[list[list[Any]], list[int]]] = {}
    for i, first in enumerate(lists[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in lists], [])
        for group, tensors in zip(groups[key][0], lists, strict=True):
            group.extend(tensors[i : i + 1])
        if with_indices:
            groups[key][1].append(i)
    return groups
