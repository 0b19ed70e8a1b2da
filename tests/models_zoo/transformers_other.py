"""Models of sound, of several kinds of inputs and of series in time of transformers, from their own configuration classes."""

from __future__ import annotations

from typing import Any

import torch

from .case import TRANSFORMERS, add
from .transformers_language import VOCABULARY, of_config

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
WAVES = {
    **SIZE,
    "conv_dim": [8, 8],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}


def speech(name: str, config: str, **options: Any) -> None:
    add(name, TRANSFORMERS, of_config(config, {**WAVES, **options}, lambda: {"input_values": torch.randn(2, 160)}))


speech("wav2vec 2.0", "Wav2Vec2Config")
speech("HuBERT", "HubertConfig")
speech("WavLM", "WavLMConfig", num_buckets=8, max_bucket_distance=16)
speech("UniSpeech", "UniSpeechConfig")
speech("SEW", "SEWConfig", squeeze_factor=2)


def whisper() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 4))}


WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
add("Whisper", TRANSFORMERS, of_config("WhisperConfig", WHISPER, whisper))
add(
    "AST",
    TRANSFORMERS,
    of_config(
        "ASTConfig",
        {**SIZE, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8},
        lambda: {"input_values": torch.randn(2, 16, 8)},
    ),
)

TEXT = {**SIZE, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**SIZE, "image_size": 16, "patch_size": 4}


def text_and_image() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 6)), "pixel_values": torch.randn(2, 3, 16, 16)}


def pairs(name: str, config: str, **options: Any) -> None:
    add(name, TRANSFORMERS, of_config(config, {"text_config": TEXT, "vision_config": IMAGE, **options}, text_and_image))


pairs("CLIP", "CLIPConfig", projection_dim=16)
pairs("SigLIP", "SiglipConfig")
add("ViLT", TRANSFORMERS, of_config("ViltConfig", {**TEXT, **IMAGE}, text_and_image))


def series() -> dict[str, Any]:
    return {"past_values": torch.randn(2, 16, 3)}


PATCHES = {
    "context_length": 16,
    "num_input_channels": 3,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "prediction_length": 4,
}
add(
    "PatchTST",
    TRANSFORMERS,
    of_config("PatchTSTConfig", {**PATCHES, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}, series),
)
add("PatchTSMixer", TRANSFORMERS, of_config("PatchTSMixerConfig", {**PATCHES, "num_layers": 2}, series))
