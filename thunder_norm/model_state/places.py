"""The places where a model holds its parameters and buffers, and other tensors in them for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Place = tuple[dict[str, Any], str]


def places_of(model: torch.nn.Module) -> Iterator[Place]:
    """Each table of a module and a name in it: ``table[name]`` is a parameter, a buffer or None."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            yield from ((table, name) for name in table)


@contextlib.contextmanager
def held_instead(tensors: Sequence[tuple[Place, torch.Tensor]]) -> Iterator[None]:
    """Inside, each of the tensors is in its place; what was there is back afterwards."""
    before = [(table, name, table[name]) for (table, name), _ in tensors]
    for (table, name), t in tensors:
        table[name] = t
    try:
        yield
    finally:
        for table, name, t in before:
            table[name] = t
