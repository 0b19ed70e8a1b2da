"""QK-clip: logits of a clipped head are exactly gamma times what they were, those of others the same; against logits seen from outside."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from modular_models import TOKENS, D
from ranks import run_ranks
from test_modular_roles import _GROUPED, _IDS, _MLA, _NAMES, _SMALL
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.seeds import seeded
from thunder_norm.errors import NormMismatchError
from thunder_norm.modular import ModularOptimizer, QKClip

_SOFTMAXES = (torch.softmax, nn.functional.softmax, torch.Tensor.softmax)


class Logits(TorchFunctionMode):
    """What softmaxes get, and what torch's attention would give its own."""

    def __init__(self):
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SOFTMAXES:
            self.seen.append(args[0].detach().clone())
        if func is nn.functional.scaled_dot_product_attention:
            q, k = args[:2]
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if kwargs.get("enable_gqa") else k
            scale = kwargs.get("scale") or q.shape[-1] ** -0.5
            logits = (q @ k.mT * scale).detach()
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if kwargs.get("is_causal"):
                mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
            self.seen.append(
                logits if mask is None else torch.where(mask if mask.dtype == torch.bool else mask == 0, logits, -math.inf)
            )
        return func(*args, **kwargs)


def logits_of(model: nn.Module, *args: Any) -> torch.Tensor:
    """Logits [heads, batch, tokens, tokens] of the one attention; -inf where a mask hides them."""
    with torch.no_grad(), Logits() as seen:
        if isinstance(model, Torch):
            seen.seen.append(model.logits(*args))  # torch does not tell what it calls inside
        else:
            model(*args)
    found = seen.seen[0]
    found = found.unflatten(0, (len(args[0]), -1)) if found.ndim == 3 else found
    return torch.where(found < -1e30, -math.inf, found).transpose(0, 1)


class ByHand(nn.Module):
    """Four heads of queries, two of keys; biases, a rotation of two entries by place, logits written out."""

    def __init__(self, fused=True, heads=4, groups=2, width=3):
        super().__init__()
        self.sizes = [heads * 2 * width, groups * 2 * width, groups * 2 * width]
        self.width, self.fused = 2 * width, fused
        self.qkv = nn.Linear(6, sum(self.sizes)) if fused else nn.ModuleList(nn.Linear(6, n) for n in self.sizes)

    def rotated(self, t):
        angle = torch.arange(t.shape[-2], dtype=t.dtype)[:, None]
        a, b = t.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x):
        parts = self.qkv(x).split(self.sizes, -1) if self.fused else [layer(x) for layer in self.qkv]
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        y = (self.rotated(q) @ self.rotated(k).mT / self.width**0.5).softmax(-1) @ v
        return y.transpose(1, 2).flatten(-2)


class KeysAreValues(ByHand):
    """What gives the keys gives the values as well."""

    def forward(self, x):
        q, k, _ = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        k = k.repeat_interleave(2, 1)
        return (q @ k.mT).softmax(-1) @ k


