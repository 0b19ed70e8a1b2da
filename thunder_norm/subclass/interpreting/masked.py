"""MaskedTensor, which comes with torch and does not say how it is taken apart: into data and mask."""

from __future__ import annotations

from typing import Any

import torch
from torch.masked import MaskedTensor

from thunder_norm.subclass.interpreting.operations import RUN_WHOLE
from thunder_norm.wrapper_classes import register_flatten


def _flatten(x: Any) -> tuple[dict[str, torch.Tensor], None]:
    return {"_masked_data": x._masked_data, "_masked_mask": x._masked_mask}, None


def _unflatten(inner: dict[str, torch.Tensor], context: None, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    # what its constructor does, which copies both tensors besides and warns
    data = inner["_masked_data"]
    x = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        MaskedTensor,
        shape,
        dtype=data.dtype,
        layout=data.layout,
        device=data.device,
        dispatch_sizes_strides_policy="strides",
        dispatch_layout=True,
    )
    x._masked_data, x._masked_mask = data, inner["_masked_mask"]
    return x


register_flatten(MaskedTensor, _flatten, _unflatten)
RUN_WHOLE.add(MaskedTensor.get_data)
