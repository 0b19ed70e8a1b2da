"""What of a program torch's autograd has followed on the fakes, and which of its results have gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.fakes import fake_of
from thunder_norm.subclass.backward.gradients import leaves_of
from thunder_norm.subclass.backward.made_leaves import is_made_leaf
from thunder_norm.subclass.classes.protocol import outer_metadata
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.recording.trace import FLATTEN, OperationId
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core import dtypes, prims
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.trace import TraceCtx

_NO_OPERATIONS = frozenset({prims.PrimIDs.RETURN, prims.PrimIDs.UNPACK_TRIVIAL, FLATTEN.id})


def check_followed(acquisition: Acquisition, trace: TraceCtx, fakes: Mapping[str, torch.Tensor]) -> None:
    """Refuse what would lose gradients.

    Raises:
        UnsupportedOpError: something of the program does not go through torch's autograd.
    """
    for proxy in acquisition.wrappers.proxies() if acquisition.has_own_formulas else ():
        spec = acquisition.wrappers.specs.get(id(proxy.fake))
        if spec is not None and not spec.requires_grad and any(acquisition.fakes.inner.get(id(t)) for t in leaves_of(proxy.fake)):
            raise UnsupportedOpError(
                with_details(
                    f"{proxy.name}, a {type(proxy.fake).__name__}, does not require grad but its inner tensors do",
                    why="other wrappers of the program require grad themselves, so gradients are torch's, which has none here",
                    instead="let all wrappers require grad themselves, or none",
                )
            )
    for bsym in trace.bound_symbols:
        if isinstance(bsym.sym.id, OperationId) or bsym.sym.id in _NO_OPERATIONS:
            continue
        if not any(_is_tracked(acquisition, fake_of(p, fakes)) for p in bsym.flat_proxy_args):
            continue
        for out in bsym.flat_proxy_outs:
            if (
                isinstance(out, TensorProxy)
                and not isinstance(out, SubclassProxy)
                and dtypes.is_inexact_dtype(out.dtype)
                and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in out.tags
            ):
                line = bsym.source_positions.lineno if bsym.source_positions is not None else "?"
                raise UnsupportedOpError(
                    with_details(
                        f"{bsym.sym.name} on a tensor whose gradient is that of a wrapper subclass",
                        at=f"{bsym.source_filename}:{line}",
                        why="it did not go through torch's autograd",
                    )
                )


def _is_tracked(acquisition: Acquisition, fake: torch.Tensor | None) -> bool:
    return fake is not None and fake.requires_grad and id(fake) not in acquisition.autograd.sources


def outputs_of(acquisition: Acquisition, returned: Sequence[Any], fakes: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the program returns with a gradient, inner tensors of wrappers that the program made of such tensors included.

    None of these is an input that is handed back, inside of a wrapper too: it comes out as the very object, and what arrives there is its
    own.  Nor is a tensor that the program has a history start at, a wrapper perhaps: outside it is a leaf.  So is what an autograd function
    puts into a wrapper, a view that is made while torch's autograd does not record.
    """
    found: dict[int, torch.Tensor] = {}
    for p in returned:
        fake = fake_of(p, fakes)
        if fake is None:
            continue
        results = () if _is_started(acquisition, fake) else (fake,)
        for t in (*results, *(leaves_of(fake) if is_wrapper(fake) else ())):
            has_history = t is fake or t.grad_fn is not None or id(t) in acquisition.autograd.sources
            if t.requires_grad and has_history and not is_handed_back(acquisition, t):
                found[id(t)] = t
    return list(found.values())


def is_handed_back(acquisition: Acquisition, fake: torch.Tensor) -> bool:
    """Whether what the program returns is an input that requires grad, with the history that it was given with."""
    is_source = id(fake) in acquisition.autograd.sources and acquisition.is_input(fake)
    return is_source and not acquisition.autograd.has_recorded(fake)


def _is_started(acquisition: Acquisition, fake: torch.Tensor) -> bool:
    if is_wrapper(fake):
        return is_made_leaf(acquisition, fake)
    proxy = acquisition.fakes.proxy_of(fake)
    return proxy is not None and proxy.name in acquisition.autograd.started


def started_histories(acquisition: Acquisition, trace: TraceCtx, is_differentiated: bool) -> dict[str, bool]:
    """The names in a finished trace of plain tensors that have histories which start in the program, and whether at them.

    Args:
        acquisition: of the program.
        trace: its computation.
        is_differentiated: whether results get gradients of torch's autograd: those that require grad need no other history then.
    """
    started = {acquisition.fakes.current(p).name: True for p in acquisition.autograd.started.values()}
    if not acquisition.autograd.is_running or is_differentiated:
        return started
    fakes = acquisition.fakes.by_name()
    for p in trace.bound_symbols[-1].args[0]["output"]:
        fake = fake_of(p, fakes)
        if fake is not None and not is_wrapper(fake) and fake.requires_grad and not is_handed_back(acquisition, fake):
            started.setdefault(p.name, False)
    return started


def starts_in_program(acquisition: Acquisition, fake: torch.Tensor, is_differentiated: bool) -> bool:
    """Whether a wrapper that is returned has a history that starts in the program, at itself or before it.

    Args:
        acquisition: of the program.
        fake: the wrapper.
        is_differentiated: whether results get gradients of torch's autograd, see `started_histories`.
    """
    if not acquisition.autograd.is_running or acquisition.is_transformed or not outer_metadata(fake)[2]:
        return False
    if is_handed_back(acquisition, fake):
        return False
    return is_made_leaf(acquisition, fake) or not is_differentiated
