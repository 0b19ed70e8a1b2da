"""Entries by their order, of what was in part set aside: in any spelling the number in place of the others is in no bound, where enough are left."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from tests.within_norms import actual_norm
from thunder_norm import LinfTensor, RMSTensor, norm_sensitivity, normed
from thunder_norm.audit import Ball, Case, search
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

SEARCH = {"restarts": 2, "steps": 8, "seed": seeded()}
MASK = torch.tensor([[0, 0, 1], [0, 1, 0]]).bool()[:, :, None]
PLACES = torch.tensor([0, 1, 2, 1, 0, 2])
SPELLED = {
    "masked_fill": lambda x, v: x.masked_fill(MASK, v),
    "subtracted": lambda x, v: x - (-v) * MASK.to(x.dtype),
    "added": lambda x, v: x + MASK.double() * v,
    "added in place": lambda x, v: x.clone().add_(torch.zeros(2, 3, 1, dtype=x.dtype).masked_fill(MASK, v)),
    "on the left": lambda x, v: torch.where(MASK, v, 0.0).double() + x,
    "in other places": lambda x, v: x.masked_fill(MASK, v).transpose(0, 2).transpose(0, 2),
    "a view": lambda x, v: (x + MASK.double() * v).reshape(6, 4).view(2, 3, 4),
}
ORDERED = {
    "amax": (lambda x: x.amax(1), 1),
    "topk": (lambda x: x.topk(2, 1).values, 1),
    "topk, smallest": (lambda x: x.topk(2, 1, largest=False)[0], -1),
    "kthvalue": (lambda x: x.kthvalue(2, 1).values, -1),
    "max of all": (lambda x: x.max(), 1),
    "min of all": (lambda x: x.min(), -1),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x.transpose(1, 2), 1), 1),
    "adaptive_max_pool2d, indices": (lambda x: F.adaptive_max_pool2d(x, (1, 4), return_indices=True)[0], 1),
    "max_pool1d": (lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1), 1),
    "max_pool2d": (lambda x: F.max_pool2d(x, (3, 2), return_indices=True)[0], 1),
    "relu": (torch.relu, 1),
    "logsumexp": (lambda x: x.logsumexp(1), 1),
}


def draws(shape=(2, 3, 4), count=2):
    generator = torch.Generator().manual_seed(seeded(0))
    corners = (s * torch.ones(shape).double() for s in (1, -1))
    one = torch.zeros(shape, dtype=torch.float64)
    one[..., -1, 0] = 1.0
    return [*torch.randn(count, *shape, dtype=torch.float64, generator=generator), *corners, one, -one]


def assert_holds(f, kind, dims, shape=(2, 3, 4), most=math.inf):
    """No tensor of norm 1 exceeds what is claimed, and none moves farther."""
    given = [t / kind.of(t, dims).norm_size for t in draws(shape)]
    for t in given:
        with norm_sensitivity("global"):
            y = f(kind(1.0, backing=t, elem_dims=dims, perturbation_size=1.0))
        assert actual_norm(y) <= y.norm_size * (1 + 1e-9) and y.norm_size <= most
        torch.testing.assert_close(y.backing, f(t))
        moved = (f(t + 1e-6 * given[0]) - f(t - 1e-6 * given[0])) / 2e-6
        assert type(y).of(moved, y.elem_dims).norm_size <= y.perturbation_size * (1 + 1e-6) + 1e-6
    with norm_sensitivity("local"):
        y = f(kind.of(2 * draws(shape)[0], dims))
    assert actual_norm(y) <= y.norm_size * (1 + 1e-9) and y.norm_size <= 10 * most


@pytest.mark.parametrize("ordered", ORDERED)
@pytest.mark.parametrize("spelled", SPELLED)
def test_the_number_in_place_of_the_others_is_in_no_bound(spelled, ordered):
    (reduce, sign), lower = ORDERED[ordered], SPELLED[spelled]
    for kind, dims in ((RMSTensor, (-1,)), (LinfTensor, ())):
        for v in (-1e9, -0.3):
            assert_holds(lambda x, v=v: reduce(lower(x, sign * v)), kind, dims, most=12.0)


FEW = {
    "topk of one too many": lambda x: x.masked_fill(MASK, -1e3).topk(3, 1).values,
    "a window of none": lambda x: F.max_pool1d((x - 1e3 * MASK.double()).transpose(1, 2), 1),
    "the smallest of what was lowered": lambda x: (x - 1e3 * MASK.double()).amin(1),
    "the largest of what was raised": lambda x: (x + 1e3 * MASK.double()).max(1)[0],
    "of both signs": lambda x: (x + torch.tensor([1e3, 0.0, -1e3]).double()[:, None]).amax(1),
    "twice": lambda x: (x - 1e3 * MASK.double() + 1e3).amax(1),
    "a place where none goes": lambda x: torch.full((4, 4), -1e3).double().index_reduce(0, PLACES, x.reshape(6, 4), "amax"),
    "the least beside what is lower": lambda x: (
        torch.full((3, 4), -1e3).double().index_reduce(0, PLACES, x.reshape(6, 4), "amin")
    ),
}


@pytest.mark.parametrize("name", FEW)
def test_where_the_number_is_taken_it_is_the_norm(name):
    assert_holds(FEW[name], RMSTensor, (-1,))
    with norm_sensitivity("global"):
        assert FEW[name](RMSTensor(1.0, backing=draws()[0])).norm_size >= 500


def scattered(x, v=-1e9, reduce="amax"):
    return torch.full((3, 4), v).double().scatter_reduce(0, PLACES[:, None].expand(6, 4), x.reshape(6, 4), reduce)


GROUPS = {
    "scatter_reduce": scattered,
    "scatter_reduce, amin": lambda x: scattered(x, 1e9, "amin"),
    "scatter_reduce, beside little": lambda x: scattered(x, -0.3),
    "index_reduce": lambda x: torch.full((3, 4), -1e9).double().index_reduce(0, PLACES, x.reshape(6, 4), "amax"),
    "relu of a place where none goes": lambda x: F.relu(
        torch.full((4, 4), -1e9).double().index_reduce(0, PLACES, x.reshape(6, 4), "amax")
    ),
    "relu of a view": lambda x: torch.full((4, 4), -1e9).double().index_reduce(0, PLACES, x.reshape(6, 4), "amax").t().relu(),
}


@pytest.mark.parametrize("name", GROUPS)
def test_largest_entries_of_groups_do_not_know_what_they_stand_beside(name):
    for kind, dims in ((RMSTensor, (-1,)), (LinfTensor, ())):
        assert_holds(GROUPS[name], kind, dims, most=12.0)


def test_a_trace_finds_out_whether_enough_are_left():
    def f(x, mask, places):
        largest = torch.full((3, 4), -1e9).scatter_reduce(0, places[:, None].expand(6, 4), x.reshape(6, 4), "amax")
        return (x - 1e9 * mask.float()).amax(1), x.masked_fill(mask, -1e9).topk(2, 1)[0], largest

    jitted, x = thunder.jit(f, transforms=[NormTransform()]), draws()[0].float()
    gone = MASK | torch.tensor([True, True, False])[:, None]
    for mask, places, most in ((MASK, PLACES, 20.0), (gone, PLACES.clamp(max=1), math.inf)):
        for y in normed(jitted)(RMSTensor.of(x), mask, places):
            assert actual_norm(y) <= y.norm_size * (1 + 1e-6) and y.norm_size <= most


class Messages(nn.Module):
    """Nodes that take the largest of what their neighbours say, of padded lists."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 2)

    def forward(self, ids):
        x = self.embed(ids) - 1e9 * (ids == 0).float()[..., None]
        return self.out(F.adaptive_max_pool1d(x.transpose(1, 2), 1).squeeze(2))


