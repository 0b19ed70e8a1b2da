"""What an epilogue writes into the user's objects for a tensor of the program: without what belongs to the call."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.tracing.calls import buffers
from thunder_norm.tracing.calls.raising import KEEPS, PACKS
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.translation import proxy_like
from thunder.core import prims
from thunder.core.interpreter import ProvenanceRecord, PseudoInst
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx


def mend_writes(epilogue: TraceCtx, acquisition: Acquisition | None) -> None:
    """Thunder's own writes: with what is kept of a wrapper, and buffers into the user's module unless a transform has put in its own.

    Thunder writes a buffer of the jitted module itself under the name ".running_mean", where nobody finds it, and an attribute by a
    ``__setattr__`` that the program has been through already.
    """
    found: list[BoundSymbol] = []
    for bsym in epilogue.bound_symbols:
        value = bsym.args[-1] if bsym.sym.id in PACKS else None
        became = _by_then(acquisition, value) if isinstance(value, TensorProxy) else None
        stays = isinstance(became, SubclassProxy) and comes_with_call(bsym.args[0])
        if acquisition is not None and became is not None and not stays:
            keep = keeping(acquisition, value)
            with tracectx(epilogue):
                plain = proxy_like(acquisition.kept(acquisition.fake_of(value)))
                found.append(bindable(KEEPS, keep)(value, output=plain))
            value = plain
        if bsym.sym.id is prims.PrimIDs.PACK_BUFFER:
            module, name, _ = bsym.args
            found.append(bindable(KEEPS, buffers.put)(module, name.removeprefix("."), value, output=None))
        elif bsym.sym.id is prims.PrimIDs.PACK_ATTR and _is_set_by_own_method(bsym.args[0]):
            found.append(bindable(KEEPS, _put)(*bsym.args[:-1], value, output=None))
        else:
            found.append(bsym if value is None else bsym.from_bsym(args=(*bsym.args[:-1], value)))
    epilogue.bound_symbols[:] = found


def _is_set_by_own_method(owner: Any) -> bool:
    """Whether the class of what a proxy stands for says itself what setting an attribute does."""
    setter = getattr(type(getattr(owner, "_o", None)), "__setattr__", None)
    return isinstance(setter, FunctionType) and setter is not torch.nn.Module.__setattr__


def _put(owner: Any, name: str, value: Any) -> None:
    vars(owner)[name] = value


def _by_then(acquisition: Acquisition | None, proxy: TensorProxy) -> TensorProxy:
    """What the proxy stands for at the end of the program, which may have written into its tensor."""
    return proxy if acquisition is None else acquisition.by_now(proxy)


def comes_with_call(owner: Any) -> bool:
    """Whether the object that a proxy stands for is held by the arguments of the call."""
    origin = getattr(owner, "history", None)
    while isinstance(origin, ProvenanceRecord) and origin.inputs:
        origin = origin.inputs[0]
    return isinstance(origin, ProvenanceRecord) and origin.inst in (PseudoInst.INPUT_ARGS, PseudoInst.INPUT_KWARGS)


def is_kept_plainly(acquisition: Acquisition | None, proxy: TensorProxy) -> bool:
    """Whether what is kept of a tensor outside of the arguments is another tensor: the one without its norm."""
    became = _by_then(acquisition, proxy)
    return acquisition is not None and isinstance(became, SubclassProxy) and acquisition.kept(became.fake) is not became.fake


def keeping(acquisition: Acquisition, proxy: TensorProxy, is_of_argument: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is kept of the tensor that a proxy stands for: without gradient if it has none in eager mode.

    An argument of the call keeps wrappers as they are, which a later call may be given.
    """
    proxy = _by_then(acquisition, proxy)
    if is_of_argument and isinstance(proxy, SubclassProxy):
        return lambda t: t
    plain = acquisition.fakes.proxy_of(acquisition.kept(proxy.fake)) if isinstance(proxy, SubclassProxy) else proxy
    is_constant = plain is not None and not acquisition.autograd.requires_grad(plain)

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept = acquisition.kept(t)
        return kept.detach() if is_constant and kept.requires_grad else kept  # a buffer that is put back stays the same tensor

    return keep
