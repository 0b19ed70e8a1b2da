"""Small configurations: what a configuration of transformers says in large, in small and consistent numbers.

Only what changes is given to the configuration's class: what it derives from other entries is derived anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY, IMAGE, PLACES = 32, 2, 16, 48, 64, 64, 64
FIRST_WORD = 24  # smaller tokens are special

Shrink = Callable[[int, dict[str, Any]], int]


def to(number: int) -> Shrink:
    """At most `number`; what is 0 or negative says that there is none."""
    return lambda value, _: min(value, number)


def kv_heads(value: int, config: dict[str, Any]) -> int:
    return HEADS if value == config.get("num_attention_heads") else 1


def patch(value: int, _: dict[str, Any]) -> int:
    """A divisor of the image's size."""
    return value if IMAGE % value == 0 and value <= IMAGE // 4 else 2 ** min(4, value.bit_length() - 1)


def embedded(value: int, config: dict[str, Any]) -> int:
    """How many patches there are along an image's side."""
    return IMAGE // patch(config["patch_size"], config) if "patch_size" in config else min(value, IMAGE // 16)


def nothing(value: int, _: dict[str, Any]) -> int:
    return value


def window(value: int, config: dict[str, Any]) -> int:
    """Two places along a side; of pixels, where patches are merged, as many as one merged patch has."""
    if "spatial_merge_size" in config and value > (size := config.get("patch_size", 1)):
        return patch(size, config) * config["spatial_merge_size"]
    return min(value, 2)


# the first name that fits counts
NAMES: list[tuple[str, Shrink]] = [
    (
        r"chunk_size_feed_forward|num_channels|in_chans|audio_channels|.*_coefficient|.*_cost|num_feature_levels|.*stride.*",
        nothing,
    ),
    (
        r".*(num_labels|kernel|dilation|padding|sampling_rate|sample_rate|hop_length).*|.*_factor|.*ratio|temporal_patch_size",
        nothing,
    ),
    (r".*(conv_dim|d_conv|merge_size|num_frames|reduction|rope_theta|eval_idx)", nothing),
    (r".*(key_value_heads|kv_heads)|n_head_kv", kv_heads),
    (
        r"(.*_)?(num_heads|n_heads?|num_attention_heads|attention_heads|num_(key|value)_heads|heads)|.*_n_heads|.*num_heads",
        to(HEADS),
    ),
    (r".*(qk_rope_head_dim|rotary_dim|qk_nope_head_dim)|rotary_pct", to(8)),
    (r".*(head_dim|d_kv|d_head|kv_channels|dim_head|head_size|attention_key_size|v_head_dim)", to(HEAD)),
    (r".*(lora_rank|laurel_rank|d_state|state_size|ssm_state.*|time_step_rank|dt_rank)", to(8)),
    (r"n_group|num_expert_group", to(2)),
    (r"topk_group", to(1)),
    (r".*(experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|num_selected_experts|moe_top_k|topk)", to(2)),
    (r".*(num_shared_experts|n_shared_experts)", to(1)),
    (r".*num_.*experts|.*routed_experts|num_experts.*", to(4)),
    (r"first_k_dense_replace|.*_layers_per_.*|num_dense_layers|num_nextn_predict_layers|num_kv_shared_layers", to(1)),
    (r"num_conv_pos_embedding_groups|num_groups|upsample_groups|n_groups|mamba_n_groups", to(2)),
    (r"num_feat_extract_layers|vision_feature_layer|max_window_layers|insert_layer_id", nothing),
    (r"(.*_)?(num_layers|n_layers?|layers|num_hidden_layers|depth|num_blocks|.*_depth|.*num_.*_layers|.*_layers)", to(2)),
    (r"(.*_)?vocab_size(_.*)?|codebook_size|num_embeddings", to(VOCABULARY)),
    (r".*(intermediate|ffn|mlp|inner|d_ff|linear_units|feedforward|feed_forward|dff).*", to(HIDDEN)),
    (r".*(pretrain_)?image_size|.*img_size|input_size", to(IMAGE)),
    (r"image_embedding_size", embedded),
    (r".*patch_size", patch),
    (
        r".*(position_embeddings|max_positions?|n_positions|source_positions|target_positions|context_length|max_seq_len.*|max_length)",
        to(PLACES),
    ),
    (r".*(sliding_window|attention_window|local_attention|chunk_size|block_size|attention_chunk_size|index_topk)(_size)?", to(4)),
    (r".*(num_queries|num_query_tokens|num_denoising|latent_query_num|resampler_n_latents|num_latents|max_num_bins)", to(4)),
    (r".*window_size", window),
    (r".*(num_buckets|max_distance|memory_size|max_rel.*|.*_bins)", to(8)),
    (r".*(codebook_dim|codevector_dim|latent_dim|latent_channels)", to(HEAD)),
    (
        r".*(hidden_size.*|hidden_dim(ension)?|embed_dim|d_model|n_embd|embedding_size|embedding_dim|emb_dim|projection_dim|output_dim|"
        r"embed_proj_dim|channels|lru_width|num_filters|proj_size|proj_dim|units|num_pos_feats|hidden_states_size|width|input_dim|"
        r"out_hidden_size|query_dim|attention_dim|fpn_.*size|d_latents|_dim|_size)|dim|classifier_dim",
        to(WIDTH),
    ),
]
SPECIAL = re.compile(r".*(_token_id|_token_index|_index|_id|token_id)s?$")
KNOWN_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WIDTHS = re.compile(
    r".*(hidden_sizes|channels|dims?|_channel_list|embed_dim_per_stage|neck_hidden_sizes|tdnn_dim|sizes_out|filters)$"
)
DEPTHS = re.compile(
    r".*(depths?|num_blocks|numb_of_layers|blocks_per_stage|block_repeats|num_block_repeats|layers_per_stage|block_sizes)$"
)


