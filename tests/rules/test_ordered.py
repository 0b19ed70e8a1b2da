"""Ranges of differences of sorted entries, against the entries."""

from __future__ import annotations

import random

import pytest
import torch

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.audit import Ball, search
from thunder_norm.core.ranges import Range
from thunder_norm.transforms import NormTransform
import thunder

GAPS = {
    "sort": lambda x: (z := torch.sort(x, -1).values)[:, 1:] - z[:, :-1],
    "method": lambda x: (z := x.sort(dim=-1)[0])[..., 2:] - z[..., :-2],
    "stable": lambda x: (z := torch.sort(x, stable=True, dim=-1)[0])[..., 1:] - z[..., :-1],
    "descending": lambda x: (z := x.sort(dim=0, descending=True)[0])[:-1] - z[1:],
    "by name": lambda x: (z := x.sort(descending=True).values)[:, :-1] - z[:, 1:],
    "narrow": lambda x: (z := torch.sort(x).values).narrow(1, 1, 3) - z.narrow(-1, 0, 3),
    "each second": lambda x: (z := torch.sort(x).values)[:, 1::2] - z[:, ::2],
    "cut twice": lambda x: (z := torch.sort(x).values)[:, 1:][:, 1:] - z[:, 1:-1],
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", GAPS)
def test_what_decays_over_gaps_is_at_most_one(name, traced):
    def decay(x):
        return torch.exp(-GAPS[name](x))

    call = thunder.jit(decay, transforms=[NormTransform()]) if traced else decay
    y = call(RMSTensor(9.0, backing=torch.randn(4, 4)))
    assert actual_norm(y) <= y.norm_size and y.norm_size.item() == pytest.approx(1.0)
    assert search(decay, [Ball("x", LinfTensor, (4, 4), norm_size=2.0)], restarts=4, steps=10, seed=seeded()).is_sound


@pytest.mark.parametrize("number", range(40))
def test_the_range_of_differences_is_right(number):
    """Of two parts of one sorted tensor, or of two, cut at random places of a random dimension, most of which may have either sign."""
    pick = random.Random(seeded(number))
    generator = torch.Generator().manual_seed(seeded(number))
    x = RMSTensor.of(torch.randn(5, 5, generator=generator))
    z, other = (x.sort(dim, descending=falling)[0] for dim, falling in [(pick.choice([0, 1, -1]), pick.random() < 0.5)] * 2)

    def part(t):
        size, step, along = pick.choice([1, 2]), pick.choice([1, 2]), pick.choice([0, 1])
        start = pick.randint(0, 1)
        slices = [slice(None), slice(None)]
        slices[along] = slice(start, start + 3 * step if start + 2 * step < 5 else None, step)
        return t[tuple(slices)] if size == 2 else t.narrow(along, start, 3)

    a, b = part(z), part(pick.choice([z, z, other * 1.5]))
    if a.shape != b.shape:
        a, b = part(z).flatten()[:6], part(z).flatten()[:6]
    for out in (a - b, torch.sub(a, b, alpha=-1), b - a):
        known = out._range or Range()
        assert known.low - 1e-6 <= out.backing.min() and out.backing.max() <= known.high + 1e-6


def test_parts_of_two_sorted_tensors_may_differ_either_way():
    x, y = (LinfTensor(3.0, backing=torch.randn(3, 4, generator=torch.Generator().manual_seed(seeded(s)))) for s in (0, 1))
    gaps = (
        torch.sort(x).values[:, 1:] - torch.sort(y - 2.0).values[:, :-1],
        torch.sort(x, 0).values[1:, :3] - torch.sort(x, 0).values[:-1, 1:],
    )
    for gap in gaps:
        assert (gap._range or Range()).low == -float("inf")


WRITES = {
    "an entry": lambda z: z[:, 0].fill_(5.0),
    "signs": lambda z: z.mul_(torch.tensor([1.0, -1.0, 1.0, -1.0])),
    "all signs": lambda z: z.neg_(),
    "a part": lambda z: z[:, 1:].sub_(4.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_is_sorted_no_more(name):
    def program(x):
        z = torch.sort(x).values
        later, earlier = z[:, 1:], z[:, :-1]
        WRITES[name](z)
        return torch.exp(earlier - later)

    for call in (program, thunder.jit(program, transforms=[NormTransform()])):
        y = call(LinfTensor(3.0, backing=torch.tensor([[3.0, -2, 1, 0.5], [0, 1, 2, 3]])))
        assert 1 < actual_norm(y) <= y.norm_size