def test_pooled_tokens_have_targets():
    """They were 1e-10."""
    torch.manual_seed(seeded(0))
    assert min(ModularNorm(Messages(), torch.tensor([[3, 1, 0], [2, 0, 0]]), mode="typical").targets.values()) > 1e-3


def _masked(op, *args, v=-1e3, shape=(2, 3, 4), **kwargs):
    """A search's program: what an operation makes of what is in every second place lowered (raised)."""
    mask = torch.arange(math.prod(shape)).reshape(shape) % 2 == 1

    def call(x):
        result = op(x.masked_fill(mask, v), *args, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    return Case(getattr(op, "__name__", str(op)), call, (Ball("x", LinfTensor, shape, 1.0, ()),), 0.0, SEARCH)


IMAGES = ((1, 2, 4), (1, 2, 2, 4), (1, 1, 2, 2, 4))
STEPS = [
    Case("adds", lambda x: (x + -1e3 * MASK.double()).amax(1), (Ball("x", RMSTensor, (2, 3, 4), 1.0),), 0.0, SEARCH),
    Case(
        "subtracts",
        lambda x: (x - 1e3 * MASK.double().expand(2, 3, 4)).max(1)[0],
        (Ball("x", RMSTensor, (2, 3, 4), 1.0),),
        0.0,
        SEARCH,
    ),
    *(
        Case(name, GROUPS[name], (Ball("x", RMSTensor, (2, 3, 4), 1.0),), 0.0, SEARCH)
        for name in ("scatter_reduce", "index_reduce", "relu of a view")
    ),
    *(_masked(op, 2, **kwargs) for op, kwargs in ((torch.topk, {}), (torch.kthvalue, {"v": 1e3}))),
    *(_masked(op, 2, v=1e3) for op in (torch.amin, torch.min)),
    *(_masked(op, v=v) for op, v in ((torch.max, -1e3), (torch.min, 1e3), (F.relu, -1e3))),
    *(
        _masked(getattr(F, f"{name}max_pool{dims}d"), 2 if not name else 1, shape=shape, return_indices=indices)
        for dims, shape in enumerate(IMAGES, 1)
        for name in ("", "adaptive_")
        for indices in (False, True)
    ),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda c: c.name)
def test_no_tensors_exceed_what_is_claimed(case):
    found = search(case.call, case.balls, **SEARCH)
    assert found.is_sound and found.value > 0, found
