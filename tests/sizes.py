"""Comparing norm sizes that different code computed."""

from __future__ import annotations

import torch


def assert_same_size(a: torch.Tensor, b: torch.Tensor) -> None:
    """Two sizes of one program: a trace may write a formula in other operations than eager mode, which round otherwise."""
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-12, atol=0, equal_nan=True)
