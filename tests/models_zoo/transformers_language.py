"""Language models of transformers, from their own configuration classes."""

from __future__ import annotations

from typing import Any

import torch

from .case import TRANSFORMERS, Build, add

VOCABULARY = 64
# what most configurations call these; one that has another name for something takes it through its `attribute_map`
SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 1}


def ids() -> torch.Tensor:
    """Two sentences of eight tokens, none of them padding."""
    return torch.randint(3, VOCABULARY, (2, 8))


def of_config(config: str, options: dict[str, Any], inputs: Any) -> Build:
    """A model of `config`, a class of transformers, by `AutoModel`."""

    def build():
        import transformers

        made = getattr(transformers, config)(**options)
        return transformers.AutoModel.from_config(made), (), inputs()

    return build


def language(name: str, config: str, **options: Any) -> None:
    """A decoder, run once over all tokens, without a cache; or an encoder."""
    add(name, TRANSFORMERS, of_config(config, {**SIZE, **options}, lambda: {"input_ids": ids()}))


def both(name: str, config: str, **options: Any) -> None:
    """An encoder and a decoder, each with tokens of its own."""
    add(
        name,
        TRANSFORMERS,
        of_config(config, {**SIZE, "use_cache": False, **options}, lambda: {"input_ids": ids(), "decoder_input_ids": ids()}),
    )


def decoder(name: str, config: str, **options: Any) -> None:
    language(name, config, **{"use_cache": False, **options})


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "num_hidden_layers": 1,
}
T5 = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}

