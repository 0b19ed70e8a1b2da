"""Numbers of NumPy beside tensors: what eager mode computes with them, in every mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Scaled(nn.Module):
    """Says what it is given besides a tensor."""

    def forward(self, x, by=1.0):
        return x * by, type(by).__name__, by.dtype, by + by


CALLS = {
    "by position": lambda m, x, by: m(x, by),
    "by keyword": lambda m, x, by: m(x, by=by),
    "the method": lambda m, x, by: m.forward(x, by),
    "checkpointed": lambda m, x, by: checkpoint(m, x, by, use_reentrant=False),
    "with other parameters": lambda m, x, by: torch.func.functional_call(m, {}, (x, by)),
}


@pytest.mark.parametrize(("name", "transform"), crossed(CALLS, (SubclassTransform, NormTransform)))
def test_modules_are_given_numbers_of_numpy_as_they_are(name, transform):
    m, x = Scaled(), torch.linspace(-1, 1, 4)
    jitted = thunder.jit(lambda x, by: CALLS[name](m, x, by), transforms=[transform()])
    for by in (np.int8(100), np.float32(2)):  # of which the sum is another in Python
        found, expected = jitted(x, by), CALLS[name](m, x, by)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1:] == expected[1:] and type(found[3]) is type(expected[3])
