"""QK-clip: logits of a clipped head are exactly gamma times what they were, those of others the same; against logits seen from outside."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from attention_models import ByHand, ClassToken, Einsum, KeysAreValues, Latent, Torch, logits_of
from modular_models import TOKENS, D
from test_modular_roles import _GROUPED, _MLA, _NAMES, _SMALL

from tests.seeds import seeded
from thunder_norm.modular import QKClip


@dataclass(frozen=True)
class Of:
    """A model with one attention, and what its keys take of gamma: half of it, or nothing where heads share them."""

    make: Any
    key: str
    of_key: float
    args: tuple = (torch.randn(2, 5, 6, dtype=D, generator=torch.Generator().manual_seed(seeded(1))) * 3,)


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
    "class token": Of(ClassToken, "qkv.weight", 0.0),
    "two terms": Of(Latent, "k_rope.weight", 0.0),
    "einsum": Of(Einsum, "k", 0.5),
    "nn.MultiheadAttention": Of(Torch, "attention.in_proj_weight", 0.5),
    "learned key": Of(lambda: Torch(add_bias_kv=True), "attention.in_proj_weight", 0.0),
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
    if of.of_key == 0 and of.key.endswith(("k_proj.weight", "qkv.1.weight", "k_rope.weight")):
        assert torch.equal(old[of.key], model.state_dict()[of.key])  # shared keys stay what they are
    changed = {k for k, t in model.state_dict().items() if not torch.equal(t, old[k])}
    assert changed and not any(word in k for k in changed for word in ("embed", "mlp", "norm", "lm_head", "ln_"))
