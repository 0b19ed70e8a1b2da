"""QK-clip: logits of a clipped head, or of those that share gains, are exactly gamma times what they were, others the same; against logits seen from outside."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.modular.attention_models import (
    Apart,
    Around,
    Bilinear,
    ByHand,
    Channels,
    ClassToken,
    Einsum,
    Gained,
    Grouped,
    KeysAreValues,
    Latent,
    Pooled,
    QueriesAreKeys,
    Relative,
    Reparametrized,
    RotatedBySums,
    RotatedByTable,
    Talking,
    Torch,
    WrittenOut,
    logits_of,
)
from tests.modular.modular_models import TOKENS, D
from tests.modular.test_roles import _GROUPED, _MLA, _MOE, _NAMES, _SMALL
from tests.seeds import seeded
from thunder_norm.modular import QKClip


@dataclass(frozen=True)
class Of:
    """A model with one attention.

    Attributes:
        make: the model.
        changed: of which parameters alone entries may change.
        kept: a parameter that heads share, which may not.
        together: how many heads have one gamma.
        args: of the model.
        heads: the dimension of heads in what the softmax gets.
    """

    make: Any
    changed: str
    kept: str = ""
    together: int = 1
    args: tuple = (torch.randn(2, 5, 6, dtype=D, generator=torch.Generator().manual_seed(seeded(1))) * 3,)
    heads: int = 1


def _hf(model: str, config: str, options: dict, **more):
    def make():
        if not hasattr(transformers, config):
            pytest.skip(f"transformers {transformers.__version__} has no {config}")
        made = getattr(transformers, config)(**{**options, "num_hidden_layers": 1, **more})
        made._attn_implementation = "eager"
        return getattr(transformers, model)(made)

    return make


_V2 = {
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 3,
    "v_head_dim": 2,
    "first_k_dense_replace": 1,
}
_V2 |= {"num_key_value_heads": 4}
_WINDOWS = {"attention_window": [4], "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16, "vocab_size": 13}
_GATED_DELTA = {"head_dim": 4, "layer_types": ["full_attention"], "num_experts": 0, "mlp_only_layers": [0]}
_BLOOM = {k: v for k, v in _NAMES.items() if k != "n_embd"} | {"hidden_size": 16}
_QKV = r"qkv"
_OF_NORMS = r"[qk]_norm"


def _weight_normed():
    model = ByHand()
    nn.utils.parametrizations.weight_norm(model.qkv)
    return model


MODELS = {
    "by hand": Of(ByHand, _QKV),
    "by hand, apart": Of(lambda: ByHand(fused=False), _QKV, kept="qkv.1.weight"),
    "by hand, as many keys": Of(lambda: ByHand(groups=4), _QKV),
    "keys are values": Of(KeysAreValues, _QKV),
    "class token": Of(ClassToken, _QKV),
    "two terms": Of(Latent, "q|k", kept="k_rope.weight"),
    "two terms of other layouts": Of(lambda: Latent(is_by_tokens=True), "q|k", kept="k_rope.weight"),
    "einsum": Of(Einsum, "q|k"),
    "nn.MultiheadAttention": Of(Torch, "in_proj"),
    "learned key": Of(lambda: Torch(add_bias_kv=True), "in_proj"),
    "GPT-2": Of(_hf("GPT2LMHeadModel", "GPT2Config", {k: v for k, v in _NAMES.items() if k != "n_layer"}), "c_attn", args=(TOKENS,)),
    "Llama": Of(_hf("LlamaForCausalLM", "LlamaConfig", _GROUPED), "q_proj", kept="model.layers.0.self_attn.k_proj.weight", args=(TOKENS,)),
    "Phi-3": Of(_hf("Phi3ForCausalLM", "Phi3Config", _GROUPED), "qkv_proj", args=(TOKENS,)),
    "GPT-NeoX": Of(_hf("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL), "query_key_value", args=(TOKENS,)),
    "Falcon": Of(_hf("FalconForCausalLM", "FalconConfig", _SMALL, num_kv_heads=2, new_decoder_architecture=True), "query_key_value", args=(TOKENS,)),
    "DeepSeek": Of(_hf("DeepseekV3ForCausalLM", "DeepseekV3Config", _GROUPED | _MLA, first_k_dense_replace=1), "q_b_proj|kv_b_proj", args=(TOKENS,)),
}  # fmt: skip
OTHERS = {
    "queries are keys": Of(QueriesAreKeys, _QKV),
    "1 + weight": Of(lambda: Reparametrized(lambda w: 1 + w), _QKV),
    "2 weight - 1": Of(lambda: Reparametrized(lambda w: 2 * w - 1), _QKV),
    "weight normalization": Of(_weight_normed, "qkv.*(original0|bias)"),
    "gains": Of(Gained, "gains", together=4),
    "gains of heads": Of(lambda: Gained(per_head=True), "gains.0", kept="gains.1"),
    "one gain": Of(lambda: Gained(same=True), "gains", together=4),
    "one number": Of(lambda: Gained("l2", is_0_dim=True), "gains", together=4),
    "gains and biases": Of(lambda: Gained("layer", bias=True), "gains|biases", together=4),
    "gains and biases in one operation": Of(lambda: Gained(per_head=True, bias=True), r"(gains|biases).0", kept="gains.1"),
    "1 + gains, biases": Of(lambda: Gained(per_head=True, bias=True, offset=1.0), r"(gains|biases).0", kept="gains.1"),
    "Qwen3": Of(_hf("Qwen3ForCausalLM", "Qwen3Config", _GROUPED, head_dim=4), _OF_NORMS, together=4, args=(TOKENS,)),
    "Gemma 3": Of(_hf("Gemma3ForCausalLM", "Gemma3TextConfig", _GROUPED, head_dim=4), _OF_NORMS, together=4, args=(TOKENS,)),
    "exponentials over their sum": Of(lambda: WrittenOut(is_shifted=False), _QKV),
    "shifted exponentials": Of(WrittenOut, _QKV),
    "values over sums of exponentials": Of(lambda: WrittenOut(is_late=True), _QKV),
    "exponentials of logarithms": Of(lambda: WrittenOut(is_log=True), _QKV),
    "rotated by a table": Of(RotatedByTable, _QKV),
    "rotated by sums": Of(RotatedBySums, _QKV),
    "pooled": Of(Pooled, _QKV),
    "channels": Of(Channels, _QKV),
    "channels, temperatures": Of(lambda: Channels(is_normalized=True), "temperature"),
    "temperatures, exponential": Of(lambda: Channels(True, torch.exp), "temperature"),
    "temperatures, exponential below a cap": Of(lambda: Channels(True, lambda t: t.clamp(max=2.0).exp()), "temperature"),
    "temperatures, exponential of a sum": Of(lambda: Channels(True, lambda t: (t - 0.5).clamp_max(1.0).exp()), "temperature"),
    "temperatures, a cap": Of(lambda: Channels(True, lambda t: t.clamp(max=2.0)), "temperature"),
    "temperatures, twice an exponential": Of(lambda: Channels(True, lambda t: 2 * t.exp()), "temperature"),
    "weight less 1, its sign changed": Of(lambda: Reparametrized(lambda w: -w + 1), _QKV),
    "heads among tokens": Of(Grouped, _QKV),
    "heads among keys": Of(Bilinear, "between"),
    "heads apart": Of(Apart, "q|k"),
    "around each query": Of(Around, _QKV),
    "relative": Of(Relative, "qkv|biases|positions"),
    "talking heads": Of(Talking, _QKV, together=4),
    "talking heads by a convolution": Of(lambda: Talking(is_convolution=True), _QKV, together=4),
    "JetMoE": Of(_hf("JetMoeForCausalLM", "JetMoeConfig", _MOE), "experts.input_linear|kv_proj", args=(TOKENS,)),
    "DeepSeek-V2": Of(_hf("DeepseekV2ForCausalLM", "DeepseekV2Config", _GROUPED | _V2), "q_b_proj|kv_b_proj", args=(TOKENS,)),
    "Qwen3-Next": Of(_hf("Qwen3NextForCausalLM", "Qwen3NextConfig", _GROUPED | _GATED_DELTA), _OF_NORMS, together=4, args=(TOKENS,)),
    "Longformer": Of(_hf("LongformerForMaskedLM", "LongformerConfig", _WINDOWS), r"self\.(query|key)\.", args=(TOKENS.repeat(1, 3) + 2,), heads=2),
    "OLMo 2": Of(_hf("Olmo2ForCausalLM", "Olmo2Config", _GROUPED), "q_norm", args=(TOKENS,)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, alpha", [*((name, a) for name in MODELS for a in (0.5, 1.0, 0.25)), *((name, 0.25) for name in OTHERS)]
)
def test_clipped_heads_have_gamma_times_their_logits_and_others_what_they_had(name, alpha):
    torch.manual_seed(seeded(0))
    of = (MODELS | OTHERS)[name]
    model = of.make().to(D).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # biases that are not 0
    clip = QKClip(model, *of.args, alpha=alpha)
    before = logits_of(model, *of.args, heads=of.heads)
    largest = before.flatten(1).amax(1)
    torch.testing.assert_close(clip.largest_logits(*of.args), largest)
    assert clip.num_heads == len(before)
    clip.tau = largest.sort().values[-2:].mean().item()
    old = copy.deepcopy(model.state_dict())
    gammas = torch.where(largest > clip.tau, clip.tau / largest, 1.0).view(-1, of.together).amin(1).repeat_interleave(of.together)
    clipped = clip.step_(*of.args)
    after = logits_of(model, *of.args, heads=of.heads)
    assert [c.gamma for c in clipped] == pytest.approx(gammas[gammas < 1].tolist())
    rounding = (
        1e-5 if name in ("Gemma 3", "Qwen3-Next", "DeepSeek-V2") else 1e-10
    )  # whose normalizations or rotations are float32's
    for a, b, gamma in zip(after, before, gammas.tolist(), strict=True):
        torch.testing.assert_close(a, b * gamma, rtol=rounding, atol=1e-2 * rounding)
    assert after.amax() <= clip.tau * (1 + rounding)
    assert (largest > clip.tau).any() and not (largest > clip.tau).all()
    changed = {k for k, t in model.state_dict().items() if not torch.equal(t, old[k])}
    assert changed and all(re.search(of.changed, k) for k in changed) and of.kept not in changed
