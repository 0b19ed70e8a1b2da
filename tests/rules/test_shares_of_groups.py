"""A softmax over groups that an index assigns, as graph attention writes it; and what is none is not taken for one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor, norm_mode, normed
from thunder_norm.audit import Ball, Case, search
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

NODES = 4
TO = torch.tensor([1, 1, 2, 2, 0, 0, 3, 1])
FROM = torch.tensor([0, 1, 2, 3, 0, 1, 2, 2])
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}


def scattered(x, index, reduce):
    """As PyG scatters: by an index that is expanded to all columns."""
    expanded = index.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
    out = x.new_zeros(NODES, *x.shape[1:])
    return (
        out.scatter_add_(0, expanded, x)
        if reduce == "sum"
        else out.scatter_reduce_(0, expanded, x, reduce=reduce, include_self=False)
    )


def by_scatter(x, index):
    e = (x - scattered(x.detach(), index, "amax").index_select(0, index)).exp()
    return e / (scattered(e, index, "sum") + 1e-16).index_select(0, index)


def by_index(x, index):
    largest = x.new_zeros(NODES, x.shape[1]).index_reduce(0, index, x, "amax", include_self=False)
    e = (x - largest[index]).exp()
    return e / x.new_zeros(NODES, x.shape[1]).index_add(0, index, e)[index]


def without_largest(x, index):
    e = F.softplus(x)
    return e / (1e-3 + x.new_zeros(NODES, x.shape[1]).scatter_reduce(0, index[:, None].expand_as(x), e, "sum")[index])


PROGRAMS = {f.__name__: f for f in (by_scatter, by_index, without_largest)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_weights_over_the_sum_of_their_group_are_at_most_one(name):
    torch.manual_seed(seeded(0))
    x = RMSTensor.of(torch.randn(8, 3) * 5)
    for found in (PROGRAMS[name](x, TO), thunder.jit(PROGRAMS[name], transforms=[NormTransform()])(x, TO)):
        assert isinstance(found, LinfTensor) and found.norm_size <= 1 + 1e-9
        torch.testing.assert_close(found.backing, PROGRAMS[name](x.backing, TO))


def into_zeros(x, index, lowered=0.0):
    """As graph attention is written by hand: into zeros that are made of numbers alone."""
    e, total = x.exp(), torch.zeros(NODES, 3)
    if lowered:
        total.sub_(lowered)
    return e / (total.scatter_add_(0, index[:, None].expand_as(e), e) + 1e-16).index_select(0, index)


def test_sums_written_into_zeros_that_no_tensor_gave_are_sums_of_groups():
    """Refused before in traces, where nothing was known of what `torch.zeros` makes."""
    torch.manual_seed(seeded(0))
    x = torch.randn(8, 3)
    found = thunder.jit(into_zeros, transforms=[NormTransform()])(RMSTensor.of(x), TO)
    assert isinstance(found, LinfTensor) and found.norm_size <= 1 + 1e-9
    torch.testing.assert_close(found.backing, into_zeros(x, TO))
    with pytest.raises(NormMismatchError, match="division"):
        thunder.jit(lambda x: into_zeros(x, TO, 1.0), transforms=[NormTransform()])(RMSTensor.of(x))


def largest_of_part(x, edges, at):
    """Of the entries less the largest ones, exponentials."""
    largest = torch.full((NODES, 3), -1e9).scatter_reduce(0, edges[1][:, None].expand(-1, 3), x, "amax")
    return (x - largest[edges[at]]).exp()


def index_taken_anew(x, edges):
    e = largest_of_part(x, edges, 1)
    return e / (torch.zeros(NODES, 3).scatter_add(0, edges[1][:, None].expand(-1, 3), e)[edges[1]] + 1e-16)


def test_a_part_of_an_index_is_the_same_each_time_it_is_taken():
    """``edges[1]`` for the largest, the sums and what is chosen of either; and another part is another index."""
    x, edges = torch.arange(24.0).view(8, 3) / 4, torch.stack([FROM, TO])
    found = thunder.jit(index_taken_anew, transforms=[NormTransform()])(RMSTensor.of(x), edges)
    assert isinstance(found, LinfTensor) and found.norm_size <= 1 + 1e-9
    torch.testing.assert_close(found.backing, index_taken_anew(x, edges))
    jitted = thunder.jit(largest_of_part, transforms=[NormTransform()])
    assert jitted(RMSTensor.of(x), edges, 1).norm_size <= 1 + 1e-9
    other = jitted(RMSTensor.of(x), edges, 0)
    assert other.norm_size >= other.backing.abs().max() > 2


class Attending(nn.Module):
    """Sums of weights that are written into what `torch.zeros` makes."""

    def __init__(self, add):
        super().__init__()
        self.score, self.add = nn.Linear(3, 1, bias=False), add

    def forward(self, x, index):
        score = self.score(x).squeeze(-1)
        e, total = (score - score.max()).exp(), torch.zeros(NODES)
        self.add(total, index, e)
        return e / total[index]


@pytest.mark.parametrize("name", ["index_add_", "scatter_add_", "index_put_"])
def test_sums_written_into_zeros_are_sums_of_groups_without_a_trace(name):
    """Of positive mass, and as far as a softmax moves: by at most half as far as scores differ."""

    def add(total, index, e):
        total.index_put_((index,), e, accumulate=True) if name == "index_put_" else getattr(total, name)(0, index, e)

    torch.manual_seed(seeded(0))
    model, x = Attending(add), torch.randn(8, 3)
    if name == "index_put_":  # no sum that the library knows
        with pytest.raises(NormMismatchError, match="division"):
            ModularNorm(model, x, TO, mode="bound")
        return
    bound = ModularNorm(model, x, TO, mode="bound").sensitivities["score.weight"]
    x = F.normalize(x, dim=-1) * math.sqrt(3)  # of RMS 1
    derivative = torch.func.jacrev(lambda w: torch.func.functional_call(model, {"score.weight": w}, (x, TO)))(
        torch.randn(1, 3, generator=torch.Generator().manual_seed(seeded(1)))
    )
    assert derivative.flatten(1).norm(dim=-1).max() / math.sqrt(3) <= bound * (1 + 1e-6)


BALLS = (Ball("x", RMSTensor, (8, 3), norm_size=2.0),)
CASES = [Case(name, lambda x, f=f: f(x, TO), BALLS, 0.5, FEW) for name, f in PROGRAMS.items()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_input_and_no_movement_exceeds_what_is_claimed(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound, found
    assert found.value > 0.5


def other_index(x, index):
    e = x.exp()
    return e / x.new_zeros(NODES, 3).index_add(0, FROM, e).index_select(0, index).clamp(min=1e-3)


def changed_index(x, index):
    index, e = index.clone(), x.exp()
    total = x.new_zeros(NODES, 3).index_add(0, index, e)
    index.copy_(FROM)
    return e / (total.index_select(0, index) + 1e-3)


def changed_through_a_view(x, index):
    index, e = index.clone(), x.exp()
    total = x.new_zeros(NODES, 3).index_add(0, index, e)
    index.view(2, 4)[0].fill_(0)
    return e / (total.index_select(0, index) + 1e-3)


def of_another(x, index):
    e = x.exp()
    return e / (x.new_zeros(NODES, 3).index_add(0, index, x.square()).index_select(0, index) + 1e-3)


def largest_of_another(x, index):
    largest = x.new_zeros(NODES, 3).index_reduce(0, index, x * 0.5, "amax", include_self=False)
    return (x - largest[index]).exp()


def changed_afterwards(x, index):
    y = x * 1.0
    largest = x.new_zeros(NODES, 3).index_reduce(0, index, y.detach(), "amax", include_self=False)
    y.add_(2.0)
    return (y - largest[index]).exp()


def smallest(x, index):
    return (x - x.new_zeros(NODES, 3).index_reduce(0, index, x, "amin", include_self=False)[index]).exp()


def largest_elsewhere(x, index):
    largest = x.new_zeros(NODES, 3).index_reduce(0, index, x, "amax", include_self=False)
    return (x - largest[FROM]).exp()


OTHERS = {
    f.__name__: f
    for f in (
        other_index, changed_index, changed_through_a_view, of_another, largest_of_another, changed_afterwards, smallest, largest_elsewhere,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_is_not_taken_for_one(name):
    """The entries of each of these exceed 1, at the data."""
    torch.manual_seed(seeded(0))
    f, x = OTHERS[name], torch.randn(8, 3) * 3
    largest = f(x, TO).abs().amax()
    assert largest > 1
    for found in (f(RMSTensor.of(x), TO), thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x), TO)):
        actual = found.backing.abs().amax() if not found.elem_dims else found.backing.square().mean(-1).sqrt().amax()
        torch.testing.assert_close(found.backing.abs().amax(), largest)
        assert actual <= found.norm_size * (1 + 1e-5)


class Attention(nn.Module):
    """A layer of graph attention (Velickovic et al. 2018), as PyG writes it."""

    def __init__(self, width: int, heads: int, out: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, heads * out, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.randn(1, heads, out) * 0.3) for _ in range(2))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        z = self.project(x).view(-1, *self.of_source.shape[1:])
        scores = (z * self.of_source).sum(-1).index_select(0, source) + (z * self.of_target).sum(-1).index_select(0, target)
        weights = by_scatter(F.leaky_relu(scores, 0.2), target)
        return scattered(z.index_select(0, source) * weights.unsqueeze(-1), target, "sum").flatten(1)


def test_two_layers_of_graph_attention_have_bounds():
    torch.manual_seed(seeded(0))
    model = nn.ModuleList([Attention(8, 2, 6), Attention(12, 2, 6)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x, edges):
            for layer in self.layers:
                x = F.elu(layer(x, edges))
            return x

    net, x, edges = Net(), torch.randn(NODES, 8), torch.stack([FROM, TO])
    with torch.no_grad():
        found = normed(thunder.jit(net, transforms=[NormTransform()]))(x, edges)
        torch.testing.assert_close(found.backing, net(x, edges))
    actual = found.backing.square().mean(found.elem_dims).sqrt().amax()
    assert actual <= found.norm_size <= 1e4 * actual
    for mode in ("bound", "typical"):
        with norm_mode(mode):
            assert min(ModularNorm(net, x, edges, mode=mode).targets.values()) > 0
