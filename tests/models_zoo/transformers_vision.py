"""Models of images and videos of transformers, from their own configuration classes."""

from __future__ import annotations

from typing import Any

import torch

from .case import TRANSFORMERS, add
from .transformers_language import of_config

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2]}


def vision(name: str, config: str, *, size: int = 16, **options: Any) -> None:
    """A model of two images of `size` x `size`, of the sizes above as far as its configuration has them."""
    add(name, TRANSFORMERS, of_config(config, options, lambda: {"pixel_values": torch.randn(2, 3, size, size)}))


vision("ViT", "ViTConfig", **SIZE)
vision("DeiT", "DeiTConfig", **SIZE)
vision("BEiT", "BeitConfig", **SIZE, use_relative_position_bias=True)
vision("DINOv2", "Dinov2Config", **SIZE)
vision("DINOv3", "DINOv3ViTConfig", **SIZE, num_register_tokens=2)
# patches of images whose sizes are entries of a tensor, which the programs read
add(
    "SigLIP 2, images",
    TRANSFORMERS,
    of_config(
        "Siglip2VisionConfig",
        {**{name: size for name, size in SIZE.items() if name != "image_size"}, "num_patches": 16},
        lambda: {
            "pixel_values": torch.randn(2, 16, 48),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
        },
    ),
)
add(
    "GLM-4V, images",
    TRANSFORMERS,
    of_config(
        "Glm4vVisionConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        lambda: {"hidden_states": torch.randn(32, 96), "grid_thw": torch.tensor([[1, 4, 4], [1, 2, 8]])},
    ),
)
vision(
    "ViT-MAE",
    "ViTMAEConfig",
    **SIZE,
    mask_ratio=0.0,
    decoder_hidden_size=16,
    decoder_num_hidden_layers=1,
    decoder_num_attention_heads=2,
    decoder_intermediate_size=32,
)
vision("SigLIP, images", "SiglipVisionConfig", **SIZE)
vision("CLIP, images", "CLIPVisionConfig", **SIZE)
vision("Swin", "SwinConfig", size=32, image_size=32, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4)
vision(
    "Swin v2", "Swinv2Config", size=32, image_size=32, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4
)
vision("ConvNeXt", "ConvNextConfig", size=32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
vision("ConvNeXt v2", "ConvNextV2Config", size=32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
vision("ResNet", "ResNetConfig", size=32, embedding_size=4, hidden_sizes=[8, 16], depths=[1, 1])
vision("RegNet", "RegNetConfig", size=32, embedding_size=4, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4)
vision("BiT", "BitConfig", size=32, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4)
vision(
    "PoolFormer",
    "PoolFormerConfig",
    size=32,
    num_encoder_blocks=2,
    depths=[1, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[7, 3],
    strides=[4, 2],
    padding=[2, 1],
)
vision("SegFormer", "SegformerConfig", size=32, **STAGES, sr_ratios=[2, 1], num_attention_heads=[1, 2], mlp_ratios=[2, 2])
vision(
    "PVT",
    "PvtConfig",
    size=32,
    image_size=32,
    num_encoder_blocks=2,
    depths=[1, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[4, 2],
    strides=[4, 2],
    sequence_reduction_ratios=[2, 1],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
)
vision(
    "CvT",
    "CvtConfig",
    size=32,
    embed_dim=[8, 16],
    num_heads=[1, 2],
    depth=[1, 2],
    patch_sizes=[7, 3],
    patch_stride=[4, 2],
    patch_padding=[2, 1],
    mlp_ratio=[2.0, 2.0],
    attention_drop_rate=[0.0, 0.0],
    drop_rate=[0.0, 0.0],
    drop_path_rate=[0.0, 0.0],
    qkv_bias=[True, True],
    cls_token=[False, True],
    qkv_projection_method=["dw_bn", "dw_bn"],
    kernel_qkv=[3, 3],
    padding_kv=[1, 1],
    stride_kv=[2, 2],
    padding_q=[1, 1],
    stride_q=[1, 1],
)
vision("MobileNet v1", "MobileNetV1Config", size=32, depth_multiplier=0.25, min_depth=4)
vision("MobileNet v2", "MobileNetV2Config", size=32, depth_multiplier=0.25, min_depth=4)
vision(
    "MobileViT",
    "MobileViTConfig",
    size=32,
    image_size=32,
    hidden_sizes=[16, 16, 16],
    neck_hidden_sizes=[4, 4, 8, 8, 16, 16, 16],
    num_attention_heads=2,
)
vision(
    "EfficientNet", "EfficientNetConfig", size=32, image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320
)
vision(
    "FocalNet", "FocalNetConfig", size=32, image_size=32, embed_dim=8, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3]
)
vision(
    "Hiera",
    "HieraConfig",
    size=32,
    image_size=[32, 32],
    embed_dim=8,
    depths=[1, 1],
    num_heads=[1, 2],
    query_stride=[2, 2],
    masked_unit_size=[4, 4],
    num_query_pool=1,
    masked_unit_attention=[True, False],
    patch_stride=[2, 2],
    patch_size=[3, 3],
    patch_padding=[1, 1],
    mlp_ratio=2.0,
)
vision(
    "LeViT",
    "LevitConfig",
    size=64,
    image_size=64,
    hidden_sizes=[16, 24, 32],
    num_attention_heads=[1, 2, 2],
    depths=[1, 1, 1],
    key_dim=[8, 8, 8],
)
vision("SwiftFormer", "SwiftFormerConfig", size=64, image_size=64, depths=[1, 1], embed_dims=[8, 16], downsamples=[True, False])
vision("YOLOS", "YolosConfig", **{**SIZE, "image_size": [16, 16]}, num_detection_tokens=4)
vision(
    "GLPN",
    "GLPNConfig",
    size=32,
    num_encoder_blocks=2,
    depths=[1, 1],
    hidden_sizes=[16, 32],
    patch_sizes=[7, 3],
    strides=[4, 2],
    sr_ratios=[2, 1],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=16,
)

VIDEO = {**SIZE, "num_frames": 2}


def video(name: str, config: str, **options: Any) -> None:
    add(name, TRANSFORMERS, of_config(config, {**VIDEO, **options}, lambda: {"pixel_values": torch.randn(1, 2, 3, 16, 16)}))


video("TimeSformer", "TimesformerConfig")
video("ViViT", "VivitConfig", tubelet_size=[2, 4, 4])
