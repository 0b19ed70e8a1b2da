"""Normed tensors for tests of dispatch."""

from __future__ import annotations

from typing import Any

import torch

from thunder_norm import (
    RMSTensor,
)

aten = torch.ops.aten


def rms(size: float = 1.0, shape: tuple[int, ...] = (4, 8), **options: Any) -> RMSTensor:
    """A normed tensor with data inside its ball."""
    t = torch.randn(shape)
    return RMSTensor(size, backing=t * (size / RMSTensor.of(t).norm_size.float()), **options)