LENGTHS = re.compile(r".*(layers?|depths?|n_layer|blocks|vocab_size|image_size|img_size|layer_types|positions?|_embeddings)$")

# which entries stay as they are in large: none; lists, which have to fit one another; all but what makes a model deep; all
STAYS: tuple[Callable[[str, Any], bool], ...] = (
    lambda name, value: False,
    lambda name, value: isinstance(value, (list, tuple)) and name != "layer_types",
    lambda name, value: not LENGTHS.match(name),
    lambda name, value: True,
)


def changes(config: Any, tokens: dict[str, int] | None = None, stays: Callable[[str, Any], bool] = STAYS[0]) -> dict[str, Any]:
    """The entries of a configuration of transformers that are other in small, those of the configurations within included."""
    from transformers import PretrainedConfig  # the name that transformers 4 has too

    tokens = dict(KNOWN_TOKENS) if tokens is None else tokens
    entries = {name: value for name, value in vars(config).items() if not name.startswith("_") and value is not None}
    found: dict[str, Any] = _left_open(config, tokens)
    for name, value in entries.items():
        if isinstance(value, PretrainedConfig):
            small = _other_than_by_default(value) | changes(value, tokens, stays)
            found[name] = type(value)(**(small | _stages(value, small))).to_dict()  # transformers 4 takes no configuration there
        elif isinstance(value, bool) or name in ("id2label", "label2id"):
            continue
        elif stays(name, value) and not SPECIAL.match(name):
            continue
        elif name in ("rope_parameters", "rope_scaling"):
            found |= {name: _sections(value)}
        elif SPECIAL.match(name):
            found |= _special(name, value, tokens)
        elif isinstance(value, int) and value > 1:
            found |= {name: _small(name, value, entries)}
        elif isinstance(value, (list, tuple)) and len(value) > 0:
            found |= _listed(name, list(value), entries)
    if getattr(config, "use_cache", None):
        found["use_cache"] = False
    return {name: value for name, value in found.items() if value != entries.get(name)} | (
        {} if stays("layer_types", []) else _layers(entries)
    )


