"""``x[index] = v``, ``x.copy_(v)``, fold, weight normalization, exponentials of RMS norms: against adversarial inputs and torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, sensitivities, with_perturbation
from thunder_norm.audit import Ball, Case
from thunder_norm.rules.layout.writing import copied, with_entries

R, INF = RMSTensor, LinfTensor
MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, True, True]])


def x(*shape, dims=None, kind=R):
    return Ball("x", kind, shape, 1.0, dims)


def v(*shape, dims=None, kind=R):
    return Ball("v", kind, shape, 0.6, dims)


def writes(*index):
    return lambda a, b: with_entries(a, index if len(index) != 1 else index[0], b)


CASES = [
    Case("a slice of the norm's", writes(..., slice(0, 2)), (x(3, 4), v(3, 2))),
    Case("a slice beside", writes(slice(0, 2)), (x(3, 4), v(2, 4))),
    Case("an index of the norm's", writes(slice(None), 2), (x(3, 4), v(3, kind=INF))),
    Case("an index beside", writes(1), (x(3, 4), v(4))),
    Case("an index and a slice", writes(1, slice(1, None, 2)), (x(3, 4, dims=(0, 1)), v(2))),
    Case("a new dimension", writes(None, slice(0, 2)), (x(3, 4), v(1, 2, 4))),
    Case("broadcast", writes(..., slice(0, 2)), (x(3, 4), v(2))),
    Case("into the largest entries", writes(slice(0, 2)), (x(3, 4, kind=INF), v(2, 4, kind=INF))),
    Case("RMS into the largest entries", writes(..., slice(0, 2)), (x(3, 4, kind=INF), v(3, 2))),
    Case("everything", writes(...), (x(3, 4), v(3, 4))),
    Case("a mask", lambda a: with_entries(a, MASK, 0.5), (x(3, 4),), 0.5),
    Case("rows", lambda a, b: with_entries(a, torch.tensor([2, 0]), b), (x(3, 4), v(2, 4, kind=INF)), 0.5),
    Case("whole rows", lambda a, b: with_entries(a, torch.tensor([2, 0]), b), (x(3, 4), v(2, 4))),
    Case("a mask of rows", lambda a, b: with_entries(a, torch.tensor([True, False, True]), b), (x(3, 4), v(2, 4))),
    Case("one row in several places", lambda a, b: with_entries(a, torch.tensor([2, 0]), b), (x(3, 4), v(4))),
    Case(
        "rows of matrices",
        writes(torch.tensor([[0], [1]]), torch.tensor([[0, 2], [1, 0]]), slice(None)),
        (x(2, 3, 4), v(2, 2, 4)),
    ),
    Case("rows, dots and a number", writes(torch.tensor([1, 0]), ..., slice(None)), (x(3, 2, 4), v(2, 2, 4))),
    Case("columns by a tensor", writes(slice(None), torch.tensor([2, 0])), (x(3, 4), v(3, 2, kind=INF)), 0.5),
    Case("rows into the largest entries", writes(torch.tensor([1, 0]), slice(None)), (x(3, 4, kind=INF), v(2, 4))),
    Case("copied", copied, (x(3, 4), v(4))),
    Case("fold, all", lambda a: F.fold(a, (4, 4), 2, stride=2), (x(8, 4, dims=(-2, -1)),)),
    Case("fold, overlapping", lambda a: F.fold(a, (4, 4), 3, padding=1), (x(9, 16, dims=(-2, -1)),), 0.6),
    Case("fold, columns", lambda a: F.fold(a, (4, 4), 2), (x(8, 9),), 0.9),
    Case("fold, entries", lambda a: F.fold(a, (4, 5), (2, 3), dilation=1, stride=(2, 1)), (x(6, 6, kind=INF),)),
    Case("a row that was not written", lambda a, b: with_entries(a, 1, b)[0], (x(3, 4), v(4))),
    Case("columns that were not written", lambda a, b: with_entries(a, (..., slice(0, 2)), b)[..., 2:], (x(3, 4), v(3, 2)), 0.8),
    Case("every other one", lambda a, b: with_entries(a, (..., slice(0, None, 2)), b)[..., 1::2], (x(3, 4), v(3, 2))),
    Case("rows that were written in part", lambda a, b: with_entries(a, (0, slice(0, 2)), b)[:2, 1:], (x(3, 4), v(2)), 0.5),
    Case("exp of RMS", torch.exp, (x(3, 4),), 0.4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


INDICES = [
    1, -1, slice(1, None), (slice(None), 0), (..., 2), (slice(0, 2), slice(1, 4, 2)), (None, 1), ..., (0, ..., slice(0, 3)),
    torch.tensor([2, 0]), MASK, (slice(None), torch.tensor([2, 0])), (torch.tensor([2, 0]), slice(1, 3)), (torch.tensor([2, 0]), ..., 1),
    (torch.tensor([[0], [1]]), torch.tensor([[0, 2], [1, 3]]), slice(None)), (torch.tensor([0, 1]), slice(None), torch.tensor([2, 0])),
    (None, torch.tensor([2, 0])), (MASK, slice(0, 2)), (0, MASK[0]), ([2, 0], slice(None)), (..., torch.tensor([1, 4])),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_values_are_torchs(index):
    t = torch.randn(3, 4, 5)
    value = torch.randn(t[index].shape)
    for given in (value, 2.5):
        expected, y = t.clone(), 1.0 * RMSTensor.of(t)
        expected[index] = given
        y[index] = RMSTensor.of(given) if isinstance(given, torch.Tensor) and given.ndim else given
        assert torch.equal(y.backing, expected)
        assert type(y).of(expected, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-6)


def test_what_was_not_written_has_the_norm_that_it_had():
    """The inverse of ``1 - a``, row by row, as programs of delta rules write it: each row is read before it is written."""
    torch.manual_seed(seeded(0))
    t = torch.randn(2, 12, 12, dtype=torch.float64).tril(-1) * 0.1
    expected, a = t.clone(), 1.0 * with_perturbation(LinfTensor.of(t, ()), 0.01)
    before = a.norm_size.item(), a.perturbation_size.item()
    for y in (expected, a):
        for i in range(1, 12):
            row, above = y[..., i, :i].clone(), y[..., :i, :i].clone()
            assert y is expected or (row.norm_size.item(), row.perturbation_size.item()) == before
            y[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    torch.testing.assert_close(a.backing, expected)
    assert expected.abs().max() <= a.norm_size == max(a[..., 11, :11].norm_size, a[..., 3:, 1].norm_size)


def test_zeros_filled_by_slices_have_the_norm_of_what_fills_them():
    a, b = RMSTensor.of(torch.randn(3, 2)), RMSTensor.of(torch.randn(3, 4))
    y = torch.zeros_like(RMSTensor.of(torch.randn(3, 6)))
    y[:, :2], y[:, 2:] = a, b
    assert type(y) is RMSTensor
    assert y.norm_size.item() == pytest.approx(((2 * a.norm_size**2 + 4 * b.norm_size**2) / 6).sqrt().item())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_weight_norm(dim):
    torch.manual_seed(seeded(0))
    w, g = (
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn((3, 1) if dim == 0 else (1, 4) if dim == 1 else (), dtype=torch.float64),
    )
    g_normed = with_perturbation(LinfTensor.of(g))
    y = torch._weight_norm(RMSTensor.of(w), g_normed, dim)
    over = {0: (-1,), 1: (-2,), -1: (-2, -1)}[dim]
    assert y.elem_dims == over
    assert y.norm_size.item() == pytest.approx(RMSTensor.of(torch._weight_norm(w, g, dim), over).norm_size.item())
    moved = torch._weight_norm(w, g.sign(), dim)
    assert sensitivities(y, [g_normed])[0].item() == pytest.approx(RMSTensor.of(moved, over).norm_size.item())
    v = with_perturbation(RMSTensor.of(w))
    assert 1e150 < sensitivities(torch._weight_norm(v, LinfTensor.of(g), dim), [v])[0].item() < math.inf
