"""Softmax and attention: adversarial search, agreement of the fused and the written-out form, masks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import rules  # noqa: F401
from thunder_norm.audit import Ball, Case, Witness, check, norm
from thunder_norm.core.context import norm_mode
from thunder_norm.core.kinds import L1Tensor, LinfTensor, RMSTensor

R, INF = RMSTensor, LinfTensor
FEW = {"restarts": 6, "steps": 14, "seed": seeded()}
sdpa = F.scaled_dot_product_attention


def logits(*shape, n, dims=None, kind=R):
    return (Ball("x", kind, shape, n, dims),)


def softmax(x):
    return F.softmax(x, -1)


def log_softmax(x):
    return F.log_softmax(x, -1)


def logsumexp(x):
    return torch.logsumexp(x, -1)


def even_odds(shape, dim):
    """Of the softmax: half of the weight on the first, which moves against the others."""
    at = 2.0 * (torch.arange(shape[dim]) == 0).double() - 1
    at = (at if dim == -1 else at[:, None]).expand(shape)
    return Witness([at * (math.log(shape[dim] - 1) / 2)], [at])


ODDS = {"witnesses": [even_odds((2, 5), -1), Witness([-even_odds((2, 5), -1).points[0]])]}  # of softmax and of softmin
ODDS_OF_ROWS = {"witnesses": [even_odds((3, 2), 0)]}

# Where RMS reaches entries of sqrt(N) n the extremal point lies at n -> inf: the claim is then attained in the limit only.
SOFTMAX = [
    Case("softmax", softmax, logits(2, 5, n=1.5, kind=INF), options=ODDS),
    Case("softmax, small logits", softmax, logits(2, 4, n=0.1, kind=INF)),
    Case("softmax of two, RMS", softmax, logits(2, 2, n=1.5)),
    Case("softmax, RMS", softmax, logits(2, 5, n=4.0), 0.93),
    Case("softmax, RMS over another dimension", softmax, logits(3, 5, n=4.0, dims=(-2,)), 0.97),
    Case("softmax, RMS over both", softmax, logits(2, 4, n=4.0, dims=(-2, -1)), 0.9),
    Case("softmin", lambda x: F.softmin(x, -1), logits(2, 5, n=1.5, kind=INF), options=ODDS),
    Case("softmax of one", softmax, logits(2, 1, n=1.5, kind=INF)),
    Case("ATen's softmax", lambda x: torch.ops.aten._softmax(x, -1, False), logits(2, 5, n=1.5, kind=INF), options=ODDS),
    Case("softmax over rows", lambda x: x.softmax(0), logits(3, 2, n=1.0, kind=INF), options=ODDS_OF_ROWS),
    Case("log_softmax", log_softmax, logits(2, 5, n=1.5, kind=INF)),
    Case("log_softmax, large logits", log_softmax, logits(2, 5, n=20.0, kind=INF)),
    Case("log_softmax, RMS", log_softmax, logits(2, 5, n=4.0), 0.88),
    Case("log_softmax, RMS over both", log_softmax, logits(2, 5, n=4.0, dims=(-2, -1)), 0.9),
    Case("logsumexp", logsumexp, logits(2, 5, n=1.5, kind=INF)),
    Case("logsumexp, RMS", logsumexp, logits(2, 5, n=10.0), 0.9),
    Case("logsumexp, RMS over both", logsumexp, logits(2, 5, n=10.0, dims=(-2, -1)), 0.9),
    Case("logsumexp, RMS over another dimension", logsumexp, logits(2, 5, n=1.5, dims=(-2,))),
    Case("logsumexp over all", lambda x: torch.logsumexp(x, (0, 1)), logits(2, 5, n=1.5, kind=INF)),
]


def qkv(heads, tokens, width, sizes=(1.0, 1.0, 1.0), q=(-1,), v=(-1,)):
    shape = (heads, tokens, width)
    return tuple(Ball(name, R, shape, n, dims) for name, n, dims in zip("qkv", sizes, (q, q, v), strict=True))


def pairs(balls):
    """Keys +-k and values +-v along one axis, queries orthogonal to it: weights of 1/2."""
    q, k = (torch.zeros(balls[0].shape, dtype=torch.float64) for _ in range(2))
    q[..., 0] = k[:, 0, 1] = 1
    k[:, 1:, 1] = -1
    root = math.sqrt(balls[0].shape[-1])
    return q * root * balls[0].norm_size, k * root * balls[1].norm_size, k * root * balls[2].norm_size


def halves(balls):
    """The same with all entries alike, queries orthogonal to the keys by their signs, if there is an even number of them."""
    q, k, v = (torch.ones(b.shape, dtype=torch.float64) for b in balls)
    q[..., 1::2] = -1
    first = torch.full((balls[1].shape[-2], 1), -1.0, dtype=torch.float64)
    first[0] = 1
    return Witness([q * balls[0].norm_size, first * k * balls[1].norm_size, first * v * balls[2].norm_size], [k, first * q, None])


def attention(name, balls, tight=0.99, call=sdpa, **options):
    return Case(name, call, balls, tight, {"witnesses": [halves(balls), pairs(balls)], **FEW, **options})


BIAS = (*qkv(2, 3, 2), Ball("bias", INF, (3, 3), 1.0))

ATTENTION = [
    attention("attention", qkv(2, 2, 4)),
    attention("other sizes", qkv(2, 2, 4, (1.5, 0.7, 2.0))),
    attention("scale 1 / d", qkv(2, 2, 2), call=lambda q, k, v: sdpa(q, k, v, scale=0.5)),
    attention("causal", qkv(2, 2, 4), call=lambda q, k, v: sdpa(q, k, v, is_causal=True)),
    attention("many tokens", qkv(1, 5, 3), tight=0.9),
    attention("largest entries", qkv(2, 2, 2, q=(), v=()), 0.9),
    attention("values in their largest entry", qkv(2, 2, 4, q=(-1,), v=()), 0.9),
    attention("norms over heads", qkv(2, 2, 2, q=(-3, -1), v=(-3, -1)), 0.8),
    attention("queries and keys over heads", qkv(2, 2, 2, q=(-3, -1)), 0.85),
    attention("values over heads", qkv(2, 3, 2, v=(-3, -1)), 0.6),
    attention("norms over tokens", qkv(2, 2, 2, q=(-2, -1), v=(-2, -1)), 0.3),
    Case("position bias", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), BIAS, 0.9, FEW),
    attention(
        "boolean mask",
        qkv(2, 3, 2),
        0.9,
        lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(3, 3).tril().bool()),
    ),
    Case(
        "grouped queries",
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        (Ball("q", R, (4, 2, 2)), Ball("k", R, (2, 2, 2)), Ball("v", R, (2, 2, 2))),
        0.9,
        FEW,
    ),
]

CASES = SOFTMAX + ATTENTION


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable(case, size):
    case.check_at(size, seeded())


def inputs(shape=(2, 3, 4), dims=(-1,), sizes=(1.0, 2.0, 3.0)):
    generator = torch.Generator().manual_seed(seeded(0))
    for n in sizes:
        t = torch.randn(shape, dtype=torch.float64, generator=generator)
        yield RMSTensor(n, backing=t, elem_dims=dims, perturbation_size=1.0)


def same(a, b):
    assert a.norm_size.item() == pytest.approx(b.norm_size.item())
    assert a.perturbation_size.item() == pytest.approx(b.perturbation_size.item())


def written_out(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v)


@pytest.mark.parametrize("mask", [None, "lowest", "-inf"])
def test_written_out_attention_has_the_same_bound_as_the_fused_one(mask):
    low = {"lowest": torch.finfo(torch.float64).min, "-inf": -math.inf, None: 0.0}[mask]
    plain = torch.full((3, 3), low, dtype=torch.float64).triu(1) if mask else None
    chain, fused = written_out(*inputs(), plain), sdpa(*inputs(), attn_mask=plain)
    same(chain, fused)
    assert norm(R, chain.backing, (-1,)) <= chain.norm_size


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -math.inf])
def test_masked_fill_and_where_before_a_softmax(low):
    hidden = torch.ones(5, 5).triu(1).bool()
    fill = torch.full((), low)
    for masked in (lambda x: x.masked_fill(hidden, low), lambda x: torch.where(hidden, fill, x)):
        p = torch.softmax(masked(LinfTensor(2.0, backing=torch.randn(5, 5), perturbation_size=1.0)), -1)
        assert type(p) is L1Tensor
        assert p.norm_size.item() == 1.0
        assert p.perturbation_size.item() == 1.0
        assert not p.backing.isnan().any()


def test_softmax_behind_a_mask_is_sound():
    mask = torch.full((4, 4), -math.inf, dtype=torch.float64).triu(1)
    check(lambda x: torch.softmax(x + mask, -1), [Ball("x", INF, (4, 4), 1.5)], seed=seeded())


def test_dropout_multiplies_by_the_worst_mask():
    plain, dropped = sdpa(*inputs()), sdpa(*inputs(), dropout_p=0.5)
    assert dropped.norm_size.item() == pytest.approx(2 * plain.norm_size.item())
    assert dropped.perturbation_size.item() == pytest.approx(2 * plain.perturbation_size.item())


ATEN = [
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, {}),
    (torch.ops.aten._scaled_dot_product_attention_math, {}),
]


@pytest.mark.parametrize("op, options", ATEN, ids=lambda o: str(o))
def test_aten_forms_have_the_bound_of_the_torch_function(op, options):
    def batched():
        return inputs((1, 2, 3, 4))

    same(op(*batched(), **options)[0], sdpa(*batched()))


def test_modula_mode_has_sensitivity_one_for_its_attention():
    """Functional attention at scale 1 / d, heads split without cost: each of q, k, v has sensitivity 1."""
    with norm_mode("modula"):
        q, k, v = (t for t in inputs((2, 3, 4), dims=(-3, -1), sizes=(1.0, 1.0, 1.0)))
        assert sdpa(q, k, v, scale=1 / 4).perturbation_size.item() == pytest.approx(3.0)


@pytest.mark.parametrize("mode", ["bound", "typical"])
def test_a_bias_that_moves_and_hides_tokens_leaves_values_as_large_as_they_are(mode):
    """Of several arguments the first was looked at rightly, and a later one that is infinite made the result infinite."""
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 3, 5, 4)
    query, key, value, bias = (
        RMSTensor(1.0, backing=t / t.abs().max()) for t in (x, x.flip(0), x.roll(1, 1), torch.randn(2, 3, 5, 5))
    )
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with norm_mode(mode):
        mask = bias.masked_fill(hidden, -math.inf)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert mask.norm_size == math.inf
    assert type(y).of(y.backing, y.elem_dims).norm_size <= y.norm_size * (1 + 1e-6) and y.norm_size <= value.norm_size
