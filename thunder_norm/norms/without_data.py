"""A model of which a part is on the meta device, its parameters say, may run where its other part is: torch does not mix devices."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.parameter import is_lazy

from thunder_norm.context_variables import setting
from thunder_norm.model_state.places import held_instead, places_of

_standing_in: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("thunder_norm_standing_in", default=frozenset())


@contextlib.contextmanager
def on_one_device(model: Callable, plain: Iterable[torch.Tensor]) -> Iterator[bool]:
    """Inside, zeros of one element's memory, where other tensors are, stand for the parameters and buffers of a model that are on meta.

    Other tensors are the model's, its `plain` arguments, or, where these are all on meta, those that it makes itself.  Yields whether
    there are any.
    """
    places = (
        [(table, name) for table, name in places_of(model) if _has_tensor(table[name])]
        if isinstance(model, torch.nn.Module)
        else []
    )
    with_data = [t for t in (*(table[name] for table, name in places), *plain) if not t.is_meta and t.numel()]
    device = with_data[0].device if with_data else torch.get_default_device()
    empty = [((table, name), t) for table, name in places if device.type != "meta" and (t := table[name]).is_meta]
    made = {id(t): _zeros(t, device) for _, t in empty}  # a tied one is one
    with held_instead([(place, made[id(t)]) for place, t in empty]), setting(_standing_in, frozenset(map(id, made.values()))):
        yield bool(empty)


def has_no_data(t: torch.Tensor) -> bool:
    """Whether it is on meta, or stands for one that is."""
    return t.is_meta or id(t) in _standing_in.get()


def _has_tensor(t: torch.Tensor | None) -> bool:
    return t is not None and not is_lazy(t)


def zeros_like(t: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Zeros of one element's memory; those that may be taken for complex numbers (``view_as_complex``) have a layout that allows it."""
    may_be_complex = t.ndim > 0 and t.shape[-1] == 2
    return torch.zeros(t.shape if may_be_complex else (), dtype=t.dtype, device=device).expand(t.shape)


def _zeros(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = zeros_like(t, device)
    return torch.nn.Parameter(made, t.requires_grad) if isinstance(t, torch.nn.Parameter) else made
