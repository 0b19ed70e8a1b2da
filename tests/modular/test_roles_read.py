"""Roles that follow from what is read of products in the end: losses that are written out, sums of experts, rows that are gathered, cumulated sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import seeded
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm, QKClip, find_roles

TARGETS = torch.arange(10).view(2, 5)


class Read(nn.Module):
    """A hidden matrix, a head, and what a program makes of its product."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.hidden, self.head, self.read = nn.Linear(8, 8), nn.Linear(8, 11), read

    def forward(self, x):
        return self.read(self.head(self.hidden(x).tanh()))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: (y.logsumexp(-1) - y.gather(-1, TARGETS[..., None]).squeeze(-1)).mean(),
        lambda y: -y.log_softmax(-1)[..., 2].mean(),
        lambda y: (y - 1).square().mean(),
        lambda y: F.kl_div(y.log_softmax(-1), torch.full((2, 5, 11), 1 / 11), reduction="batchmean"),
        lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
        lambda y: F.cross_entropy(y.flatten(0, 1), TARGETS.flatten()) + 1e-3 * y.logsumexp(-1).square().mean(),
        lambda y: sum((t - 1).abs().sum() for t in y.unbind(1)),
        lambda y: torch.stack([y.norm(), y.std()]).sum(),
    ],
    ids=["cross entropy", "one of a softmax", "squares", "divergence", "smoothed", "with a penalty", "in turns", "norms"],
)
def test_what_a_loss_takes_that_is_written_out_is_a_head(loss):
    torch.manual_seed(seeded(0))
    roles = find_roles(Read(loss), torch.randn(2, 5, 8))
    assert (roles["head.weight"].role, roles["hidden.weight"].role) == ("head", "matrix")


def test_what_is_reduced_on_its_way_to_another_matrix_is_no_head():
    torch.manual_seed(seeded(0))
    roles = find_roles(
        nn.Sequential(Read(lambda y: y.logsumexp(-1, keepdim=True)), nn.Linear(1, 1), nn.Flatten(0)), torch.randn(2, 5, 8)
    )
    assert roles["0.head.weight"].role == "matrix" and roles["1.weight"].role == "head"


