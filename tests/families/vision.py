"""Models of timm and torchvision: the smallest of each module, or as they are; their classes have no small configurations."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = Callable[[], tuple[nn.Module, dict[str, Any]]]


def of_torchvision(name: str) -> Made:
    """A model by its name, also of parts of it without trained weights, which would be fetched."""
    import torchvision

    parameters = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    weights = dict.fromkeys(n for n in ("weights", "weights_backbone") if n in parameters)
    make = lambda: torchvision.models.get_model(name, **weights)  # noqa: E731
    return _on_first_image(make, ((3, 64, 64), (3, 128, 128), (3, 224, 224), (3, 8, 112, 112), (3, 16, 224, 224)))


# what makes a model of timm small, where its class takes it
SIZES: tuple[dict[str, Any], ...] = ({"img_size": 64}, {"img_size": 128}, {})
DEPTHS: tuple[dict[str, Any], ...] = ({"depth": 2}, {"depths": (1, 1, 1, 1)}, {"layers": (1, 1, 1, 1)}, {})


def of_timm(module: str) -> Made:
    """The smallest of the first models of a module, with ten classes, for small images and of few layers where its class takes that."""
    import timm

    def size(model: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(model).parameters())

    smallest = min(timm.list_models(module=module)[:6], key=size)
    for depths, sizes in itertools.product(DEPTHS, SIZES):
        make = functools.partial(timm.create_model, smallest, num_classes=10, **depths, **sizes)
        try:
            return _on_first_image(make, ((3, 64, 64), (3, 160, 160), (3, 224, 224), (3, 256, 256), (3, 384, 384)))
        except Exception:  # noqa: BLE001 - it takes none of these arguments, or not together
            if not depths and not sizes:
                raise
    raise AssertionError("the model as it is comes last")


def _on_first_image(make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...]) -> Made:
    """With an image of the first of these shapes that the model runs on in eager PyTorch: one, a list of one, or one for each argument."""
    module = make().eval()
    names = list(inspect.signature(module.forward).parameters)
    pair = [n for n in names if n in ("image1", "image2")]

    def given(shape: tuple[int, ...]) -> dict[str, Any]:
        if names[0] == "images":
            return {"images": [torch.randn(shape)]}
        return {n: torch.randn(1, *shape) for n in pair or names[:1]}

    for shape in shapes:
        try:
            with torch.no_grad():
                module(**given(shape))
        except Exception:  # noqa: BLE001 - of a fixed size, or too small an image
            continue
        return lambda: (make(), given(shape))
    raise ValueError(f"{type(module).__name__} runs on none of {shapes}")
