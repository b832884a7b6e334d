"""The diffusion transformer of BD3-LM and MDLM checkpoints (kuleshov-group), for inference.

The checkpoints take no time input at inference (sigma is 0), so the time embedding is one constant vector.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from specdiff.errors import UnsupportedError


class BD3LMConfig(PreTrainedConfig):
    """``config.json`` of kuleshov-group/bd3lm-owt-block_size*."""

    model_type = "bd3lm"

    block_size: int = 16
    vocab_size: int = 50258
    model_length: int = 1024
    adaln: bool = True
    causal: bool = False
    hidden_dim: int = 768
    cond_dim: int = 128
    n_blocks: int = 12
    n_heads: int = 12
    dropout: float = 0.1
    time_conditioning: bool = False
    initializer_range: float = 0.02

    @property
    def num_hidden_layers(self) -> int:
        """As other configs call it."""
        return self.n_blocks


class Scale(nn.Module):
    """Layer norm in float32 with a weight and no bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (F.layer_norm(x.float(), [x.shape[-1]]) * self.weight.float()).to(x.dtype)


class TokenTable(nn.Module):
    """Bare embedding parameter."""

    def __init__(self, size: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab, size))


class TimeMap(nn.Module):
    """Sinusoidal features of sigma through a two-layer MLP."""

    def __init__(self, size: int, features: int = 256) -> None:
        super().__init__()
        self.features = features
        self.mlp = nn.Sequential(nn.Linear(features, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self) -> Tensor:
        """``[1, size]`` for sigma 0: cosines 1, sines 0."""
        weight = next(self.mlp.parameters())
        half = self.features // 2
        zero = torch.cat([weight.new_ones(1, half), weight.new_zeros(1, self.features - half)], -1)
        return self.mlp(zero)


class DiTBlock(nn.Module):
    """Attention and MLP, modulated by the time vector."""

    def __init__(self, config: BD3LMConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_dim
        self.layer, self.heads = layer, config.n_heads
        self.norm1, self.norm2 = Scale(size), Scale(size)
        self.attn_qkv = nn.Linear(size, 3 * size, bias=False)
        self.attn_out = nn.Linear(size, size, bias=False)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size))
        self.adaLN_modulation = nn.Linear(config.cond_dim, 6 * size) if config.adaln else None

    def forward(
        self, x: Tensor, c: Tensor | None, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache: Any
    ) -> Tensor:
        if self.adaLN_modulation is not None:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        else:
            shift1 = shift2 = scale1 = scale2 = x.new_zeros(())
            gate1 = gate2 = x.new_ones(())
        rows, length, size = x.shape
        qkv = self.attn_qkv(self.norm1(x) * (1 + scale1) + shift1)
        query, key, value = qkv.view(rows, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, *rotary), _rotate(key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + gate1 * self.attn_out(out.transpose(1, 2).reshape(rows, length, size))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], -1) * sin


class FinalLayer(nn.Module):
    """Norm, modulation, head."""

    def __init__(self, config: BD3LMConfig) -> None:
        super().__init__()
        self.norm_final = Scale(config.hidden_dim)
        self.linear = nn.Linear(config.hidden_dim, config.vocab_size)
        self.adaLN_modulation = nn.Linear(config.cond_dim, 2 * config.hidden_dim) if config.adaln else None

    def forward(self, x: Tensor, c: Tensor | None) -> Tensor:
        x = self.norm_final(x)
        if self.adaLN_modulation is not None:
            shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)
            x = x * (1 + scale) + shift
        return self.linear(x)


class DiT(nn.Module):
    """The backbone."""

    def __init__(self, config: BD3LMConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = TokenTable(config.hidden_dim, config.vocab_size)
        self.sigma_map = TimeMap(config.cond_dim) if config.adaln else None
        self.blocks = nn.ModuleList([DiTBlock(config, i) for i in range(config.n_blocks)])
        self.output_layer = FinalLayer(config)

    def forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, keep: int) -> Tensor:
        x = self.vocab_embed.embedding[ids]
        c = None if self.sigma_map is None else F.silu(self.sigma_map())
        dim = self.config.hidden_dim // self.config.n_heads
        power = torch.arange(0, dim, 2, device=ids.device, dtype=torch.float32) / dim
        angle = positions[..., None].float() / 10_000.0**power
        angle = torch.cat([angle, angle], -1)[:, None]
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, c, mask, rotary, cache)
        return self.output_layer(x[:, -keep:], c)


class BD3LM(PreTrainedModel):
    """BD3-LM (block-causal) or MDLM (full attention): the mask decides."""

    config_class = BD3LMConfig
    base_model_prefix = "backbone"
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb", r"sampling_eps"]  # noqa: RUF012 - transformers' convention

    def __init__(self, config: BD3LMConfig) -> None:
        super().__init__(config)
        if config.time_conditioning:
            raise UnsupportedError(
                "BD3-LM checkpoints with time_conditioning need a time input, which denoisers here do not take"
            )
        self.backbone = DiT(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, TokenTable):
            nn.init.normal_(module.embedding, std=std)
        elif isinstance(module, Scale):
            nn.init.ones_(module.weight)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, V]``, the last ``logits_to_keep`` of them."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return CausalLMOutputWithPast(
            logits=self.backbone(input_ids, attention_mask, position_ids, cache, logits_to_keep)
        )