class Experts(nn.Module):
    """Experts whose results a router adds up, by products of activations; before another layer of such, or an attention."""

    def __init__(self, add: Callable, ends: str):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 8)), nn.Parameter(torch.randn(3, 8, 6))
        self.router, self.qkv, self.head, self.add, self.ends = nn.Linear(8, 3), nn.Linear(8, 24), nn.Linear(8, 11), add, ends

    def mixed(self, x):
        y = torch.einsum("bti,eoi->ebto", x, self.up).relu()
        y = torch.einsum("ebti,eoi->ebto", y, self.down)
        return x + self.add(y, self.router(x).softmax(-1))

    def forward(self, x):
        x = self.mixed(x)
        if self.ends == "loss":
            return F.cross_entropy(self.head(x).flatten(0, 1), TARGETS.flatten())
        if self.ends == "loss written out":
            y = self.head(x)
            return (y.logsumexp(-1) - y.gather(-1, TARGETS[..., None]).squeeze(-1)).mean()
        if self.ends == "experts":
            return self.head(self.mixed(x)).softmax(-1)
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.ends == "linear attention":
            return self.head(q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True))
        if self.ends == "written out":
            return self.head(q.sigmoid() * (k.exp() * v).cumsum(1) / k.exp().cumsum(1))
        return self.head(F.scaled_dot_product_attention(*(t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2))  # fmt: skip


ADDED = {
    "einsum": lambda y, p: torch.einsum("ebto,bte->bto", y, p),
    "entries": lambda y, p: (y * p.movedim(-1, 0)[..., None]).sum(0),
    "matmul": lambda y, p: (p[..., None, :] @ y.permute(1, 2, 0, 3)).squeeze(-2),
}


@pytest.mark.parametrize("ends", ["loss", "loss written out", "experts", "linear attention", "written out"])
@pytest.mark.parametrize("added", ADDED)
def test_sums_of_experts_by_weights_are_no_scores_of_an_attention(added, ends):
    torch.manual_seed(seeded(0))
    model, x = Experts(ADDED[added], ends), torch.randn(2, 5, 8)
    roles = find_roles(model, x)
    of_attention = {"query", "key", "value"}
    assert not any(b.role in of_attention for name in ("up", "down", "router.weight") for b in roles[name].blocks)
    assert roles["head.weight"].role == "head" and not roles["head.weight"].is_split
    with pytest.raises(NormMismatchError, match="no attention is found"):
        QKClip(model, x)


@pytest.mark.parametrize("added", ADDED)
def test_an_attention_after_experts_is_clipped_as_it_is_without(added):
    torch.manual_seed(seeded(0))
    model, x = Experts(ADDED[added], "attention"), torch.randn(2, 5, 8)
    clip = QKClip(model, x)
    assert clip.num_heads == 2
    q, k, _ = (t.unflatten(-1, (2, 4)).transpose(1, 2).double() for t in model.qkv(model.mixed(x)).chunk(3, -1))
    wanted = (q @ k.mT / 2).amax((0, 2, 3))
    torch.testing.assert_close(clip.largest_logits(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "rows",
    [
        lambda t, i: t.gather(0, i.view(-1, 1).expand(-1, 8)).view(2, 5, 8),
        lambda t, i: t.gather(0, i.view(-1, 1).repeat(1, 8)).view(2, 5, 8),
        lambda t, i: torch.take_along_dim(t, i.view(-1, 1), 0).view(2, 5, 8),
        lambda t, i: t.mT.gather(1, i.view(1, -1).expand(8, -1)).mT.view(2, 5, 8),
    ],
    ids=["gather", "repeated", "along", "second"],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_that_are_gathered_are_those_of_a_table(rows, is_tied):
    class Gathered(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(11, 8)), nn.Linear(8, 11)

        def forward(self, i):
            x = rows(self.table, i).tanh()
            return x @ self.table.T if is_tied else self.head(x)

    torch.manual_seed(seeded(0))
    assert find_roles(Gathered(), TARGETS)["table"].role == ("tied" if is_tied else "table")


@pytest.mark.parametrize("cumulate", [lambda a: a.cumsum(1), lambda a: a.cummax(1).values, lambda a: a.logcumsumexp(1)])
def test_a_gate_beside_what_is_cumulated_over_tokens_is_one(cumulate):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(6, 8)

        def forward(self, x):
            a, gate = self.up(x).chunk(2, -1)
            return self.down(cumulate(a) * F.silu(gate)).tanh()

    torch.manual_seed(seeded(0))
    x = torch.randn(2, 5, 8)
    norm = ModularNorm(Gated(), x, mode="typical", blocks=True)
    assert [(b.role, b.indices.tolist()) for b in norm.roles["up.weight"].blocks][1] == ("gate", list(range(6, 12)))
    assert len(norm.blocks["up.weight"]) == 2


@pytest.mark.parametrize(
    "kept",
    [
        lambda a: a.cumsum(1),
        lambda a: a.mean(1, keepdim=True).expand_as(a),
        lambda a: F.max_pool1d(a.mT, 3, 1, 1).mT,
        lambda a: torch.zeros_like(a).index_add(1, torch.arange(5).flip(0), a),
    ],
)
def test_a_gate_after_what_experts_return_is_one(kept):
    """Their results times weights, summed over experts, may be products of queries and keys as far as is known; what comes later is not."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 8, 8))
            self.router, self.up, self.down = nn.Linear(8, 3), nn.Linear(8, 12), nn.Linear(6, 4)

        def forward(self, x):
            results = torch.bmm(x.flatten(0, 1).expand(3, -1, -1), self.experts.mT).unflatten(1, (2, 5))
            x = x + torch.einsum("ebto,bte->bto", results, self.router(x).softmax(-1))
            a, gate = self.up(F.rms_norm(x, (8,))).chunk(2, -1)
            return self.down(kept(a) * F.silu(gate)).tanh()

    roles = find_roles(Model(), torch.randn(2, 5, 8))
    assert [b.role for b in roles["up.weight"].blocks][1] == "gate"


def test_what_is_cumulated_over_its_own_entries_is_one_matrix():
    class Cumulated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(6, 8)

        def forward(self, x):
            a, b = self.up(x).cumsum(-1).chunk(2, -1)
            return self.down(a * b.sigmoid())

    torch.manual_seed(seeded(0))
    assert not find_roles(Cumulated(), torch.randn(2, 5, 8))["up.weight"].is_split
