"""The DFlash-type drafter: a few layers that denoise a whole block in one pass, reading the target's hidden states.

Mathematics, for a block after the anchor token ``a`` at position p (all earlier positions have target states):

    context   c_j = hidden_norm(fc(taps_j)),  j < p            keys and values of every layer, beside the block's own
    block     u = [embedding(a), mask, ..., mask]              K + 1 slots at positions p .. p + K     (z-lab layout)
          or  u_k = s (g_k (W_h taps_{p-1} + W_e embedding(a)) + slot_k),  K slots at p .. p + K - 1      (direct)
    layers    x = layers(u; c)                                 bidirectional inside the block
    heads     y_k = f(x_k, drafted tokens before slot k)       optional, walked left to right
    logits    norm(y_k) E_draft^T                              E_draft: the target's head, its rows perhaps pruned
    edges     logits_k + score(token before slot k, .)         optional, walked left to right

The embedding and the head belong to the target and stay frozen; a drafter reads them when it is bound and never edits
them.
Sources: DFlash (block diffusion for flash speculative decoding) and DFlash 2, DFly and DSpark for the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdiff.drafters.base import DraftRequest
from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.edges import CandidateSelector, ConfidenceHead, TransitionHead
from specdiff.drafters.heads import CorrectionHead, MarkovHead, TokenInjection, tokens_before_slots
from specdiff.drafters.layers import DraftLayer, RMSNorm, inside_window, rms_norm, rotary
from specdiff.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from specdiff.drafters.dflash_session import DFlashSession
    from specdiff.drafters.packed import DraftRuntime


class DFlashModel(nn.Module):
    """The trainable part: no embedding, no head. Parameter names are those of the z-lab layout, plus ``options.*``."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        width, taps = config.hidden_size, len(config.target_layer_ids)
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.options = nn.ModuleDict()
        if config.direct:
            self.options["state"] = nn.Linear(taps * width, width, bias=False)
            self.options["token"] = nn.Linear(width, width, bias=False)
            self.options["slot"] = nn.Embedding(config.block_size, width)
            self.options["gain"] = nn.Embedding(config.block_size, width)
            nn.init.normal_(self.option("slot").weight, std=0.02)
            nn.init.ones_(self.option("gain").weight)
        if config.late_mlp:
            self.options["inject"] = TokenInjection(
                width, config.correction_window, config.rms_norm_eps, config.input_scale
            )
        if config.correction:
            self.options["correction"] = CorrectionHead(
                width, config.correction, config.correction_window, config.rms_norm_eps
            )
        if config.markov_rank:
            self.options["markov"] = MarkovHead(width, config.markov_rank, config.rms_norm_eps)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(
                width, config.vocab_size, config.selector_rank, config.selector_top_k
            )
        if config.transition_rank:
            columns = config.draft_vocab_size or config.vocab_size
            self.markov_head = TransitionHead(config.vocab_size, columns, config.transition_rank)
        if config.confidence:
            seen = config.transition_rank if config.confidence_sees_token else 0
            self.confidence_head = ConfidenceHead(width + seen)

    @property
    def stack(self) -> list[DraftLayer]:
        """The draft layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def option(self, name: str) -> Any:
        """The module of an option that is on."""
        return self.options[name]

    def tap_features(self, taps: Tensor) -> Tensor:
        """Taps ``[..., n * H]`` as they enter ``fc`` and the direct path."""
        if not self.config.normalize_taps:
            return taps
        count = len(self.config.target_layer_ids)
        split = taps.view(*taps.shape[:-1], count, self.config.hidden_size)
        return rms_norm(split, self.config.rms_norm_eps).flatten(-2)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``[B, g, T, D]`` of every layer for context ``features``: ``[B, T, n * H]``."""
        hidden = self.hidden_norm(self.fc(features))
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        pairs = (layer.self_attn.keys_values(hidden, cos, sin) for layer in self.stack)
        return [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs]

    def block_input(self, anchor: Tensor, last: Tensor, mask: Tensor | None, slots: int) -> Tensor:
        """States ``[B, A, S, H]`` that enter the first layer.

        Args:
            anchor: ``[B, A, H]`` embedding of each anchor.
            last: ``[B, A, n * H]`` tap features of the position before each anchor (zeros where there is none).
            mask: ``[H]`` embedding of the mask token (unused when direct).
            slots: S.
        """
        config = self.config
        if config.direct:
            base = self.option("state")(last) + self.option("token")(rms_norm(anchor, config.rms_norm_eps))
            slot, gain = self.option("slot").weight[:slots], self.option("gain").weight[:slots]
            return (base[:, :, None] * gain + slot) * config.input_scale
        assert mask is not None
        masks = mask.to(anchor.dtype).expand(*anchor.shape[:2], slots - 1, -1)
        return torch.cat([anchor[:, :, None], masks], 2) * config.input_embedding_scale

    def run_layers(self, x: Tensor, context: Sequence[tuple[Tensor, Tensor]], visible: Tensor, start: Tensor) -> Tensor:
        """States of the drafted slots ``[B, A, k, H]`` before the heads and the final norm.

        Args:
            x: ``[B, A, S, H]`` of :meth:`block_input`.
            context: keys and values by layer.
            visible: ``Bool[B, A, T]`` context that each anchor may see.
            start: ``Long[B, A]`` position of each anchor.
        """
        positions = start[..., None] + torch.arange(x.shape[2], device=x.device)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        for layer, (k, v) in zip(self.stack, context, strict=True):
            mask = inside_window(visible, start, x.shape[2], layer.window) if layer.window else visible
            x = layer.attend(x, k, v, mask, cos, sin)
            if layer is not self.stack[-1] or not self.config.late_mlp:
                x = layer.think(x)
        return x[:, :, 1:] if self.config.anchor_slot else x

    def correct(self, x: Tensor, previous: Tensor | None) -> Tensor:
        """Normed states ``[..., H]`` that meet the head.

        Args:
            x: ``[..., H]`` parallel states.
            previous: embeddings ``[..., window, H]`` of the tokens before, zeros where there is none; None where no
                slot has any (the same as zeros).
        """
        if "inject" in self.options:
            x = self.stack[-1].think(x if previous is None else self.option("inject")(x, previous))
        if "correction" in self.options:
            head = self.option("correction")
            x = head.correct(x, head.prepare(x), previous)
        y = self.norm(x)
        if "markov" in self.options and previous is not None:
            y = y + self.option("markov")(previous[..., 0, :]).to(y.dtype)
        return y

    def edge_logits(self, logits: Tensor, normed: Tensor, previous: Tensor, ids: Tensor) -> Tensor:
        """Logits ``[B, Vd]`` of one slot, rescored by the token before it.

        Args:
            logits: ``[B, Vd]`` as the head gave them.
            normed: ``[B, H]`` the slot's normed state.
            previous: ``Long[B]`` target ids of the tokens before the slot.
            ids: ``Long[Vd]`` target id of each column.
        """
        if self.config.transition_rank:
            logits = self.markov_head(logits, previous)
        if self.config.selector_rank:
            logits = self.candidate_selector(logits, normed, previous, ids)
        return logits

    def confidence(self, normed: Tensor, previous: Tensor) -> Tensor:
        """``[B]`` estimated acceptance of the slot with normed state ``[B, H]`` after the tokens ``Long[B]``."""
        features = normed
        if self.config.confidence_sees_token:
            features = torch.cat([normed, self.markov_head.markov_w1(previous).to(normed.dtype)], -1)
        return self.confidence_head(features)

    def shape_logits(self, logits: Tensor) -> Tensor:
        """The optional multiplier and soft cap."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if self.config.final_logit_softcapping:
            cap = self.config.final_logit_softcapping
            logits = cap * torch.tanh(logits / cap)
        return logits


def same_weights(own: Tensor | None, theirs: Tensor) -> bool:
    """Whether ``own`` is ``theirs`` up to the rounding of its dtype."""
    return own is not None and own.shape == theirs.shape and torch.equal(theirs.to(own), own)


class DFlashDrafter(nn.Module):
    """A :class:`DFlashModel` with its draft vocabulary, bound to a target.

    Args:
        model: the trainable part.
        draft_ids: ``Long[Vd]`` ascending target ids that the drafter may propose, or None for all of them.
        own_head: ``[Vd, H]`` output rows of a checkpoint that brings its own; None for the target's.
        own_embedding: ``[V, H]`` likewise for the input embedding.
    """

    def __init__(
        self,
        model: DFlashModel,
        draft_ids: Tensor | None = None,
        own_head: Tensor | None = None,
        own_embedding: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        if draft_ids is not None:
            draft_ids = draft_ids.long()
            if draft_ids.numel() == 0 or int(draft_ids.min()) < 0 or int(draft_ids.max()) >= self.config.vocab_size:
                raise InvalidInputError(f"draft_ids must be a non-empty set of ids in 0..{self.config.vocab_size - 1}")
            if draft_ids.numel() > 1 and bool((draft_ids[1:] <= draft_ids[:-1]).any()):
                raise InvalidInputError("draft_ids must ascend without repeats")
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        columns = self.config.vocab_size if draft_ids is None else len(draft_ids)
        if self.config.transition_rank and columns != (self.config.draft_vocab_size or self.config.vocab_size):
            raise InvalidInputError(f"the transition head does not have the {columns} columns of the draft vocabulary")
        for name, own, rows in (("head", own_head, columns), ("embedding", own_embedding, self.config.vocab_size)):
            if own is not None and own.shape != (rows, self.config.hidden_size):
                raise InvalidInputError(
                    f"own_{name} has shape {tuple(own.shape)}, expected {(rows, self.config.hidden_size)}"
                )
        self.own_head: Tensor | None
        self.own_embedding: Tensor | None
        self.register_buffer("own_head", own_head, persistent=False)
        self.register_buffer("own_embedding", own_embedding, persistent=False)
        self._min_confidence = 0.0
        self._embedding: Tensor | None = None
        self._head: Tensor | None = None
        self._runtime: DraftRuntime | None = None

    @property
    def block_size(self) -> int:
        """K, the largest number of drafted tokens per proposal."""
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output states the drafter reads."""
        return self.config.target_layer_ids

    @property
    def min_confidence(self) -> float:
        """For drafters with a confidence head: a draft ends where the estimated probability that all of it is accepted
        falls below this. 0 drafts whole blocks."""
        return self._min_confidence

    @min_confidence.setter
    def min_confidence(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise InvalidInputError(f"min_confidence must be in [0, 1], not {value}")
        if value and not self.config.confidence:
            raise UnsupportedError("this drafter has no confidence head: min_confidence cannot be set")
        self._min_confidence = value

    @property
    def bound(self) -> bool:
        """Whether :meth:`bind` has been called."""
        return self._head is not None

    def bind(self, target: Any) -> DFlashDrafter:
        """Take the embedding and head rows of ``target`` (a Hugging Face causal LM), and move to where its head is. The
        target is only read.

        Raises:
            UnsupportedError: the target is not the kind this drafter was trained for (width, depth, vocabulary).
        """
        text = target.config.get_text_config()
        wants = {
            "hidden_size": (self.config.hidden_size, text.hidden_size),
            "num_hidden_layers": (self.config.num_target_layers, text.num_hidden_layers),
        }
        for name, (mine, theirs) in wants.items():
            if mine != theirs:
                raise UnsupportedError(f"this drafter was made for a target with {name} {mine}; this one has {theirs}")
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if embedding is None or head is None:
            raise UnsupportedError("the target gives no input embedding or output head (get_input/output_embeddings)")
        if getattr(head, "bias", None) is not None:
            raise UnsupportedError("targets whose output head has a bias are not supported by DFlash drafters")
        if head.weight.shape[0] < self.config.vocab_size or embedding.weight.shape[0] < self.config.vocab_size:
            raise UnsupportedError(
                f"this drafter knows {self.config.vocab_size} ids, the target's head has {head.weight.shape[0]}"
            )
        self.bind_weights(embedding.weight.detach(), head.weight.detach())
        return self.to(head.weight.device)

    def bind_weights(self, embedding: Tensor, head: Tensor) -> None:
        """Bind to raw weights ``[V, H]``; the pruned head rows are copied, the rest is shared.

        What a checkpoint brought of its own is used instead, and forgotten where it is the target's own.
        """
        vocab = self.config.vocab_size
        rows = head[:vocab] if self.draft_ids is None else head[self.draft_ids.to(head.device)]
        if same_weights(self.own_head, rows):
            self.own_head = None
        if same_weights(self.own_embedding, embedding[:vocab]):
            self.own_embedding = None
        self._embedding = embedding if self.own_embedding is None else self.own_embedding.to(embedding.device)
        self._head = rows if self.own_head is None else self.own_head.to(head.device)

    def _apply(self, fn: Any, recurse: bool = True) -> DFlashDrafter:
        super()._apply(fn, recurse)
        if self._head is not None and (self.draft_ids is not None or self.own_head is not None):
            self._head = fn(self._head)
        if self._embedding is not None and self.own_embedding is not None:
            self._embedding = fn(self._embedding)
        return self

    def embed(self, ids: Tensor) -> Tensor:
        """Frozen target embeddings of ``ids`` in the drafter's dtype; negative ids give zeros."""
        assert self._embedding is not None, "bind the drafter to a target first"
        rows = F.embedding(ids.clamp(min=0).to(self._embedding.device), self._embedding).to(ids.device)
        rows = rows.to(self.model.fc.weight.dtype)
        return rows * (ids >= 0)[..., None].to(rows.dtype)

    @property
    def head(self) -> Tensor:
        """``[Vd, H]`` output rows of the draft vocabulary."""
        assert self._head is not None, "bind the drafter to a target first"
        return self._head

    @property
    def embedding(self) -> Tensor:
        """``[V, H]`` the embedding that drafted tokens are read by."""
        assert self._embedding is not None, "bind the drafter to a target first"
        return self._embedding

    def mask_embedding(self) -> Tensor | None:
        """``[H]`` embedding of the mask token, None for direct drafters."""
        if self.config.direct or self.config.mask_token_id is None:
            return None
        return self.embed(torch.tensor(self.config.mask_token_id, device=self.model.fc.weight.device))

    def states(
        self, features: Tensor, anchors: Tensor, anchor_ids: Tensor, slots: int, valid: Tensor | None = None
    ) -> Tensor:
        """Parallel states ``[B, A, k, H]`` for anchors inside whole documents (training and evaluation).

        A block sees the context strictly left of its anchor and its own slots, nothing else.

        Args:
            features: ``[B, T, n * H]`` tap features of the documents.
            anchors: ``Long[B, A]`` anchor positions.
            anchor_ids: ``Long[B, A]`` their tokens.
            slots: drafted tokens k per anchor.
            valid: ``Bool[B, T]`` positions that exist (default: all).
        """
        length = features.shape[1]
        positions = torch.arange(length, device=features.device)
        context = self.model.context(features, positions.expand(features.shape[0], -1))
        visible = positions < anchors[..., None]
        if valid is not None:
            visible = visible & valid[:, None]
        before = (anchors - 1).clamp(min=0)
        last = features.gather(1, before[..., None].expand(-1, -1, features.shape[-1]))
        last = last * (anchors > 0)[..., None].to(last.dtype)
        if self.config.edges:
            raise UnsupportedError("drafters with a candidate selector or transition head can be served, not trained")
        width = slots + int(self.config.anchor_slot)
        x = self.model.block_input(self.embed(anchor_ids), last, self.mask_embedding(), width)
        return self.model.run_layers(x, context, visible, anchors)

    def previous(self, tokens: Tensor) -> Tensor:
        """Embeddings ``[..., k, window, H]`` of the drafted tokens before each slot of ``tokens``: ``Long[..., k]``."""
        return self.embed(tokens_before_slots(tokens, self.config.correction_window))

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits ``[..., Vd]`` (float32) of normed states ``[..., H]``."""
        return self.model.shape_logits(F.linear(normed.to(self.head.dtype), self.head).float())

    def runtime(self) -> DraftRuntime:
        """What decoding runs: the layers and the head, packed for few rows; made again when a weight has changed."""
        from specdiff.drafters.packed import DraftRuntime, stamp

        if self._runtime is None or self._runtime.stamp != stamp(self.model, self.head):
            self.__dict__["_runtime"] = DraftRuntime(self.model, self.head)  # not a submodule: it holds copies
        assert self._runtime is not None
        return self._runtime

    def cost_key(self) -> list[Any]:
        """What its cost depends on."""
        width = 0 if self.draft_ids is None else len(self.draft_ids)
        return [repr(self.config), width, str(self.model.fc.weight.dtype)]

    def start(self, request: DraftRequest) -> DFlashSession:
        """Open the state for one call of ``generate``."""
        from specdiff.drafters.dflash_session import DFlashSession

        if not self.bound:
            raise InvalidInputError("this drafter is not bound to a target: call drafter.bind(target) first")
        return DFlashSession(self, request)

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Write ``config.json`` and safetensors to ``folder``; see :func:`specdiff.drafters.saving.save`."""
        from specdiff.drafters.saving import save

        save(self, Path(folder), **kwargs)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, target: Any = None, **kwargs: Any) -> DFlashDrafter:
        """Load from a folder or a hub repository and bind to ``target`` if given."""
        from specdiff.drafters.saving import load

        drafter = load(name_or_path, target=target, **kwargs)
        return drafter.bind(target) if target is not None else drafter

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload to the hub; returns the address of the commit."""
        from specdiff.drafters.saving import push

        return push(self, repo_id, **kwargs)
