"""What torch computes with one operation where no gradient is needed, in the operations that it stands for: Thunder has none of these.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` in eval mode call them; a mask says what is left out, as a bool or, of other
dtypes, by what is not 0.  Tensors of several lengths in one (``enable_nested_tensor`` with a padding mask) are made by operations before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.tracing.lookasides import instead_of
from thunder.core.interpreter import WrappedValue, _interpret_call


@instead_of(torch._transformer_encoder_layer_fwd)
def _layer_of_encoder(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _interpret_call(_layer, *args, **kwargs)


@instead_of(torch._native_multi_head_attention)
def _attention_of_module(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return _interpret_call(_attention, *args, **kwargs)


@instead_of(torch.nn.modules.transformer._detect_is_causal_mask)
def _is_causal(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Whether attention may go by this alone: torch compares the mask's values, of which a trace has none, and goes by the mask itself."""
    return _interpret_call(lambda mask, is_causal=None, size=None: is_causal is True, *args, **kwargs)


def _layer(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps,
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2,
    mask=None, mask_type=None,
):  # fmt: skip
    """As ``nn.TransformerEncoderLayer.forward`` has it: pre-norm or post-norm, without dropout."""

    def attention(x):
        return _heads(x, x, x, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, _allowed(mask, mask_type))

    def feed_forward(x):
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attention(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attention(src))
    return norm_2(x + feed_forward(x))


def _attention(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
    mask=None, need_weights=True, average_attn_weights=True, mask_type=None,
):  # fmt: skip
    """Results and, where they are asked for, the attention weights, averaged over heads or of each."""
    allowed = _allowed(mask, mask_type)
    result = _heads(query, key, value, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, allowed)
    if not need_weights:
        return result, None
    q, k, _ = _projected(query, key, value, num_head, qkv_weight, qkv_bias)
    scores = torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
    weights = (scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))).softmax(-1)
    return result, weights.mean(1) if average_attn_weights else weights


def _heads(query, key, value, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, allowed):
    q, k, v = _projected(query, key, value, num_heads, qkv_weight, qkv_bias)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    return F.linear(y.transpose(1, 2).reshape(query.shape), proj_weight, proj_bias)


def _projected(query, key, value, num_heads, weight, bias):
    """[batch, places, width] -> [batch, heads, places, width / heads], of each of the three."""
    if query is key and key is value:
        made = F.linear(query, weight, bias).chunk(3, -1)
    else:
        of_each = zip((query, key, value), weight.chunk(3), bias.chunk(3), strict=True)
        made = [F.linear(x, w, b) for x, w, b in of_each]
    return [t.reshape(t.shape[0], t.shape[1], num_heads, -1).transpose(1, 2) for t in made]


def _allowed(mask, mask_type):
    """What may be looked at, for [batch, heads, places, places]: of a mask of places by places (0), of keys (1), of all (2 and None)."""
    if mask is None:
        return None
    left_out = mask if mask.dtype == torch.bool else mask != 0
    return ~(left_out[:, None, None, :] if mask_type == 1 else left_out)