def _left_open(config: Any, tokens: dict[str, int]) -> dict[str, Any]:
    """What a configuration leaves to a checkpoint's: which token stands for an image, and heads that are as many, and as wide, as others say."""
    open_ = {name for name, value in vars(config).items() if value is None}
    found: dict[str, Any] = {
        name: tokens.setdefault(name, FIRST_WORD - 1) for name in ("image_token_id", "image_token_index") if name in open_
    }
    heads = vars(config).get("num_attention_heads")
    if isinstance(heads, int) and "num_key_value_heads" in open_:
        found["num_key_value_heads"] = min(heads, HEADS)
    if isinstance(heads, int) and "head_dim" in open_:
        found["head_dim"] = HEAD
    return found


def _other_than_by_default(config: Any) -> dict[str, Any]:
    """What a configuration within another is given by it, and its class would not say."""
    default = vars(type(config)())
    return {n: v for n, v in vars(config).items() if not n.startswith("_") and n != "stage_names" and default.get(n, ...) != v}


def _stages(config: Any, small: dict[str, Any]) -> dict[str, Any]:
    """As many stages to return as there were, the last ones, and layers enough for them."""
    stages = getattr(config, "out_features", None)
    if not stages or "num_hidden_layers" not in vars(config):
        return {"out_features": stages} if stages else {}
    layers = max(small.get("num_hidden_layers", 0), len(stages))
    last = range(layers - len(stages) + 1, layers + 1)
    return {"num_hidden_layers": layers, "out_features": [f"stage{i}" for i in last], "out_indices": None}


def _special(name: str, value: Any, tokens: dict[str, int]) -> dict[str, Any]:
    if isinstance(value, int) and value >= 0:
        return {name: tokens.setdefault(name, min(len(tokens), FIRST_WORD - 1))}
    if isinstance(value, list) and name in KNOWN_TOKENS:
        return {name: KNOWN_TOKENS[name]}
    return {}


def _sections(rope: Any) -> Any:
    """Which places rotate by which coordinate, of a head in small; within the entries of types of layers too."""
    if not isinstance(rope, dict):
        return rope
    if not isinstance(large := rope.get("mrope_section"), (list, tuple)):
        return {name: _sections(value) for name, value in rope.items()}
    places = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
    small = [n * places // sum(large) for n in large]
    small[0] += places - sum(small)
    return {**rope, "mrope_section": small}


def _small(name: str, value: int, config: dict[str, Any]) -> int:
    return next((small(value, config) for pattern, small in NAMES if re.fullmatch(pattern, name)), value)


def _listed(name: str, value: list, config: dict[str, Any]) -> dict[str, Any]:
    """Of stages as many, each narrower and of one layer; what there is of each layer is cut to the layers that are left."""
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if numbers and DEPTHS.match(name):
        return {name: [1] * len(value)}
    if numbers and re.match(r".*heads.*", name) and len(value) > 1:
        return {name: [max(1, v // min(value)) for v in value]}
    if numbers and WIDTHS.match(name):
        return {name: [max(8, v * 8 // min(v for v in value if v > 3) // 8 * 8) if v > 3 else v for v in value]}
    if numbers and name in ("image_size", "img_size", "pretrain_image_size"):
        return {name: [IMAGE] * len(value)}
    if name != "layer_types" and len(value) == config.get("num_hidden_layers") and len(value) > 2:
        return {name: [value[i] for i in _kept(config)]}
    return {}


def _kept(config: dict[str, Any]) -> list[int]:
    """Which layers there are of in small: the first of each type, or the first two."""
    types = config.get("layer_types")
    if not isinstance(types, (list, tuple)):
        return [0, 1]
    first = sorted({types.index(t) for t in types})
    return first if len(first) > 1 else list(range(min(2, len(types))))


def _layers(config: dict[str, Any]) -> dict[str, Any]:
    types = config.get("layer_types")
    if not isinstance(types, (list, tuple)) or len(types) < 3:
        return {}
    kept = _kept(config)
    return {"layer_types": [types[i] for i in kept], "num_hidden_layers": len(kept)}
