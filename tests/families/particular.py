"""What single families need beyond what their names of entries say: entries that are `None`, or that fit one another in a way of their own."""

from __future__ import annotations

from typing import Any

from .shrunk import HEAD, HEADS, VOCABULARY, WIDTH

TIMM = {"backbone": "resnet10t", "use_timm_backbone": True, "use_pretrained_backbone": False, "backbone_config": None}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
SERIES = {"prediction_length": 7, "context_length": 16, "lags_sequence": [1, 4, 7], "num_time_features": 1}
STAGES = {"encoder_in_channels": [16, 32, 64], "decoder_in_channels": [WIDTH] * 3}
HGNET = {
    "backbone_config": {"stage_in_channels": [8, 8, 32, 64], "hidden_sizes": [8, 32, 64, 128]},
    "encoder_in_channels": [32, 64, 128],
    "decoder_in_channels": [WIDTH] * 3,
}
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8}
EFFICIENT = {
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "in_channels": [32, 16],
    "out_channels": [16, 24],
    "kernel_sizes": [3, 5],
    "strides": [1, 2],
    "num_block_repeats": [1, 2],
    "expand_ratios": [1, 6],
    "depthwise_padding": [],
    "hidden_dim": 1280,
}

PARTICULAR: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer", "timm_backbone"), TIMM),
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_image_text", "glm_ocr_text"), {"rope_parameters": SECTIONS}
    ),
    "glm4v_moe_text": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr"), {"text_config": {"rope_parameters": SECTIONS}}),
    "glm4v_moe": {"text_config": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}}},
    **dict.fromkeys(("bamba", "granitemoehybrid"), STATES),
    "mamba2": {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "expand": 2},
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), SERIES),
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 2},
    **dict.fromkeys(("deepseek_v3", "youtu", "longcat_flash", "axk1"), LATENT),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), {"head_dim": HEAD}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "laguna": {"num_attention_heads_per_layer": [HEADS] * 2},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "codegen": {"n_head": 4, "n_embd": 64},
    "bros": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": HEAD},
    "lilt": {"hidden_size": 48},
    "efficientnet": EFFICIENT,
    "align": {"vision_config": EFFICIENT | {"out_channels": [16, WIDTH]}},
    "vits": {"pad_token_id": 0, "vocab_size": VOCABULARY},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "bridgetower": {"vision_config": {"hidden_size": 64}},  # heads of 64
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), STAGES),
    **dict.fromkeys(("d_fine", "deimv2"), HGNET),
    **dict.fromkeys(("encodec", "mimi"), {"codebook_dim": WIDTH}),
    **dict.fromkeys(("sam", "sam_hq"), {"vision_config": {"num_pos_feats": WIDTH // 2}}),
    "oneformer": {"conv_dim": WIDTH},
    "sam2": {"vision_config": {"backbone_config": {"hidden_size": 8}, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
}
