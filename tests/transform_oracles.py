"""Comparing transforms of functions with torch.func's, and with each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.seeds import seeded


def assert_same(found: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    """Two trees have the same structure, and tensors of the same dtypes and values in the same places."""
    leaves, spec = tree_flatten(found)
    wanted, expected_spec = tree_flatten(expected)
    assert spec == expected_spec
    for v, w in zip(leaves, wanted, strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(v, w, rtol=rtol, atol=atol)
        else:
            assert v == w


def float64(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers that are the same in every test that asks for the same."""
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(seed + 1000 * len(shape) + sum(shape)))
    )
