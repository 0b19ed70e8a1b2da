"""Scaled dot product attention, as one operation.

The unfused chain (scores by `matmul`, `softmax`, weights by `matmul`) has the same constants; one node is shorter to read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.context import current_mode
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import distances
from thunder_norm.core.nonfinite import bounded
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._gaussian import softmax_gain
from thunder_norm.rules._local import data
from thunder_norm.rules._shared import Constant, refined, rms, root, spread
from thunder_norm.rules.layers._attention_nearby import Moved, Nearby


def _attention(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> RMSTensor:
    """The bound, see `scaled_dot_product_attention`; `mask` is plain or normed."""
    width, tokens = query.shape[-1], key.shape[-2]
    given = 1 / math.sqrt(width) if scale is None else scale
    scale = abs(given)
    # heads and batches in value's norm stay in the output's; its features stay as they are
    kept = tuple(d for d in ed.nontrivial(value.shape, value.elem_dims) if d != -2)
    batch = tuple(d for d in kept if d < -2)
    averaged = tokens if -2 in value.elem_dims else 1
    of_value = spread(math.sqrt(averaged * min(ed.numel(value.shape, batch), tokens // max(averaged, 1))))
    of_query, of_key = refined(query, (-1,)), refined(key, (-1,))
    product = of_query * of_key * of_value
    if set(ed.nontrivial(query.shape, query.elem_dims)) <= {*batch, -1}:
        # the mean over heads may stay with the query: mean_h |q_h|^2 max_h |k_h|^2 max_h |v_h|^2
        product = min(product, of_key * refined(value, tuple(d for d in kept if d == -1)))
    gain = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    nq, nk, nv = query.norm_size, key.norm_size, value.norm_size
    c: Constant = scale * width * product * gain
    if current_mode() == "typical":
        by_width = scale * math.sqrt(width)
        c = softmax_gain(nq * nk * by_width, tokens) * (by_width * gain)
    sensitivity: dict[str, Any] = {"query": nk * nv * c, "key": nq * nv * c, "value": of_value * gain}
    is_moving = any(x.perturbation_size is not None for x in (query, key, value))
    if is_moving and dropout_p == 0 and not enable_gqa and (moved := _moved(query, key, value, mask)) is not None:
        bias = mask.backing if isinstance(mask, RMSTensor) else mask
        here = Nearby.of(data(query), data(key), data(value), bias, is_causal, given, moved).slopes(batch)
        # from RMS over the features of queries and keys to that over those of values, or to the largest one where the output is
        by_feature = root(width) / (root(value.shape[-1]) if -1 in kept else 1.0)
        for name, x, found in (("query", query, here.query), ("key", key, here.key)):
            found = found * (by_feature * refined(x, (*batch, -1)))
            sensitivity[name] = torch.minimum(sensitivity[name], found)
        sensitivity["value"] = (here.value * refined(value, kept)).clamp(max=of_value)
    value_size = nv * (of_value * gain)
    if isinstance(mask, RMSTensor):
        sensitivity["attn_mask"] = nv * (of_value * refined(mask, ()) * gain)
        value_size = value_size + bounded(0.0, mask.norm_size)
    return rms(value_size, kept, sensitivity=sensitivity)


def _moved(query: RMSTensor, key: RMSTensor, value: RMSTensor, mask: torch.Tensor | None) -> Moved | None:
    """How far tokens are from the data where claims are to hold there alone (`distances`)."""
    normed = [query, key, value, *([mask] if isinstance(mask, RMSTensor) else [])]
    found = distances(*normed)
    if found is None:
        return None
    entries = [refined(x, ()) for x in normed[3:]]
    lengths = [refined(x, (-1,)) * math.sqrt(x.shape[-1]) for x in normed[:3]]
    return Moved(*(d * c for d, c in zip(found, lengths + entries, strict=True)))


@normed_op(F.scaled_dot_product_attention).register_norm(allow_plain_tensors="constant")
def scaled_dot_product_attention(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> RMSTensor:
    """softmax(s q k^T + mask) v for each head.

    query, key, value: [..., heads, tokens, d], RMS over the last dimension: maximum over tokens, heads and batches
    attn_mask: plain, additive or boolean, of any size: each row of weights remains a convex combination
    Value:        |y| <= |v|                              (attained: equal values)
    Sensitivity:  s d |k| |v|,  s d |q| |v|,  1           (attained at weights 1/2, 1/2 on keys +-k and values +-v, q orthogonal)
                  from d y = s Cov_p(v, k) dq and |Cov_p(v, k)| <= sup |v| sup |k|; s = 1 / sqrt(d) unless given
    Local:        s |Cov_p(v, k)|_2 (bounded within d^(1/8)) to q, s |q|_2 sum_j p_j |v_j - y|_2 to k, of the worst token;
                  over heads by the weights that they share
    Typical:      s sqrt(d) |k| |v| g,  s sqrt(d) |q| |v| g,  1; logits are independent, of size s sqrt(d) |q| |k|, and g = `softmax_gain`
                  of them: 1/2 where they are small, as large ones 0 but where two compete.  The value is that of values that agree
    Norms over heads: the mean stays with the values at factor sqrt(min(heads, tokens)), each head looking at a position of
    its own; queries and keys are converted.  Dropout multiplies everything by 1 / (1 - p), the worst mask's.
    Source:       Large et al. 2024, "Scalable Optimization in the Modular Norm" (functional attention: the case s = 1 / d)
    """
    return _attention(query, key, value, dropout_p, scale, attn_mask, is_causal, enable_gqa)


@normed_op(F.scaled_dot_product_attention).register_norm
def scaled_dot_product_attention_with_bias(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    attn_mask: RMSTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> RMSTensor:
    """The same with an additive mask that moves, a position bias: sensitivity |v| to its largest entry."""
    return _attention(query, key, value, dropout_p, scale, attn_mask, is_causal, enable_gqa)


# -- ATen's names: the same function, further outputs without a norm -------------------------------------------------------


@normed_op(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default).register_norm(allow_plain_tensors="constant")
def _flash_attention_for_cpu(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[NormedTensor | None, ...]:
    """`scaled_dot_product_attention`.

    Gap:         none but the search's, in few cases: that function is attained
    """
    return _attention(query, key, value, dropout_p, scale, attn_mask, is_causal), None


@normed_op(torch.ops.aten._scaled_dot_product_flash_attention.default).register_norm
def _flash_attention(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[NormedTensor | None, ...]:
    """`scaled_dot_product_attention`.

    Untried:     a kernel for CUDA
    """
    return (_attention(query, key, value, dropout_p, scale, None, is_causal), *[None] * 8)


@normed_op(torch.ops.aten._scaled_dot_product_efficient_attention.default).register_norm(allow_plain_tensors="constant")
def _efficient_attention(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[NormedTensor | None, ...]:
    """`scaled_dot_product_attention`.

    Untried:     a kernel for CUDA
    """
    return (_attention(query, key, value, dropout_p, scale, attn_bias, is_causal), *[None] * 3)


@normed_op(torch.ops.aten._scaled_dot_product_cudnn_attention.default).register_norm(allow_plain_tensors="constant")
def _cudnn_attention(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[NormedTensor | None, ...]:
    """`scaled_dot_product_attention`.

    Untried:     a kernel for CUDA
    """
    return (_attention(query, key, value, dropout_p, scale, attn_bias, is_causal), *[None] * 8)


@normed_op(torch.ops.aten._scaled_dot_product_attention_math.default).register_norm(allow_plain_tensors="constant")
def _attention_math(
    query: RMSTensor,
    key: RMSTensor,
    value: RMSTensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[NormedTensor | None, ...]:
    """`scaled_dot_product_attention`.

    Gap:         none but the search's, in few cases: that function is attained
    """
    return _attention(query, key, value, dropout_p, scale, attn_mask, is_causal, enable_gqa), None
