"""Models that others have wrapped: the module inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import OptimizedModule

from thunder.core.module import ThunderModule


def layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model, what it wraps, and so on to the module inside."""
    while True:
        yield model
        if isinstance(model, ThunderModule):
            model = model._model
        elif isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        else:
            return


def unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """The module inside, and the process group it is replicated in."""
    *outside, inside = layers(model)
    groups = [m.process_group for m in outside if isinstance(m, torch.nn.parallel.DistributedDataParallel)]
    return inside, groups[-1] if groups else None
