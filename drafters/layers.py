"""The draft layer: attention of a small block over injected context keys and values, then a gated MLP.

One function serves training (many anchors of one document share its context) and decoding (one anchor per row), so that
the two cannot disagree. Shapes: B rows, A anchors per row, S slots per anchor, T context positions, H width, h query
heads, g key/value heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.convolution import DynamicConvolution
from specdiff.fast.norm import inverse_rms


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same shape and dtype."""
        return rms_norm(x, self.eps, self.weight)


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square normalisation over the last dimension, in float32, back in the dtype of ``x``."""
    wide = x.float()
    if weight is None and x.device.type == "cpu" and not torch.is_grad_enabled():
        return (wide * inverse_rms(wide, eps)).to(x.dtype)
    return F.rms_norm(wide, x.shape[-1:], None if weight is None else weight.float(), eps).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[..., D]`` (float32) of half-split rotary embedding at integer ``positions``: ``[...]``."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = positions[..., None].float() * frequency
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to ``x``: ``[..., heads, D]`` with ``cos``, ``sin``: ``[..., D]``."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos[..., None, :] + turned.float() * sin[..., None, :]).to(x.dtype)


def inside_window(visible: Tensor, start: Tensor, slots: int, window: int) -> Tensor:
    """``Bool[B, A, S, T]``: of the context that an anchor may see, what lies less than ``window`` before each slot.

    Args:
        visible: ``Bool[B, A, T]``.
        start: ``Long[B, A]`` position of each block's first slot; context position t is t.
        slots: S.
        window: in tokens, the slot itself included.
    """
    slot = start[..., None] + torch.arange(slots, device=start.device)
    position = torch.arange(visible.shape[-1], device=start.device)
    return visible[:, :, None] & (slot[..., None] - position < window)


def hidden_slots(slots: int, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """``Bool[S, S]`` which slots of its own block a slot may not see; None when it sees all of them."""
    if not causal and not 0 < window < slots:
        return None
    index = torch.arange(slots, device=device)
    distance = index[:, None] - index
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    return hidden | (distance.abs() >= window) if window else hidden


def block_attention(
    q: Tensor, ctx_k: Tensor, ctx_v: Tensor, blk_k: Tensor, blk_v: Tensor, ctx_mask: Tensor, hidden: Tensor | None
) -> Tensor:
    """Each anchor's slots attend to the context positions that ``ctx_mask`` allows and to their own block.

    Args:
        q: ``[B, A, S, h, D]`` queries.
        ctx_k: ``[B, g, T, D]`` context keys; ``ctx_v`` likewise.
        ctx_v: context values.
        blk_k: ``[B, A, S, g, D]`` the blocks' own keys; ``blk_v`` likewise.
        blk_v: the blocks' own values.
        ctx_mask: ``Bool[B, A, T]``, or ``Bool[B, A, S, T]`` by slot: True where it may look.
        hidden: of :func:`hidden_slots`.

    Returns:
        ``[B, A, S, h * D]``.
    """
    rows, anchors, slots, heads, width = q.shape
    groups, length = ctx_k.shape[1], ctx_k.shape[2]
    share = heads // groups
    q = (q * width**-0.5).view(rows, anchors, slots, groups, share, width).permute(0, 3, 4, 1, 2, 5)  # B g s A S D
    ctx = torch.matmul(q.reshape(rows, groups, share * anchors * slots, width), ctx_k.transpose(-1, -2))
    ctx = ctx.view(rows, groups, share, anchors, slots, length).float()
    by_slot = ctx_mask if ctx_mask.dim() == 4 else ctx_mask[:, :, None]
    ctx = ctx.masked_fill(~by_slot[:, None, None], float("-inf"))
    own = torch.matmul(q, blk_k.permute(0, 3, 1, 4, 2)[:, :, None]).float()  # B g s A S S
    if hidden is not None:
        own = own.masked_fill(hidden, float("-inf"))
    weights = torch.cat([ctx, own], -1).softmax(-1).to(ctx_v.dtype)
    seen, mine = weights.split([length, slots], -1)
    out = torch.matmul(seen.reshape(rows, groups, share * anchors * slots, length), ctx_v)
    out = out.view(rows, groups, share, anchors, slots, width)
    out = out + torch.matmul(mine, blk_v.permute(0, 3, 1, 2, 4)[:, :, None])
    return out.permute(0, 3, 4, 1, 2, 5).reshape(rows, anchors, slots, heads * width)


class DraftAttention(nn.Module):
    """Attention with injected context; names as in the z-lab layout."""

    def __init__(self, config: DFlashConfig, index: int = 0) -> None:
        super().__init__()
        self.config = config
        self.window = config.windows[index] if config.windows else 0
        self.causal = config.sliding_causal if self.window else config.causal
        heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads * width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, groups * width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, groups * width, bias=False)
        self.o_proj = nn.Linear(heads * width, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(width, config.rms_norm_eps)
            self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normalised, rotated) and values ``[..., g, D]`` of ``x``: ``[..., H]``."""
        shape = (*x.shape[:-1], self.config.num_kv_heads, self.config.head_dim)
        k, v = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        if self.config.qk_norm:
            k = self.k_norm(k)
        return rotate(k, cos, sin), v

    def forward(self, x: Tensor, ctx_k: Tensor, ctx_v: Tensor, ctx_mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: ``[B, A, S, H]`` block states; the rest as in :func:`block_attention`."""
        q = self.q_proj(x).view(*x.shape[:-1], self.config.num_heads, self.config.head_dim)
        if self.config.qk_norm:
            q = self.q_norm(q)
        k, v = self.keys_values(x, cos, sin)
        q = rotate(q, cos, sin)
        hidden = hidden_slots(x.shape[2], self.causal, self.window, x.device)
        return self.o_proj(block_attention(q, ctx_k.to(q.dtype), ctx_v.to(q.dtype), k, v, ctx_mask, hidden))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP around a residual stream, each perhaps between two convolutions."""

    def __init__(self, config: DFlashConfig, index: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)
        self.window = self.self_attn.window
        self.convolved = config.conv_kernel > 0
        if self.convolved:
            self.attention_conv = DynamicConvolution(config.hidden_size, config.conv_kernel, config.conv_group)
            self.mlp_conv = DynamicConvolution(config.hidden_size, config.conv_kernel, config.conv_group)

    def forward(self, x: Tensor, ctx_k: Tensor, ctx_v: Tensor, ctx_mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, A, S, H]`` to the same shape."""
        return self.think(self.attend(x, ctx_k, ctx_v, ctx_mask, cos, sin))

    def attend(self, x: Tensor, ctx_k: Tensor, ctx_v: Tensor, ctx_mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The attention half."""
        normed = self.input_layernorm(x)
        if not self.convolved:
            return x + self.self_attn(normed, ctx_k, ctx_v, ctx_mask, cos, sin)
        normed, kernel = self.attention_conv.before(normed)
        return x + self.attention_conv.after(self.self_attn(normed, ctx_k, ctx_v, ctx_mask, cos, sin), kernel)

    def think(self, x: Tensor) -> Tensor:
        """The MLP half."""
        normed = self.post_attention_layernorm(x)
        if not self.convolved:
            return x + self.mlp(normed)
        normed, kernel = self.mlp_conv.before(normed)
        return x + self.mlp_conv.after(self.mlp(normed), kernel)
