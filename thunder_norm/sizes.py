"""Norm sizes of many tensors at once: reading them is most of the work of a norm map's call, so it is a few passes of C."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from thunder_norm.tensors import LinfTensor, NormedTensor

_norm_size, _perturbation_size, _elem_dims = attrgetter("norm_size"), attrgetter("perturbation_size"), attrgetter("elem_dims")
_requires_grad, _device, _is_cpu = attrgetter("requires_grad"), attrgetter("device"), attrgetter("is_cpu")
_dtype, _ndim = attrgetter("dtype"), attrgetter("ndim")


class Sizes:
    """The sizes in NormedTensors, numbers or 0-dim tensors, and what a compiled program relies on about them besides the values.

    Raises:
        NormMismatchError: a value cannot be a size.
    """

    def __init__(self, values: Iterable[Any]):
        values = tuple(values)
        kinds: tuple[type | None, ...] = tuple(map(type, values))
        if not all(issubclass(kind, NormedTensor) for kind in set(kinds)):
            kinds = tuple(kind if issubclass(kind, NormedTensor) else None for kind in kinds)
            values = tuple(v if kind is not None else LinfTensor(v) for kind, v in zip(kinds, values, strict=True))
        self.norm_sizes: list[torch.Tensor] = list(map(_norm_size, values))
        self.perturbation_sizes: list[torch.Tensor | None] = list(map(_perturbation_size, values))
        given = [d for d in self.perturbation_sizes if d is not None]
        self.signature = (
            kinds,
            tuple(map(_elem_dims, values)),
            _metadata(self.norm_sizes),
            tuple(d is None for d in self.perturbation_sizes) if given else (),
            _metadata(given),
        )


def _metadata(scalars: Sequence[torch.Tensor]) -> tuple:
    devices = () if all(map(_is_cpu, scalars)) else tuple(map(_device, scalars))
    return tuple(map(_requires_grad, scalars)), devices, frozenset(map(_dtype, scalars)), frozenset(map(_ndim, scalars))
