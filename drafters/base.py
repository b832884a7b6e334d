"""What a drafter is. Anything that follows these two protocols drafts losslessly for any target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdiff.fast.recording import Recorder
from specdiff.verify.laws import Proposal
from specdiff.verify.noise import RoundNoise

Warp = Callable[[Tensor], Tensor]
"""Maps raw logits ``[..., V]`` to warped logits of the same shape (temperature, top-k, top-p, ...)."""


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter learns about one call of ``generate``.

    Attributes:
        batch_size: number of rows at the start.
        device: where token tensors live.
        dtype: dtype of the target's hidden states (taps).
        vocab_size: width of the target's logits; only ids below it may be proposed.
        rule: the acceptance rule in force: "greedy", "token", "block" or "coupled". Under "greedy" a drafter proposes
            its argmax (law Delta); under "coupled" it should draw with ``noise.coupled`` (law Coupled).
        warp: temperature and filters of this request, to be applied to the drafter's own logits before sampling.
        capacity: upper bound of committed tokens per row in this request (prompt and new tokens), for preallocation.
        target_cache: read-only view of the target's KV cache, for drafters that share weights with it, else None.
        prompt_lengths: ``Long[B]`` logical tokens of each prompt; the first token after them is the prefill's own.
        recorder: records steps of fixed shapes where the target's passes are recorded too, else None.
    """

    batch_size: int
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    rule: str = "greedy"
    warp: Warp = field(default=lambda logits: logits)
    capacity: int = 0
    target_cache: object | None = None
    prompt_lengths: Tensor | None = None
    recorder: Recorder | None = None

    @property
    def greedy(self) -> bool:
        """True when the drafter should propose its argmax."""
        return self.rule == "greedy"


@dataclass(frozen=True)
class Outlook:
    """What a row's next proposal would be, known before anything is drawn.

    A session may offer ``outlook(anchor: Long[B]) -> list[Outlook]``, a function of committed tokens and past rounds
    alone. Block lengths that adapt keep their running acceptance by ``source``.

    Attributes:
        source: a name for what will draft.
        most: tokens it can propose.
        free: it runs no model, so that its drafts cost next to nothing.
        chance: expected acceptance of a token whose predecessors were accepted, before anything is known.
    """

    source: str
    most: int
    free: bool = False
    chance: float = 0.8


@runtime_checkable
class DraftSession(Protocol):
    """All drafter state of one request; nothing survives it.

    Optional members: ``outlook`` (see :class:`Outlook`); ``lazy = True`` when ``commit`` only takes notes and the work
    is done by the next ``propose``, so that rounds without a draft cost nothing; ``notes``, a list of what a user
    should know afterwards.
    """

    request: DraftRequest
    """The request in force. A conversation sets it anew for each call (another rule or warp, same caches)."""

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """Draft a block after ``anchor``: ``Long[B]``, at most ``limits``: ``Long[B]`` tokens per row.

        ``noise`` is the round's noise; draws use ``Purpose.DRAFT`` or ``noise.coupled``.
        """
        ...

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Learn about committed tokens whose target states now exist.

        Called for each prefill chunk and after each round (anchor and accepted drafts). ``tokens``: ``Long[B, T]``,
        left-aligned; ``counts``: ``Long[B]`` valid entries per row (entries past it are padding, in taps too);
        ``taps``: ``[B, T, n*H]`` target states after the tapped layers, concatenated in tap order, or None if the
        drafter taps nothing.
        """
        ...

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows``: ``Long[b]`` indices into the current batch, in that order."""
        ...

    def rollback(self, lengths: Tensor) -> None:
        """Forget committed tokens past ``lengths``: ``Long[B]`` per row (an edited history)."""
        ...

    def close(self) -> None:
        """Release what the session holds. Called exactly once, also after errors."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes blocks of tokens. Holds weights and settings, no request state; never edits the target."""

    @property
    def block_size(self) -> int:
        """K, the largest number of drafted tokens per proposal."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """Target layer ids whose output states the drafter reads (``hidden_states[i + 1]``); empty for none."""
        ...

    def start(self, request: DraftRequest) -> DraftSession:
        """Open the state for one call of ``generate``."""
        ...


def move_drafter(drafter: object, *args: Any, **kwargs: Any) -> None:
    """``drafter.to(...)``, for drafters that have weights to move."""
    move = getattr(drafter, "to", None)
    if move is not None:
        move(*args, **kwargs)


def rebind(drafter: object, target: Any) -> None:
    """``drafter.bind(target)``, for drafters that read the embedding and head of a target."""
    bind = getattr(drafter, "bind", None)
    if bind is not None:
        bind(target)


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of ``tensor`` costs nothing. Elsewhere a session works with bounds: it never waits."""
    return tensor.device.type == "cpu"


def as_limits(limits: Tensor, block_size: int) -> Tensor:
    """``limits`` clamped to [0, block_size]."""
    return torch.clamp(limits, min=0, max=block_size)
