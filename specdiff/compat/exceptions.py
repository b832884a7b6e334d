"""Where the shrinking rules are not enough: a few words per architecture, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_SHARED_BLOCK = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"]

OVERRIDES: dict[str, dict[str, Any]] = {
    # Encoders by default; as decoders they are causal.
    **{
        name: {"is_decoder": True}
        for name in (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        )
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "xlm": {"causal": True},
    # Its chunks and axial position grid must divide the text.
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
        "num_attention_heads": 4,
    },
    # Default configurations without any attention layer: both kinds belong in the table.
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    # Their attention block is shared, so it takes two of them.
    "zamba": {"num_key_value_heads": 4, "num_hidden_layers": 5, "layers_block_type": _SHARED_BLOCK},
    "zamba2": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 5,
        "layers_block_type": _SHARED_BLOCK,
        "hybrid_layer_ids": [2, 4],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"head_dim": 16},
    # Its projections round up to multiples of 64.
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "falcon_h1": {"mamba_d_ssm": 32},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32},
    # One cache slot per layer, stack and cycle: 2 x 2 x (1 + 2).
    "hrm_text": {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "num_hidden_layers": 12},
    # Three stacks that must add up.
    "dory": {
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
        "layer_types": [
            "sliding_attention",
            "mlp",
            "full_attention",
            "mlp",
            "sliding_attention",
            "mlp",
            "full_attention",
            "mlp",
        ],
    },
    # The last layers read the keys and values of earlier ones of the same type.
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    # The default leaves the rotary settings of its layer types out.
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
}
"""Values set after the rules, by model type; nested dicts reach into sub-configurations."""

DEFAULTS: dict[str, Callable[[Any], PreTrainedConfig]] = {
    # Its own default configuration does not pass its own validation.
    "gemma4_assistant": lambda cls: cls(
        text_config={"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    ),
}
"""How to make a default configuration where calling the class does not, by model type."""

AFTER: dict[str, Callable[[PreTrainedConfig], None]] = {}
"""Changes to the finished configuration, by model type."""
