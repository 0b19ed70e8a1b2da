"""Models of timm and torchvision: the smallest of each module, or as they are; their classes have no small configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = Callable[[], tuple[nn.Module, dict[str, Any]]]


def of_torchvision(name: str) -> Made:
    """A model by its name."""
    import torchvision

    make = lambda: torchvision.models.get_model(name, weights=None)  # noqa: E731
    return _on_first_image(make, ((3, 64, 64), (3, 224, 224), (3, 8, 112, 112)))


def of_timm(module: str) -> Made:
    """The smallest of the first models of a module, with ten classes."""
    import timm

    def size(model: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(model).parameters())

    smallest = min(timm.list_models(module=module)[:6], key=size)
    return _on_first_image(lambda: timm.create_model(smallest, num_classes=10), ((3, 64, 64), (3, 224, 224), (3, 256, 256)))


def _on_first_image(make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...]) -> Made:
    """With an image of the first of these shapes that the model runs on in eager PyTorch."""
    module = make().eval()
    name = next(iter(inspect.signature(module.forward).parameters))
    for shape in shapes:
        try:
            with torch.no_grad():
                module(torch.zeros(1, *shape))
        except Exception:  # noqa: BLE001 - of a fixed size, or too small an image
            continue
        return lambda: (make(), {name: torch.randn(1, *shape)})
    raise ValueError(f"{type(module).__name__} runs on none of {shapes}")
