"""What one model of the zoo is, and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.seeds import seeded

TRANSFORMERS, TORCHVISION, TIMM, WRITTEN = "transformers", "torchvision", "timm", "by hand"
SOURCES = (TRANSFORMERS, TORCHVISION, TIMM, WRITTEN)
Build = Callable[[], tuple[nn.Module, tuple, dict[str, Any]]]


@dataclass(frozen=True)
class Model:
    """A model in small, with random weights.

    `build` gives the module and its arguments, positional and by name; it is called anew for every column, under the same seed, and
    imports what it needs.  `source` is the library that the model is from.
    """

    name: str
    source: str
    build: Build


MODELS: dict[str, Model] = {}


def add(name: str, source: str, build: Build) -> None:
    """Add a model to the zoo."""
    assert name not in MODELS and source in SOURCES, name
    MODELS[name] = Model(name, source, build)


@dataclass(frozen=True)
class Built:
    """A module in eval mode and its arguments, the same in every call of `built`."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]

    def __call__(self, call: Callable | None = None) -> Any:
        """What `call`, or the module itself, gives for the arguments."""
        return (call or self.module)(*self.args, **self.kwargs)


def built(model: Model) -> Built:
    torch.manual_seed(seeded(0))
    module, args, kwargs = model.build()
    return Built(module.eval(), args, kwargs)


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order; the mappings of transformers (`ModelOutput`) are pytrees once they are imported."""
    return [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def floating(result: Any) -> list[torch.Tensor]:
    return [t for t in tensors(result) if t.is_floating_point()]