class Einsum(nn.Module):
    """A stack of matrices, one for each head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(3, 6, 4)) for _ in range(3))

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hid->bhtd", x, w) for w in (self.q, self.k, self.v))
        return torch.einsum("bhts,bhsd->bthd", torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1), v)


class Torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def logits(self, x):
        y = nn.functional.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias)
        q, k, _ = (t.unflatten(-1, (3, 2)).transpose(1, 2) for t in y.chunk(3, -1))
        return q @ k.mT / 2**0.5


@dataclass(frozen=True)
class Of:
    """A model with one attention, and what its keys take of gamma: half of it, or nothing where heads share them."""

    make: Any
    key: str
    of_key: float
    args: tuple = (torch.randn(2, 5, 6, dtype=D, generator=torch.Generator().manual_seed(1)) * 3,)


def _hf(model: str, config: str, options: dict, **more):
    def make():
        made = getattr(transformers, config)(**{**options, "num_hidden_layers": 1, **more})
        made._attn_implementation = "eager"
        return getattr(transformers, model)(made)

    return make


_BLOOM = {k: v for k, v in _NAMES.items() if k != "n_embd"} | {"hidden_size": 16}
MODELS = {
    "by hand": Of(ByHand, "qkv.weight", 0.0),
    "by hand, apart": Of(lambda: ByHand(fused=False), "qkv.1.weight", 0.0),
    "by hand, as many keys": Of(lambda: ByHand(groups=4), "qkv.weight", 0.5),
    "keys are values": Of(KeysAreValues, "qkv.weight", 0.0),
    "einsum": Of(Einsum, "k", 0.5),
    "nn.MultiheadAttention": Of(Torch, "attention.in_proj_weight", 0.5),
    "GPT-2": Of(_hf("GPT2LMHeadModel", "GPT2Config", {k: v for k, v in _NAMES.items() if k != "n_layer"}), "", 0.5, (TOKENS,)),
    "Llama": Of(_hf("LlamaForCausalLM", "LlamaConfig", _GROUPED), "model.layers.0.self_attn.k_proj.weight", 0.0, (TOKENS,)),
    "Phi-3": Of(_hf("Phi3ForCausalLM", "Phi3Config", _GROUPED), "", 0.0, (TOKENS,)),
    "GPT-NeoX": Of(_hf("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL), "", 0.5, (TOKENS,)),
    "Falcon": Of(_hf("FalconForCausalLM", "FalconConfig", _SMALL, num_kv_heads=2, new_decoder_architecture=True), "", 0.0, (TOKENS,)),
    "DeepSeek": Of(_hf("DeepseekV3ForCausalLM", "DeepseekV3Config", _GROUPED | _MLA, first_k_dense_replace=1), "", 0.5, (TOKENS,)),
}  # fmt: skip


@pytest.mark.parametrize("alpha", [0.5, 1.0, 0.25])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_heads_have_gamma_times_their_logits_and_others_what_they_had(name, alpha):
    torch.manual_seed(seeded(0))
    of = MODELS[name]
    model = of.make().to(D).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # biases that are not 0
    clip = QKClip(model, *of.args, alpha=alpha)
    before = logits_of(model, *of.args)
    largest = before.flatten(1).amax(1)
    torch.testing.assert_close(clip.largest_logits(*of.args), largest)
    assert clip.num_heads == len(before)
    clip.tau = largest.sort().values[-2:].mean().item()
    old = copy.deepcopy(model.state_dict())
    clipped = clip.step_(*of.args)
    after = logits_of(model, *of.args)
    assert len(clipped) == (largest > clip.tau).sum()
    for head, (a, b) in enumerate(zip(after, before, strict=True)):
        gamma = min(1.0, clip.tau / largest[head].item())
        torch.testing.assert_close(a, b * gamma, rtol=1e-10, atol=1e-12)
    assert (largest > clip.tau).any() and not (largest > clip.tau).all()
    if of.of_key == 0 and of.key.endswith(("k_proj.weight", "qkv.1.weight")):
        assert torch.equal(old[of.key], model.state_dict()[of.key])  # shared keys stay what they are
    changed = {k for k, t in model.state_dict().items() if not torch.equal(t, old[k])}
    assert changed and not any(word in k for k in changed for word in ("embed", "mlp", "norm", "lm_head", "ln_"))


def test_what_is_added_to_logits_or_done_with_them_does_not_count():
    """Position biases, masks, soft caps and sinks: gamma is of the products of queries and keys that count."""

    class Dressed(ByHand):
        def forward(self, x):
            q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
            logits = 0.5 * (q @ k.repeat_interleave(2, 1).mT) / 2
            n = logits.shape[-1]
            dressed = 30 * torch.tanh(logits / 30) + 3 * torch.arange(n)
            dressed = dressed.masked_fill(torch.ones(n, n).triu(1).bool(), torch.finfo(x.dtype).min)
            dressed = torch.cat([dressed, torch.ones(*dressed.shape[:-1], 1, dtype=x.dtype)], -1)
            return logits, dressed.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)

    torch.manual_seed(seeded(0))
    model, x = Dressed().to(D), 3 * torch.randn(2, 5, 6, dtype=D)
    with torch.no_grad():
        before = model(x)[0].tril() + torch.full((5, 5), -math.inf).triu(1)
    clip = QKClip(model, x, tau=before.amax().item() / 2)
    torch.testing.assert_close(clip.largest_logits(x), before.amax((0, 2, 3)))
    assert clip.step_(x) and not clip.step_(x)
    torch.testing.assert_close(clip.largest_logits(x).amax().item(), clip.tau)


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
    gammas = (clip.tau / largest).clamp(max=1)
    torch.testing.assert_close(seen.seen[0], before[0] * gammas.view(-1, 1, 1))  # what comes second gets other inputs


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


class Shared(ByHand):
    """Queries are keys: a multiple of one is a multiple of the other."""

    def forward(self, x):
        q, _, v = self.qkv(x).split(self.sizes, -1)
        q = q.unflatten(-1, (-1, self.width)).transpose(1, 2)
        return (q @ q.mT).softmax(-1) @ v[:, None]


class Penalized(ByHand):
    def forward(self, x):
        w = self.qkv.weight
        return super().forward(x), w.square().sum()


class Mixed(ByHand):
    """A constant is added to queries and keys, so a multiple of their projection is no multiple of them."""

    def rotated(self, t):
        return t + 1


X = torch.randn(2, 5, 6)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: nn.Linear(6, 4), "no attention is found"),
        (Normalized, "cannot be scaled alone(.|\n)*normalized, or constants are added"),
        (Mixed, "normalized, or constants are added"),
        (Shared, "also another head's, or taken elsewhere"),
        (Penalized, "also another head's, or taken elsewhere"),
    ],
)
def test_attentions_that_cannot_be_clipped_are_refused(make, says):
    with pytest.raises(NormMismatchError, match=says):
        QKClip(make(), X)


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
    qwen = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=4, **_GROUPED | _IDS))
    with pytest.raises(NormMismatchError, match="normalized"):
        QKClip(qwen, TOKENS)
