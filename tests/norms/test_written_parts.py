"""Parts of constants that a program writes normed tensors into (`out[i] += f(x[i])`): values are eager PyTorch's, norms hold, or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.norms.eager import run_eagerly
from thunder_norm.transforms import NormTransform
import thunder


def added_row_by_row(x, f):
    out = torch.zeros_like(x)
    for i in range(3):
        out[i] += f(x[i])
    return out


def added_twice_to_one(x, f):
    out = torch.ones(4, 4)
    out[1] += f(x[0])
    out[1] -= f(x[2])
    return out


def added_by_indices(x, f):
    out, chosen = torch.zeros_like(x), torch.tensor([0, 2])
    out[chosen] += f(x[chosen])
    out[torch.tensor([2, 3])] += f(x[:2])
    return out


def added_by_index_and_slice(x, f):
    out = torch.ones(4, 8)
    out[torch.tensor([1, 3]), 2:6] += f(x[:2])
    return out


def a_view_that_is_kept(x, f):
    out = torch.ones(4, 4)
    first, column = out[0], out[:, 1]
    first += f(x[0])
    return torch.cat([out.flatten(), first, column])


def the_whole_after_views(x, f):
    out = torch.ones(4, 4)
    first, copied = out[0], out[torch.tensor([0])]
    out.add_(f(x))
    return torch.cat([first, copied[0], out[1]])


def mixed_experts(x, f):
    out = torch.zeros_like(x)
    for chosen, weight in ((torch.tensor([0, 3]), 0.3), (torch.tensor([1, 3]), 0.7)):
        out.index_add_(0, chosen, weight * f(x[chosen]))
    return out


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.linear, self.program = nn.Linear(4, 4), program

    def forward(self, x, y):
        return self.program(x, self.linear).reshape(-1, 4) @ y.T


FOLLOWED = [
    added_row_by_row, added_twice_to_one, added_by_indices, added_by_index_and_slice, a_view_that_is_kept, the_whole_after_views, mixed_experts
]  # fmt: skip


@pytest.mark.parametrize("program", FOLLOWED)
@pytest.mark.parametrize("is_x_normed", [False, True])
def test_parts_that_are_written_into(program, is_x_normed):
    torch.manual_seed(seeded(0))
    model, x, y = Model(program), torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        expected = model(x, y)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(2):
        found = jitted(RMSTensor.of(x) if is_x_normed else x, RMSTensor.of(y))
        torch.testing.assert_close(found.backing.detach(), expected)
        assert type(found).of(expected, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)
    assert thunder.cache_misses(jitted) == 1
    given = (RMSTensor.of(x) if is_x_normed else x, RMSTensor.of(y))
    found = run_eagerly(model, given, {}, policy="measured", mode="bound")[0]
    torch.testing.assert_close(found.backing.detach(), expected)
    assert type(found).of(expected, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)


def a_view_that_was_used(x, f):
    out = torch.ones(4, 4)
    row = out[0][None]
    out[1:] += f(x[1:])
    out[0] += f(x[0])
    return torch.cat([out, row])


def a_view_of_a_view(x, f):
    out = torch.ones(4, 4)
    entry = out[:2][0]
    entry += f(x[0])
    return out


def a_view_by_a_zero_dimensional_index(x, f):
    out = torch.ones(4, 4)
    row = out[torch.tensor(1)]
    row += f(x[0])
    return out


@pytest.mark.parametrize("program", [a_view_that_was_used, a_view_of_a_view, a_view_by_a_zero_dimensional_index])
def test_other_views_are_right_or_refused(program):
    torch.manual_seed(seeded(0))
    model, x, y = Model(program), torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        expected = model(x, y)
    runs = (
        lambda: thunder.jit(model, transforms=[NormTransform()])(x, RMSTensor.of(y)),
        lambda: run_eagerly(model, (x, RMSTensor.of(y)), {}, policy="measured", mode="bound")[0],
    )
    for run in runs:
        try:
            found = run()
        except UnsupportedOpError:
            continue
        torch.testing.assert_close(found.backing.detach(), expected)
        assert type(found).of(expected, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)
