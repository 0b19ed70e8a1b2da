"""QK-clip in use: what counts as a logit, optimizers, ranks, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

from tests.modular.attention_models import ByHand, Gained, Logits, Reparametrized, Torch, logits_of
from tests.modular.modular_models import D
from tests.ranks import run_ranks
from tests.seeds import seeded
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularOptimizer, QKClip


def test_what_is_added_to_logits_or_done_with_them_does_not_count():
    """Position biases, masks, soft caps and sinks: gamma is of the products of queries and keys that count."""

    class Dressed(ByHand):
        def forward(self, x):
            q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
            logits = 0.5 * (q @ k.repeat_interleave(2, 1).mT) / 2
            n = logits.shape[-1]
            dressed = 30 * torch.tanh(logits / 30)
            dressed += 3 * torch.arange(n)
            dressed = dressed.masked_fill(torch.ones(n, n).triu(1).bool(), torch.finfo(x.dtype).min)
            dressed = torch.cat([dressed, torch.ones(*dressed.shape[:-1], 1, dtype=x.dtype)], -1)
            return logits, dressed.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)

    torch.manual_seed(seeded(0))
    model, x = Dressed().to(D), 3 * torch.randn(2, 5, 6, dtype=D)
    with torch.no_grad():
        before = model(x)[0].tril() + torch.full((5, 5), -math.inf).triu(1)
    clip = QKClip(model, x, tau=before.amax().item() / 2)
    torch.testing.assert_close(clip.largest_logits(x), before.amax((0, 2, 3)))
    assert len(clip.step_(x)) == (before.amax((0, 2, 3)) > clip.tau).sum()
    torch.testing.assert_close(clip.largest_logits(x).amax().item(), clip.tau)
    # what rounding left above tau is clipped by no more than that
    assert all(c.gamma == pytest.approx(1, rel=1e-12) for c in clip.step_(x))


def test_heads_of_a_window_and_of_global_tokens_are_clipped_apart():
    """Longformer: scores of keys in the window and of global ones are of the same heads, those of global queries of others."""
    torch.manual_seed(seeded(0))
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 11}
    model = transformers.LongformerForMaskedLM(transformers.LongformerConfig(attention_window=[4], **sizes)).to(D).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
    ids = torch.randint(3, 11, (2, 13))
    is_global = {"global_attention_mask": (torch.arange(13) < torch.tensor([[1], [2]])).long()}

    def logits():
        with torch.no_grad(), Logits() as seen:
            model(ids, **is_global)
        window, of_global = seen.seen
        heads = (*window.unbind(2), *of_global.unflatten(0, (2, 3)).unbind(1))
        return [t[t.abs() < 1e30] for t in heads]

    before = logits()
    largest = torch.stack([t[t != 0].amax() for t in before])
    clip = QKClip(model, ids, **is_global)
    torch.testing.assert_close(clip.largest_logits(ids, **is_global), largest)
    clip.tau = largest.sort().values[3:5].mean().item()
    clip.step_(ids, **is_global)
    gammas = torch.where(largest > clip.tau, clip.tau / largest, 1.0)
    for a, b, gamma in zip(logits(), before, gammas.tolist(), strict=True):
        torch.testing.assert_close(a, b * gamma, rtol=1e-10, atol=1e-10)


def test_attentions_that_run_twice_are_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = ByHand(), nn.Linear(24, 6)

        def forward(self, x):
            return self.layer(self.other(self.layer(x)))

    torch.manual_seed(seeded(0))
    model, x = Twice().to(D), 3 * torch.randn(2, 5, 6, dtype=D)
    with torch.no_grad(), Logits() as seen:
        model(x)
    largest = torch.stack([t.amax((0, 2, 3)) for t in seen.seen]).amax(0)
    clip = QKClip(model, x, tau=largest.amax().item() / 3)
    assert clip.num_heads == 4
    torch.testing.assert_close(clip.largest_logits(x), largest)
    before = [t.clone() for t in seen.seen]
    clip.step_(x)
    with torch.no_grad(), Logits() as seen:
        model(x)
    gammas = torch.where(largest > clip.tau, clip.tau / largest, 1.0)
    torch.testing.assert_close(seen.seen[0], before[0] * gammas.view(-1, 1, 1))  # what comes second gets other inputs


def test_what_a_bias_in_place_hides_is_not_counted():
    class InPlace(ByHand):
        def forward(self, x):
            q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
            logits = q @ k.repeat_interleave(2, 1).mT
            before = logits.clone()
            logits += 100
            return before, logits.softmax(-1) @ v.repeat_interleave(2, 1)

    torch.manual_seed(seeded(0))
    model, x = InPlace().to(D), torch.randn(2, 5, 6, dtype=D)
    torch.testing.assert_close(QKClip(model, x).largest_logits(x), model(x)[0].amax((0, 2, 3)).detach())


def test_queries_that_change_in_place_under_another_name_are_no_multiples():
    class Under(ByHand):
        def forward(self, x):
            y = self.qkv(x)
            q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in y.split(self.sizes, -1))
            y.tanh_()
            return (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)

    with pytest.raises(NormMismatchError, match="cannot be scaled"):
        QKClip(Under(), torch.randn(2, 5, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_clipped_stays_to_the_last_bit(dtype):
    torch.manual_seed(seeded(0))
    model, x = ByHand().to(dtype), (3 * torch.randn(2, 5, 6)).to(dtype)
    clip = QKClip(model, x)
    largest = clip.largest_logits(x)
    clip.tau = largest.sort().values[-2:].mean().item()
    old = model.qkv.weight.detach().clone()
    (clipped,) = clip.step_(x)
    head = int(largest.argmax())
    changed = (model.qkv.weight != old).any(1).nonzero().flatten().tolist()
    assert set(changed) <= set(range(6 * head, 6 * head + 6)) and changed
    exact = old.double()[6 * head : 6 * head + 6] * clipped.gamma
    assert torch.equal(model.qkv.weight[6 * head : 6 * head + 6], exact.to(dtype))


def test_it_clips_after_steps_of_any_optimizer():
    torch.manual_seed(seeded(0))
    x = 3 * torch.randn(2, 5, 6)
    for make in (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
        lambda m: ModularOptimizer(m, x, lr=1.0),
    ):
        model = Torch()
        optimizer = make(model)
        clip = QKClip(model, x, tau=0.5)
        handles = clip.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            assert clip.largest_logits(x).amax() <= 0.5 * (1 + 1e-5)
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            model.attention.in_proj_weight.mul_(10)
        optimizer.step()
        assert clip.largest_logits(x).amax() > 0.5


@pytest.mark.slow
def test_logits_explode_without_it_and_not_with_it():
    """The example: steps of a fixed size on every matrix, which sharpen a softmax."""
    from examples.qk_clip import TAU, train

    without, _ = train(60, None)
    largest, loss = train(60, TAU)
    assert without[-1] > 3 * TAU and without[-1] > without[2] * 1.5
    assert max(largest) <= TAU * (1 + 1e-4) and math.isfinite(loss)


def check_ranks(wanted: dict[str, torch.Tensor], inputs: torch.Tensor) -> None:
    torch.manual_seed(seeded(0))
    model = nn.parallel.DistributedDataParallel(ByHand().to(D))
    mine = inputs[dist.get_rank()][None]
    clip = QKClip(model, mine, tau=0.1)
    assert clip.step_(mine)
    for name, t in model.module.state_dict().items():
        torch.testing.assert_close(t, wanted[name])


@pytest.mark.slow
def test_ranks_clip_alike():
    inputs = torch.randn(2, 5, 6, dtype=D) * torch.tensor([1.0, 5.0]).view(2, 1, 1)
    torch.manual_seed(seeded(0))
    model = ByHand().to(D)
    QKClip(model, inputs, tau=0.1).step_(inputs)
    run_ranks(2, check_ranks, model.state_dict(), inputs)


# -- what is refused -------------------------------------------------------------------------------------------------------


class Normalized(ByHand):
    def rotated(self, t):
        return nn.functional.rms_norm(t, (self.width,))


class Clamped(ByHand):
    """As DBRX has it (``clip_qkv``)."""

    def rotated(self, t):
        return t.clamp(-1, 1)


class Penalized(ByHand):
    def forward(self, x):
        w = self.qkv.weight
        return super().forward(x), w.square().sum()


class PenalizedGains(Gained):
    def forward(self, x):
        return super().forward(x), *(gain.square().sum() for gain in self.gains)


class Mixed(ByHand):
    """A constant is added to queries and keys, so a multiple of their projection is no multiple of them."""

    def rotated(self, t):
        return t + 1


class Distances(nn.Module):
    """Logits are `-|q - k|^2`, by differences or by what they add up to."""

    def __init__(self, is_added_up):
        super().__init__()
        self.is_added_up, self.q, self.k, self.v = is_added_up, nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.is_added_up:
            logits = 2 * q @ k.mT - q.square().sum(-1, keepdim=True) - k.square().sum(-1).unsqueeze(-2)
        else:
            logits = -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
        return logits.softmax(-1) @ v


class Partly(nn.Module):
    """As Llama 4: queries and keys are normalized without gains in some layers, and not at all in others."""

    def __init__(self):
        super().__init__()
        self.one, self.between, self.two = Normalized(), nn.Linear(24, 6), ByHand()

    def forward(self, x):
        return self.two(self.between(self.one(x)))


X = torch.randn(2, 5, 6)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: nn.Linear(6, 4), "no attention is found"),
        (lambda: Distances(False), "no attention is found(.|\n)*are at most 0 whatever the weights"),
        (lambda: Distances(True), "head 0 cannot be scaled(.|\n)*taken elsewhere"),
        (Normalized, "head 0 cannot be scaled(.|\n)*normalized, clamped, frozen, or constants are added"),
        (Clamped, "head 0 cannot be scaled(.|\n)*normalized, clamped, frozen, or constants are added"),
        (lambda: Reparametrized(torch.tanh), "nothing multiplies them"),
        (lambda: Reparametrized(lambda w: w / w.norm(dim=1, keepdim=True)), "nothing multiplies them"),
        (lambda: Reparametrized(lambda w: (w.square() + 1) * 2), "nothing multiplies them"),
        (PenalizedGains, "entries of gains.0 are on the other side as well, taken elsewhere, or frozen"),
        (Mixed, "normalized, clamped, frozen, or constants are added"),
        (Penalized, "entries of qkv.weight are on the other side as well, taken elsewhere, or frozen"),
    ],
)
def test_attentions_that_cannot_be_clipped_are_refused(make, says):
    with pytest.raises(NormMismatchError, match=says):
        QKClip(make(), X)


class Bent(ByHand):
    """Logits are a function of products, entry by entry."""

    def __init__(self, bend):
        super().__init__()
        self.bend = bend

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.bend(q @ k.mT / 2).softmax(-1) @ v


def test_logits_that_are_powers_of_products_are_not_taken_for_these():
    assert QKClip(Bent(torch.tanh), X, tau=1e-3).step_(X)
    for stretch in (torch.square, torch.sinh, lambda t: t.relu().pow_(3) + 1):
        with pytest.raises(NormMismatchError, match="cannot be told from what is done with them before the softmax"):
            QKClip(Bent(stretch), X, tau=1e-3).step_(X)


def test_heads_that_nothing_scales_stay_and_are_refused_when_they_exceed_tau():
    torch.manual_seed(seeded(0))
    model = Partly().to(D)
    with torch.no_grad():
        model.two.qkv.weight.mul_(30)
    x = X.to(D)
    with torch.no_grad(), Logits() as seen:
        model(x)
    largest = [t.amax((0, 2, 3)) for t in seen.seen]
    clip = QKClip(model, x, tau=1.01 * largest[0].amax().item())
    assert clip.fixed == tuple(f"one.qkv.weight, head {h}" for h in range(4)) and clip.num_heads == 8
    torch.testing.assert_close(clip.largest_logits(x), torch.cat(largest))
    assert largest[1].amax() > clip.tau
    clip.step_(x)
    with torch.no_grad(), Logits() as after:
        model(x)
    torch.testing.assert_close(after.seen[0], seen.seen[0])
    torch.testing.assert_close(after.seen[1], seen.seen[1] * (clip.tau / largest[1]).clamp(max=1).view(-1, 1, 1))
    clip.tau, before = 0.99 * largest[0].amax().item(), copy.deepcopy(model.state_dict())
    with pytest.raises(NormMismatchError, match=r"exceed tau = .*, and nothing scales them: one.qkv.weight, head \d"):
        clip.step_(x)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


class Adapted(nn.Module):
    """LoRA of a layer."""

    def __init__(self, of):
        super().__init__()
        self.of, self.a, self.b = of.requires_grad_(False), nn.Linear(6, 2, bias=False), nn.Linear(2, of.out_features, bias=False)

    def forward(self, x):
        return self.of(x) + self.b(self.a(x))


def test_what_is_frozen_while_others_train_stays_what_it_is():
    torch.manual_seed(seeded(0))
    model = ByHand()
    model.qkv = Adapted(model.qkv)
    with pytest.raises(
        NormMismatchError, match="entries of qkv.of.bias, qkv.of.weight are on the other side as well, taken elsewhere, or frozen"
    ):
        QKClip(model, X)
    model = ByHand(fused=False, groups=4).to(D)  # queries, keys and values apart
    x = X.to(D)
    clip = QKClip(model, x)
    largest = clip.largest_logits(x)
    clip.tau = 0.5 * largest.amin().item()
    keys = {n: p.detach().clone() for n, p in model.qkv[1].requires_grad_(False).named_parameters()}
    before = logits_of(model, x)
    assert [c.gamma for c in clip.step_(x)] == pytest.approx((clip.tau / largest).tolist())
    torch.testing.assert_close(logits_of(model, x), before * (clip.tau / largest).view(-1, 1, 1, 1))
    assert all(torch.equal(p, keys[n]) for n, p in model.qkv[1].named_parameters())
    model = nn.Sequential(ByHand(), nn.Linear(24, 2)).to(D)
    model[0].requires_grad_(False)
    with pytest.raises(NormMismatchError, match="head 0 cannot be scaled(.|\n)*frozen"):
        QKClip(model, x)


class Merged(nn.Module):
    """Projections of queries and keys that are made of matrices; two heads of four."""

    seen: torch.Tensor | None = None

    def __init__(self, project):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(8, 6)) for _ in range(2))
        self.a, self.b = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(8, 3))
        self.c, self.d = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(16, 3))
        self.project = project

    def forward(self, x, looks=False):
        q, k = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.project(self, x))
        self.seen = (q @ k.mT / 2).detach() if looks else None
        return F.scaled_dot_product_attention(q, k, x.unflatten(-1, (2, 3)).transpose(1, 2))


# how queries and keys are made, and what is multiplied of which parameters: never what other heads have as well
MERGED = {
    "a sum": (lambda m, x: (F.linear(x, m.w + 0.5 * m.b @ m.a), F.linear(x, m.v)), {"w", "b", "v"}),
    "factors": (lambda m, x: (F.linear(x, m.b @ m.a), F.linear(x, m.v)), {"b", "v"}),
    "three": (lambda m, x: (F.linear(x, m.b @ (m.c @ m.a)), F.linear(x, m.v)), {"b", "v"}),
    "three, from the left": (lambda m, x: (F.linear(x, m.b @ m.c @ m.a), F.linear(x, m.v)), {"b", "v"}),
    "inputs first": (lambda m, x: (x @ (m.w.T + m.a.T @ m.b.T), x @ m.v.T), {"w", "b", "v"}),
    "addmm": (lambda m, x: (x @ torch.addmm(m.w, m.b, m.a).T, x @ m.v.T), {"w", "b", "v"}),
    "einsum": (lambda m, x: (torch.einsum("bti,or,ri->bto", x, m.b, m.a), x @ m.v.T), {"b", "v"}),
    "fused": (lambda m, x: F.linear(x, m.d @ m.a).chunk(2, -1), {"d"}),
    "fused, chosen": (
        lambda m, x: (F.linear(x, m.d @ m.a).index_select(-1, torch.arange(8 * i, 8 * i + 8)) for i in (0, 1)),
        {"d"},
    ),
    "its own adjoint": (lambda m, x: (F.linear(x, m.w @ m.w.T @ m.w), F.linear(x, m.v)), {"v"}),
}


@pytest.mark.parametrize("how", MERGED)
def test_heads_of_projections_that_are_made_of_several_matrices_are_clipped_one_by_one(how):
    torch.manual_seed(seeded(0))
    project, scaled = MERGED[how]
    model, x = Merged(project).to(D), torch.randn(2, 5, 6, dtype=D)
    model(x, looks=True)
    before = model.seen
    largest = before.amax((0, 2, 3))
    tau = largest.mean().item()
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    clipped = QKClip(model, x, tau=tau).step_(x)
    model(x, looks=True)
    gammas = (tau / largest).clamp(max=1)
    assert len(clipped) == 1
    torch.testing.assert_close(model.seen, before * gammas.view(-1, 1, 1))
    assert {n for n, p in model.named_parameters() if not torch.equal(p, old[n])} == scaled


def test_a_frozen_term_of_a_merged_projection_is_not_scaled():
    model, x = Merged(MERGED["a sum"][0]), torch.randn(2, 5, 6)
    for p in (model.w, model.v):
        p.requires_grad_(False)
    with pytest.raises(NormMismatchError, match="entries of w are on the other side as well, taken elsewhere, or frozen"):
        QKClip(model, x)


def test_arguments_out_of_their_range_are_refused():
    model = ByHand()
    for options, says in (
        ({"tau": 0}, "tau must be a number > 0"),
        ({"tau": math.nan}, "tau must be"),
        ({"alpha": 1.5}, "alpha must be a number from 0 to 1"),
        ({"alpha": "half"}, "alpha must be"),
    ):
        with pytest.raises(NormMismatchError, match=says):
            QKClip(model, X, **options)
    with pytest.raises(NormMismatchError, match="QKClip needs a torch.nn.Module"):
        QKClip(torch.relu, X)
    clip = QKClip(model, X, tau=1e-3)
    with pytest.raises(NormMismatchError, match="step_.. needs the model's arguments"):
        clip.step_()
    before = model.qkv.weight.detach().clone()
    with pytest.raises(NormMismatchError, match="NaN or infinite"):
        clip.step_(X * math.nan)
    assert torch.equal(model.qkv.weight, before)
