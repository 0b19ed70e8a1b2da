"""Which modules of a model are checkpointed."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch

from thunder_norm.errors import CheckpointError, with_details

EVERY_BLOCK = "every block"


def chosen_modules(model: torch.nn.Module, policy: str | Sequence[str]) -> dict[str, torch.nn.Module]:
    """The modules that a policy names, by name.

    "every block": the modules with children of their own in a ModuleList or Sequential, the outermost ones: the layers of a
    transformer, the stages of a convolutional network.  Otherwise names or patterns, as ``"layers.*"``.

    Raises:
        CheckpointError: the model has no blocks, or no module of that name.
    """
    modules = dict(model.named_modules())
    if policy == EVERY_BLOCK:
        found = _blocks(modules)
        if not found:
            raise CheckpointError(
                with_details(
                    f'"{EVERY_BLOCK}": {type(model).__name__} has no ModuleList or Sequential of modules with children',
                    instead="name the modules",
                )
            )
        return found
    found = {}
    for name in policy:
        matching = {n: m for n, m in modules.items() if n and fnmatch.fnmatchcase(n, name)}
        if not matching:
            raise CheckpointError(
                with_details(
                    f"{type(model).__name__} has no module {name!r}", known=", ".join(n for n in modules if n) or "(none)"
                )
            )
        found |= matching
    return found


def _blocks(modules: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    found: dict[str, torch.nn.Module] = {}
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0])
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential)) and not is_inside and any(module.children()):
            found[name] = module
    return found
