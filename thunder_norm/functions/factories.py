"""``torch.eye`` in a trace, where Thunder has none: the standard basis that Jacobians are written with."""

from __future__ import annotations

from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.interpreter import WrappedValue, get_interpreterruntimectx
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy

from thunder_norm.functions.acquisition import wrapped
from thunder_norm.functions.opaque import opaque_executor
from thunder_norm.tracing import lookasides


def _eye_meta(n: int, m: int, *, device: str, dtype: torch.dtype) -> TensorProxy:
    return TensorProxy(shape=(n, m), device=devices.to_device(device), dtype=dtypes.to_dtype(dtype), requires_grad=False)


def _eye(n: int, m: int, *, device: str, dtype: Any) -> torch.Tensor:
    return torch.eye(n, m, device=device, dtype=dtypes.to_torch_dtype(dtype) if isinstance(dtype, dtypes.dtype) else dtype)


_EYE = opaque_executor.register_operator("eye", meta=_eye_meta, fn=_eye)


def eye(n: int, m: int | None = None, *, device: Any = None, dtype: Any = None) -> TensorProxy:
    """Write the identity matrix of n rows and m columns into the open trace."""
    device = torch.get_default_device() if device is None else devices.to_torch_device(device)
    dtype = torch.get_default_dtype() if dtype is None else dtypes.to_torch_dtype(dtype)
    return _EYE(int(n), int(n if m is None else m), device=str(device), dtype=dtype)


@lookasides.instead_of(torch.eye)
def _torch_eye(
    n: WrappedValue,
    m: WrappedValue | None = None,
    *,
    device: WrappedValue | None = None,
    dtype: WrappedValue | None = None,
    layout: WrappedValue | None = None,
    requires_grad: WrappedValue | None = None,
) -> Any:
    filename, positions = get_interpreterruntimectx().get_current_user_source_location()
    get_jit_ctx().computation_trace.set_current_source_location(filename, positions)
    values = [None if w is None else w.value for w in (m, device, dtype)]
    return wrapped(eye(n.value, values[0], device=values[1], dtype=values[2]), n)
