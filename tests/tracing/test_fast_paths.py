"""torch's own transformer layers in eval mode, where they call one operation for a whole layer, as in eager mode."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from thunder_norm import normed
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

SRC = torch.randn(2, 5, 16)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


def _operations(jm):
    """The names of what the first trace consists of, without the lines of torch's that it comes from."""
    return [b.sym.name for b in thunder.last_traces(jm)[0].bound_symbols]


@pytest.mark.parametrize(
    ("norm_first", "activation", "masks"),
    list(itertools.product([False, True], ["relu", "gelu"], ["none", "causal"]))
    + [(False, "relu", "padding"), (True, "gelu", "both")],
)
def test_encoder_layer(norm_first, activation, masks):
    layer = nn.TransformerEncoderLayer(16, 2, 24, activation=activation, batch_first=True, norm_first=norm_first).eval()
    given = {
        "src_mask": CAUSAL if masks in ("causal", "both") else None,
        "src_key_padding_mask": PADDED if masks in ("padding", "both") else None,
    }
    with torch.no_grad():
        expected = layer(SRC, **given)
        for transform in (SubclassTransform(), NormTransform()):
            jm = thunder.jit(layer, transforms=[transform])
            torch.testing.assert_close(jm(SRC, **given), expected, rtol=1e-5, atol=1e-5)
            assert not any("encoder_layer_fwd" in name for name in _operations(jm))


@pytest.mark.parametrize("weights", ["none", "averaged", "of each head"])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both"])
def test_attention(weights, masks):
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    given = {
        "need_weights": weights != "none",
        "average_attn_weights": weights != "of each head",
        "attn_mask": CAUSAL if masks in ("causal", "both") else None,
        "key_padding_mask": PADDED.float().masked_fill(PADDED, float("-inf")) if masks in ("padding", "both") else None,
    }

    jm = thunder.jit(attention, transforms=[NormTransform()])
    with torch.no_grad():
        expected, found = attention(SRC, SRC, SRC, **given), jm(SRC, SRC, SRC, **given)
        assert not any("native_multi_head_attention" in name for name in _operations(jm))
        y, _ = normed(jm)(SRC, SRC, SRC, **given)
    torch.testing.assert_close(y.backing, expected[0], rtol=1e-5, atol=1e-5)
    assert y.backing.square().mean(y.elem_dims).sqrt().max() <= y.norm_size * (1 + 1e-6)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    if weights == "none":
        assert found[1] is expected[1] is None
    else:
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


def test_whole_transformer():
    model = nn.Transformer(16, 2, 1, 1, 24, batch_first=True).eval()
    target = torch.randn(2, 5, 16)
    jm = thunder.jit(model, transforms=[NormTransform()])
    with torch.no_grad():
        expected = model(SRC, target, tgt_mask=CAUSAL)
        torch.testing.assert_close(jm(SRC, target, tgt_mask=CAUSAL), expected, rtol=1e-5, atol=1e-5)
        y = normed(jm)(SRC, target, tgt_mask=CAUSAL)
    torch.testing.assert_close(y.backing, expected, rtol=1e-5, atol=1e-5)
    assert y.backing.square().mean(y.elem_dims).sqrt().max() <= y.norm_size * (1 + 1e-6)
