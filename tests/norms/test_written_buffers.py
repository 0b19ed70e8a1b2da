"""Buffers that a program writes normed tensors into: values and state are eager PyTorch's, and norms hold for all inputs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import NormedTensor, RMSTensor, build_norm_map, norm_report, normed
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

DECAY = 0.9


def data_in_place(m, y):
    m.buffer.data.mul_(DECAY).add_(y.mean(0).detach(), alpha=1 - DECAY)
    return y - m.buffer


def in_place_under_no_grad(m, y):
    with torch.no_grad():
        m.buffer.mul_(DECAY).add_(y.mean(0), alpha=1 - DECAY)
    return y - m.buffer


def lerp(m, y):
    with torch.no_grad():
        m.buffer.lerp_(y.mean(0), 1 - DECAY)
    return (y - m.buffer) * 2


def copied(m, y):
    with torch.no_grad():
        m.buffer.copy_(m.buffer * DECAY + (1 - DECAY) * y.mean(0))
    return y - m.buffer


def assigned(m, y):
    m.buffer = m.buffer * DECAY + (1 - DECAY) * y.mean(0).detach()
    return y - m.buffer


def subtracted(m, y):
    with torch.no_grad():
        m.buffer -= (1 - DECAY) * (m.buffer - y.mean(0))
    return y - m.buffer


def written_again(m, y):
    held = m.buffer.data
    with torch.no_grad():
        m.buffer.add_(y.mean(0), alpha=1 - DECAY)
        m.buffer.mul_(0.5)
        m.buffer[1:3] = 0.25
        m.buffer.add_(y.abs().amax(0))
    return y * m.buffer + held


def a_part(m, y):
    with torch.no_grad():
        m.buffer[:3] = y.mean(0)[:3]
    return y - m.buffer


def by_another_name(m, y):
    def moved(average, new):
        average.data.mul_(DECAY).add_(new, alpha=1 - DECAY)

    moved(m.buffer, y.mean(0).detach())
    return y - 0.5 * m.buffer


def codebook(m, y):
    distances = y.pow(2).sum(1, keepdim=True) - 2 * y @ m.table.t() + m.table.pow(2).sum(1)
    nearest = distances.argmin(1)
    m.table.data.mul_(DECAY).add_(F.one_hot(nearest, 6).to(y.dtype).t() @ y.detach(), alpha=1 - DECAY)
    return y + (F.embedding(nearest, m.table) - y).detach()


def queue(m, y):
    scores = y @ m.table.clone().detach().t()
    with torch.no_grad():
        m.table[: y.shape[0]] = y
    return scores + y @ m.table.t()


def kept_values(m, y):
    m.table[1 : 1 + y.shape[0]] = y.detach()
    return F.scaled_dot_product_attention(y[None], m.table[None], m.table[None])[0]


def added_by_index(m, y):
    with torch.no_grad():
        m.table.index_add_(0, torch.arange(y.shape[0]) // 2, y)
    return y @ m.table.t()


def not_used(m, y):
    m.buffer.data.lerp_(y.detach().mean(0), 1 - DECAY)
    return y


PROGRAMS = [
    data_in_place, in_place_under_no_grad, lerp, copied, assigned, subtracted, written_again, a_part, by_another_name, codebook, queue, kept_values, added_by_index, not_used
]  # fmt: skip


class Model(nn.Module):
    buffer: torch.Tensor
    table: torch.Tensor

    def __init__(self, program):
        super().__init__()
        self.linear, self.program = nn.Linear(6, 6), program
        self.register_buffer("buffer", torch.randn(6))
        self.register_buffer("table", torch.randn(6, 6))

    def forward(self, x):
        return self.program(self, self.linear(x))


@pytest.fixture
def make():
    def made(program):
        torch.manual_seed(seeded(0))
        return Model(program)

    return made


def state(model):
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def no_larger(x, norm):
    """Of each row's norm no more than x has."""
    return x / x.square().mean(-1, keepdim=True).sqrt() * norm


