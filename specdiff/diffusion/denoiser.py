"""The denoiser: one face for every model. Hides the logits shift, the mask's dtype and the model's class."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdiff.diffusion.canvas import pack
from specdiff.diffusion.scatter import ScatterCache
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.visibility import additive_mask
from specdiff.errors import UnsupportedError


@dataclass
class PassInput:
    """One denoiser pass over ``A`` rows of ``N`` positions.

    Attributes:
        ids: ``Long[A, N]`` tokens.
        plan: ``Bool[A, N]`` positions to compute (rows of wanted logits are added to it).
        want: ``Bool[A, N]`` positions whose prediction is wanted.
        index: ``Long[A, N]`` block index; a query sees keys of no higher index.
        visible: ``Bool[A, N]`` keys that may be seen at all.
        open: ``Bool[A, N]`` positions of the open block (denoised, not clean context).
        conditioning: ``[A, W, V]`` logits of the previous step, for self-conditioned models.
        conditioned: ``Bool[A]`` rows for which ``conditioning`` holds.
    """

    ids: Tensor
    plan: Tensor
    want: Tensor
    index: Tensor
    visible: Tensor
    open: Tensor
    conditioning: Tensor | None = None
    conditioned: Tensor | None = None

    def doubled(self, ids: Tensor) -> PassInput:
        """Twice the batch, the second half with other ``ids``."""
        twice = {
            name: torch.cat([getattr(self, name)] * 2)
            for name in ("plan", "want", "index", "visible", "open", "conditioning", "conditioned")
            if getattr(self, name) is not None
        }
        return replace(self, ids=torch.cat([self.ids, ids]), **twice)


class Adapter(Protocol):
    """Weights that act on the open block alone (a dual-mode adapter)."""

    def rows(self, noisy: Tensor) -> contextlib.AbstractContextManager[None]:
        """Within the context, the adapter acts on the inputs where ``noisy``: ``Bool[A, T]``."""
        ...


class DenoiserLike(Protocol):
    """What the loop needs of a denoiser."""

    @property
    def spec(self) -> DLMSpec: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def supports_cache(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, rows: int, capacity: int) -> Any: ...

    def select(self, cache: Any, rows: Tensor) -> None: ...

    def logits(self, batch: PassInput, cache: Any = None) -> Tensor: ...


def logit_rows(want: Tensor, shift: int) -> Tensor:
    """Output rows that hold the predictions of ``want``: ``Bool[A, N]`` (position 0 uses its own row)."""
    if shift == 0:
        return want
    rows = torch.zeros_like(want)
    rows[:, :-1] = want[:, 1:]
    rows[:, 0] |= want[:, 0]
    return rows


def spread(logits: Tensor, rows: Tensor, want: Tensor, shift: int) -> Tensor:
    """Logits of the packed ``rows`` rearranged for the packed ``want``; returned as they are where both agree."""
    if shift == 0 or not bool(want[:, 0].any()):
        return logits
    rank = rows.long().cumsum(-1) - 1
    positions, _ = pack(want)
    column = rank.gather(1, (positions - shift).clamp(min=0)).clamp(min=0)
    return logits.gather(1, column[..., None].expand(*column.shape, logits.shape[-1]))


class Denoiser:
    """A Hugging Face model (causal or masked LM class) as a denoiser.

    Stock classes are used unpatched: visibility goes in as an additive 4-D mask, places as ``position_ids``, caches
    as a
    :class:`~specdiff.diffusion.scatter.ScatterCache`.

    Args:
        model: the model, already loaded, on its device.
        spec: its description.
        adapter: optional weights that act on the open block alone.
    """

    def __init__(self, model: nn.Module, spec: DLMSpec, adapter: Adapter | None = None) -> None:
        self.model = model
        self.spec = spec
        self.adapter = adapter
        config = getattr(model, "config", None)
        if config is None:
            raise UnsupportedError(f"{type(model).__name__} has no config: give a Hugging Face model or a DenoiserLike")
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab_size = int(self.config.vocab_size)
        spec.check_vocab(self.vocab_size)
        names = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model)
        self._keep = "logits_to_keep" in names
        self._positions = "position_ids" in names
        self._use_cache = "use_cache" in names
        self.supports_cache = (
            self._cache_name is not None
            and self._positions
            and not getattr(self.config, "is_encoder_decoder", False)
            and not _is_masked_lm(model)
        )
        self._offset = _position_offset(model, self.config)
        self._limit = _learned_positions(self.config)

    @property
    def device(self) -> torch.device:
        """Device of the model's first parameter."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Floating dtype of the weights, which the attention mask takes too."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def new_cache(self, rows: int, capacity: int) -> ScatterCache:
        """An empty cache for sequences of up to ``capacity`` positions."""
        if not self.supports_cache:
            raise UnsupportedError(f"{type(self.model).__name__} takes no key/value cache; use cache='none'")
        return ScatterCache(int(self.config.num_hidden_layers), capacity, rows)

    def select(self, cache: ScatterCache, rows: Tensor) -> None:
        """Keep only ``rows`` of ``cache``."""
        cache.select(rows)

    def commit(self, batch: PassInput, cache: ScatterCache) -> None:
        """Write keys and values of ``batch.plan`` without asking for logits."""
        self.logits(replace(batch, want=torch.zeros_like(batch.want)), cache)

    @torch.no_grad()
    def logits(self, batch: PassInput, cache: ScatterCache | None = None) -> Tensor:
        """float32 ``[A, W, V]`` predictions for the wanted positions, packed as by ``canvas.pack``."""
        rows = logit_rows(batch.want, self.spec.shift)
        if cache is None or not self._positions:
            # without a cache the keys are the queries themselves
            plan = batch.plan | rows | batch.visible
        else:
            plan = batch.plan | rows
        if self._positions:
            ahead, ahead_ok = pack(plan & ~rows)
            tail, tail_ok = pack(rows)
            positions, valid = torch.cat([ahead, tail], 1), torch.cat([ahead_ok, tail_ok], 1)
        else:
            positions, valid = pack(plan)
            tail, _ = pack(rows)
        output = self._forward(batch, positions, valid, tail.shape[1], cache)
        if not self._positions:
            rank = (plan.long().cumsum(-1) - 1).gather(1, tail).clamp(min=0)
            output = output.gather(1, rank[..., None].expand(*rank.shape, output.shape[-1]))
        return spread(output, rows, batch.want, self.spec.shift)

    def _forward(
        self, batch: PassInput, positions: Tensor, valid: Tensor, keep: int, cache: ScatterCache | None
    ) -> Tensor:
        ids = batch.ids.gather(1, positions)
        query_index = batch.index.gather(1, positions)
        if cache is None:
            key_positions = positions
            key_index = query_index
            key_ok = valid & batch.visible.gather(1, positions)
        else:
            extent = int(torch.where(batch.visible, 1, 0).any(0).nonzero().max()) + 1
            cache.aim(positions, valid, extent)
            slots = torch.arange(-1, extent, device=ids.device).expand(ids.shape[0], -1)
            key_positions = slots
            key_index = torch.cat([query_index.new_zeros(ids.shape[0], 1), batch.index[:, :extent]], 1)
            key_ok = torch.cat([valid.new_zeros(ids.shape[0], 1), batch.visible[:, :extent]], 1)
        seen = key_ok[:, None, :] & (key_index[:, None, :] <= query_index[:, :, None])
        if self._limit is not None and int(positions.max()) >= self._limit:
            raise UnsupportedError(
                f"{type(self.model).__name__} has {self._limit} learned positions; position {int(positions.max())} is "
                f"beyond"
            )
        kwargs: dict[str, Any] = {"attention_mask": self._mask(seen, positions, key_positions)}
        if self._positions:
            kwargs["position_ids"] = positions + self._offset
        if self._use_cache:
            kwargs["use_cache"] = cache is not None
        if cache is not None and self._cache_name is not None:
            kwargs[self._cache_name] = cache
        if self._keep and self._positions:
            # 0 means "all" in transformers
            kwargs["logits_to_keep"] = max(keep, 1)
        with self._adapted(batch.open.gather(1, positions) & valid):
            logits = self.model(input_ids=ids, **kwargs).logits
        if not self._positions:
            return logits.float()
        return logits[:, logits.shape[1] - keep :].float()

    @contextlib.contextmanager
    def _adapted(self, noisy: Tensor) -> Iterator[None]:
        if self.adapter is None:
            yield
            return
        with self.adapter.rows(noisy):
            yield

    def _mask(self, seen: Tensor, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """An additive mask, or one per layer type for models that mix full and sliding layers."""
        kinds = set(getattr(self.config, "layer_types", None) or ())
        window = getattr(self.config, "sliding_window", None)
        if getattr(self.config, "use_sliding_window", True) is False:
            window = None
        if not kinds - {"full_attention"} and (kinds or window is None):
            return additive_mask(seen, self.dtype)
        unknown = kinds - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedError(f"attention layers of type {', '.join(sorted(unknown))} cannot be a denoiser")
        near = seen if window is None else seen & (keys[:, None, :] > queries[:, :, None] - window)
        if not kinds:
            return additive_mask(near, self.dtype)
        masks = {"full_attention": seen, "sliding_attention": near}
        return {kind: additive_mask(masks[kind], self.dtype) for kind in kinds}


def cache_argument(model: nn.Module) -> str | None:
    """Name under which the model's forward takes a key/value cache; newer transformers call it ``cache``."""
    names = inspect.signature(model.forward).parameters
    return next((n for n in ("cache", "past_key_values") if n in names), None)


def _is_masked_lm(model: nn.Module) -> bool:
    names = getattr(model.config, "architectures", None) or [type(model).__name__]
    return any("MaskedLM" in name for name in [*names, type(model).__name__])


def _position_offset(model: nn.Module, config: Any) -> int:
    """RoBERTa's family counts positions from ``padding_idx + 1``."""
    if getattr(config, "model_type", "") in (
        "roberta",
        "xlm-roberta",
        "camembert",
        "xlm-roberta-xl",
        "roberta-prelayernorm",
    ):
        return int(config.pad_token_id) + 1
    return 0


def _learned_positions(config: Any) -> int | None:
    """Number of learned absolute positions, or None if positions are computed."""
    if getattr(config, "model_type", "") in ("bert", "distilbert", "electra", "gpt2", "albert"):
        return int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 0)) or None
    return None
