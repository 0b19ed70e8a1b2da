"""Whole layers that torch has a kernel for, with what torch's autograd records of them in the forward.

Torch's formula for the gradient of an operation runs the operation again, which costs as much as the gradient where that is a whole layer
(`torch.lstm`).  In a program that is differentiated such an operation returns a tensor without entries first, on which the graph of that
call hangs.  Whoever copies that tensor has no graph, nor has a transform of torch's that runs the program: there the layer runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder_norm.functions.calls_apart import detached
from thunder_norm.functions.programs import flat_proxies
from thunder_norm.functions.pulled_back import PLAIN, nothing_transforms, records_alone
from thunder_norm.functions.torch_calls import meta_vjp, run_vjp
from thunder_norm.trees import flat_tensors, map_tensors
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

_RECORDED = "_thunder_norm_recorded"
# elsewhere a call may be replayed, in the memory of an earlier one (CUDA graphs)
_DEVICES = ("cpu", "meta")


class _Recorded(NamedTuple):
    """A call under torch's autograd: the floating results, and the tensors that their history ends at."""

    results: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor]


def meta_recording(meta: Callable, wanted: Sequence[bool], args: tuple, kwargs: dict) -> tuple[TensorProxy, Any]:
    """The proxies of what `run_recording` returns."""
    first = flat_proxies((args, kwargs))[0]
    return TensorProxy(like=first, shape=(0,), dtype=dtypes.bool8, requires_grad=False), meta(*args, **kwargs)


def run_recording(run: Callable, wanted: Sequence[bool], args: tuple, kwargs: dict) -> tuple[torch.Tensor, Any]:
    """What the graph hangs on, and the results; gradients are `wanted` of some of the floating tensors in (args, kwargs)."""
    given, by_name, held, leaves = _opened(wanted, args, kwargs)
    if leaves is None or any([t.requires_grad for t in flat_tensors((args, kwargs))]):
        return held, run(*args, **kwargs)
    return _recorded(run, given, by_name, held, leaves)


def record(run: Callable, wanted: Sequence[bool], args: tuple, kwargs: dict) -> tuple[torch.Tensor, Any]:
    """As `run_recording`, apart from whatever torch's autograd knows of the arguments: in one walk through them."""
    given, by_name, held, leaves = _opened(wanted, args, kwargs)
    if leaves is None:
        return held, map_tensors(detached, run(*map_tensors(detached, args), **map_tensors(detached, kwargs)))
    held, found = _recorded(run, given, by_name, held, leaves)
    return held, map_tensors(detached, found)


def _opened(wanted: Sequence[bool], args: tuple, kwargs: dict) -> tuple[Any, Any, torch.Tensor, list[torch.Tensor] | None]:
    """The arguments without a history of their own, what the graph is to hang on, and the leaves; None where nothing may be recorded."""
    remaining, leaves = iter(wanted), []
    may_record, held = records_alone(), None

    def opened(t: torch.Tensor) -> torch.Tensor:
        nonlocal may_record, held
        if held is None:
            held = t.new_empty(0, dtype=torch.bool)
        may_record = may_record and type(t) in PLAIN and t.device.type in _DEVICES and not t.is_inference()
        if may_record and t.is_floating_point() and next(remaining):
            leaves.append(t.detach().requires_grad_())
            return leaves[-1]
        return detached(t)

    given, by_name = map_tensors(opened, args), map_tensors(opened, kwargs)
    assert held is not None, "a layer takes tensors"
    return given, by_name, held, leaves if may_record else None


def _recorded(
    run: Callable, args: tuple, kwargs: dict, held: torch.Tensor, leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, Any]:
    with torch.enable_grad():
        found = run(*args, **kwargs)
    setattr(held, _RECORDED, _Recorded([t for t in flat_tensors(found) if t.is_floating_point()], leaves))
    return held, found


def meta_pullback(meta: Callable, held: TensorProxy, *call: Any) -> tuple[TensorProxy, ...]:
    """The proxies of what `run_pullback` returns."""
    return meta_vjp(meta, *call)


def run_pullback(
    run: Callable,
    held: torch.Tensor,
    args: tuple,
    kwargs: dict,
    cotangents: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """As `run_vjp`, by the graph that hangs on `held` where it is there."""
    recorded: _Recorded | None = getattr(held, _RECORDED, None)  # what it ran on was looked at then
    if recorded is None or not nothing_transforms(cotangents):
        return run_vjp(run, args, kwargs, cotangents, wanted)
    pairs = [(t, g) for t, g in zip(recorded.results, cotangents, strict=True) if g is not None and t.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, recorded.leaves))
    results, received = zip(*pairs, strict=True)
    return torch.autograd.grad(results, recorded.leaves, received, retain_graph=True, allow_unused=True, materialize_grads=True)


def pull_back(
    run: Callable,
    held: torch.Tensor,
    args: tuple,
    kwargs: dict,
    cotangents: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """As `run_pullback`, apart from whatever torch's autograd knows of the tensors."""
    if not hasattr(held, _RECORDED):
        args, kwargs = map_tensors(detached, (args, kwargs))
    return map_tensors(detached, run_pullback(run, held, args, kwargs, map_tensors(detached, cotangents), wanted))
