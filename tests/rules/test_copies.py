"""Copies in the place of views, chunks put together: norms against adversarial inputs; what has no norm is refused."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, NormedTensor, RMSTensor
from thunder_norm.audit import Ball, Case
from thunder_norm.errors import NormMismatchError

R, INF = RMSTensor, LinfTensor


def x(*shape, dims=None, kind=R, size=1.0, name="x"):
    return Ball(name, kind, shape, size, dims)


def y(*shape, dims=None, kind=R):
    return x(*shape, dims=dims, kind=kind, size=0.6, name="y")


def chunk_cat(dim, chunks):
    return lambda a, b: (torch._chunk_cat if isinstance(a, NormedTensor) else written_out)([a, b], dim, chunks)


def written_out(tensors, dim, chunks):
    """torch's `_chunk_cat` has no derivative, which the search needs."""
    rows = []
    for t in tensors:
        missing = -t.shape[dim] % chunks
        zeros = t.new_zeros(*t.shape[:dim], missing, *t.shape[dim + 1 :])
        rows.append(torch.cat([t, zeros], dim).reshape(*t.shape[:dim], chunks, -1))
    return torch.cat(rows, -1)


@pytest.mark.parametrize("dim, chunks", [(0, 2), (1, 2), (1, 3)])
def test_chunk_cat_is_what_the_search_takes_it_for(dim, chunks):
    a, b = torch.randn(2, 3, 2), torch.randn(2, 4)
    assert torch.equal(torch._chunk_cat([a, b], dim, chunks), written_out([a, b], dim, chunks))


CASES = [
    Case("alias_copy", torch.alias_copy, (x(2, 3),)),
    Case("unfold_copy beside", lambda a: torch.unfold_copy(a, 0, 2, 1), (x(4, 3),)),
    Case("unfold_copy over", lambda a: torch.unfold_copy(a, 1, 2, 1), (x(2, 4),)),
    Case("_chunk_cat", chunk_cat(0, 2), (x(3, 2), y(2))),
    Case("_chunk_cat behind", chunk_cat(1, 2), (x(2, 3, 2, dims=(0, 1, 2)), y(2, 2, dims=(0, 1)))),
    Case("_chunk_cat, leading maximum", chunk_cat(1, 2), (x(2, 3, 2, dims=(1, 2)), y(2, 2))),
    Case("_chunk_cat entries", chunk_cat(0, 2), (x(3, 2, kind=INF), y(2, kind=INF))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())
    case.check_at(0.0, seeded())


def test_strides_without_a_norm_are_refused():
    a = RMSTensor.of(torch.ones(2, 3))
    with pytest.raises(NormMismatchError, match="use slices"):
        torch.as_strided(RMSTensor.of(torch.ones(2, 4)[:, :3]), (2,), (3,))
    with pytest.raises(NormMismatchError, match="use slices"):
        torch.as_strided_copy(a, (2, 2), (1, 1))
    with pytest.raises(NormMismatchError, match="use slices"):
        torch.as_strided_scatter(a, torch.ones(2, 2), (2, 2), (1, 1))
    with pytest.raises(NormMismatchError, match="use slices"):
        torch.as_strided_scatter(torch.ones(2, 3), RMSTensor.of(torch.ones(2, 2)), (2, 2), (1, 1))


def test_splits_at_positions_that_are_data_are_refused():
    with pytest.raises(NormMismatchError, match="numbers"):
        torch.tensor_split(RMSTensor.of(torch.ones(4, 3)), torch.tensor([1, 2]))


PYTHONS_TYPES = {
    "to bool": lambda x: x.to(bool),
    "to float": lambda x: x.to(float),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=bool),
    "ones_like": lambda x: torch.ones_like(x, dtype=int),
    "full_like": lambda x: torch.full_like(x, 2, dtype=float),
    "new_ones": lambda x: x.new_ones(3, dtype=bool),
}


@pytest.mark.parametrize("name", PYTHONS_TYPES)
def test_types_of_python_are_dtypes(name):
    """A tensor of bools had the norm that its numbers had, of which entries of 1 know nothing."""
    f, x = PYTHONS_TYPES[name], torch.full((3, 4), 0.01)
    found, expected = f(RMSTensor.of(x)), f(x)
    assert found.dtype == expected.dtype
    assert isinstance(found, RMSTensor | LinfTensor) is expected.is_floating_point()
    torch.testing.assert_close(found.backing if expected.is_floating_point() else found, expected)
