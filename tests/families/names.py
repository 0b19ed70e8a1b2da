"""The names of all families, and a model in small of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models_zoo.case import TIMM, TORCHVISION, TRANSFORMERS, Model
from tests.seeds import seeded

from .inputs import arguments
from .particular import PARTICULAR
from .shrunk import STAYS, changes
from .vision import of_timm, of_torchvision

LARGEST = 40_000_000  # parameters


class NotSmallError(Exception):
    """What was made of a configuration is still too large to be run here."""


def families(source: str) -> list[str]:
    """The names of all architectures of a library."""
    if source == TRANSFORMERS:
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        return list(MODEL_MAPPING_NAMES)
    if source == TIMM:
        import timm

        return sorted(timm.list_modules())
    import torchvision

    return sorted(torchvision.models.list_models())


def family(source: str, name: str) -> Model:
    """A model in small, of random weights, with arguments that eager PyTorch accepts."""
    make = {TRANSFORMERS: _of_transformers, TIMM: of_timm, TORCHVISION: of_torchvision}[source]
    return Model(name, source, _once_found(lambda: make(name)))


def _once_found(make: Callable[[], Callable[[], tuple[nn.Module, dict[str, Any]]]]) -> Callable[[], tuple]:
    """What builds a model each time, and finds out how once."""
    found: list[Callable] = []

    def build() -> tuple[nn.Module, tuple, dict[str, Any]]:
        if not found:
            found.append(make())
        torch.manual_seed(seeded(0))
        module, kwargs = found[0]()
        return module, (), kwargs

    return build


def _of_transformers(name: str) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    """The smallest that runs: what does not fit in small is left as it is in large."""
    said: list[Exception] = []
    for stays in STAYS:
        try:
            return _shrunk(name, stays)
        except Exception as e:  # noqa: BLE001 - any error says that the entries do not fit one another
            said.append(e)
    raise said[0]


def _shrunk(name: str, stays: Callable[[str, Any], bool]) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    large = CONFIG_MAPPING[name]()
    config = type(large)(**_merged(changes(large, stays=stays), PARTICULAR.get(name, {})))
    make = lambda: transformers.AutoModel.from_config(config)  # noqa: E731
    with torch.device("meta"):
        _check_small(make())
    module = make()
    kwargs = arguments(module, config)
    return lambda: (make(), {name: t.clone() for name, t in kwargs.items()})


def _merged(entries: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The entries with the others in their place, those within a configuration one by one."""
    within = {n: v for n, v in others.items() if isinstance(v, dict) and n.endswith("_config") and n in entries}
    return entries | others | {n: _merged(entries[n], v) for n, v in within.items()}


def _check_small(module: nn.Module) -> None:
    size = sum(p.numel() for p in module.parameters())
    if size > LARGEST:
        name, largest = max(module.named_parameters(), key=lambda item: item[1].numel())
        raise NotSmallError(f"{size:,} parameters, of which {name} {[*largest.shape]}")
