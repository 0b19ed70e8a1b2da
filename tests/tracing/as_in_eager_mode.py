"""Programs that return a tensor and what they saw, compared with eager mode."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder_norm.transforms import NormTransform
import thunder


def check_program(f: Callable) -> None:
    """Two calls with other numbers, acquired once: tensors and what the program saw are eager mode's."""
    jitted = thunder.jit(f, transforms=[NormTransform()])
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])):
        (found, *seen), (expected, *wanted) = jitted(x), f(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert seen == wanted
    assert thunder.cache_misses(jitted) == 1
