"""Tiny random models of any architecture: the default configuration shrunk by rules, with a short table of exceptions.

The rules keep what matters for a cache (layer types, windows, ranks, groups, sharing) and make everything small: hidden
size 32, a vocabulary of 128, a window of 8, two to six layers. Weights are drawn wide enough that logits lie well
apart.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from specdiff.compat.exceptions import AFTER, OVERRIDES

VOCABULARY = 128
WINDOW = 8
FIRST_ORDINARY_ID = 40
"""Ids below it may be special tokens; prompts use the ones from here on."""

_SIZES: list[tuple[str, int]] = [
    (r"(decoder_)?vocab_size(_per_layer_input)?|unpadded_vocab_size", VOCABULARY),
    (r"hidden_size|d_model|n_embd|emb_dim|dim|lru_width|backbone_hidden_size|word_embed_proj_dim|embedding_dim", 32),
    (r"embedding_size|hidden_size_global|out_hidden_size|projector_\w+put_dim", 32),
    (r"attention_hidden_size|mamba_d_ssm", 64),
    (
        r"(\w+_)?intermediate_size(_mlp)?|ffn_(hidden_size|dim)|\w+_ffn_(dim|hidden_size)|d_ff|dff|d_inner|n_inner|dim_ff",
        48,
    ),
    (r"mlp_dim|feed_forward_size|shared_experts?_intermediate_size|intermediate_multiple_size", 48),
    (r"moe_(shared_expert_)?intermediate_size|expert_ffn_hidden_size|router_hidden_size", 16),
    (r"num_attention_heads|(encoder|decoder)_attention_heads|num_(encoder|decoder)_attention_heads|n_heads?", 4),
    (r"num_heads|attention_heads|swa_num_attention_heads|conf_num_attention_heads", 4),
    (
        r"num_key_value_heads|swa_num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|num_global_key_value_heads",
        2,
    ),
    (r"head_dim|swa_head_dim|global_head_dim|kv_channels|dim_head|d_kv|attention_head_size|d_head", 8),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim|indexer_head_dim|rotary_dim", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim|attention_head_dim", 16),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|\w*lowrank|laurel_rank|gated_norm_rank|adapter_rank|loop_gate_rank", 16),
    (r"index_topk|hc_mult", 4),
    (r"index_n_heads", 16),
    (r"n_routed_experts|num_(local_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k", 2),
    (r"n_group|topk_group|num_expert_group|o_groups|n_groups|mamba_n(_)?groups|pretraining_tp", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_nextn_predict_layers", 1),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_target_positions|model_max_length",
        128,
    ),
    (r"max_source_positions|original_max_position_embeddings|rel_extent|mem_len|bias_max_distance", 128),
    (
        r"sliding_window(_size)?|attention_chunk_size|attention_window_size|window_size|local_attention|keep_window_size",
        WINDOW,
    ),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads|mamba_num_heads|mamba_n_heads|n_mamba_heads", 4),
    (r"linear_(key_|value_)?head_dim|mamba_d_state|ssm_state_size|state_size", 8),
    (r"mamba_dt_rank|time_step_rank|hidden_size_per_layer_input|ple_embed_dim|d_rel", 8),
    (r"chunk_size|mamba_chunk_size|block_size", 16),
    (r"num_codebooks", 2),
]
_LAYERS = (
    r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_(encoder|decoder)_layers|depth|num_blocks"
)
_UNSET = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
"""Values for what a default configuration leaves open though its model needs it."""
_SPECIAL = re.compile(r"\w+_(token_id|token_index|index|token)")
_KEEP = re.compile(r"A_log|dt_|\bD$|norm|ln_|layernorm|correction|rotary|inv_freq|\bscale", re.IGNORECASE)


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture, small. ``config`` may be a default one or that of a real model."""
    config = text_part(config)
    model_type = config.model_type
    values = _shrunk(config.to_dict(), OVERRIDES.get(model_type, {}))
    made = type(config).from_dict(values)
    AFTER.get(model_type, lambda config: None)(made)
    return made


def causal_class(model_type: str) -> type[PreTrainedModel]:
    """The class that ``AutoModelForCausalLM`` makes for a model type."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return found


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part that the causal LM of a configuration is built from: itself, or the sub-configuration of its class."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    wanted = cls.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for name in config.sub_configs if isinstance(part := getattr(config, name), wanted)), config)


def tiny_model(config: PreTrainedConfig, cls: type[PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """A random model of ``cls`` for an (already tiny) configuration, in float32 and evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = cls(config).float().eval()
        _spread(model)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return model


