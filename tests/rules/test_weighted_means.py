"""Weighted means written out: no larger than what is averaged, whatever the weights and the spelling; and what is none is not taken for one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import L1Tensor, RMSTensor, norm_mode, normed, rules, with_perturbation  # noqa: F401
from thunder_norm.audit import Ball, Case, search
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
import thunder

D = torch.float64
FEW = {"restarts": 6, "steps": 15, "seed": seeded()}
TO = torch.tensor([1, 1, 2, 2, 0, 0])
FROM = torch.tensor([0, 1, 2, 3, 0, 1])
MASK = torch.ones(4, 4, dtype=torch.bool).triu(1)


def elu1(x):
    return F.elu(x) + 1


def by_einsum(x, v, feature=torch.exp):
    q, k = feature(x), feature(x.flip(1))
    return (
        torch.einsum("bnd,bde->bne", q, torch.einsum("bnd,bne->bde", k, v)) / torch.einsum("bnd,bd->bn", q, k.sum(1))[..., None]
    )


def by_three(x, v, feature=elu1, eps=1e-2):
    q, k = feature(x), feature(x.flip(1))
    z = 1 / (torch.einsum("bnd,bd->bn", q, k.sum(dim=1)) + eps)
    return torch.einsum("bnd,bde,bn->bne", q, torch.einsum("bnd,bne->bde", k, v), z)


def by_matrices(x, v, feature=torch.exp, eps=0.0):
    q, k = feature(x), feature(x.flip(1))
    return (q @ (k.transpose(-2, -1) @ v)) / ((q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + eps)


def by_columns(x, v):
    q, k = torch.exp(x), torch.exp(x.flip(1))
    return (q @ (k.mT @ v)) * (q @ k.sum(1).unsqueeze(-1) + 1e-6).reciprocal()


def causal(x, v):
    q, k = torch.exp(x), torch.exp(x.flip(1))
    sums = torch.einsum("bnd,bne->bnde", k, v).cumsum(1)
    return torch.einsum("bnd,bnde->bne", q, sums) / torch.einsum("bnd,bnd->bn", q, k.cumsum(1)).unsqueeze(-1)


def scores(x, v):
    a = torch.exp(x @ x.mT)
    return (a @ v) / a.sum(-1, keepdim=True)


def masked_scores(x, v):
    a = torch.exp(x @ x.mT).masked_fill(MASK, 0.0)
    return torch.matmul(a, v) / a.sum(-1).unsqueeze(-1)


def lower_scores(x, v):
    a = torch.exp(x @ x.mT).tril()
    return (a @ v) / (a.sum(-1, keepdim=True) + 1e-6)


def pooled(x, v):
    w = torch.exp(x[..., :1])
    return (w * v).sum(1) / w.sum(1)


def pooled_means(x, v):
    w = torch.exp(x[..., :1])
    return (v * w).mean(1) / w.mean(1)


def pooled_by_softplus(x, v):
    w = F.softplus(x[..., :1])
    return torch.sum(w * v, dim=1) / (w.sum(1) + 0.1)


def pooled_by_relu(x, v):
    w = torch.relu(x[..., :1])
    return (w * v).sum(1) / w.sum(1).clamp(min=0.1)


def of_each_channel(x, v):
    w = torch.exp(x)
    return (w * v).sum(1) / w.sum(1)


def running_average(x, v):
    """RWKV: sums that decay."""
    num, den = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0])
    out = []
    for i in range(v.shape[1]):
        now, decay = torch.exp(x[:, i]), torch.exp(-x[:, 0].square())
        out.append((num + now * v[:, i]) / (den + now))
        num, den = decay * num + now * v[:, i], decay * den + now
    return torch.stack(out, 1)


def over_edges(x, v):
    """Attention over the edges of a graph."""
    e = torch.exp(x[0, FROM][:, :1] + x[0, TO][:, 1:2])
    sums = torch.zeros(4, v.shape[-1], dtype=v.dtype).index_add(0, TO, e * v[0][FROM])
    return sums / (torch.zeros(4, 1, dtype=v.dtype).index_add(0, TO, e) + 1e-16)


def after_one(x, v):
    """sLSTM: the sum of the weights starts at one, that of the values at zero."""
    c, n, m = torch.zeros_like(v[:, 0]), torch.ones_like(v[:, 0]), torch.zeros_like(v[:, 0])
    for i in range(v.shape[1]):
        f, now = F.logsigmoid(x[:, i].flip(-1)), x[:, i]
        largest = torch.maximum(f + m, now)
        now, keep, m = torch.exp(now - largest), torch.exp(f + m - largest), largest
        c, n = keep * c + now * v[:, i], keep * n + now
    return c / n


MEANS = {f.__name__: f for f in (
    by_einsum, by_three, by_matrices, by_columns, causal, scores, masked_scores, lower_scores, pooled, pooled_means, pooled_by_softplus,
    pooled_by_relu, of_each_channel, running_average, over_edges, after_one,
)} | {
    "by_einsum, elu": lambda x, v: by_einsum(x, v, lambda t: elu1(t) + 0.1),
    "by_three, exp": lambda x, v: by_three(x, v, torch.exp),
    "by_matrices, relu": lambda x, v: by_matrices(x, v, torch.relu, 0.1),
}  # fmt: skip
CHANNELS = {"of_each_channel", "running_average", "after_one"}  # the weights vary along the channels of v


def x(*shape, n=0.7, name="x"):
    return Ball(name, RMSTensor, shape, n, None)


@pytest.mark.parametrize("name", MEANS)
def test_a_weighted_mean_is_no_larger_than_what_is_averaged(name):
    torch.manual_seed(seeded())
    v = RMSTensor.of(torch.randn(2, 4, 3, dtype=D))
    for scale in (0.1, 1.0, 4.0):
        y = MEANS[name](RMSTensor.of(torch.randn(2, 4, 3, dtype=D) * scale), v)
        assert RMSTensor.of(y.backing, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-9)
        assert y.norm_size.item() == pytest.approx(v.norm_size.item() * (math.sqrt(3) if name in CHANNELS else 1))


SHARES = {
    "softplus": lambda x, v: (lambda p: p / p.sum(-1, keepdim=True))(F.softplus(x)),
    "sigmoid": lambda x, v: (lambda p: p / (p.sum(1, keepdim=True) + 0.1))(torch.sigmoid(x)),
    "exp of what is bounded": lambda x, v: (lambda p: p / p.sum((1, 2), keepdim=True))(torch.exp(torch.tanh(x) * 2)),
    "products": lambda x, v: (lambda p: p / p.sum(-1).unsqueeze(-1))(torch.exp(x) * F.softplus(v)),
    "without keepdim": lambda x, v: (lambda p: p / p.sum(1)[:, None])(F.softplus(x, beta=2.0)),
    "slots": lambda x, v: (lambda p: p / p.sum(-1, keepdim=True))(x.softmax(1) + 1e-8),
    "softmax again": lambda x, v: (lambda p: p / p.sum(1, keepdim=True))(x.softmax(-1)),
    "twice a number": lambda x, v: (lambda p: p / p.sum(1, keepdim=True))(0.5 + (torch.sigmoid(4 * x) + 1e-3)),
}


@pytest.mark.parametrize("name", SHARES)
def test_weights_over_their_own_sum_sum_up_to_one(name):
    torch.manual_seed(seeded())
    v, t = (RMSTensor.of(torch.randn(2, 4, 3, dtype=D) * 3) for _ in range(2))
    y = SHARES[name](t, v)
    assert isinstance(y, L1Tensor) and y.norm_size.item() == pytest.approx(1.0)
    assert L1Tensor.of(y.backing, y.elem_dims).norm_size <= 1 + 1e-9
    found = search(SHARES[name], [x(2, 4, 3), x(2, 4, 3, name="v")], **FEW)
    assert found.is_sound, found


def with_more_below(below):
    """A weighted sum over one of the same weights and of others."""

    def mean(x, v):
        a, b, c = torch.exp(x[:, 0]), torch.sigmoid(x[:, 1]), torch.exp(v[:, 3])
        return (a * (b * v[:, 0] + c * v[:, 1]) + b * v[:, 2]) / below(a, b, c)

    return mean


LARGER = {
    "a term within": with_more_below(lambda a, b, c: a * (c + a + b) + b),
    "a term after": with_more_below(lambda a, b, c: c + (a * (b + c) + b)),
    "twice as many": with_more_below(lambda a, b, c: b + (a * (2 * b + 2 * c) + b)),
    "constants": with_more_below(lambda a, b, c: a * (b + c + torch.tensor([0.0, 1.0, 2.0], dtype=D) * b) + b),
    "a gate": lambda x, v: torch.tanh(x[:, 3]) * after_one(x, v) * v[:, 3],
    "a gate above": lambda x, v: (lambda a, b: torch.tanh(x[:, 3]) * (a * v[:, 0] + b * v[:, 1]) / (a + b))(x[:, 0].exp(), x[:, 1].exp()),
    "a gate within": lambda x, v: (lambda a, b: (v[:, 3] * (a * v[:, 0]) + b * v[:, 1]) / (a + b))(x[:, 0].exp(), x[:, 1].exp()),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGER)
def test_more_weights_below_and_factors_above_leave_a_mean_bounded(name):
    torch.manual_seed(seeded())
    for scale in (0.1, 1.0, 4.0):
        v = RMSTensor.of(torch.randn(2, 4, 3, dtype=D))
        y = LARGER[name](RMSTensor.of(torch.randn(2, 4, 3, dtype=D) * scale), v)
        assert RMSTensor.of(y.backing, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-9)
        assert y.norm_size <= 10 * v.norm_size.clamp(min=1) ** 2, "without the weights in common it grows as exp(4) does"


CASES = [Case(name, call, (x(2, 4, 3), x(2, 4, 3, name="v")), 0.0, FEW) for name, call in (MEANS | SHARES | LARGER).items()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_tensors_exceed_what_is_claimed_of_a_weighted_mean(case):
    found = search(case.call, case.balls, **FEW)
    assert found.is_sound, found


@pytest.mark.parametrize("name", MEANS)
def test_traced_and_eager_claims_agree(name):
    torch.manual_seed(seeded())
    v, t = (with_perturbation(RMSTensor.of(torch.randn(2, 4, 3))) for _ in range(2))
    eager = MEANS[name](t, v)
    traced = thunder.jit(MEANS[name], transforms=[NormTransform()])(t, v)
    assert torch.allclose(traced.backing, eager.backing, atol=1e-5)
    assert traced.norm_size.item() == pytest.approx(eager.norm_size.item(), rel=1e-5)


def test_weights_that_move_by_a_share_of_themselves_move_the_mean_by_that_share():
    """Two values, of opposite signs, and weights that are equal: the worst case of a covariance."""
    v = RMSTensor(1.0, backing=torch.tensor([[1.0], [-1.0]], dtype=D))
    k = torch.zeros(2, 1, dtype=D)

    def mean(k, v):
        e = torch.exp(k)
        return (e * v).sum(0) / e.sum(0)

    claimed = mean(RMSTensor(1.0, backing=k, perturbation_size=1.0), v)
    moved = torch.func.jvp(lambda k: mean(k, v.backing), (k,), (torch.tensor([[1.0], [-1.0]], dtype=D),))[1]
    assert claimed.perturbation_size.item() == pytest.approx(moved.abs().max().item())


OTHERS = {
    "other weights above": lambda x, v: (torch.exp(2 * x) * v).sum(1) / torch.exp(x).sum(1),
    "weights that were changed": lambda x, v: (lambda e: (e * v).sum(1) / e.tril_().sum(1))(torch.exp(x)),
    "another dimension": lambda x, v: (torch.exp(x) * v).sum(1) / torch.exp(x).sum(2),
    "a decay above alone": lambda x, v: (torch.exp(x) * v + v).sum(1) / torch.exp(x).sum(1),
    "queries for keys": lambda x, v: (torch.exp(x) @ (torch.exp(x).mT @ v)) / torch.exp(x).sum(-1, keepdim=True),
    "other places": lambda x, v: (lambda e: (e * v).cumsum(1) / e.flip(1).cumsum(1))(torch.exp(x)),
    "a term above that is not below": lambda x, v: (lambda a, b: (a * v[:, 0] + b * v[:, 1]) / (a + 1))(
        x[:, 0].exp(), x[:, 1].exp()
    ),
    "a term twice": lambda x, v: (lambda a, b: (a * v[:, 0] + a * v[:, 1] + b * v[:, 2]) / (a + b))(x[:, 0].exp(), x[:, 1].exp()),
    "a factor of one term": lambda x, v: (lambda a, b: (a * (a * v[:, 0] + b * v[:, 1])) / (a + a * b))(
        x[:, 0].exp(), x[:, 1].exp()
    ),
    "constants below one": lambda x, v: (lambda a, b: (a * v[:, 0] + b * v[:, 1]) / (0.01 * a + b))(x[:, 0].exp(), x[:, 1].exp()),
    "less": lambda x, v: (lambda e: (e * v).sum(1) / (e.sum(1) - 0.5))(torch.exp(x)),
    "a share below": lambda x, v: (lambda e: (e * v).sum(1) / (0.1 * e.sum(1)))(torch.exp(x)),
    "a mask below": lambda x, v: (lambda e: (e @ v) / e.tril().sum(-1, keepdim=True))(torch.exp(x @ x.mT)),
}


# what divides them may be 0, whatever the norms
REFUSED = {"weights that were changed", "less", "a mask below"}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_weighted_mean_is_refused_or_bounded_as_it_is(name):
    torch.manual_seed(seeded())
    for scale in (0.1, 1.0, 5.0):
        v, t = RMSTensor.of(torch.randn(2, 3, 3, dtype=D)), RMSTensor.of(torch.randn(2, 3, 3, dtype=D) * scale)
        if name in REFUSED:
            with pytest.raises(NormMismatchError):
                OTHERS[name](t, v)
            continue
        y = OTHERS[name](t, v)
        assert RMSTensor.of(y.backing, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["typical", "modula"])
def test_modes_without_a_guarantee_have_the_size_of_what_is_averaged(mode):
    torch.manual_seed(seeded())
    v, t = (with_perturbation(RMSTensor(1.0, backing=torch.randn(2, 4, 3))) for _ in range(2))
    with norm_mode(mode):
        for name in ("by_einsum", "scores", "pooled"):
            assert MEANS[name](t, v).norm_size.item() == pytest.approx(1.0)


@pytest.mark.parametrize("weights", [lambda x: x.softmax(1) + 1e-8, lambda x: torch.relu(x) + 1e-6, lambda x: x.square() + 1e-7])
def test_an_epsilon_does_not_say_how_small_weights_typically_are(weights):
    """Slot attention: its slots had targets of 1e-23, as if each weight were the epsilon."""
    torch.manual_seed(seeded())

    def shares(x):
        w = weights(x)
        return w / w.sum(-1, keepdim=True)

    at, by = torch.randn(50, 3, 16, dtype=D), torch.randn(50, 3, 16, dtype=D)
    moved = torch.func.jvp(shares, (at,), (by,))[1].abs().sum(-1).square().mean().sqrt()
    with norm_mode("typical"):
        claimed = shares(RMSTensor(1.0, backing=at, perturbation_size=1.0)).perturbation_size
    assert 0.3 * moved < claimed < 10 * moved


def over_edges_by_scatter(x, v, index=TO):
    """The same sums by scatters, whose indices are expanded: at each place the same rows."""
    e = torch.exp(x[0, FROM][:, :1] + x[0, TO][:, 1:2])
    sums = torch.zeros(4, 3, dtype=v.dtype).scatter_add(0, TO[:, None].expand(6, 3), e * v[0][FROM])
    return sums / (torch.zeros(4, 1, dtype=v.dtype).scatter_add(0, index[:, None].expand(6, 1), e) + 1e-16)


def test_sums_at_the_same_indices_are_told_from_those_at_others():
    torch.manual_seed(seeded())
    v, t = (RMSTensor.of(torch.randn(2, 4, 3, dtype=D)) for _ in range(2))
    assert over_edges_by_scatter(t, v).norm_size.item() == pytest.approx(v.norm_size.item())
    assert over_edges_by_scatter(t, v, TO.flip(0)).norm_size > 1e6 * v.norm_size
    changed = TO.clone()
    y = torch.zeros(4, 3, dtype=D).index_add(0, changed, torch.exp(t[0, :, :1])[FROM] * v[0][FROM])
    changed[0] = 3
    below = torch.zeros(4, 1, dtype=D).index_add(0, changed, torch.exp(t[0, :, :1])[FROM]) + 1e-16
    assert (y / below).norm_size > 1e6 * v.norm_size


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t + (0.3 + 0.4j), lambda t: t + True, lambda t: torch.add(t, torch.arange(3)), lambda t: torch.exp(t).swapaxes(0, 1),
        lambda t: torch.swapaxes(torch.exp(t), axis0=0, axis1=1), lambda t: torch.exp(t).permute(dims=(1, 0)), lambda t: t.exp().sum(),
        lambda t: torch.exp(t).cumsum(dim=0), lambda t: t.exp().unsqueeze(dim=0), lambda t: torch.exp(t)[torch.tensor([0, 1, 0])],
        lambda t: t.exp() @ t.exp()[0], lambda t: torch.einsum("ii->i", t.exp()), lambda t: 1 / (t.exp() + 1), lambda t: t.exp().mean(),
        lambda t: torch.exp(t).gather(0, torch.zeros(2, 3, dtype=torch.long)), lambda t: torch.exp(t)[None, ..., None].squeeze(),
    ],
)  # fmt: skip
def test_other_spellings_run_as_ever(call):
    t = torch.rand(3, 3, dtype=D)
    try:
        y = call(RMSTensor.of(t))
    except NormMismatchError:
        return
    assert torch.allclose(y.backing, call(t))


def test_zeros_of_a_parameter_are_not_those_of_the_program():
    """A parameter that starts at 0 is any tensor of its norm."""

    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.start = torch.nn.Parameter(torch.zeros(4, 1))

        def forward(self, x):
            e = torch.exp(x)
            above = torch.zeros(4, 1).index_add(0, TO, (e * x)[FROM])
            return above / (self.start.index_add(0, TO, e[FROM]) + 1e-6)

    t = RMSTensor(1.0, backing=torch.randn(4, 1))
    model = Sums()
    for parameters in ("unit", {"start": 0.5}):
        with pytest.raises(NormMismatchError):
            normed(thunder.jit(model, transforms=[NormTransform(parameters=parameters)]))(t)
    with pytest.raises(NormMismatchError):
        ModularNorm(model, t)
