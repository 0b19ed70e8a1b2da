"""What stands for a wrapper subclass instance while a trace is acquired."""

from __future__ import annotations

from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

from thunder_norm.subclass.protocol import outer_metadata


class SubclassProxy(TensorProxy):
    """A proxy whose one field of truth is `fake`: an instance of the user's class over fake inner tensors.

    Type, shape, dtype, context and methods are the fake's own; nothing is copied that could get out of step.  It appears in
    the acquired trace only as the product of (un)flattening and is gone once `boundary.lower` ran.
    """

    def __init__(self, fake: torch.Tensor, *, name: str | None = None, history: Any = None, tags: set | None = None):
        shape, _, _ = outer_metadata(fake)
        with torch._C.DisableTorchFunctionSubclass():
            dtype, device = fake.dtype, fake.device
        super().__init__(
            name,
            shape=shape,
            device=devices.to_device(device),
            dtype=dtypes.to_dtype(dtype),
            requires_grad=False,
            history=history,
            tags=tags,
        )
        self.fake = fake

    def replace(self, **changes: Any) -> SubclassProxy:
        """A copy under another name (the interpreter renames proxies after the user's variables)."""
        return SubclassProxy(
            self.fake,
            name=changes.get("name", self.name),
            history=changes.get("history", self.history),
            tags=changes.get("tags", self.tags),
        )

    def type_string(self) -> str:
        """Shown in traces: the class, then what a tensor shows."""
        return f"{type(self.fake).__name__} {super().type_string()}"
