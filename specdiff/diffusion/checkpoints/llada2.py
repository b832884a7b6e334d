"""LLaDA2.x's mixture-of-experts transformer, which transformers has no native class for. Inference only.

Layout of the public checkpoints: fused query/key/value with per-head RMS norms, half-rotary embedding, one shared
expert, a
sigmoid router in groups with a bias that only chooses, and a scaling factor on the chosen weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class LLaDA2MoeConfig(PreTrainedConfig):
    """``config.json`` of inclusionAI/LLaDA2.x."""

    model_type = "llada2_moe"

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = 128
    use_qkv_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 600000.0
    partial_rotary_factor: float = 0.5
    num_experts: int | None = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 156892
    eos_token_id: int | list[int] | None = 156892

    @property
    def rope_base(self) -> float:
        """Rotary base, wherever this version of transformers keeps it."""
        return float((getattr(self, "rope_parameters", None) or {}).get("rope_theta") or self.rope_theta)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the best ``topk_group`` groups by their two best biased experts; the best experts among those."""

    expert_bias: Tensor

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts or 0, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts or 0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``Long[n, k]`` experts and ``float32[n, k]`` weights for ``x``: ``[n, H]``."""
        c = self.config
        score = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        biased = score + self.expert_bias
        groups = biased.view(len(x), c.n_group, -1)
        best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        allowed = torch.zeros(len(x), c.n_group, dtype=torch.bool, device=x.device).scatter_(1, best, True)
        masked = groups.masked_fill(~allowed[..., None], -torch.inf).view(len(x), -1)
        chosen = masked.topk(c.num_experts_per_tok, dim=-1).indices
        weight = score.gather(1, chosen)
        if c.num_experts_per_tok > 1 and c.norm_topk_prob:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return chosen, weight * c.routed_scaling_factor


class MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList([MLP(size, inner) for _ in range(config.num_experts or 0)])
        self.gate = Router(config)
        self.shared_experts = MLP(size, inner * config.num_shared_experts) if config.num_shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen, weight = self.gate(flat)
        out = torch.zeros_like(flat, dtype=torch.float32)
        for i in chosen.unique().tolist():
            token, place = (chosen == i).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[i](flat[token]).float() * weight[token, place, None])
        out = out.to(x.dtype).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class Attention(nn.Module):
    """Grouped-query attention with fused projections."""

    def __init__(self, config: LLaDA2MoeConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.head_dim or config.hidden_size // config.num_attention_heads
        width = (self.heads + 2 * self.groups) * self.dim
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=config.use_qkv_bias)
        self.dense = nn.Linear(self.heads * self.dim, config.hidden_size, bias=config.use_bias)
        self.query_layernorm: nn.Module
        self.key_layernorm: nn.Module
        if config.use_qk_norm:
            self.query_layernorm = RMSNorm(self.dim, config.rms_norm_eps)
            self.key_layernorm = RMSNorm(self.dim, config.rms_norm_eps)
        else:
            self.query_layernorm = self.key_layernorm = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        rows, length, _ = x.shape
        fused = self.query_key_value(x).view(rows, length, self.heads + 2 * self.groups, self.dim).transpose(1, 2)
        query, key, value = fused.split([self.heads, self.groups, self.groups], dim=1)
        query = _rotate(self.query_layernorm(query), *rotary)
        key = _rotate(self.key_layernorm(key), *rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.dense(out.transpose(1, 2).reshape(rows, length, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the leading ``cos.shape[-1]`` dimensions; the rest passes."""
    turn, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turn.chunk(2, dim=-1)
    return torch.cat([turn * cos + torch.cat([-b, a], -1) * sin, rest], -1)


class Layer(nn.Module):
    """One block; the first ``first_k_dense_replace`` have a dense MLP."""

    def __init__(self, config: LLaDA2MoeConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        dense = not config.num_experts or layer < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), mask, rotary, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        x = self.word_embeddings(ids)
        head = self.config.head_dim or self.config.hidden_size // self.config.num_attention_heads
        dim = int(head * self.config.partial_rotary_factor)
        power = torch.arange(0, dim, 2, device=ids.device, dtype=torch.float32) / dim
        angle = positions[..., None].float() / self.config.rope_base**power
        angle = torch.cat([angle, angle], -1)[:, None]
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask, rotary, cache)
        return self.norm(x)


class LLaDA2MoeForCausalLM(PreTrainedModel):
    """LLaDA2.x with its head. Takes additive 4-D masks only."""

    config_class = LLaDA2MoeConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}  # noqa: RUF012 - transformers' convention

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding | Router):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, Router):
            nn.init.zeros_(module.expert_bias)
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, V]``, the last ``logits_to_keep`` of them; full attention unless the mask says otherwise."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        hidden = self.model(input_ids, attention_mask, position_ids, cache)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]))
