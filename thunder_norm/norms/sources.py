"""What the programs of a norm map take in a call: sizes, arguments, and tensors of a model, which may be others by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from thunder_norm.model_state.shards import reshard, whole


@dataclass(frozen=True)
class OfArgument:
    """An input of the computation that is a size of one of the call's flattened arguments, or the argument itself."""

    position: int
    attribute: str | None = None

    def __call__(self, leaves: Sequence[Any]) -> torch.Tensor:
        """The tensor in a call."""
        return leaves[self.position] if self.attribute is None else getattr(leaves[self.position], self.attribute)


@dataclass(eq=False)
class OfModel:
    """An input of the computation that is a parameter or buffer."""

    name: str
    tensor: torch.Tensor

    def __call__(self, leaves: Sequence[Any]) -> torch.Tensor:
        """The tensor as it is in a call; whole, by a collective, if each rank has a part."""
        return whole(self.tensor)


# One input of the computation; an int is a position among the sizes given in the call: all norm sizes, then all perturbation sizes.
Source = int | OfArgument | OfModel


class ModelTensors:
    """The parameters and buffers of a model as they are now, for programs that were acquired with them.

    Args:
        model: a module; of anything else nothing is known.
    """

    def __init__(self, model: Callable):
        self._model = model
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: list[tuple[dict, str, Any]] = []
        modules = model.named_modules(remove_duplicate=False) if isinstance(model, torch.nn.Module) else ()
        for path, module in modules:
            for holder in (module._parameters, module._buffers, module._modules):
                for name, value in holder.items():
                    self._places.append((holder, name, value))
                    if isinstance(value, torch.Tensor) and not is_lazy(value):
                        self._tensors[f"{path}.{name}" if path else name] = value
        self._requires_grad = [t.requires_grad for t in self._tensors.values()]
        self._described = _described(self._tensors)

    def current(self, sources: Iterable[Source]) -> ModelTensors | None:
        """The tensors by now, which `sources` read from then on; None if their programs are not for such tensors."""
        if self._are_in_place():
            return self
        reshard(self._model)  # the last forward of a sharded model may have left gathered tensors in their places
        if self._are_in_place():
            return self
        now = ModelTensors(self._model)
        if now._described != self._described:
            return None
        for source in sources:
            if isinstance(source, OfModel):
                source.tensor = now._tensors[source.name]
        return now

    def _are_in_place(self) -> bool:
        are_the_same = all([holder.get(name) is value for holder, name, value in self._places])
        return are_the_same and self._requires_grad == [t.requires_grad for t in self._tensors.values()]


def _described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """What a program depends on of tensors that it reads anew in each call: also which names are one tensor."""
    first: dict[int, str] = {}
    return {
        name: (
            first.setdefault(id(t), name),
            isinstance(t, torch.nn.Parameter),
            t.requires_grad,
            (t.dtype, t.device, tuple(t.shape)),
        )
        for name, t in tensors.items()
    }
