"""Whole models in eager mode, without Thunder: every operation has a rule, and values and movements stay within the claims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from thunder_norm import rules  # noqa: F401
from thunder_norm.audit import norm
from thunder_norm.core.context import norm_mode
from thunder_norm.core.kinds import RMSTensor, RMSToRMSTensor
from thunder_norm.core.tensors import NormedTensor

transformers = pytest.importorskip("transformers")
WIDTH, TOKENS = 16, 5


def language_inputs(**more):
    return {"inputs_embeds": (torch.randn(2, TOKENS, WIDTH), (-1,)), **more}


def image_inputs(size):
    return {"pixel_values": (torch.randn(2, 3, size, size), (-3,))}


def padding():
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 3:] = 0
    return mask


def gpt2(attention):
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=2, attn_implementation=attention, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), language_inputs(attention_mask=padding())


def llama(attention):
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), language_inputs(attention_mask=padding())


def bert(attention):
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation=attention,
    )
    return transformers.BertModel(config), language_inputs(attention_mask=padding())


def vit(attention):
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        attn_implementation=attention,
    )
    return transformers.ViTForImageClassification(config), image_inputs(8)


def resnet(layer_type):
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type=layer_type)
    return transformers.ResNetForImageClassification(config), image_inputs(16)


MODELS = [(build, a) for build in (gpt2, llama, bert, vit) for a in ("eager", "sdpa")]
MODELS += [(resnet, layer_type) for layer_type in ("basic", "bottleneck")]


def outputs(result):
    return [t for t in tree_leaves(dict(result) if isinstance(result, dict) else result) if isinstance(t, torch.Tensor)]


def check_within_claims(model, plain, step=1e-3):
    """The outputs' norms, and how far they move, are within what the normed run says; some are normed."""
    moved = {k: (v[0] + step * torch.randn(v[0].shape), v[1]) if isinstance(v, tuple) else v for k, v in plain.items()}
    normed = {}
    for name, v in plain.items():
        if isinstance(v, tuple):
            (t, dims), there = v, moved[name][0]
            size = max(norm(RMSTensor, x.double(), dims).item() for x in (t, there))
            distance = norm(RMSTensor, (there - t).double(), dims).item()
            normed[name] = RMSTensor(size, backing=t, elem_dims=dims, perturbation_size=distance)
        else:
            normed[name] = v
    with torch.no_grad():
        claims = outputs(model(**normed))
        here, there = (
            outputs(model(**{k: v[0] if isinstance(v, tuple) else v for k, v in inputs.items()})) for inputs in (plain, moved)
        )
    assert len(claims) == len(here)
    assert any(isinstance(c, NormedTensor) for c in claims)
    for claim, a, b in zip(claims, here, there, strict=True):
        if isinstance(claim, NormedTensor):
            assert torch.isfinite(claim.norm_size)
            assert torch.isfinite(claim.perturbation_size)
            torch.testing.assert_close(claim.backing, a)
            assert norm(type(claim), a.double(), claim.elem_dims) <= claim.norm_size * (1 + 1e-5)
            assert norm(type(claim), (b - a).double(), claim.elem_dims) <= claim.perturbation_size * (1 + 1e-3)


@pytest.mark.parametrize("build, variant", MODELS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_transformers_model_stays_within_its_claims(build, variant):
    model, inputs = build(variant)
    check_within_claims(model.eval(), inputs)


def tokens():
    return {"x": (torch.randn(2, TOKENS, 8), (-1,))}


class SelfAttention(nn.Module):
    def __init__(self, need_weights, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


MODULES = {
    "attention": lambda: SelfAttention(False, batch_first=True),
    "attention, tokens first": lambda: SelfAttention(False),
    "attention with weights": lambda: SelfAttention(True, batch_first=True),
    "encoder layer": lambda: Wrapped(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
    "encoder layer, norm first": lambda: Wrapped(nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=True)),
    "encoder": lambda: Wrapped(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)),
}


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_torch_module_stays_within_its_claims(build):
    check_within_claims(build().eval(), tokens())


# What modula's own dualize gives for its GPT: embedding tared to mass 1, blocks to 5 together, head of mass 1, target norm 1.
MODULA_TARGETS = {"embedding": 0.142857, "q": 0.714286, "k": 0.714286, "v": 0.714286}
MODULA_TARGETS |= {"out": 0.238095, "up": 0.238095, "down": 0.238095, "head": 0.142857}


def modula_gpt(moving, blocks, width=8, heads=2):
    """The GPT of modula written with torch operations, all norms 1; the perturbation of its output when `moving` moves by 1."""
    shapes = {"embedding": (11, width), "up": (4 * width, width), "down": (width, 4 * width), "head": (11, width)}

    def weight(name):
        kind = RMSTensor if name == "embedding" else RMSToRMSTensor
        t = torch.randn(shapes.get(name.rpartition(".")[2], (width, width)))
        return kind(1.0, backing=t, perturbation_size=1.0 if name == moving else None)

    def split(t):
        return t.view(1, 3, heads, -1).transpose(1, 2)

    x = F.embedding(torch.tensor([[3, 1, 4]]), weight("embedding"))
    for i in range(blocks):
        y = F.layer_norm(x, (width,))
        q, k, v = (split(F.linear(y, weight(f"{i}.{name}"))) for name in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=heads / width) / 3
        y = F.linear(y.transpose(1, 2).reshape(1, 3, width), weight(f"{i}.out"))
        x = (1 - 1 / (2 * blocks)) * x + 1 / (2 * blocks) * y
        y = F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), weight(f"{i}.up"))) / 1.1289, weight(f"{i}.down"))
        x = (1 - 1 / (2 * blocks)) * x + 1 / (2 * blocks) * y
    return F.linear(F.layer_norm(x, (width,)), weight("head")).perturbation_size.item()


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name, target", MODULA_TARGETS.items())
def test_modula_mode_gives_modulas_targets_for_its_gpt(name, target, blocks):
    outside = name in ("embedding", "head")
    mass = 1.0 if outside else 5 / (6 * blocks)
    with norm_mode("modula"):
        sensitivity = modula_gpt(name if outside else f"{blocks - 1}.{name}", blocks)
    assert mass / 7 / sensitivity == pytest.approx(target, rel=1e-5)