decoder("GPT-2", "GPT2Config")
decoder("GPT-Neo", "GPTNeoConfig", num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4)
decoder("GPT-NeoX", "GPTNeoXConfig")
decoder("GPT-J", "GPTJConfig", rotary_dim=8)
decoder("GPT-BigCode", "GPTBigCodeConfig")
decoder("CodeGen", "CodeGenConfig", rotary_dim=8, num_attention_heads=4)
decoder("OPT", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32)
decoder("BLOOM", "BloomConfig")
decoder("Falcon", "FalconConfig")
decoder("MPT", "MptConfig", d_model=32, n_heads=2, n_layers=2, max_seq_len=32)
decoder("Llama", "LlamaConfig", **GROUPED)
decoder("Mistral", "MistralConfig", sliding_window=4, **GROUPED)
decoder("Mixtral", "MixtralConfig", **GROUPED, **EXPERTS)
decoder("Qwen2", "Qwen2Config", **GROUPED)
decoder("Qwen3", "Qwen3Config", head_dim=16, **GROUPED)
decoder("Qwen3 MoE", "Qwen3MoeConfig", head_dim=16, **GROUPED, **EXPERTS)
decoder("Gemma", "GemmaConfig", head_dim=16, **GROUPED)
decoder("Gemma 2", "Gemma2Config", head_dim=16, sliding_window=4, **GROUPED)
decoder("Gemma 3", "Gemma3TextConfig", head_dim=16, sliding_window=4, **GROUPED)
decoder("Phi", "PhiConfig")
decoder("Phi-3", "Phi3Config", **GROUPED)
decoder("OLMo 2", "Olmo2Config", **GROUPED)
decoder("OLMoE", "OlmoeConfig", **GROUPED, **EXPERTS)
decoder("JetMoE", "JetMoeConfig", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, kv_channels=16)
decoder("StableLM", "StableLmConfig", **GROUPED)
decoder("StarCoder2", "Starcoder2Config", **GROUPED)
decoder("Cohere", "CohereConfig", **GROUPED)
decoder("Granite", "GraniteConfig", **GROUPED)
decoder("GLM", "GlmConfig", head_dim=16, **GROUPED)
decoder("Nemotron", "NemotronConfig", head_dim=16, **GROUPED)
decoder("SmolLM3", "SmolLM3Config", **GROUPED)
decoder(
    "DeepSeek-V3",
    "DeepseekV3Config",
    num_key_value_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
decoder("GPT-OSS", "GptOssConfig", head_dim=16, sliding_window=4, **GROUPED, **EXPERTS)
decoder("Mamba", "MambaConfig", state_size=4)
decoder("Mamba-2", "Mamba2Config", state_size=4, head_dim=16, num_heads=4, n_groups=1, chunk_size=4)
decoder("RWKV", "RwkvConfig", attention_hidden_size=32, context_length=32)
decoder("RecurrentGemma", "RecurrentGemmaConfig", lru_width=32, attention_window_size=4, num_hidden_layers=3, **GROUPED)
decoder("XGLM", "XGLMConfig", d_model=32, ffn_dim=48, num_layers=2, attention_heads=2)
decoder("BioGPT", "BioGptConfig")
decoder("CTRL", "CTRLConfig", n_embd=32, dff=48, n_layer=2, n_head=2, n_positions=32)

language("BERT", "BertConfig")
language("RoBERTa", "RobertaConfig")
language("DistilBERT", "DistilBertConfig", dim=32, hidden_dim=48, n_layers=2, n_heads=2)
language("ALBERT", "AlbertConfig", embedding_size=16)
language("ELECTRA", "ElectraConfig", embedding_size=16)
language("DeBERTa", "DebertaConfig")
language("DeBERTa-v2", "DebertaV2Config", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8)
add(
    "XLNet",
    TRANSFORMERS,
    of_config(
        "XLNetConfig",
        {
            "d_model": 32,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 48,
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "use_mems_eval": False,
        },
        lambda: {"input_ids": ids()},
    ),
)
language("MPNet", "MPNetConfig")
language("ConvBERT", "ConvBertConfig", embedding_size=32, conv_kernel_size=3)
language("SqueezeBERT", "SqueezeBertConfig", embedding_size=32)
language("MobileBERT", "MobileBertConfig", embedding_size=16, intra_bottleneck_size=16)
add(
    "Funnel",
    TRANSFORMERS,
    of_config(
        "FunnelConfig",
        {
            "architectures": ["FunnelModel"],
            "d_model": 32,
            "n_head": 2,
            "d_head": 16,
            "d_inner": 48,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "vocab_size": VOCABULARY,
        },
        lambda: {"input_ids": ids()},
    ),
)
language("FNet", "FNetConfig")
language("Longformer", "LongformerConfig", attention_window=4)
# with attention in blocks, for which these sentences are too short, it rebuilds itself in its first call
language("BigBird", "BigBirdConfig", attention_type="original_full")
language("RoFormer", "RoFormerConfig", embedding_size=32)
language("ModernBERT", "ModernBertConfig", cls_token_id=1, sep_token_id=2)
language("Nystromformer", "NystromformerConfig", num_landmarks=4, segment_means_seq_len=8)
language("RemBERT", "RemBertConfig", input_embedding_size=16, output_embedding_size=16)
language("ESM", "EsmConfig")
language("I-BERT", "IBertConfig")

both("T5", "T5Config", **T5)
both(
    "Switch Transformers",
    "SwitchTransformersConfig",
    **T5,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
)
both("LongT5", "LongT5Config", **T5, local_radius=3)
both("BART", "BartConfig", **SEQ2SEQ)
both("Pegasus", "PegasusConfig", **SEQ2SEQ)
both("Marian", "MarianConfig", **SEQ2SEQ)
both("LED", "LEDConfig", **SEQ2SEQ, attention_window=4, max_encoder_position_embeddings=32, max_decoder_position_embeddings=32)
both("M2M-100", "M2M100Config", **SEQ2SEQ)
both(
    "NLLB-MoE",
    "NllbMoeConfig",
    **SEQ2SEQ,
    num_experts=4,
    encoder_sparse_step=1,
    decoder_sparse_step=1,
    expert_capacity=8,
)
