"""Settings of a DFlash-type drafter. With every option off they describe the plain z-lab layout."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from specdiff.errors import FormatError, InvalidInputError


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and options of a :class:`~specdiff.drafters.dflash.DFlashDrafter`.

    Attributes:
        hidden_size: width H; must equal the target's.
        intermediate_size: width of the gated MLP.
        num_layers: draft layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        vocab_size: rows of the target's head that are valid ids.
        num_target_layers: depth of the target; a drafter is bound only to a target of this depth.
        target_layer_ids: taps, the state *after* each of these layers is read.
        block_size: K, drafted tokens per pass (the anchor is not counted).
        mask_token_id: target id whose embedding fills the undecided slots; None for direct drafters.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: rotary base.
        qk_norm: RMSNorm over the heads of queries and keys (the z-lab layout has it).
        causal: slots see only slots to their left, in layers without a window (the z-lab layout is bidirectional).
        windows: sliding window of each layer in tokens, 0 for a layer that sees everything; () for no windows at all.
        sliding_causal: the same as ``causal``, for layers with a window.
        anchor_predicts: the anchor's slot drafts too: slot k (from 0) predicts the token k + 1 after the anchor.
        input_embedding_scale: factor on the embeddings that enter the block.
        output_multiplier: factor on the logits.
        final_logit_softcapping: logits become ``c * tanh(logits / c)``.
        normalize_taps: RMSNorm (without weight) of each tap before it is projected. Taps differ in scale by orders of
            magnitude; this is what lets one learning rate serve all of them.
        direct: the block's input is ``input_scale * (W_h taps[anchor-1] + W_e embedding[anchor] + slot)`` (times a gain
            per slot and channel) instead of mask embeddings; there is no anchor slot, slot k (from 0) predicts the
            token k + 1 after the anchor.
        input_scale: see ``direct``.
        late_mlp: the MLP of the last draft layer runs after a slot has been told the drafted tokens before it (their
            embeddings are added by a linear map): a sequential head that costs one MLP and no new parameters but the
            map.
        correction: width of the sequential correction head, 0 for none.
        correction_window: how many drafted tokens before a slot the sequential heads see.
        markov_rank: rank of the low-rank Markov bias on the logits that reads the frozen embedding, 0 for none.
        conv_kernel: taps of the dynamic convolutions around each half of a layer (DFlash 2), 0 for none.
        conv_group: channels that share a dynamic kernel.
        selector_rank: rank of the candidate selector (DFlash 2), 0 for none.
        selector_top_k: candidates per slot that the selector scores.
        transition_rank: rank of the Markov bias ``W1[x_prev] W2`` with tables of its own (DSpark), 0 for none.
        draft_vocab_size: columns of the transition head when the draft vocabulary is pruned, 0 for ``vocab_size``.
        confidence: a head estimates the probability that a slot is accepted (DSpark).
        confidence_sees_token: that head also reads the transition head's row of the token before.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qk_norm: bool = True
    causal: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    normalize_taps: bool = False
    direct: bool = False
    input_scale: float = 1.0
    late_mlp: bool = False
    correction: int = 0
    correction_window: int = 1
    markov_rank: int = 0
    windows: tuple[int, ...] = ()
    sliding_causal: bool = False
    anchor_predicts: bool = False
    conv_kernel: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    transition_rank: int = 0
    draft_vocab_size: int = 0
    confidence: bool = False
    confidence_sees_token: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
        object.__setattr__(self, "windows", tuple(int(i) for i in self.windows))
        if self.block_size < 1:
            raise InvalidInputError(f"block_size must be at least 1, not {self.block_size}")
        if self.num_layers < 1:
            raise InvalidInputError(f"num_layers must be at least 1, not {self.num_layers}")
        if not self.target_layer_ids:
            raise InvalidInputError("target_layer_ids is empty: a DFlash drafter reads at least one target layer")
        if not all(0 <= i < self.num_target_layers for i in self.target_layer_ids):
            raise InvalidInputError(
                f"target_layer_ids {self.target_layer_ids} must lie in 0..{self.num_target_layers - 1}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidInputError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise InvalidInputError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if self.correction_window < 1:
            raise InvalidInputError("correction_window must be at least 1")
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise InvalidInputError(
                f"windows {self.windows} must name a size, or 0, for each of {self.num_layers} layers"
            )
        if self.conv_kernel and self.hidden_size % self.conv_group:
            raise InvalidInputError(f"conv_group {self.conv_group} must divide hidden_size {self.hidden_size}")
        if self.direct and self.anchor_predicts:
            raise InvalidInputError("a direct drafter has no anchor slot: anchor_predicts does not apply")
        if self.confidence_sees_token and not (self.confidence and self.transition_rank):
            raise InvalidInputError("confidence_sees_token needs confidence and a transition head")
        if not self.direct and self.mask_token_id is None:
            raise InvalidInputError("mask_token_id is needed unless the drafter is direct")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise InvalidInputError(f"mask_token_id {self.mask_token_id} lies outside the vocabulary {self.vocab_size}")

    @property
    def slots(self) -> int:
        """Positions of one full draft pass: K, plus the anchor's slot where that drafts nothing."""
        return self.block_size + int(self.anchor_slot)

    @property
    def anchor_slot(self) -> bool:
        """Whether the block begins with a slot for the anchor that drafts nothing."""
        return not (self.direct or self.anchor_predicts)

    @property
    def sequential(self) -> bool:
        """Whether a slot's state depends on the drafted tokens before it."""
        return self.late_mlp or self.correction > 0 or self.markov_rank > 0

    @property
    def edges(self) -> bool:
        """Whether a slot's logits are rescored by the id of the token before it (the anchor for the first slot)."""
        return self.selector_rank > 0 or self.transition_rank > 0

    @property
    def plain(self) -> bool:
        """Whether this is exactly what the z-lab layout can express (apart from a pruned vocabulary)."""
        extra = self.direct or self.sequential or self.edges or self.conv_kernel or self.confidence
        return not (extra or self.normalize_taps or self.anchor_predicts) and self.qk_norm

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DFlashConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            FormatError: unknown or missing names.
        """
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise FormatError(f"unknown drafter settings {sorted(unknown)}: written by a newer specdiff?")
        try:
            return cls(**values)
        except TypeError as error:
            raise FormatError(f"incomplete drafter settings: {error}") from error
