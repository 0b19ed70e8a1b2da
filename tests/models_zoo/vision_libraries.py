"""Models of torchvision and timm, small where their classes can be."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import TIMM, TORCHVISION, add


def torchvision(name: str, size: int = 32) -> Callable[[Callable[[], nn.Module]], Callable]:
    """Add the model that the decorated function makes; its argument are two images of `size` x `size`."""

    def enter(make: Callable[[], nn.Module]) -> Callable:
        add(f"{name} (torchvision)", TORCHVISION, lambda: (make(), (torch.randn(2, 3, size, size),), {}))
        return make

    return enter


@torchvision("SqueezeNet", 64)
def _():
    from torchvision.models import SqueezeNet

    return SqueezeNet("1_1", num_classes=10)


@torchvision("DenseNet")
def _():
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2, num_classes=10)


@torchvision("MobileNet v2")
def _():
    from torchvision.models import MobileNetV2

    setting = [[1, 8, 1, 1], [6, 16, 2, 2]]
    return MobileNetV2(num_classes=10, width_mult=0.25, inverted_residual_setting=setting)


@torchvision("MobileNet v3")
def _():
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    block = partial(InvertedResidualConfig, width_mult=1.0)
    setting = [block(8, 3, 16, 8, True, "RE", 2, 1), block(8, 3, 16, 16, False, "HS", 2, 1)]
    return MobileNetV3(setting, last_channel=32, num_classes=10)


@torchvision("ShuffleNet v2")
def _():
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], num_classes=10)


@torchvision("MNASNet")
def _():
    from torchvision.models import MNASNet

    return MNASNet(0.25, num_classes=10)


@torchvision("EfficientNet")
def _():
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    setting = [FusedMBConvConfig(2, 3, 2, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2, 1.0, 1.0)]
    return EfficientNet(setting, dropout=0.2, num_classes=10, last_channel=32)


@torchvision("RegNet")
def _():
    from torchvision.models.regnet import BlockParams, RegNet

    params = BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=4, se_ratio=0.25)
    return RegNet(params, num_classes=10, stem_width=8)


@torchvision("ConvNeXt")
def _():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=10)


@torchvision("ViT")
def _():
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48, num_classes=10)


@torchvision("Swin")
def _():
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 8, [2, 1], [1, 2], [4, 4], num_classes=10)


@torchvision("Swin v2")
def _():
    from torchvision.models import SwinTransformer
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    options = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    return SwinTransformer([2, 2], 8, [2, 1], [1, 2], [4, 4], num_classes=10, **options)


@torchvision("MaxViT")
def _():
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 8, 4, [8, 16], [1, 1], head_dim=8, stochastic_depth_prob=0.0, num_classes=10)


@torchvision("FCN")
def _():
    from torchvision.models import ResNet
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import Bottleneck
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    backbone = ResNet(Bottleneck, [1, 1, 1, 1], groups=4, width_per_group=4)
    return FCN(IntermediateLayerGetter(backbone, {"layer2": "out"}), FCNHead(512, 3))


def video_mvit():
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    options = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    return MViT((32, 32), 4, blocks, num_classes=10, **options), (torch.randn(1, 3, 4, 32, 32),), {}


add("MViT, video (torchvision)", TORCHVISION, video_mvit)


def timm(name: str, model: str, size: int = 32, **options: Any) -> None:
    """Add what `timm.create_model` makes, without pretrained weights."""

    def build():
        import timm

        made = timm.create_model(model, pretrained=False, num_classes=10, **options)
        return made, (torch.randn(2, 3, size, size),), {}

    add(f"{name} (timm)", TIMM, build)


timm("ViT", "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
timm("ConvNeXt", "test_convnext")
timm("ResNet", "test_resnet")
timm("EfficientNet", "test_efficientnet")
timm("NFNet", "test_nfnet")
timm("MambaOut", "test_mambaout")
timm("BYOB", "test_byobnet")
timm("CaiT", "cait_xxs24_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, depth_token_only=1)
timm("XCiT", "xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32, depth=2, num_heads=2)
timm("EVA", "eva02_tiny_patch14_224", img_size=28, size=28, patch_size=7, embed_dim=32, depth=2, num_heads=2)
timm("Twins", "twins_svt_small", img_size=64, size=64, embed_dims=(8, 16, 32, 64), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 1))
timm("PiT", "pit_ti_224", img_size=32, patch_size=8, stride=4, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2))
timm("EdgeNeXt", "edgenext_xx_small", size=64, dims=(8, 16, 24, 32), depths=(1, 1, 2, 1))
timm("RepViT", "repvit_m1", embed_dim=(8, 16), depth=(1, 1))
timm("FastViT", "fastvit_t8", layers=(1, 1), embed_dims=(16, 32), mlp_ratios=(2, 2), token_mixers=("repmixer", "attention"))


def timm_class(name: str, module: str, cls: str, **options: Any) -> None:
    """Add a model of a class of timm, where `create_model` fixes its sizes; `options` may name attributes of the module."""

    def build():
        found = importlib.import_module(f"timm.models.{module}")
        made = {k: getattr(found, v) if isinstance(v, str) and hasattr(found, v) else v for k, v in options.items()}
        return getattr(found, cls)(num_classes=10, **made), (torch.randn(2, 3, 32, 32),), {}

    add(f"{name} (timm)", TIMM, build)


MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}
timm_class("MLP-Mixer", "mlp_mixer", "MlpMixer", **MIXER)
timm_class("ResMLP", "mlp_mixer", "MlpMixer", **MIXER, mlp_ratio=4, block_layer="ResBlock", norm_layer="Affine")
timm_class(
    "gMLP",
    "mlp_mixer",
    "MlpMixer",
    **MIXER,
    mlp_ratio=4,
    block_layer="SpatialGatingBlock",
    mlp_layer="GatedMlp",
    act_layer=nn.GELU,
)
timm_class("ConvMixer", "convmixer", "ConvMixer", dim=16, depth=2, kernel_size=3, patch_size=4)
timm_class(
    "VOLO",
    "volo",
    "VOLO",
    img_size=32,
    layers=[1, 1],
    stem_hidden_dim=8,
    embed_dims=[16, 32],
    num_heads=[2, 2],
    downsamples=(True, False),
    outlook_attention=(True, False),
)
