"""A model of which a part is on the meta device, its parameters say, may run where its other part is: torch does not mix devices."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.parameter import is_lazy

from thunder_norm.core.context import setting

_standing_in: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("thunder_norm_standing_in", default=frozenset())


@contextlib.contextmanager
def on_one_device(model: Callable, plain: Iterable[torch.Tensor]) -> Iterator[bool]:
    """Inside, zeros of one element's memory, where other tensors are, stand for the parameters and buffers of a model that are on meta.

    Other tensors are the model's, its `plain` arguments, or, where these are all on meta, those that it makes itself.  Yields whether
    there are any.
    """
    places = list(_places(model)) if isinstance(model, torch.nn.Module) else []
    with_data = [t for t in (*(holder[name] for holder, name in places), *plain) if not t.is_meta and t.numel()]
    device = with_data[0].device if with_data else torch.get_default_device()
    before = [(holder, name, holder[name]) for holder, name in places if device.type != "meta" and holder[name].is_meta]
    made = {id(t): _zeros(t, device) for _, _, t in before}  # a tied one is one
    for holder, name, t in before:
        holder[name] = made[id(t)]
    try:
        with setting(_standing_in, frozenset(map(id, made.values()))):
            yield bool(before)
    finally:
        for holder, name, t in before:
            holder[name] = t


def has_no_data(t: torch.Tensor) -> bool:
    """Whether it is on meta, or stands for one that is."""
    return t.is_meta or id(t) in _standing_in.get()


def _places(model: torch.nn.Module) -> Iterator[tuple[dict, str]]:
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            yield from ((holder, name) for name, t in holder.items() if t is not None and not is_lazy(t))


def zeros_like(t: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Zeros of one element's memory; those that may be taken for complex numbers (``view_as_complex``) have a layout that allows it."""
    may_be_complex = t.ndim > 0 and t.shape[-1] == 2
    return torch.zeros(t.shape if may_be_complex else (), dtype=t.dtype, device=device).expand(t.shape)


def _zeros(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = zeros_like(t, device)
    return torch.nn.Parameter(made, t.requires_grad) if isinstance(t, torch.nn.Parameter) else made
