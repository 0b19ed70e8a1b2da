"""Proxies of tensors: what is known of one from its shape, dtype and device is found without checking each of them again."""

from __future__ import annotations

import math
import operator
from typing import Any

from thunder_norm.tracing.replacement import Replacement
from thunder.core import baseutils, compile_data, dtypes, proxies, utils
from thunder.core.devices import Device
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import DistParallelType, Proxy, TensorProxy

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
        found = _OF_DTYPES[id(dtype)] = dtype, dtypes.is_inexact_dtype(dtype), _original_to_strong(dtype)
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


_SYMBOLIC = CACHE_OPTIONS.SYMBOLIC_VALUES
_original_shape: Any = TensorProxy.shape
_original_hash = dtypes.dtype.__hash__
_original_are_same = dtypes.are_same_dtypes
_original_to_strong = dtypes.to_strong_dtype
_compile_data = compile_data._compile_data.get
_HASH = "_thunder_norm_hash"  # of a dtype


def _shape(self: TensorProxy) -> Any:
    compiled = _compile_data()[0]
    if compiled is None or compiled.cache_option is not _SYMBOLIC:
        return self._shape
    return _original_shape.fget(self)


def _hash(self: dtypes.dtype) -> int:
    try:
        return self.__dict__[_HASH]
    except KeyError:
        found = self.__dict__[_HASH] = _original_hash(self)
        return found


def strong_dtype(dtype: dtypes.dtype) -> dtypes.dtype:
    """The dtype of a tensor that has dimensions."""
    return _of_dtype(dtype)[2]


def _are_same(a: Any, b: Any, *, weak_and_strong_are_equivalent: bool = True) -> bool:
    if not weak_and_strong_are_equivalent:
        return _original_are_same(a, b, weak_and_strong_are_equivalent=False)
    a = a._dtype if type(a) is TensorProxy else a
    b = b._dtype if type(b) is TensorProxy else b
    if not isinstance(a, dtypes.dtype) or not isinstance(b, dtypes.dtype):
        return _original_are_same(a, b)
    return _of_dtype(a)[2] is _of_dtype(b)[2]


def _to_strong(dtype: Any) -> Any:
    return _of_dtype(dtype)[2] if isinstance(dtype, dtypes.dtype) else _original_to_strong(dtype)


def _check_type(x: Any, types: Any) -> None:
    if not isinstance(x, types):
        _original_check_type(x, types)


REPLACEMENTS = (
    Replacement(proxies, "_infer_tensor_properties", _properties, "the same, which checks what it is given by closures"),
    Replacement(TensorProxy, "replace", _replace, "TensorProxy.replace, which infers everything twice"),
    Replacement(TensorProxy, "shape", property(_shape), "the same, which asks by five functions whether sizes are symbolic"),
    Replacement(Proxy, "name", property(operator.attrgetter("_name")), "the same, a function of Python"),
    Replacement(dtypes.dtype, "__hash__", _hash, "the same, which writes the hashed text each time"),
    *(Replacement(m, "are_same_dtypes", _are_same, "the same, of dtypes and of tensors") for m in (dtypes, utils)),
    Replacement(dtypes, "to_strong_dtype", _to_strong, "the same, of dtypes"),
    Replacement(baseutils, "check_type", _check_type, "check_type, which makes a message for what is right too"),
)
