"""What a diffusion language model is, as data: mask id, shift, attention, blocks, conventions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from specdiff.errors import InvalidInputError, UnsupportedError

Attention = Literal["full", "block_causal", "causal_context", "causal"]
Convention = Literal["llada", "dream", "sdar"]

_ATTENTION = ("full", "block_causal", "causal_context", "causal")
_CONVENTIONS = ("llada", "dream", "sdar")


@dataclass(frozen=True)
class DLMSpec:
    """A frozen description of a diffusion language model.

    Attributes:
        name: a label for messages.
        corruption: "mask" (absorbing state) or "uniform" (random tokens, no mask id).
        mask_id: the id of the mask token; required for "mask".
        shift: 0 if row ``i`` of the logits predicts position ``i``; 1 if it predicts position ``i + 1``.
        attention: "full"; "block_causal" (bidirectional in a block, blocks causal); "causal_context" (clean tokens are
            causal, the open block is bidirectional); "causal" (plain autoregressive).
        block_size: tokens per block, or None for one block over the whole generation.
        alignment: "absolute" (block edges at multiples of ``block_size``, a prompt's tail sits in the first block) or
            "prompt" (blocks are counted from the end of the prompt).
        sub_block: sub-block size of Fast-dLLM v2, or None.
        first_token: "denoise" (like any other) or "ar" (the first token of a block is the argmax or draw of the clean
            pass before it).
        commit: who writes the keys and values of clean tokens: "model" (the same forward) or "encoder" (a separate
            one).
        self_conditioning: the denoiser reads its previous step's logits.
        eos_ids: ids that end a row.
        pad_id: id written after the end of a row; None means ``eos_ids[0]``, or 0.
        forbidden_ids: ids never proposed, beside ``mask_id``.
        convention: sampling convention. "llada": Gumbel noise to the power T, confidence from the untempered softmax.
            "dream": temperature, top-p, top-k, confidence from the filtered law. "sdar": the same, top-k before top-p.
        policy: name of the default policy.
        options: default options of that policy.
        cache: name of the default block cache.
        max_length: longest sequence the model was made for, or None.
    """

    name: str = "custom"
    corruption: Literal["mask", "uniform"] = "mask"
    mask_id: int | None = None
    shift: int = 0
    attention: Attention = "full"
    block_size: int | None = None
    alignment: Literal["absolute", "prompt"] = "prompt"
    sub_block: int | None = None
    first_token: Literal["denoise", "ar"] = "denoise"
    commit: Literal["model", "encoder"] = "model"
    self_conditioning: bool = False
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    forbidden_ids: tuple[int, ...] = ()
    convention: Convention = "llada"
    policy: str = "threshold"
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str = "none"
    max_length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        object.__setattr__(self, "eos_ids", tuple(self.eos_ids))
        object.__setattr__(self, "forbidden_ids", tuple(self.forbidden_ids))
        if self.corruption not in ("mask", "uniform"):
            raise UnsupportedError(
                f"corruption {self.corruption!r} is not supported: only discrete diffusion ('mask', 'uniform') is; "
                "continuous embedding diffusion (Diffusion-LM, AR-Diffusion, DiT, flow matching) has no token canvas"
            )
        if self.corruption == "mask" and self.mask_id is None:
            raise InvalidInputError(f"spec {self.name!r}: corruption 'mask' needs mask_id")
        if self.shift not in (0, 1):
            raise InvalidInputError(f"spec {self.name!r}: shift must be 0 or 1, not {self.shift}")
        if self.attention not in _ATTENTION:
            raise InvalidInputError(
                f"spec {self.name!r}: attention must be one of {_ATTENTION}, not {self.attention!r}"
            )
        if self.convention not in _CONVENTIONS:
            raise InvalidInputError(
                f"spec {self.name!r}: convention must be one of {_CONVENTIONS}, not {self.convention!r}"
            )
        if self.block_size is not None and self.block_size < 1:
            raise InvalidInputError(f"spec {self.name!r}: block_size must be positive, not {self.block_size}")
        if self.attention == "block_causal" and self.block_size is None:
            raise InvalidInputError(f"spec {self.name!r}: block_causal attention needs block_size")
        if self.first_token == "ar" and (self.shift != 1 or self.attention == "full"):
            raise InvalidInputError(f"spec {self.name!r}: first_token 'ar' needs shift 1 and causal blocks")
        if self.alignment not in ("absolute", "prompt"):
            raise InvalidInputError(f"spec {self.name!r}: alignment must be 'absolute' or 'prompt'")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.to_dict(),))

    def __hash__(self) -> int:
        return hash((self.name, self.mask_id, self.shift, self.attention, self.block_size))

    def replace(self, **changes: Any) -> DLMSpec:
        """A copy with some attributes changed; unknown names are refused."""
        unknown = set(changes) - set(self.__dataclass_fields__)
        if unknown:
            raise InvalidInputError(f"DLMSpec has no attribute {', '.join(sorted(unknown))}")
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All attributes as plain JSON values."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        out["options"] = dict(self.options)
        out["eos_ids"] = list(self.eos_ids)
        out["forbidden_ids"] = list(self.forbidden_ids)
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DLMSpec:
        """The inverse of :meth:`to_dict`."""
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise InvalidInputError(f"DLMSpec has no attribute {', '.join(sorted(unknown))}")
        return cls(**values)

    @property
    def pad(self) -> int:
        """The id written where a row has ended."""
        if self.pad_id is not None:
            return self.pad_id
        return self.eos_ids[0] if self.eos_ids else 0

    @property
    def refused_ids(self) -> tuple[int, ...]:
        """Ids never proposed: forbidden ones and the mask."""
        return self.forbidden_ids + (() if self.mask_id is None else (self.mask_id,))

    def check_vocab(self, vocab_size: int) -> None:
        """Raise if an id lies outside a vocabulary of ``vocab_size``."""
        ids = {"mask_id": self.mask_id, "pad_id": self.pad_id}
        ids.update({f"eos_ids[{i}]": v for i, v in enumerate(self.eos_ids)})
        for name, value in ids.items():
            if value is not None and not 0 <= value < vocab_size:
                raise InvalidInputError(
                    f"spec {self.name!r}: {name} = {value} is outside the model's vocabulary of {vocab_size}; "
                    "give the right id as a keyword, e.g. DiffusionLM(model, preset=..., mask_id=...)"
                )


def _rebuild(values: dict[str, Any]) -> DLMSpec:
    return DLMSpec.from_dict(values)