def _spread(model: PreTrainedModel) -> None:
    """Draw matrices anew, by fan-in, so that random logits differ by far more than rounding does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or not parameter.is_floating_point() or _KEEP.search(name):
                continue
            fan_in = math.prod(parameter.shape[1:]) if parameter.dim() == 2 else parameter.shape[-1]
            parameter.normal_(0.0, 1.2 / math.sqrt(max(fan_in, 1)))
        embedding = model.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        if isinstance(weight, torch.nn.Parameter):
            weight.normal_(0.0, 0.6)


def _shrunk(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(values)
    values.pop("transformers_version", None)
    special = iter(range(10, FIRST_ORDINARY_ID))
    picks = _layer_picks(values, overrides)
    layers = next((values[key] for key in values if re.fullmatch(_LAYERS, key) and isinstance(values[key], int)), None)
    for key, value in list(values.items()):
        if isinstance(value, dict) and "model_type" in value:
            values[key] = _shrunk(value, overrides.get(key, {}))
        elif key == "per_layer_config" and isinstance(value, dict):
            values[key] = _own_layers(value, picks)
        elif value is None and key in _UNSET:
            values[key] = _UNSET[key]
        elif isinstance(value, list) and layers is not None and len(value) == layers and layers > 1:
            values[key] = [value[pick] for pick in picks]
        elif isinstance(value, list) and key == "mrope_section":
            values[key] = [2, 1, 1]
        elif isinstance(value, int) and not isinstance(value, bool):
            values[key] = _smaller(key, value, len(picks), special)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if key in values and not isinstance(values[key], list):
            values[key] = {"pad_token_id": 0, "bos_token_id": 1}.get(key, 2)
        elif key in values:
            values[key] = [2]
    if layers is not None and values.get("num_kv_shared_layers") == layers:
        values["num_kv_shared_layers"] = len(picks)  # an assistant, whose layers all read another model's cache
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no groups
    if values.get("qk_nope_head_dim") and values.get("qk_rope_head_dim") and "qk_head_dim" in values:
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    _fit_rope(values)
    for key, value in overrides.items():
        if not isinstance(value, dict) or not isinstance(values.get(key), dict) or "model_type" not in values[key]:
            values[key] = value
    return values


def _layer_picks(values: dict[str, Any], overrides: dict[str, Any]) -> list[int]:
    """Which of the layers stay: the first of each kind, then the ones after them, at least two and in order."""
    layers = next((values[key] for key in values if re.fullmatch(_LAYERS, key) and isinstance(values[key], int)), 2)
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == layers and layers > 1]
    kinds = list(zip(*([str(entry) for entry in value] for value in lists), strict=True)) if lists else [()] * layers
    picks: list[int] = []
    for at, kind in enumerate(kinds):
        if kind not in [kinds[pick] for pick in picks]:
            picks.append(at)
    picks = picks[:6]
    for at in range(layers):
        if len(picks) >= max(2, min(layers, 3 if len(set(kinds)) > 1 else 2)):
            break
        if at not in picks:
            picks.append(at)
    return sorted(picks) if layers >= len(picks) else list(range(layers))


def _own_layers(values: dict[Any, Any], picks: list[int]) -> dict[int, dict[str, Any]]:
    """Settings of single layers, for the layers that stay; their heads get twice the width, so they still differ."""
    kept: dict[int, dict[str, Any]] = {}
    for at, pick in enumerate(picks):
        own = next((value for key, value in values.items() if int(key) == pick), None)
        if own is not None:
            small = {k: _smaller(k, v, 0, iter(())) for k, v in own.items() if isinstance(v, int)}
            if "head_dim" in small:
                small["head_dim"] = 16
            if "kv_lora_rank" in small and "num_key_value_heads" in small:
                small["num_key_value_heads"] = small.get("num_attention_heads", 4)
            kept[at] = small
    return kept


def _smaller(key: str, value: int, layers: int, special: Any) -> int:
    if re.fullmatch(_LAYERS, key):
        return min(value, layers) if value else 0
    if _SPECIAL.fullmatch(key) and value >= FIRST_ORDINARY_ID:
        return next(special, 3)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, key):
            return min(value, size) if value > 0 else value
    return value


def _fit_rope(values: dict[str, Any]) -> None:
    """Per-dimension rotary factors and M-RoPE sections must fit the small head."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if not isinstance(rope, dict):
            continue
        for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
            if "mrope_section" in part:
                part["mrope_section"] = [2, 1, 1]
            for factor, value in (("short_factor", 1.0), ("long_factor", 4.0)):
                if factor in part:
                    part[factor] = [value] * 4
            if "original_max_position_embeddings" in part:
                part["original_max_position_embeddings"] = 64
