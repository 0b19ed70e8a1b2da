"""Inputs whose flag the program sets: ``x.requires_grad_()`` of a tensor that is given without, as models of forces do with positions.

The flag is set as in eager mode, and the program acquired anew, as if it had been set before the call.  That is the same where nothing
was made of the tensor before, and nobody has asked whether it requires grad; elsewhere it is refused.  Later calls set it in the
prologue, once all is checked.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder import clang
from thunder.core import dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.jit_ext import JitCtx, get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, get_tracectx

_SET = "_thunder_norm_flags_set"  # of compile data: the tensors whose flag the last acquisition has set
_SETS = "set_requires_grad"


def may_be_set(acquisition: Acquisition, proxy: TensorProxy, real: torch.Tensor | None) -> bool:
    """Whether it is the same to set the flag of an input before the program runs; it is then acquired anew."""
    if type(real) is not torch.Tensor or real.is_inference() or not real.is_leaf or acquisition.is_transformed:
        return False
    if proxy.name in acquisition.flags_asked or not (real.is_floating_point() or real.is_complex()):
        return False
    return not any(p.name == proxy.name for b in get_jit_ctx().computation_trace.bound_symbols for p in b.flat_proxy_args)


def begins_again(acquisition: Acquisition) -> bool:
    """Set the flags that the program has set; whether it has, and is to be acquired with them."""
    for real in acquisition.flags_set:
        real.requires_grad_()
    vars(get_compile_data()).setdefault(_SET, []).extend(acquisition.flags_set)
    return bool(acquisition.flags_set)


def write(acquisition: Acquisition, ctx: JitCtx) -> None:
    """Let the trace serve calls in which these tensors are given without the flag, which is set then."""
    found = vars(get_compile_data()).pop(_SET, [])
    if not found:
        return

    def is_set(p: Any) -> bool:
        real = acquisition.fakes.real_input(p) if isinstance(p, TensorProxy) else None
        return any(real is t for t in found)

    checks = [c for c in ctx._constraints if c[0] is clang.check_tensor_shape_and_metadata and is_set(c[1])]
    others = [c for c in ctx._constraints if not any(c is other for other in checks)]
    ctx._constraints = [*others, *((_check_all_but_flag, c[1]) for c in checks), *((_set_flag, c[1]) for c in checks)]


def _check_all_but_flag(p: TensorProxy) -> None:
    shape, device, dtype = tuple(map(int, p.shape)), p.device.device_str(), dtypes.to_torch_dtype(p.dtype)

    def check(t: torch.Tensor) -> None:
        found = tuple(t.shape), str(t.device), t.dtype
        if found != (shape, device, dtype) or not (t.requires_grad or (t.is_leaf and not t.is_inference())):
            raise GuardError(f"expected a tensor with {shape}, {device}, {dtype}, got {found}")

    get_tracectx().bound_symbols.append(bindable("check_but_requires_grad", check)(p, output=None))


def _set_flag(p: TensorProxy) -> None:
    def set_flag(t: torch.Tensor) -> None:
        if not t.requires_grad:
            t.requires_grad_()

    get_tracectx().bound_symbols.append(bindable(_SETS, set_flag)(p, output=None))


def set_last(prologue: TraceCtx) -> None:
    """Have flags be set once all is checked."""
    sets = [b for b in prologue.bound_symbols if b.sym.name.startswith(_SETS)]
    if sets:
        others = [b for b in prologue.bound_symbols if not any(b is s for s in sets)]
        prologue.bound_symbols = [*others[:-1], *sets, others[-1]]
