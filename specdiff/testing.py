"""Drafters without weights, for tests: one replays a known text, one guesses at random.

Both follow :mod:`specdiff.drafters.base`, so they run with any target and any acceptance rule. ``ReplayDrafter`` fixes
how many tokens a round keeps (the engine's own losses can then be measured at a known tau); ``RandomDrafter`` is the
worst honest drafter, whose text must still follow the target's law.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, as_limits
from specdiff.errors import InvalidInputError
from specdiff.verify.laws import Delta, Proposal, Sampled
from specdiff.verify.noise import Purpose, RoundNoise, mix_seed

__all__ = ["RandomDrafter", "ReplayDrafter"]


def _check_block_size(block_size: int) -> int:
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise InvalidInputError(f"block_size must be a whole number of at least 1, got {block_size!r}")
    return block_size


class ReplayDrafter:
    """Proposes a text that is known beforehand. Law: ``Delta``.

    Args:
        continuation: ``Long[B, L]`` (or a nested list) ids of the *new* tokens of each row, counted from the end of the
            prompt: column 0 is the token that the prefill itself produces. One row serves any batch; fewer rows than
            the batch are repeated as ``num_return_sequences`` repeats prompts.
        block_size: K, tokens per proposal.
        wrong_at: 0-based offsets within every block whose id is replaced by ``(id + 1) % vocab_size``. With
            ``wrong_at=(j,)`` and the target's own greedy text every full round keeps exactly j drafted tokens.

    Raises:
        InvalidInputError: for ids that are not whole numbers, or offsets outside the block.
    """

    taps: Sequence[int] = ()

    def __init__(
        self, continuation: Tensor | Sequence[Sequence[int]], block_size: int = 8, wrong_at: Iterable[int] = ()
    ) -> None:
        ids = torch.as_tensor(continuation)
        if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise InvalidInputError(f"continuation must hold token ids, got {ids.dtype}")
        if ids.dim() == 1:
            ids = ids[None]
        if ids.dim() != 2 or not ids.shape[0]:
            raise InvalidInputError(f"continuation must be Long[B, L], got shape {tuple(ids.shape)}")
        self.continuation = ids.long()
        self.block_size = _check_block_size(block_size)
        self.wrong_at = tuple(sorted(set(wrong_at)))
        if any(not 0 <= offset < block_size for offset in self.wrong_at):
            raise InvalidInputError(f"wrong_at must lie in [0, {block_size}), got {self.wrong_at}")

    def cost_key(self) -> list[int]:
        """What its cost depends on."""
        return [self.block_size]

    def start(self, request: DraftRequest) -> ReplaySession:
        """Open the state for one call of ``generate``.

        Raises:
            InvalidInputError: when the batch is no multiple of the rows given, or an id is not in the vocabulary.
        """
        rows = self.continuation.shape[0]
        if request.batch_size % rows:
            raise InvalidInputError(f"ReplayDrafter has {rows} rows for a batch of {request.batch_size}")
        ids = self.continuation.to(request.device)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= request.vocab_size):
            raise InvalidInputError(f"ReplayDrafter's continuation has ids outside [0, {request.vocab_size})")
        ids = ids.repeat_interleave(request.batch_size // rows, dim=0)
        return ReplaySession(request, ids, self.block_size, self.wrong_at)


class ReplaySession:
    """State of one request: how many tokens each row has committed, and where its prompt ended."""

    def __init__(self, request: DraftRequest, ids: Tensor, block_size: int, wrong_at: tuple[int, ...]) -> None:
        self.request = request
        self._ids = ids
        self._block_size = block_size
        self._shift = torch.zeros(block_size, dtype=torch.long, device=ids.device)
        self._shift[list(wrong_at)] = 1
        self._committed = torch.zeros(ids.shape[0], dtype=torch.long, device=ids.device)
        self._prompt: Tensor | None = None
        self._rows = torch.arange(ids.shape[0], device=ids.device)

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """The next K ids of every row; the first call marks the end of the prompt unless the request tells it."""
        if self._prompt is None:
            given = self.request.prompt_lengths
            self._prompt = self._committed.clone() if given is None else given[self._rows]
        new = self._committed - self._prompt + 1  # the anchor is a new token, but not committed yet
        length = self._ids.shape[1]
        lengths = torch.minimum(as_limits(limits, self._block_size), (length - new).clamp(min=0))
        columns = new[:, None] + torch.arange(self._block_size, device=new.device)
        if length:
            tokens = (self._ids.gather(1, columns.clamp(max=length - 1)) + self._shift) % self.request.vocab_size
        else:
            tokens = torch.zeros_like(columns)
        return Proposal(tokens=tokens, lengths=lengths, law=Delta())

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Count the committed tokens."""
        self._committed = self._committed + counts

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows``."""
        self._ids, self._rows = self._ids[rows], self._rows[rows]
        self._committed = self._committed[rows]
        if self._prompt is not None:
            self._prompt = self._prompt[rows]

    def rollback(self, lengths: Tensor) -> None:
        """Forget tokens past ``lengths``; what is committed next is a new prompt."""
        self._committed = torch.minimum(self._committed, lengths)
        self._prompt = None

    def close(self) -> None:
        """Nothing to release."""


class RandomDrafter:
    """Proposes uniformly random ids. Law: ``Sampled``, with ``q = 1 / vocab_size`` at every position.

    The draws come from the round's noise, rotated by ``seed``: over many request seeds they are truly random (a drafter
    that repeated its guesses for every request would not follow the law it states), and two drafters with different
    seeds guess differently under the same request seed.

    Args:
        vocab_size: ids are drawn from ``[0, vocab_size)``.
        block_size: K, tokens per proposal.
        seed: which of many equally random drafters this is.
    """

    taps: Sequence[int] = ()

    def __init__(self, vocab_size: int, block_size: int = 8, seed: int = 0) -> None:
        if vocab_size < 1:
            raise InvalidInputError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size
        self.block_size = _check_block_size(block_size)
        self.seed = seed

    def cost_key(self) -> list[int]:
        """What its cost depends on."""
        return [self.block_size, self.vocab_size]

    def start(self, request: DraftRequest) -> RandomSession:
        """Open the state for one call of ``generate``.

        Raises:
            InvalidInputError: when the target's vocabulary is smaller than the drafter's.
        """
        if self.vocab_size > request.vocab_size:
            raise InvalidInputError(
                f"RandomDrafter draws from {self.vocab_size} ids, the target has {request.vocab_size}"
            )
        return RandomSession(self, request)


class RandomSession:
    """No state but the settings: every round is drawn from its own noise."""

    def __init__(self, drafter: RandomDrafter, request: DraftRequest) -> None:
        self.request = request
        self._block_size = drafter.block_size
        self._vocab_size = drafter.vocab_size
        device = request.device
        self._flat = torch.zeros(1, 1, 1, device=device)
        pruned = drafter.vocab_size < request.vocab_size
        self._draft_ids = torch.arange(drafter.vocab_size, device=device) if pruned else None
        turns = [mix_seed(drafter.seed, slot + 1) & 0xFFFFFFFF for slot in range(drafter.block_size)]
        self._turns = torch.tensor(turns, dtype=torch.float64, device=device) * 2.0**-32

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """K uniform ids per row."""
        uniform = (noise.uniform(Purpose.DRAFT, self._block_size) + self._turns) % 1.0
        tokens = (uniform * self._vocab_size).long().clamp_(max=self._vocab_size - 1)
        return Proposal(
            tokens=tokens,
            lengths=as_limits(limits, self._block_size),
            law=Sampled(),
            logits=self._flat.expand(*tokens.shape, self._vocab_size),
            draft_ids=self._draft_ids,
        )

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Nothing to learn."""

    def select(self, rows: Tensor) -> None:
        """Nothing to select."""

    def rollback(self, lengths: Tensor) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to release."""
