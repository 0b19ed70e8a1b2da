"""Types of Python as dtypes, as torch reads them: on plain tensors and on normed ones, in eager mode's words."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import NormedTensor, RMSTensor
from thunder_norm.transforms import NormTransform
import thunder

PROGRAMS = {
    "zeros": lambda x: x + torch.zeros(3, dtype=int),
    "ones": lambda x: torch.ones(3, dtype=bool) & (x > 0),
    "full": lambda x: x * torch.full((3,), 2, dtype=float),
    "eye": lambda x: torch.eye(3, dtype=int),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=int),
    "arange": lambda x: torch.arange(3, dtype=float) + x,
    "tensor": lambda x: torch.tensor([1, 2, 3], dtype=float) + x,
    "new_zeros": lambda x: x.new_zeros(3, dtype=int),
    "empty": lambda x: torch.empty(3, dtype=int).zero_(),
    "sum": lambda x: x.sum(dtype=float),
    "cumsum": lambda x: x.cumsum(0, dtype=float),
    "to": lambda x: x.to(float),
    "to, by name": lambda x: x.to(dtype=float),
    "softmax": lambda x: torch.softmax(x, 0, dtype=float),
    "a default of the user's": lambda x, kind=float: x.to(kind),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_types_as_dtypes(name):
    torch.manual_seed(seeded(0))
    x = torch.randn(3)
    wanted = PROGRAMS[name](x)
    for given in (x, RMSTensor.of(x)):
        found = thunder.jit(PROGRAMS[name], transforms=[NormTransform()])(given)
        torch.testing.assert_close(found.backing if isinstance(found, NormedTensor) else found, wanted)


def test_types_are_no_dtypes_elsewhere():
    def f(x):
        return x * (2 if isinstance(x.shape[0], int) and float("2") == 2 and int is not float else 3)

    assert thunder.jit(f, transforms=[NormTransform()])(torch.ones(3))[0] == 2
