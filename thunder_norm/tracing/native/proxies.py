"""Proxies of tensors: what is known of one from its shape, dtype and device is found without checking each of them again."""

from __future__ import annotations

import math
from typing import Any

from thunder_norm.tracing.replacement import Replacement
from thunder.core import baseutils, dtypes, proxies
from thunder.core.devices import Device
from thunder.core.proxies import DistParallelType, TensorProxy

_original_properties = proxies._infer_tensor_properties
_original_replace = TensorProxy.replace
_original_check_type = baseutils.check_type
# But for the dtype: of a weak one Thunder makes a strong one, where the shape says no more that it is weak.
_CHANGES = frozenset(
    {"name", "history", "tags", "shape", "device", "requires_grad", "distparallel_type", "thunder_fsdp_padding_size"}
)
_NOT_SHARDED = DistParallelType.NONE


# By id, as Thunder hashes a dtype by its names: the dtype, which stays alive with that, whether gradients may flow, and the strong one.
_OF_DTYPES: dict[int, tuple[dtypes.dtype, bool, dtypes.dtype]] = {}


def _of_dtype(dtype: dtypes.dtype) -> tuple[dtypes.dtype, bool, dtypes.dtype]:
    found = _OF_DTYPES.get(id(dtype))
    if found is None:
        found = _OF_DTYPES[id(dtype)] = dtype, dtypes.is_inexact_dtype(dtype), dtypes.to_strong_dtype(dtype)
    return found


def _properties(
    like: Any = None,
    shape: Any = None,
    device: Any = None,
    dtype: Any = None,
    requires_grad: Any = None,
    grad: Any = None,
    distparallel_type: Any = None,
    thunder_fsdp_padding_size: Any = None,
) -> tuple:
    """Thunder's own for what is sharded, symbolic, of a number's type, or wrong."""
    size = like._shape if type(like) is TensorProxy and shape is None else shape
    if (
        not (like is None or type(like) is TensorProxy)
        or not (type(size) is tuple or type(size) is list)
        or not (distparallel_type is None or distparallel_type is _NOT_SHARDED)
        or thunder_fsdp_padding_size is not None
        or proxies.using_symbolic_values()
    ):
        return _original_properties(like, shape, device, dtype, requires_grad, grad, distparallel_type, thunder_fsdp_padding_size)
    where, kind, needs_grad, gradient = device, dtype, requires_grad, grad
    if like is not None:
        where = like._device if where is None else where
        kind = like._true_dtype if kind is None else kind
        needs_grad = like._requires_grad if needs_grad is None else needs_grad
        gradient = like._grad if gradient is None else gradient
    if (
        type(where) is not Device
        or not isinstance(kind, dtypes.dtype)
        or type(needs_grad) is not bool
        or (like is not None and like._distparallel_type is not _NOT_SHARDED)
        or any(type(n) is not int or n < 0 for n in size)
    ):
        return _original_properties(like, shape, device, dtype, requires_grad, grad, distparallel_type, thunder_fsdp_padding_size)
    _, may_need_grad, strong = _of_dtype(kind)
    needs_grad = needs_grad and may_need_grad
    return (
        tuple(size),
        where,
        strong,
        kind if size else dtypes.to_weak_dtype(kind),
        math.prod(size),
        len(size),
        needs_grad,
        gradient if needs_grad else None,
        _NOT_SHARDED,
        None,
    )


def _replace(self: TensorProxy, **changes: Any) -> TensorProxy:
    """Another proxy, whose properties are inferred once."""
    if not changes.keys() <= _CHANGES:
        return _original_replace(self, **changes)
    return TensorProxy(
        name=changes.get("name", self._name),
        tags=changes.get("tags", self._tags),
        shape=changes.get("shape", self._shape),
        device=changes.get("device", self._device),
        dtype=self._dtype,
        requires_grad=changes.get("requires_grad", self._requires_grad),
        distparallel_type=changes.get("distparallel_type", self._distparallel_type),
        thunder_fsdp_padding_size=changes.get("thunder_fsdp_padding_size", self._thunder_fsdp_padding_size),
        history=changes.get("history", self.history),
    )


def _check_type(x: Any, types: Any) -> None:
    if not isinstance(x, types):
        _original_check_type(x, types)


REPLACEMENTS = (
    Replacement(proxies, "_infer_tensor_properties", _properties, "the same, which checks what it is given by closures"),
    Replacement(TensorProxy, "replace", _replace, "TensorProxy.replace, which infers everything twice"),
    Replacement(baseutils, "check_type", _check_type, "check_type, which makes a message for what is right too"),
)
