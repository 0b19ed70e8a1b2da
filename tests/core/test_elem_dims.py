"""The algebra of elem_dims against norms computed by brute force, on random shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.seeds import seeded
from thunder_norm.core import elem_dims as ed
from thunder_norm.errors import NormMismatchError

D = torch.float64
# sizes 0 and 1 are where index arithmetic goes wrong; a scalar has no dimensions at all
shapes = st.lists(st.sampled_from((1, 2, 3, 4, 0)), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_dims(draw, count=1):
    shape = draw(shapes)
    every = list(range(-len(shape), 0))
    subsets = st.sets(st.sampled_from(every)) if every else st.just(set())
    return shape, *(tuple(sorted(draw(subsets))) for _ in range(count))


def brute_rms(t: torch.Tensor, dims: tuple[int, ...]) -> float:
    """Largest RMS over `dims`, position by position; 0 of nothing."""
    assert all(-t.ndim <= d < 0 for d in dims) and len(set(dims)) == len(dims)
    if t.numel() == 0:
        return 0.0
    if t.ndim == 0:
        return abs(t.item())
    inside = {d % t.ndim for d in dims}
    groups: dict[tuple, list[float]] = {}
    for index in torch.cartesian_prod(*(torch.arange(n) for n in t.shape)).reshape(-1, t.ndim).tolist():
        groups.setdefault(tuple(i for d, i in enumerate(index) if d not in inside), []).append(t[tuple(index)].item())
    return max(math.sqrt(sum(v * v for v in values) / len(values)) for values in groups.values())


def random(shape):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seeded(math.prod(shape))))


def spike(shape):
    t = torch.zeros(shape, dtype=D)
    if t.numel():
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
        if witness.numel() and (d in kept or d in target):
            witness = witness.amax(d, keepdim=True).expand_as(witness)
    assert brute_rms(witness, target) == pytest.approx(factor * brute_rms(witness, source))


@given(shape_and_dims(count=2))
def test_same_dims_give_the_same_norm(case):
    shape, a, b = case
    if ed.is_same(shape, a, b):
        assert brute_rms(random(shape), a) == pytest.approx(brute_rms(random(shape), b))
    elif math.prod(shape):
        assert max(ed.rms_factor(shape, a, b), ed.rms_factor(shape, b, a)) > 1


@given(shape_and_dims(), st.data())
def test_permute_moves_dims_along(case, data):
    shape, dims = case
    permutation = data.draw(st.permutations(range(len(shape))))
    t = random(shape)
    target = ed.permute(dims, permutation)
    assert brute_rms(t.permute(permutation), target) == pytest.approx(brute_rms(t, dims))
    mixed = [d if d % 2 else d - len(shape) for d in permutation]
    assert ed.permute(dims, mixed) == target
    assert [shape[d] for d in dims] == [t.permute(permutation).shape[d] for d in target]  # in the order given


@given(shapes.filter(bool), st.data())
def test_swapped_and_moved_are_torchs_transpose_and_movedim(shape, data):
    any_dim = st.integers(-len(shape), len(shape) - 1)
    t = random(shape)
    first, second = data.draw(any_dim), data.draw(any_dim)
    assert torch.equal(t.permute(ed.swapped(len(shape), first, second)), t.transpose(first, second))
    assert torch.equal(t.permute(ed.moved(len(shape), first, second)), t.movedim(first, second))
    sources = data.draw(st.permutations(range(len(shape))))
    count = data.draw(st.integers(0, len(shape)))
    targets = data.draw(st.permutations(range(-len(shape), 0)))[:count]
    expected = t.movedim(tuple(sources[:count]), tuple(targets))
    assert torch.equal(t.permute(ed.moved(len(shape), sources[:count], targets)), expected)


def test_a_scalar_has_no_dimensions_to_move():
    assert ed.swapped(0, 0, -1) == [] and ed.permute((), ()) == () and ed.without(0, (0,)) == []
    assert ed.reduce((), (0,), 0, True) == () and ed.every(0) == () and ed.insert((), 0, 0) == ()


@given(shape_and_dims(count=2), st.booleans())
def test_reduce_names_the_dims_that_are_left(case, keepdim):
    shape, dims, reduced = case
    t = random(shape)
    left = ed.reduce(dims, reduced, len(shape), keepdim)
    # select keeps a slice in which every entry of the other dimensions is there
    out = t
    for d in reversed(reduced) if keepdim else reduced:
        out = out.narrow(d, 0, min(1, shape[d]))
    expected = brute_rms(out, tuple(d for d in dims if d not in reduced))
    out = out if keepdim or 0 in out.shape else out.squeeze(tuple(reduced)) if reduced else out
    if out.numel():
        assert brute_rms(out, left) == pytest.approx(expected)
    # sizes are unlike each other, so that a dimension is known by its size
    named = torch.empty(tuple(range(2, 2 + len(shape))))
    named = named.sum(reduced, keepdim=keepdim) if reduced else named
    assert {named.shape[d] for d in left} == {d % len(shape) + 2 for d in dims if d not in reduced}
    assert all(-named.ndim <= d < 0 for d in left) and list(left) == sorted(left)


@given(shape_and_dims(), st.data())
def test_insert_leaves_a_norm_as_it_is(case, data):
    shape, dims = case
    at = data.draw(st.integers(-len(shape) - 1, len(shape)))
    t = random(shape)
    target = ed.insert(dims, at, len(shape))
    assert brute_rms(t.unsqueeze(at), target) == pytest.approx(brute_rms(t, dims))
    # the new dimension is not in it, so stacking takes the maximum
    assert brute_rms(torch.stack([t, 2 * t], at), target) == pytest.approx(2 * brute_rms(t, dims))
    assert ed.place(dims, ed.with_new(len(shape), at)) == target


@given(shape_and_dims(), st.data())
def test_place_follows_dimensions_into_any_layout(case, data):
    """An output made by permuting, dropping dimensions (at their first position) and inserting new ones."""
    shape, dims = case
    if 0 in shape:
        return
    kept = data.draw(st.permutations(range(-len(shape), 0)))[: data.draw(st.integers(0, len(shape)))]
    layout = list(kept)
    for _ in range(data.draw(st.integers(0, 2))):
        layout.insert(data.draw(st.integers(0, len(layout))), None)
    t = random(shape)
    gone = [d for d in range(-len(shape), 0) if d not in kept]
    for d in gone:
        t = t.narrow(d, 0, 1)
    before = brute_rms(t, tuple(d for d in dims if d in kept))
    order = [d % len(shape) for d in kept] + [d % len(shape) for d in gone]
    out = t.permute(order).reshape([t.shape[d] for d in kept]) if shape else t
    for i, d in enumerate(layout):
        out = out.unsqueeze(i) if d is None else out
    assert brute_rms(out, ed.place(dims, layout)) == pytest.approx(before)
    assert len(ed.place(dims, layout)) == sum(d in kept for d in dims)


@given(shape_and_dims(), st.data())
def test_copies_make_no_difference_to_a_mean(case, data):
    old, dims = case
    stretched = [data.draw(st.integers(0, 3)) if n == 1 else n for n in old]
    new = (*data.draw(st.lists(st.integers(0, 3), max_size=2)), *stretched)
    t = random(old)
    out = t.broadcast_to(new)
    copied = ed.copies(old, new)
    some = set(data.draw(st.sets(st.sampled_from(copied)))) if copied else set()
    if out.numel():
        for over in (dims, ed.expand(dims, old, new), tuple({*dims, *some}), tuple({*dims} - some)):
            assert brute_rms(out, over) == pytest.approx(brute_rms(t, dims))
    # a sum grows with the copies, so an L1 norm must not run over them
    assert not set(ed.expand(dims, old, new)) & set(copied)
    assert all(out.shape[d] != 1 and (out.numel() == 0 or (out == out.narrow(d, 0, 1)).all()) for d in copied)


@pytest.mark.parametrize("old, new", [((2,), (3,)), ((2, 1), (2,)), ((3,), (3, 1))], ids=str)
def test_shapes_that_do_not_broadcast_are_refused(old, new):
    with pytest.raises(NormMismatchError, match="does not broadcast"):
        ed.copies(old, new)


def reshapes(numel: int) -> list[tuple[int, ...]]:
    if numel == 0:
        return [(0,), (0, 3), (2, 0), (1, 0, 2)]
    found = {(numel,), (numel, 1), (1, numel)} | ({()} if numel == 1 else set())
    for a in range(1, numel + 1):
        for b in range(1, numel // a + 1):
            if numel % (a * b) == 0:
                found.add((a, b, numel // (a * b)))
    return sorted(found)


@given(shape_and_dims(), st.data(), st.sampled_from(("coarsen", "refine")))
def test_reshape_is_sound_and_exact_where_it_says_so(case, data, policy):
    shape, dims = case
    new = data.draw(st.sampled_from(reshapes(math.prod(shape))))
    target, factor, is_exact = ed.reshape(dims, shape, new, policy)
    for t in (random(shape), spike(shape), torch.ones(shape, dtype=D)):
        before, after = brute_rms(t, dims), brute_rms(t.reshape(new), target)
        assert after == pytest.approx(before) if is_exact else after <= factor * before * (1 + 1e-12)
    assert factor == 1 or (policy == "refine" and not is_exact)
    if policy == "refine":  # and is free for a sum: each group of the result lies in one of the input
        t = random(shape).abs()
        assert largest_sum(t.reshape(new), target) <= largest_sum(t, dims) * (1 + 1e-12)


def largest_sum(t: torch.Tensor, dims: tuple[int, ...]) -> float:
    """The largest sum over `dims` of a tensor without negative entries."""
    if t.numel() == 0:
        return 0.0
    return (t.sum(dims) if dims else t).max().item()


@given(shape_and_dims(), st.data())
def test_refused_are_the_reshapes_that_are_not_exact(case, data):
    shape, dims = case
    new = data.draw(st.sampled_from(reshapes(math.prod(shape))))
    coarse, fine = ed.reshape(dims, shape, new), ed.reshape(dims, shape, new, "refine")
    assert coarse.is_exact == fine.is_exact
    if coarse.is_exact:
        assert ed.reshape(dims, shape, new, "refuse") == coarse == fine
        return
    assert set(fine.dims) < set(coarse.dims) and fine.factor > 1
    with pytest.raises(NormMismatchError, match="merges"):
        ed.reshape(dims, shape, new, "refuse")


def test_the_factor_of_a_refined_reshape_is_attained():
    t = torch.zeros(2, 3, dtype=D)
    t[0, 0] = 1.0
    target, factor, _ = ed.reshape((-1,), (2, 3), (6,), "refine")
    assert brute_rms(t.reshape(6), target) == pytest.approx(factor * brute_rms(t, (-1,)))


@given(shapes, st.data())
def test_reshape_groups_have_equal_products(shape, data):
    new = data.draw(st.sampled_from(reshapes(math.prod(shape))))
    if 0 in shape:
        with pytest.raises(NormMismatchError):
            ed.reshape_groups(shape, new)
        return
    groups = ed.reshape_groups(shape, new)
    assert [d for old, _ in groups for d in old] == list(range(len(shape)))
    assert [d for _, named in groups for d in named] == list(range(len(new)))
    for old, named in groups:
        assert math.prod(shape[d] for d in old) == math.prod(new[d] for d in named)
    # minimal: no group can be split in two of equal products
    for old, named in groups:
        inner_old = {math.prod(shape[d] for d in old[:i]) for i in range(1, len(old))}
        inner_new = {math.prod(new[d] for d in named[:i]) for i in range(1, len(named))}
        assert not (inner_old & inner_new) - {1, math.prod(shape[d] for d in old)}


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
    assert ed.reshape((1,), (2, 12, 5), (2, 3, 20)) == ((-2, -1), 1.0, False)
    assert ed.reshape((1,), (2, 12, 5), (2, 3, 20), "refine") == ((), math.sqrt(12), False)
    assert ed.reshape((2,), (2, 6, 12), (2, 6, 3, 4)) == ((-2, -1), 1.0, True)
    assert ed.reshape((-1,), (2, 3, 4), (2, 12)) == ((-1,), 1.0, False)
    assert ed.expand((-1,), (4,), (2, 5, 4)) == (-1,) and ed.copies((4,), (2, 5, 4)) == (-3, -2)
    assert ed.align((2, 5, 4), (-1,), (-2, -1)) == ((-2, -1), (1.0, 1.0))
    assert ed.rms_factor((2, 12, 5), (-2,), ()) == math.sqrt(12)
    assert ed.reshape((-1,), (0, 3), (3, 0)) == ((-2, -1), 1.0, True)
