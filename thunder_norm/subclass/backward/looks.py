"""What a call must find in places that a program can reach, for a trace to serve it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.model_state.reachable import Place, contents
from thunder_norm.tracing.provenances import walked

_TOLD_BY_MORE = (torch.Tensor, dict, list, tuple)


@dataclass(frozen=True)
class Look:
    """What a call must find in a place, or at the end of a way in the same place of another owner, to be served by a trace."""

    place: Place
    kind: Callable[[Any], Any]
    expected: Any
    may_change: bool
    way: tuple[tuple[str, Any], ...] | None = None

    @functools.cached_property
    def _is_told_by_identity(self) -> bool:
        """Whether the same objects are enough: of tensors what they are counts too, of containers what they hold."""
        held = self.place.held
        return not any(isinstance(v, _TOLD_BY_MORE) for v in (held.values() if isinstance(held, dict) else held))

    def holds(self, *roots: Any) -> bool:
        if self.way is None and self._is_told_by_identity and not self.place.is_changed:
            return True
        place = self.place if self.way is None or self.place.at is None else self.place.at(walked(self.way, *roots))
        return self.kind(place.read()) == self.expected


class Looks:
    """All of them in one check; without what classes have changed themselves until the first call: what they count in their dispatch."""

    def __init__(self, looks: list[Look]):
        self._looks, self._is_first = looks, True

    def __call__(self, *roots: Any) -> bool:
        if self._is_first:
            self._looks = [look for look in self._looks if not look.may_change or look.holds(*roots)]
            self._is_first = False
        return all(look.holds(*roots) for look in self._looks)


def kind_of(value: Any, of: Callable[[Any], Any] = id, by_identity: bool = False) -> Any:
    """What a trace relies on about what is put in another's place: of tensors all but the data, or which they are, of objects what `of` says."""
    if isinstance(value, torch.Tensor) and by_identity:
        return id(value)
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, dict):
        # a tensor says of each of its entries whether it is equal
        return type(value), tuple(
            (id(k) if isinstance(k, torch.Tensor) else k, kind_of(v, of, by_identity)) for k, v in contents(value).items()
        )
    if isinstance(value, list | tuple):
        held = tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value)  # the class's own may do anything
        return type(value), tuple(kind_of(v, of, by_identity) for v in held)
    return (type(value), value) if isinstance(value, _VALUES) else of(value)


_VALUES = int | float | complex | str | bytes | slice | range | set | None | enum.Enum | torch.dtype | torch.device
