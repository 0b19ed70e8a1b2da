"""What the programs of a norm map take in a call: sizes, arguments, and tensors of a model, which may be others by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from thunder_norm.errors import NormMismatchError, with_details
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


@dataclass(eq=False)
class OfAttribute:
    """An input of the computation that is a tensor from elsewhere: an attribute of a module that is no buffer, or of no module (`name` is empty).

    The attribute may be another tensor by the time of a call; what is of no module, a global variable say, is the one that was acquired.
    """

    name: str
    tensor: torch.Tensor
    model: torch.nn.Module | None = None

    @staticmethod
    def of(tensor: torch.Tensor, model: Callable | None) -> OfAttribute:
        """Where a tensor is found that is no parameter and no buffer."""
        if isinstance(model, torch.nn.Module):
            for name, value in plain_attributes(model).items():
                if value is tensor:
                    return OfAttribute(name, tensor, model)
        return OfAttribute("", tensor)

    def __call__(self, leaves: Sequence[Any]) -> torch.Tensor:
        """The tensor as it is in a call.

        Raises:
            NormMismatchError: it is another one, which the program was not acquired with.
        """
        if self.model is None:
            return self.tensor
        path, _, attribute = self.name.rpartition(".")
        found = vars(self.model.get_submodule(path)).get(attribute)
        if found is self.tensor:
            return found
        if not isinstance(found, torch.Tensor) or type_of(found) != type_of(self.tensor):
            raise NormMismatchError(
                with_details(
                    f"the attribute {self.name!r} of the model is no longer the tensor that the norm map was acquired with",
                    acquired=type_of(self.tensor),
                    now=type_of(found) if isinstance(found, torch.Tensor) else type(found).__name__,
                    instead="build the norm map anew",
                )
            )
        return found


def type_of(t: torch.Tensor) -> str:
    """Dtype, shape and device in words."""
    return f"{t.dtype}{list(t.shape)} on {t.device}"


def plain_attributes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that modules hold as attributes, no parameters and no buffers, by their dotted names."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


# One input of the computation; an int is a position among the sizes given in the call: all norm sizes, then all perturbation sizes.
Source = int | OfArgument | OfModel | OfAttribute


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
        read = [s for s in sources if isinstance(s, OfModel)]
        # one that was read on meta had values while the program was acquired (`initial_buffers`)
        if now._described != self._described or any(now._tensors[s.name].device != s.tensor.device for s in read):
            return None
        for source in read:
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
