"""Norm sizes of many tensors at once: reading them is most of the work of a norm map's call, so it is a few passes of C."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from thunder_norm.core.tensors import NORM_DTYPE, NormedTensor, _as_size

_norm_size, _perturbation_size, _elem_dims = attrgetter("norm_size"), attrgetter("perturbation_size"), attrgetter("elem_dims")
_requires_grad, _device, _is_cpu = attrgetter("requires_grad"), attrgetter("device"), attrgetter("is_cpu")
_dtype, _ndim = attrgetter("dtype"), attrgetter("ndim")


class Sizes:
    """The sizes in NormedTensors, numbers or 0-dim tensors, and what a compiled program relies on about them besides the values.

    Raises:
        NormMismatchError: a value cannot be a size.
    """

    norm_sizes: list[torch.Tensor]
    perturbation_sizes: list[torch.Tensor | None]
    signature: tuple

    def __init__(self, values: Iterable[Any]):
        values = list(values)
        kinds: tuple[type | None, ...] = tuple(map(type, values))
        if all(issubclass(kind, NormedTensor) for kind in set(kinds)):
            self.norm_sizes = list(map(_norm_size, values))
            self.perturbation_sizes = list(map(_perturbation_size, values))
            elem_dims = tuple(map(_elem_dims, values))
        else:
            kinds = tuple([kind if issubclass(kind, NormedTensor) else None for kind in kinds])
            bare = iter(_sizes([v for kind, v in zip(kinds, values, strict=True) if kind is None]))
            pairs = list(zip(kinds, values, strict=True))
            self.norm_sizes = [v.norm_size if kind else next(bare) for kind, v in pairs]
            self.perturbation_sizes = [v.perturbation_size if kind else None for kind, v in pairs]
            elem_dims = tuple([v.elem_dims if kind else None for kind, v in pairs])
        given = [d for d in self.perturbation_sizes if d is not None]
        perturbed = tuple([d is not None for d in self.perturbation_sizes]) if given else ()
        self.signature = (kinds, elem_dims, *_metadata(self.norm_sizes), perturbed, *_metadata(given), _shapes(kinds, values))

    def are_scalars(self) -> bool:
        """Whether all sizes are 0-dim float64 tensors: so they are made, but nothing keeps attributes from being set."""
        return _are_scalars([*self.norm_sizes, *(d for d in self.perturbation_sizes if d is not None)])


def _sizes(values: Sequence[Any]) -> Sequence[torch.Tensor]:
    """0-dim float64 tensors from numbers and tensors; those that need no conversion, such as ``vector.unbind()``, fast."""
    if {torch.Tensor}.issuperset(map(type, values)) and _are_scalars(values) and all(map(_is_cpu, values)):
        if all([size >= 0 for size in map(torch.Tensor.item, values)]):
            return values
    return [_as_size(v, "norm_size") for v in values]


def _are_scalars(tensors: Sequence[torch.Tensor]) -> bool:
    return {NORM_DTYPE}.issuperset(map(_dtype, tensors)) and {0}.issuperset(map(_ndim, tensors))


def _shapes(kinds: Sequence[type | None], values: Sequence[Any]) -> tuple:
    """Shapes of the backings, if there are any."""
    backings = [v.backing if kind else None for kind, v in zip(kinds, values, strict=True)]
    return tuple([None if b is None else b.shape for b in backings]) if any([b is not None for b in backings]) else ()


def _metadata(scalars: Sequence[torch.Tensor]) -> tuple[tuple, tuple]:
    devices = () if all(map(_is_cpu, scalars)) else tuple(map(_device, scalars))
    return tuple(map(_requires_grad, scalars)), devices
