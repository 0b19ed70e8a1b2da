"""Tensors of which each rank holds a shard (DTensor), and models whose parameters are such (`fully_shard`, `parallelize_module`)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from thunder_norm.context_variables import setting
from thunder_norm.errors import NormMismatchError, with_details
from thunder_norm.model_state.places import held_instead, places_of

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
else:  # a torch built without it, where nothing is one of these
    DTensor = FSDPModule = FullyShardedDataParallel = ()


Box = tuple[tuple[int, int], ...]
"""From where to where, in each dimension."""


def is_spread(t: Any) -> bool:
    """Whether a tensor's entries are described by a mesh of ranks."""
    return isinstance(t, DTensor)


def local(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, which shares memory with it; the tensor if it is not spread."""
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t: torch.Tensor) -> torch.Tensor:
    """The tensor with all of its entries; collective for one that is spread."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def placed(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor spread as another one of its shape.

    Raises:
        NormMismatchError: they have different shapes, or `t` is spread and `like` is not.
    """
    if t.shape != like.shape:
        raise NormMismatchError(f"a tensor of shape {list(t.shape)} cannot be placed as one of shape {list(like.shape)}")
    if not isinstance(like, DTensor):
        if isinstance(t, DTensor):
            raise NormMismatchError("a DTensor came where this process has a plain tensor: use its full_tensor()")
        return t
    if not isinstance(t, DTensor):
        return around(cut(t, like).to(like.device, copy=True), like)
    if (t.device_mesh, t.placements) == (like.device_mesh, like.placements):
        return t
    return t.redistribute(like.device_mesh, like.placements)


def around(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part as a tensor that is spread as `like`; the part itself if that is not spread."""
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def box(t: torch.Tensor) -> Box | None:
    """Where in the tensor this rank's part is; None if that is no range of indices in each dimension."""
    if not isinstance(t, DTensor):
        return tuple((0, size) for size in t.shape)
    chunks = t.__create_chunk_list__()  # what torch.distributed.checkpoint goes by
    found = tuple((low, low + size) for low, size in zip(chunks[0].offsets, chunks[0].sizes, strict=True))
    return found if len(chunks) == 1 and torch.Size(b - a for a, b in found) == t.to_local().shape else None


def cut(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The entries of a whole tensor that this rank has of `like`, a view.

    Raises:
        NormMismatchError: they are no range of indices in each dimension.
    """
    found = box(like)
    if found is None:
        raise NormMismatchError(f"shards placed as {like.placements} are no ranges of indices")
    return t[tuple(slice(*r) for r in found)]


def check_placement(name: str, t: torch.Tensor) -> None:
    """Refuse a tensor of which no rank has entries, only terms of a sum.

    Raises:
        NormMismatchError: it has a Partial placement.
    """
    if isinstance(t, DTensor) and any(p.is_partial() for p in t.placements):
        raise NormMismatchError(
            with_details(
                f"{name!r} has placements {t.placements}: its entries are sums over ranks that were not added up",
                instead="redistribute(...) it to Shard or Replicate",
            )
        )


def reshard(model: torch.nn.Module) -> None:
    """Put back the shards of modules that still hold what the last forward gathered.

    Raises:
        NormMismatchError: a module is FullyShardedDataParallel, which flattens parameters.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise NormMismatchError("FullyShardedDataParallel flattens parameters, so none has a norm: use fully_shard(model)")
        if isinstance(module, FSDPModule):
            module.reshard()


_gathered: contextvars.ContextVar[Mapping[int, torch.Tensor] | None] = contextvars.ContextVar(
    "thunder_norm_gathered", default=None
)


@contextlib.contextmanager
def as_one_process(model: Any) -> Iterator[None]:
    """Inside, a model is that of one process: its parameters and buffers are whole, and torch.distributed does nothing around modules.

    Collective for a model that has tensors that are spread; others, and what is no module, are left as they are.

    Raises:
        NormMismatchError: a module is FullyShardedDataParallel.
    """
    if not isinstance(model, torch.nn.Module):
        yield
        return
    reshard(model)
    spread = [((table, name), t) for table, name in places_of(model) if is_spread(t := table[name])]
    if not spread:
        yield
        return
    made = {id(t): whole_data(t) for _, t in spread}  # a tied one is gathered once
    gathered = {**(_gathered.get() or {}), **{id(made[id(t)]): t for _, t in spread}}
    with setting(_gathered, gathered), held_instead([(place, made[id(t)]) for place, t in spread]), without_hooks(model):
        yield


def is_collective() -> bool:
    """Whether a model that is spread is being taken as that of one process: what is asked then, all ranks must ask."""
    return bool(_gathered.get())


def spread_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor that is spread, inside `as_one_process` for the whole one that stands for it; any other as it is."""
    return (_gathered.get() or {}).get(id(t), t)


def whole_data(t: torch.Tensor) -> torch.Tensor:
    """The tensor with all of its entries and without a history, a parameter if it is one; collective for one that is spread."""
    if not is_spread(t):
        return t
    with torch.no_grad():
        data = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if t.is_meta else whole(t)
    return torch.nn.Parameter(data, t.requires_grad) if isinstance(t, torch.nn.Parameter) else data


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """A module's class, without the one that `fully_shard` put before it."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


@contextlib.contextmanager
def without_hooks(model: torch.nn.Module) -> Iterator[None]:
    """The model's forward without what torch.distributed does around it: the plain program, on whole tensors."""
    kept = [(m, m._forward_pre_hooks, m._forward_hooks) for m in model.modules()]
    try:
        for m, before, after in kept:
            m._forward_pre_hooks, m._forward_hooks = _own(before), _own(after)
        yield
    finally:
        for m, before, after in kept:
            m._forward_pre_hooks, m._forward_hooks = before, after


def _own(hooks: Any) -> Any:
    found = hooks.copy()
    for key, hook in hooks.items():
        if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
            del found[key]
    return found
