"""``y[mask] = values`` where gradients are wanted, against eager PyTorch: of what is written, and of what is left."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import crossed, seeded
from thunder_norm import transforms
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

MASK = torch.tensor([True, False, True])


def _masked(y, key, values):
    y[key] = values
    return y


# functions of x [3, 4]
PROGRAMS = {
    "rows": lambda x: _masked(x * 1, MASK, (x * 2)[:2]),
    "one row for all": lambda x: _masked(x * 1, MASK, x[1]),
    "one row for all, with dimensions of length 1": lambda x: _masked(x * 1, MASK, x[1][None, None]),
    "a column for each row": lambda x: _masked(x * 1, MASK, x[:2, :1]),
    "a number without dimensions": lambda x: _masked(x * 1, MASK, x.sum()),
    "entries by values": lambda x: _masked(x.sin(), x > 0, (x * 2)[x > 0]),
    "entries of a mask of no dimensions": lambda x: _masked(x * 1, torch.tensor(True), x.exp()),
    "nothing": lambda x: _masked(x * 1, torch.zeros(3, dtype=torch.bool), x[:0]),
    "columns": lambda x: _masked(x * 1, (slice(None), torch.tensor([True, False, False, True])), x[:, :2] * 3),
    "a mask beside indices": lambda x: _masked(x * 1, (MASK, torch.tensor([3, 0])), x[0, :2]),
    "after an ellipsis and a new dimension": lambda x: _masked(
        (x * 1)[None], (..., torch.tensor([True, False, False, False])), x[:, :1]
    ),
    "twice": lambda x: _masked(_masked(x * 1, MASK, x[1:]), x[:, 0] > 0, 0.5),
}


def _given() -> torch.Tensor:
    torch.manual_seed(seeded(0))
    return torch.randn(3, 4).requires_grad_()


@pytest.mark.parametrize(("name", "transform"), crossed(PROGRAMS, [SubclassTransform, NormTransform]))
def test_gradients_are_those_of_eager_mode(name, transform):
    found = []
    for f in (thunder.jit(PROGRAMS[name], transforms=[transform()]), PROGRAMS[name]):
        x = _given()
        y = f(x)
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        found.append((y, first, *torch.autograd.grad(first.sin().sum(), x)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_functions_are_those_of_torch(name):
    def loss(x):
        return PROGRAMS[name](x).sin().sum()

    x = _given().detach()
    torch.testing.assert_close(transforms.grad(loss)(x), torch.func.grad(loss)(x))
