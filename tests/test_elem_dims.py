"""The algebra of elem_dims against norms computed by brute force, on random shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thunder_norm import elem_dims as ed
from thunder_norm.errors import NormMismatchError

D = torch.float64
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def shape_and_dims(draw, count=1):
    shape = draw(shapes)
    every = list(range(-len(shape), 0))
    return shape, *(tuple(sorted(draw(st.sets(st.sampled_from(every))))) for _ in range(count))


def brute_rms(t: torch.Tensor, dims: tuple[int, ...]) -> float:
    """Largest RMS over `dims`, position by position."""
    inside = {d % t.ndim for d in dims}
    groups: dict[tuple, list[float]] = {}
    for index in torch.cartesian_prod(*(torch.arange(n) for n in t.shape)).reshape(-1, t.ndim).tolist():
        groups.setdefault(tuple(i for d, i in enumerate(index) if d not in inside), []).append(t[tuple(index)].item())
    return max(math.sqrt(sum(v * v for v in values) / len(values)) for values in groups.values())


def random(shape):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(math.prod(shape)))


def spike(shape):
    t = torch.zeros(shape, dtype=D)
    t.view(-1)[-1] = 1.0
    return t


@given(shape_and_dims(count=2))
def test_rms_factor_bounds_and_is_attained_by_a_spike(case):
    shape, source, target = case
    factor = ed.rms_factor(shape, source, target)
    for t in (random(shape), spike(shape), torch.ones(shape, dtype=D)):
        assert brute_rms(t, target) <= factor * brute_rms(t, source) * (1 + 1e-12)
    # a spike within what leaves the mean, constant along what stays
    kept = set(source) & set(target)
    witness = spike(shape)
    for d in range(-len(shape), 0):
        if d in kept or d in target:
            witness = witness.amax(d, keepdim=True).expand_as(witness)
    assert brute_rms(witness, target) == pytest.approx(factor * brute_rms(witness, source))


@given(shape_and_dims(count=2))
def test_same_dims_give_the_same_norm(case):
    shape, a, b = case
    if ed.is_same(shape, a, b):
        assert brute_rms(random(shape), a) == pytest.approx(brute_rms(random(shape), b))
    else:
        assert max(ed.rms_factor(shape, a, b), ed.rms_factor(shape, b, a)) > 1


@given(shape_and_dims(), st.data())
def test_permute_moves_dims_along(case, data):
    shape, dims = case
    permutation = data.draw(st.permutations(range(len(shape))))
    t = random(shape)
    assert brute_rms(t.permute(permutation), ed.permute(dims, permutation)) == pytest.approx(brute_rms(t, dims))


@given(shape_and_dims(count=2), st.booleans())
def test_reduce_names_the_dims_that_are_left(case, keepdim):
    shape, dims, reduced = case
    if not reduced:
        return
    out = torch.empty(shape).sum(reduced, keepdim=keepdim)
    left = ed.reduce(dims, reduced, len(shape), keepdim)
    # sizes are unlike each other, so that a dimension is known by its size
    named = torch.empty(tuple(range(2, 2 + len(shape)))).sum(reduced, keepdim=keepdim)
    assert {named.shape[d] for d in left} == {d % len(shape) + 2 for d in dims if d not in reduced}
    assert all(-out.ndim <= d < 0 for d in left)


@given(shape_and_dims(), st.data())
def test_insert_leaves_a_norm_as_it_is(case, data):
    shape, dims = case
    at = data.draw(st.integers(-len(shape) - 1, len(shape)))
    t = random(shape)
    assert brute_rms(t.unsqueeze(at), ed.insert(dims, at, len(shape))) == pytest.approx(brute_rms(t, dims))


def reshapes(numel: int) -> list[tuple[int, ...]]:
    found = {(numel,), (numel, 1), (1, numel)}
    for a in range(1, numel + 1):
        for b in range(1, numel // a + 1):
            if numel % (a * b) == 0:
                found.add((a, b, numel // (a * b)))
    return sorted(found)


@given(shape_and_dims(), st.data())
def test_reshape_is_sound_and_exact_where_it_says_so(case, data):
    shape, dims = case
    new = data.draw(st.sampled_from(reshapes(math.prod(shape))))
    target, is_exact = ed.reshape(dims, shape, new)
    for t in (random(shape), spike(shape)):
        before, after = brute_rms(t, dims), brute_rms(t.reshape(new), target)
        assert after == pytest.approx(before) if is_exact else after <= before * (1 + 1e-12)


@given(shapes, st.data())
def test_reshape_groups_have_equal_products(shape, data):
    new = data.draw(st.sampled_from(reshapes(math.prod(shape))))
    groups = ed.reshape_groups(shape, new)
    assert [d for old, _ in groups for d in old] == list(range(len(shape)))
    assert [d for _, named in groups for d in named] == list(range(len(new)))
    for old, named in groups:
        assert math.prod(shape[d] for d in old) == math.prod(new[d] for d in named)


@given(shape_and_dims(count=3))
def test_align_is_sound_and_no_candidate_is_cheaper(case):
    shape, *candidates = case
    target, factors = ed.align(shape, *candidates)
    for dims, factor in zip(candidates, factors, strict=True):
        for t in (random(shape), spike(shape)):
            assert brute_rms(t, target) <= factor * brute_rms(t, dims) * (1 + 1e-12)
    for other in candidates:
        assert math.prod(factors) <= math.prod(ed.rms_factor(shape, dims, other) for dims in candidates) * (1 + 1e-12)


@given(shape_and_dims())
def test_align_with_itself_costs_nothing(case):
    shape, dims = case
    target, factors = ed.align(shape, dims, dims)
    assert factors == (1.0, 1.0)
    assert ed.is_same(shape, target, dims)


@given(shape_and_dims())
def test_canonical_takes_any_writing(case):
    shape, dims = case
    mixed = [d if d % 2 else d + len(shape) for d in reversed(dims)]
    assert ed.canonical(mixed, len(shape)) == dims
    assert sorted(ed.canonical_ordered(mixed, len(shape))) == list(dims)
    assert ed.numel(shape, dims) == math.prod(shape[d] for d in dims)


@pytest.mark.parametrize("dims", [(3,), (-4,), (0, -3), (1, 1), ("a",)], ids=str)
def test_dims_that_do_not_fit_are_refused(dims):
    with pytest.raises(NormMismatchError):
        ed.canonical(dims, 3)


def test_examples():
    assert ed.reshape((1,), (2, 12, 5), (2, 3, 20)) == ((-2, -1), False)
    assert ed.reshape((2,), (2, 6, 12), (2, 6, 3, 4)) == ((-2, -1), True)
    assert ed.reshape((-1,), (2, 3, 4), (2, 12)) == ((-1,), False)
    assert ed.align((2, 5, 4), (-1,), (-2, -1)) == ((-2, -1), (1.0, 1.0))
    assert ed.rms_factor((2, 12, 5), (-2,), ()) == math.sqrt(12)
    assert ed.reshape((-1,), (0, 3), (3, 0)) == ((-2, -1), True)
