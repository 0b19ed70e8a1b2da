"""Roles where parameters, or their products, are put beside each other, multiplied by each other, or taken inside operators on functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.modular.attention_models import logits_of
from tests.seeds import seeded
from thunder_norm.modular import QKClip, find_roles

WIDTH, HEADS, HEAD = 12, 4, 3


def attended(q, k, v):
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Joined(nn.Module):
    """Queries, keys and values by matrices of these sizes, joined as weights or as products, and cut at these places."""

    def __init__(self, sizes, cuts, is_of_weights, has_bias=False):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, n, bias=has_bias) for n in sizes)
        self.cuts, self.is_of_weights = cuts, is_of_weights

    def forward(self, x):
        if self.is_of_weights:
            bias = None if self.parts[0].bias is None else torch.cat([part.bias for part in self.parts])
            y = F.linear(x, torch.cat([part.weight for part in self.parts]), bias)
        else:
            y = torch.cat([part(x) for part in self.parts], -1)
        return attended(*y.split(self.cuts, -1))


def described(row):
    return [(b.role, b.start, b.size, b.heads) for b in row.blocks]


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seeded(0)))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_of_weights", [False, True])
def test_parts_of_what_was_joined_are_those_of_their_own_parameters(is_of_weights, has_bias):
    one_each = Joined([12, 6, 6], [12, 6, 6], is_of_weights, has_bias)
    across = Joined([12, 12], [12, 6, 6], is_of_weights, has_bias)  # keys and values in one
    between = Joined([15, 9], [12, 6, 6], is_of_weights, has_bias)  # keys in two, a head in each
    for name in ("weight", "bias")[: 1 + has_bias]:
        rows = [find_roles(one_each, X)[f"parts.{i}.{name}"] for i in range(3)]
        assert [described(row) for row in rows] == [[("query", 0, 12, 4)], [("key", 0, 6, 2)], [("value", 0, 6, 2)]]
        rows = [find_roles(across, X)[f"parts.{i}.{name}"] for i in range(2)]
        assert [described(row) for row in rows] == [[("query", 0, 12, 4)], [("key", 0, 6, 2), ("value", 6, 6, 2)]]
        rows = [find_roles(between, X)[f"parts.{i}.{name}"] for i in range(2)]
        assert [described(row) for row in rows] == [
            [("query", 0, 12, 4), ("key", 12, 3, 1)],
            [("key", 0, 3, 1), ("value", 3, 6, 2)],
        ]


class HeadsApart(nn.Module):
    """A matrix for each of many heads, their products stacked."""

    def __init__(self, heads):
        super().__init__()
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(WIDTH, HEAD) for _ in range(heads)) for _ in range(3))

    def forward(self, x):
        q, k, v = (torch.stack([layer(x) for layer in layers], 1) for layers in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_each_of_many_heads_is_that_of_its_own_matrix():
    torch.manual_seed(seeded(1))
    model, x = HeadsApart(12).double(), 4 * X.double()
    roles = find_roles(model, x)
    for of, role in (("q", "query"), ("k", "key"), ("v", "value")):
        for i in range(12):
            assert described(roles[f"{of}.{i}.weight"]) == [(role, 0, HEAD, 1)]
    before = logits_of(model, x)
    largest = before.flatten(1).amax(1)
    clip = QKClip(model, x, tau=largest.sort().values[-4:-2].mean().item())
    gammas = torch.where(largest > clip.tau, clip.tau / largest, 1.0)
    assert [c.head for c in clip.step_(x)] == [f"q.{i}.weight, head {i}" for i in range(12) if gammas[i] < 1]
    torch.testing.assert_close(logits_of(model, x), before * gammas.view(-1, 1, 1, 1))


class Experts(nn.Module):
    """Many experts, whose weights are stacked and multiplied at once."""

    def __init__(self, number):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 8, bias=False) for _ in range(number))
        self.router, self.out = nn.Linear(WIDTH, number), nn.Linear(8, WIDTH)

    def forward(self, x):
        y = torch.einsum("btd,efd->btef", x, torch.stack([expert.weight for expert in self.experts]))
        return self.out(torch.einsum("btef,bte->btf", y.relu(), self.router(x).softmax(-1)))


@pytest.mark.parametrize("number", [3, 20])
def test_stacked_weights_are_matrices_however_many_there_are(number):
    roles = find_roles(Experts(number), X)
    assert {roles[f"experts.{i}.weight"].role for i in range(number)} == {"matrix"}
    assert {roles[f"experts.{i}.weight"].out_axis for i in range(number)} == {0}


class TwoResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(WIDTH, 6), nn.Linear(6, 5), nn.Linear(6, 1)

    def forward(self, x, is_sum=False):
        h = self.body(x).relu()
        return self.policy(h) + self.value(h) if is_sum else torch.cat([self.policy(h), self.value(h)], -1)


def test_heads_whose_products_stand_beside_each_other_are_heads():
    roles = find_roles(TwoResults(), X)
    assert [row.role for row in roles if row.name.endswith("weight")] == ["matrix", "head", "head"]
    roles = find_roles(TwoResults(), X, is_sum=True)
    assert [row.role for row in roles if row.name.endswith("weight")] == ["matrix"] * 3


class LowRank(nn.Module):
    """A matrix that is made of two, added to another or not; by columns or by rows."""

    def __init__(self, has_other, is_by_columns):
        super().__init__()
        self.other = nn.Parameter(torch.randn(3 * WIDTH, WIDTH)) if has_other else None
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(3 * WIDTH, 2))
        self.is_by_columns = is_by_columns

    def forward(self, x):
        w = (self.down.T @ self.up.T).T if self.is_by_columns else self.up @ self.down
        w = w if self.other is None else self.other + w
        return attended(*F.linear(x, w).chunk(3, -1))


@pytest.mark.parametrize("is_by_columns", [False, True])
@pytest.mark.parametrize("has_other", [False, True])
def test_the_factor_with_the_outputs_has_their_blocks(has_other, is_by_columns):
    roles = find_roles(LowRank(has_other, is_by_columns), X)
    of_three = [("query", 0, 12, 4), ("key", 12, 12, 4), ("value", 24, 12, 4)]
    assert described(roles["up"]) == of_three and roles["up"].out_axis == 0
    assert roles["down"].role == "matrix" and not roles["down"].is_split
    if has_other:
        assert described(roles["other"]) == of_three


class Projected(nn.Module):
    """One projection, and an attention by an operator on functions, or inside a transform of functions."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(WIDTH, 3 * WIDTH), attend

    def forward(self, x):
        return self.attend(self.qkv, x)


def _flex(qkv, x):
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -torch.inf))


def _mapped(qkv, x):
    return torch.vmap(lambda one: attended(*qkv(one[None]).chunk(3, -1))[0])(x)


def _chosen(qkv, x):
    def of_some(t):
        return attended(*qkv(t).chunk(3, -1))

    return torch.cond(x.square().sum() > 0, of_some, lambda t: t * 1.0, (x,))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attend", [_flex, _mapped, _chosen])
def test_what_runs_inside_operators_on_functions_is_followed(attend):
    model = Projected(attend)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    roles = find_roles(model, X)
    of_three = [("query", 0, 12, 4), ("key", 12, 12, 4), ("value", 24, 12, 4)]
    assert described(roles["qkv.weight"]) == described(roles["qkv.bias"]) == of_three
    assert roles["qkv.weight"].role == "matrix" and roles["qkv.bias"].role == "bias"
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
