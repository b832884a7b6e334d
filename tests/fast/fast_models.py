"""Tiny models of every family that the fast path takes, and some that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
PROMPTS = torch.tensor([[0, 0, 5, 17, 42, 8], [9, 33, 71, 12, 60, 3]])
MASK = (PROMPTS != 0).long()
NEW = 24
"""Two rows of different lengths, and how many tokens they get."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TAKEN: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama-tied-mha": lambda: LlamaConfig(**COMMON | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama-rope-scaled": lambda: LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "llama-wide-heads": lambda: LlamaConfig(**COMMON, head_dim=20),
    "smollm": lambda: LlamaConfig(
        **COMMON | {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    ),
    "smollm3": lambda: SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1]),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=None),
    "gemma": lambda: GemmaConfig(**COMMON, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        sliding_window=200,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "gpt2": (lambda: GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=64), "embed_tokens"),
    "mixtral": (lambda: MixtralConfig(**COMMON, num_local_experts=2), ""),
    "olmo2": (lambda: Olmo2Config(**COMMON), ""),
    "phi": (lambda: PhiConfig(**COMMON), ""),
    "gemma2": (lambda: Gemma2Config(**COMMON, head_dim=16), "soft-capped"),
    "granite": (lambda: GraniteConfig(**COMMON, residual_multiplier=0.5), "looks familiar"),
    "rope-dynamic": (
        lambda: LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "length",
    ),
}


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model; norms and biases are random too, so that nothing is a neutral element by accident."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.mul_(0.7)
    return model
