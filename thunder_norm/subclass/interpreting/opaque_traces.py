"""What prologues ask of objects that cannot be taken apart, and what may not be in a computation with them; see `opaque_objects`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.interpreting.opaque_objects import ID, OpaqueProxy, check_apart, stride_of
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.locations import location_of
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


def guard_input(acquisition: Acquisition, p: OpaqueProxy, plain: Sequence[TensorProxy]) -> BoundSymbol:
    """What a prologue asks of an object: its class and strides, and that `plain` are apart from it if it may be written into."""
    cls, stride, has_changed = type(p.example), p.strides, acquisition.opaque.has_changed

    def check(x: torch.Tensor, *others: torch.Tensor) -> None:
        if type(x) is not cls or stride_of(x) != stride:
            raise GuardError(f"expected a {cls.__name__} of strides {stride}, got a {type(x).__name__}")
        if has_changed:
            check_apart(f"the program, given a {cls.__name__},", [x], others)

    return bindable(f"check_{cls.__name__}", check)(p, *plain, output=None)


def check_computation(acquisition: Acquisition, trace: TraceCtx) -> None:
    """Refuse what Thunder would do to objects without us, and what cannot be kept in order with what they do.

    Raises:
        UnsupportedOpError: there is something of that.
    """
    if not acquisition.opaque.is_met:
        return
    for bsym in trace.bound_symbols:
        is_ours = str(bsym.sym.id).startswith(ID) or bsym.sym.id in (prims.PrimIDs.RETURN, prims.PrimIDs.UNPACK_TRIVIAL)
        if not is_ours and any(isinstance(p, OpaqueProxy) for p in bsym.flat_proxy_args):
            raise UnsupportedOpError(
                with_details(f"{bsym.sym.name} on an object that cannot be taken apart", at=location_of(bsym))
            )
    if acquisition.has_changed_plain() or acquisition.fakes.replaced:
        raise UnsupportedOpError(
            with_details(
                "a plain tensor is changed in place in a program with objects that cannot be taken apart",
                why="they may share its memory",
                instead="use the out-of-place operation",
            )
        )
    if torch.is_grad_enabled() and any(isinstance(p, TensorProxy) and p.requires_grad for p in trace.args):
        for what in acquisition.opaque.once:
            raise UnsupportedOpError(
                with_details(
                    f"{what} in a program that is differentiated",
                    why="it draws numbers or changes what it is given, and the backward would run it again",
                )
            )
