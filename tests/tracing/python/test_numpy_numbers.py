"""Numbers of NumPy beside tensors: what eager mode computes with them, in every mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.seeds import crossed, seeded
from tests.within_norms import check_bounds
from thunder_norm import RMSTensor
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform
import thunder

TRANSFORMS = (SubclassTransform, NormTransform, SplitBiasTransform)
PROGRAMS = {
    "times": lambda x: x * np.sqrt(5),
    "of single precision": lambda x: x * np.float32(1.1) + np.float16(2),
    "integer": lambda x: x * np.int64(3) - np.uint8(2),
    "bool": lambda x: x * np.bool_(True),
    "on the left": lambda x: np.float64(2) * x + (np.float32(1) - x),
    "in place": lambda x: (x + 1).mul_(np.sqrt(5)),
    "in place, by an operator": lambda x: _scaled(x + 1),
    "of a function": lambda x: torch.add(x, np.float64(2), alpha=np.float32(3)),
    "of Python's function": lambda x: F.softplus(x, np.float64(2)),
    "bound": lambda x: x.clamp(min=np.float64(0.1)),
    "size": lambda x: x.reshape(-1, np.prod((2, 2))),
    "sizes": lambda x: x.reshape((np.int64(3), 2, 2)).expand(np.int32(2), 3, 2, 2),
    "dimension": lambda x: x.sum(np.int64(0)) + x.sum((np.int64(1),), keepdim=True),
    "index": lambda x: x[:, : np.int64(2)] + x[np.int64(1), :2],
    "padding": lambda x: F.pad(x, (np.int64(1), 0)),
    "made": lambda x: torch.full((np.int64(2), 1), np.float64(3)) + x[0],
    "compared": lambda x: x * (x > np.float64(0.1)) + x * (np.int64(0) >= x),
    "compared and chosen": lambda x: torch.where(np.float32(0.5) != x, x, np.float64(2)) * (x == np.float64(1)).logical_not(),
    "looked at": lambda x: x * 2 if np.sqrt(4) == 2 else x,
}


def _scaled(y):
    y *= np.sqrt(3)
    return y


@pytest.mark.parametrize(("name", "transform"), crossed(PROGRAMS, TRANSFORMS))
def test_numbers_of_numpy_are_numbers(name, transform):
    torch.manual_seed(seeded(0))
    f = PROGRAMS[name]
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(3, 4, dtype=dtype)
        found = thunder.jit(f, transforms=[transform()])(x)
        torch.testing.assert_close(found, f(x))  # the dtype too


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_numpy_beside_norms(name):
    torch.manual_seed(seeded(1))
    f, x = PROGRAMS[name], torch.randn(3, 4)
    found = thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x))
    torch.testing.assert_close(found.backing, f(x))
    check_bounds([found])
