"""Guards of how inputs lie in memory, for programs that see it: by what they ask of tensors, or by where random numbers go."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx


def guard_layout(proxy: TensorProxy, real: torch.Tensor, *, with_offset: bool) -> None:
    """Let the trace serve calls in which an input has the strides that it has now, and the place in its storage if the program sees it."""
    if proxy.history is not None:
        get_jit_ctx().add_constraint((_check(tuple(real.stride()), real.storage_offset() if with_offset else None), proxy))


def guard_put_off(proxy: TensorProxy, asked: str, found: bool) -> None:
    """Let the trace serve calls in which torch has put off the same of an input: its conjugation, `is_conj`, or its sign, `is_neg`."""
    if proxy.history is not None:
        get_jit_ctx().add_constraint((_check_put_off(asked, found), proxy))


@functools.cache
def _check_put_off(asked: str, found: bool) -> Callable[[TensorProxy], None]:
    def check(t: torch.Tensor) -> None:
        if getattr(t, asked)() is not found:
            raise GuardError(f"expected a tensor whose {asked}() is {found}")

    bind = bindable("check_put_off", check)
    return lambda p: get_tracectx().bound_symbols.append(bind(p, output=None))


@functools.cache
def _check(stride: tuple[int, ...], offset: int | None) -> Callable[[TensorProxy], None]:
    """What writes the check that an input has this layout into a prologue."""

    def check(t: torch.Tensor) -> None:
        if t.stride() != stride or (offset is not None and t.storage_offset() != offset):
            raise GuardError(f"expected strides {stride} from {offset}, got {t.stride()} from {t.storage_offset()}")

    bind = bindable("check_layout", check)
    return lambda p: get_tracectx().bound_symbols.append(bind(p, output=None))
