"""Dimensions of a norm map's inputs that may change between calls.

Norms run over elem_dims and are a maximum over the rest, so a batch dimension does not enter any rule.  That is not taken on
trust: the program is acquired once more at another size and must come out the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from thunder_norm.core.tensors import NormedTensor, describe
from thunder_norm.errors import NormMismatchError, with_details


def check_hashable(leaves: Sequence[Any]) -> None:
    """Refuse objects that hold who knows what; a norm map is made for numbers, strings and such as they are.

    Raises:
        NormMismatchError: an argument is one that cannot be known again.
    """
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and type(leaf).__hash__ is None:
            raise NormMismatchError(
                with_details(
                    f"an argument of a norm map is a {type(leaf).__qualname__}, which is not known to be made of tensors",
                    instead="torch.utils._pytree.register_dataclass(cls), or register_pytree_node, or tensors and containers of them",
                )
            )


@dataclass(frozen=True)
class Variant:
    """Inputs at another size of one dynamic dimension."""

    name: str
    inputs: list[Any]
    size: int
    other_size: int


@dataclass
class DynamicDims:
    """For each argument (by position among the flattened ones): dimension -> name."""

    by_leaf: dict[int, dict[int, str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The dynamic dimensions, each once."""
        return list(dict.fromkeys(name for dims in self.by_leaf.values() for name in dims.values()))

    def without(self, position: int, t: torch.Tensor) -> tuple[int | None, ...]:
        """The shape of argument number `position`, with None for dynamic dimensions."""
        dims = self.by_leaf.get(position, {})
        return tuple(None if d in dims else size for d, size in enumerate(t.shape))

    def sizes(self, leaves: Sequence[Any], examples: Sequence[Any]) -> dict[str, int]:
        """The sizes of the dynamic dimensions in a call.

        Raises:
            NormMismatchError: an argument's shape differs from the example's in another dimension, or two arguments disagree.
        """
        sizes: dict[str, int] = {}
        for i, (leaf, example) in enumerate(zip(leaves, examples, strict=True)):
            if not isinstance(example, torch.Tensor):
                continue
            if isinstance(leaf, NormedTensor) and not leaf.finalized:
                continue
            if not isinstance(leaf, torch.Tensor):
                raise NormMismatchError(f"argument {i} must be a tensor like the example, got {type(leaf).__name__}")
            self._check_shape(i, leaf, example, sizes)
        for i, dims in self.by_leaf.items():
            for d, name in dims.items():
                sizes.setdefault(name, examples[i].shape[d])
        return sizes

    def _check_shape(self, i: int, leaf: torch.Tensor, example: torch.Tensor, sizes: dict[str, int]) -> None:
        dims = self.by_leaf.get(i, {})
        same_rank = leaf.ndim == example.ndim
        if not same_rank or any(a != b and d not in dims for d, (a, b) in enumerate(zip(leaf.shape, example.shape, strict=True))):
            raise NormMismatchError(
                f"argument {i} is {describe(leaf)}, the example was of shape {list(example.shape)}; "
                "name dimensions that may change in dynamic_shapes"
            )
        for d, name in dims.items():
            if sizes.setdefault(name, leaf.shape[d]) != leaf.shape[d]:
                raise NormMismatchError(
                    f"dynamic dimension {name!r} is {sizes[name]} in one argument and {leaf.shape[d]} in another"
                )

    def variants(self, inputs: Sequence[Any]) -> Iterator[Variant]:
        """For each dynamic dimension, the inputs with that dimension one larger."""
        for name in self.names:
            sizes = {(i, d): inputs[i].shape[d] for i, dims in self.by_leaf.items() for d, n in dims.items() if n == name}
            size = next(iter(sizes.values()))
            changed = [
                _resized(x, {d for (j, d) in sizes if j == i}, size + 1) if any(j == i for j, _ in sizes) else x
                for i, x in enumerate(inputs)
            ]
            yield Variant(name, changed, size, size + 1)


def _resized(x: torch.Tensor, dims: set[int], size: int) -> torch.Tensor:
    if isinstance(x, NormedTensor):
        return type(x)._wrap(_resized(x.backing, dims, size), x.norm_size, x.perturbation_size, x.elem_dims)
    shape = [size if d in dims else s for d, s in enumerate(x.shape)]
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(shape)


def parse_dynamic_shapes(model: Callable, args: tuple, kwargs: dict, dynamic_shapes: Any, leaves: Sequence[Any]) -> DynamicDims:
    """Read ``dynamic_shapes`` in the forms `torch.export.export` takes.

    Raises:
        NormMismatchError: it does not fit the arguments.
    """
    if dynamic_shapes is None:
        return DynamicDims()
    by_argument = _by_argument(model, args, kwargs, dynamic_shapes)
    found: dict[int, dict[int, str]] = {}
    left = dict(enumerate(leaves))  # one tensor may be several arguments
    for value, shapes in by_argument:
        flat = tree_flatten(value)[0]
        per_leaf = [None] * len(flat) if shapes is None else [shapes]
        if shapes is not None and not isinstance(value, torch.Tensor):
            per_leaf = tree_flatten(shapes, is_leaf=_is_dims)[0]
        if len(per_leaf) != len(flat) or not all(map(_is_dims, per_leaf)):
            raise NormMismatchError("dynamic_shapes do not have the structure of the example arguments")
        for t, dims in zip(flat, per_leaf, strict=True):
            position = next(i for i, leaf in left.items() if leaf is t)
            del left[position]
            if dims:
                found[position] = _dims_of(t, dims)
    return DynamicDims(found)


def _is_dims(shapes: Any) -> bool:
    return shapes is None or isinstance(shapes, Mapping) and all(isinstance(k, int) for k in shapes)


def _by_argument(model: Callable, args: tuple, kwargs: dict, dynamic_shapes: Any) -> list[tuple[Any, Any]]:
    if isinstance(dynamic_shapes, Mapping):
        forward = model.forward if isinstance(model, torch.nn.Module) else model
        try:
            values = inspect.signature(forward).bind(*args, **kwargs).arguments
        except TypeError as e:
            raise NormMismatchError(f"the example arguments do not fit the model: {e}") from e
        flat: dict[str, Any] = {}
        for name, value in values.items():
            flat.update(value) if name == "kwargs" and isinstance(value, dict) else flat.setdefault(name, value)
        unknown = set(dynamic_shapes) - set(flat)
        if unknown:
            raise NormMismatchError(f"dynamic_shapes names {sorted(unknown)}, the arguments are {sorted(flat)}")
        return [(value, dynamic_shapes.get(name)) for name, value in flat.items()]
    if not isinstance(dynamic_shapes, list | tuple) or len(dynamic_shapes) != len(args):
        raise NormMismatchError(f"dynamic_shapes must be a dict by name, or have one entry for each of the {len(args)} arguments")
    return list(zip(args, dynamic_shapes, strict=True))


def _dims_of(t: Any, dims: Mapping[int, Any]) -> dict[int, str]:
    if not isinstance(t, torch.Tensor):
        raise NormMismatchError(f"dynamic_shapes: {type(t).__name__} has no dimensions")
    found = {}
    for d, name in dims.items():
        if not isinstance(d, int) or not -t.ndim <= d < t.ndim:
            raise NormMismatchError(f"dynamic_shapes: dimension {d!r} is out of range for a tensor of {t.ndim} dimensions")
        if name is not None:
            found[d % t.ndim] = name if isinstance(name, str) else getattr(name, "__name__", str(name))
    return found
