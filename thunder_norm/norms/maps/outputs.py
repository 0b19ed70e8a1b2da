"""What the program of a norm map returns, as data: which results are the sizes of which norm, and everything beside norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.model_state.escapes import check_results
from thunder_norm.norms.maps.norm_map_trace import OutputShape, sizes_of_call

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class NormOutput:
    """A normed tensor in what a program returns.

    Attributes:
        kind: of the norm.
        elem_dims: the dimensions it runs over.
        shape: which of the program's output shapes it has.
        size: which of the computed numbers is its norm_size.
        perturbation: which is its perturbation_size, if it has one.
        number: the same for two places that hold one tensor.
    """

    kind: type[NormedTensor]
    elem_dims: tuple[int, ...]
    shape: int
    size: int
    perturbation: int | None
    number: int


@dataclass(frozen=True)
class PlainOutput:
    """A plain tensor in what a program returns, of which a norm map knows the metadata alone.

    Attributes:
        shape: which of the program's output shapes it has.
    """

    shape: int


def described(epilogue: Any, shapes: Sequence[OutputShape], num_results: int) -> Any:
    """What an epilogue returns, with a `NormOutput` for each normed tensor, a `PlainOutput` for each plain one without data.

    It is run on numbers that say which they are.

    Args:
        epilogue: from the results of the computation to what the program returns.
        shapes: of the normed tensors, and of plain ones.
        num_results: how many numbers the computation returns.
    """
    with torch.no_grad(), sizes_of_call({}):
        found = epilogue(*torch.arange(num_results, dtype=torch.float64).unbind())
    seen: dict[int, int] = {}

    def describe(x: Any) -> Any:
        if not isinstance(x, NormedTensor):
            plain = next((i for i, s in enumerate(shapes) if isinstance(x, torch.Tensor) and s.made_last is x), None)
            return x if plain is None else PlainOutput(plain)
        number = seen.setdefault(id(x), len(seen))
        shape = next(i for i, s in enumerate(shapes) if s.made_last is x.backing)
        perturbation = None if x.perturbation_size is None else int(x.perturbation_size)
        return NormOutput(type(x), x.elem_dims, shape, int(x.norm_size), perturbation, number)

    return tree_map(describe, found, is_leaf=lambda x: isinstance(x, NormedTensor))


@dataclass
class SavedEpilogue:
    """Puts together what a program returns from its description."""

    tree: Any
    shapes: Sequence[OutputShape]

    def __call__(self, *results: torch.Tensor) -> Any:
        """From the results of the computation to what the program returns."""
        made: dict[int, NormedTensor] = {}

        def make(x: Any) -> Any:
            if isinstance(x, PlainOutput):
                return self.shapes[x.shape].backing()
            if not isinstance(x, NormOutput):
                return x
            if x.number not in made:
                perturbation = None if x.perturbation is None else results[x.perturbation]
                made[x.number] = x.kind._wrap(self.shapes[x.shape].backing(), results[x.size], perturbation, x.elem_dims)
            return made[x.number]

        return tree_map(make, self.tree, is_leaf=lambda x: isinstance(x, NormOutput | PlainOutput))


def finishing(epilogue: Any, shapes: Sequence[OutputShape], num_results: int) -> Callable[..., Any]:
    """From the results of the computation to what the program returns: an epilogue, or the same without Thunder's call around it.

    That takes longer than the arithmetic of a small norm map.  Arguments as of `described`.
    """
    found = described(epilogue, shapes, num_results)
    if not isinstance(found, NormOutput):
        return epilogue
    wrap, shape, size, perturbation, dims = found.kind._wrap, shapes[found.shape], found.size, found.perturbation, found.elem_dims

    def of_one_norm(*results: torch.Tensor) -> NormedTensor:
        check_results(*results)
        return wrap(shape.backing(), results[size], None if perturbation is None else results[perturbation], dims)

    return of_one_norm


def differ(a: Any, b: Any) -> bool:
    """Whether two programs return other things beside norms: numbers, strings, shapes, also in objects, or another structure."""
    (flat, spec), (other_flat, other_spec) = tree_flatten(a), tree_flatten(b)
    if spec != other_spec:
        return True
    constants = [[*_constants(v, {})] for v in (flat, other_flat)]
    return [(type(v), v) for v in constants[0]] != [(type(v), v) for v in constants[1]]


def _constants(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    if isinstance(value, _CONSTANTS):
        yield repr(value) if isinstance(value, float) else value  # of NaN too
    elif isinstance(value, torch.Tensor | type) or callable(value) or id(value) in seen:
        return
    elif isinstance(value, list | tuple | dict):
        seen[id(value)] = value
        for v in value.values() if isinstance(value, dict) else value:
            yield from _constants(v, seen)
    else:
        seen[id(value)] = value
        yield from _constants(getattr(value, "__dict__", {}), seen)
