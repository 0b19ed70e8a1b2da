"""Models that others have wrapped: the module inside."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import OptimizedModule

from thunder.core.module import ThunderModule


def unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    """The module inside, and the process group it is replicated in."""
    group = None
    while True:
        if isinstance(model, ThunderModule):
            model = model._model
        elif isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model, group = model.module, model.process_group
        elif isinstance(model, torch.nn.DataParallel):
            model = model.module
        else:
            return model, group
