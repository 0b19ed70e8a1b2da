"""Scatters of sources that are larger than their index, and copies to a position that is no list: entries of the table of `torch_semantics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy


def _read(src: Any, index: Any) -> Any:
    """What an index of another shape reads of a source: gradients, Thunder's and torch's, are of that alone."""
    if not isinstance(src, TensorProxy) or not isinstance(index, TensorProxy) or src.ndim != index.ndim:
        return src
    is_larger = src.shape != index.shape and all(n <= of for n, of in zip(index.shape, src.shape, strict=True))
    return ltorch.getitem(src, tuple(slice(n) for n in index.shape)) if is_larger else src


def _of_what_is_read(operation: Callable) -> Callable:
    def scatter(input: Any, dim: int, index: Any, src: Any = None, *args: Any, **options: Any) -> Any:
        return operation(input, dim, index, _read(src, index), *args, **options)

    return scatter


def _to_positions(operation: Callable) -> Callable:
    """Thunder's gradients ask for the length of the index, and are not there for a source without dimensions."""

    def index_copy(input: Any, dim: int, index: Any, source: Any) -> Any:
        if input.ndim and index.ndim == 0:
            index = ltorch.reshape(index, (1,))
        if input.ndim and source.ndim == 0:
            source = ltorch.reshape(source, (1,))
        return operation(input, dim, index, source)

    return index_copy


ENTRIES: dict[Callable, Callable] = {
    fn: _of_what_is_read(ltorch._torch_to_thunder_function_map[fn])
    for fn in (
        *(torch.scatter, torch.scatter_add, torch.scatter_reduce),
        *(torch.Tensor.scatter, torch.Tensor.scatter_add, torch.Tensor.scatter_reduce),
        *(torch.Tensor.scatter_, torch.Tensor.scatter_add_),
    )
} | {
    fn: _to_positions(ltorch._torch_to_thunder_function_map[fn])
    for fn in (torch.index_copy, torch.Tensor.index_copy, torch.Tensor.index_copy_)
}