@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_are_eager_ones_and_norms_hold_for_all_inputs(program, make):
    model, eager = make(program), make(program)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for rows in (4, 3):
        x, before = torch.randn(rows, 6), copy.deepcopy(eager)
        found = jitted(RMSTensor.of(x))
        torch.testing.assert_close(found.backing, eager(x))
        torch.testing.assert_close(state(model), state(eager))
        assert all(type(t) in (torch.Tensor, nn.Parameter) for t in model.state_dict(keep_vars=True).values())
        bound = found.norm_size * (1 + 1e-5)
        for other in (x, *(no_larger(torch.randn(rows, 6), RMSTensor.of(x).norm_size) for _ in range(5))):
            y = copy.deepcopy(before)(other.to(x.dtype))
            assert actual_norm(type(found)._wrap(y, found.norm_size, None, found.elem_dims)) <= bound


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_that_look_leave_the_state_and_agree(program, make):
    model, x = make(program), torch.randn(4, 6)
    before, jitted = state(model), thunder.jit(model, transforms=[NormTransform(parameters="unit")])
    rows = norm_report(jitted, RMSTensor.of(x), sensitivity="global").rows
    torch.testing.assert_close(state(model), before)
    found = normed(jitted)(RMSTensor.of(x)).norm_size.item()
    assert any(r.norm_size == pytest.approx(found) for r in rows)
    modular = ModularNorm(make(program), x, mode="typical")
    assert modular.unreached == () and all(t > 0 for t in modular.targets.values())
    if program is not codebook:  # the nearest entries depend on values
        mapped = build_norm_map(make(program), x, parameters="unit")(RMSTensor.of(x))
        assert mapped.norm_size.item() == pytest.approx(found)


def a_view_of_it_is_written(m, y):
    row = m.table[1:5]
    with torch.no_grad():
        row.copy_(y)
    return y @ m.table.t()


def a_view_of_it_is_used(m, y):
    row = m.table[1]
    with torch.no_grad():
        m.table.lerp_(y.mean(0)[None].expand(6, 6), 0.1)
    return y * row


def a_view_of_what_it_became_is_written(m, y):
    with torch.no_grad():
        m.table.copy_(y.mean(0)[None].expand(6, 6))
        m.table[1:3].mul_(2.0)
    return y @ m.table.t()


@pytest.mark.parametrize("program", [a_view_of_it_is_written, a_view_of_it_is_used, a_view_of_what_it_became_is_written])
def test_views_are_right_or_refused(program, make):
    model, eager, x = make(program), make(program), torch.randn(4, 6)
    expected = eager(x)
    last = norm_report(thunder.jit(make(program), transforms=[NormTransform()]), x).rows[-1]
    assert last.actual <= last.norm_size * (1 + 1e-5)
    try:
        found = thunder.jit(model, transforms=[NormTransform()])(RMSTensor.of(x))
    except UnsupportedOpError:
        return
    torch.testing.assert_close(found.backing, expected)
    torch.testing.assert_close(state(model), state(eager))
    assert actual_norm(found) <= found.norm_size * (1 + 1e-5)


def test_data_that_is_set_to_a_normed_tensor_in_a_run_that_looks(make):
    def program(m, y):
        m.buffer.data = m.buffer.data * DECAY + (1 - DECAY) * y.mean(0).detach()
        return y - m.buffer

    model, x = make(program), torch.randn(4, 6)
    before, expected = state(model), make(program)(x)
    last = norm_report(thunder.jit(model, transforms=[NormTransform()]), x).rows[-1]
    assert isinstance(expected, torch.Tensor) and not isinstance(expected, NormedTensor)
    assert last.actual == pytest.approx(actual_norm(RMSTensor.of(expected)).item(), rel=1e-5)
    torch.testing.assert_close(state(model), before)
