"""Prompt lookup: propose what followed the same n-gram earlier in the text. No weights, no taps; the floor to beat.

Source: prompt lookup decoding (Saxena 2023). Differences: the index is built incrementally, the latest occurrence of
the longest known suffix wins, and a continuation that runs into the end of the text goes on with its own period, so
that loops are predicted for a whole block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, Outlook, as_limits
from specdiff.errors import InvalidInputError
from specdiff.verify.laws import Delta, Proposal
from specdiff.verify.noise import RoundNoise

LONGEST_MATCH = 32
"""Matches are measured up to this many tokens."""


class NgramIndex:
    """The committed tokens of one row and where each n-gram was last seen.

    Args:
        smallest: shortest n-gram that counts as a match.
        largest: longest n-gram indexed; longer matches are found by comparing backwards.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self.smallest, self.largest = smallest, largest
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; O(largest) work for each."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(self.smallest, min(self.largest, end) + 1):
                self._ends[tuple(self.tokens[end - n : end])] = end

    def truncate(self, length: int) -> None:
        """Forget tokens past ``length``."""
        if length < len(self.tokens):
            kept = self.tokens[:length]
            self.tokens, self._ends = [], {}
            self.extend(kept)

    def match(self, anchor: int, count: int) -> tuple[int, list[int]]:
        """Length of the longest match that ends in ``anchor``, and the ``count`` tokens that followed it.

        (0, []) when even the shortest n-gram is new.
        """
        text = [*self.tokens[-LONGEST_MATCH:], anchor]
        for n in range(min(self.largest, len(text)), self.smallest - 1, -1):
            end = self._ends.get(tuple(text[len(text) - n :]))
            if end is not None:
                break
        else:
            return 0, []
        length = n
        while length < min(len(text), end) and self.tokens[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        whole = len(self.tokens) + 1
        period = whole - end  # the text from ``end`` on is anchor-terminated: it repeats with this period
        found: list[int] = []
        for i in range(count):
            at = end + i
            found.append(self.tokens[at] if at < whole - 1 else anchor if at == whole - 1 else found[i - period])
        return length, found


class PromptLookup:
    """Drafter that copies. Law: ``Delta``.

    Args:
        block_size: K, tokens per proposal.
        smallest: shortest n-gram that counts as a match.
        largest: longest n-gram indexed.
    """

    taps: Sequence[int] = ()

    def __init__(self, block_size: int = 8, smallest: int = 2, largest: int = 4) -> None:
        if block_size < 1 or smallest < 1 or largest < smallest:
            raise InvalidInputError(
                f"need block_size >= 1 and 1 <= smallest <= largest, got {block_size}, {smallest}, {largest}"
            )
        self.block_size, self.smallest, self.largest = block_size, smallest, largest

    def cost_key(self) -> list[int]:
        """What its cost depends on."""
        return [self.block_size, self.largest]

    def start(self, request: DraftRequest) -> LookupSession:
        """Open the state for one call of ``generate``."""
        return LookupSession(self, request)


def copied(match: int, most: int) -> Outlook:
    """The outlook of ``most`` tokens copied behind a match of ``match`` tokens."""
    return Outlook(f"copied behind {min(match, 4)}", most, free=True, chance=0.2 * min(match, 4))


class LookupSession:
    """An :class:`NgramIndex` for every row, on the host."""

    lazy = True

    def __init__(self, drafter: PromptLookup, request: DraftRequest) -> None:
        self.request = request
        self.drafter = drafter
        self.rows = [NgramIndex(drafter.smallest, drafter.largest) for _ in range(request.batch_size)]

    def matches(self, anchor: Tensor) -> list[tuple[int, list[int]]]:
        """Match length and continuation (K tokens) of every row."""
        count = self.drafter.block_size
        return [row.match(token, count) for row, token in zip(self.rows, anchor.tolist(), strict=True)]

    def outlook(self, anchor: Tensor) -> list[Outlook]:
        """Rows by length of their match: long matches go on more often than short ones."""
        return [copied(length, len(tokens)) for length, tokens in self.matches(anchor)]

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """The continuation of the longest match of every row; rows without a match propose nothing."""
        limits = as_limits(limits, self.drafter.block_size)
        found = [tokens for _, tokens in self.matches(anchor)]
        lengths = torch.minimum(limits, torch.tensor([len(t) for t in found], device=limits.device))
        width = int(lengths.max())
        table = [tokens[:width] + [0] * (width - len(tokens[:width])) for tokens in found]
        tokens = torch.tensor(table, dtype=torch.long, device=anchor.device).view(len(found), width)
        return Proposal(tokens, lengths, Delta())

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Index newly committed tokens."""
        for row, new, count in zip(self.rows, tokens.tolist(), counts.tolist(), strict=True):
            row.extend(new[:count])

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``, in that order."""
        self.rows = [self.rows[r] for r in rows.tolist()]

    def rollback(self, lengths: Tensor) -> None:
        """Forget tokens past ``lengths``."""
        for row, length in zip(self.rows, lengths.tolist(), strict=True):
            row.truncate(length)

    def close(self) -> None:
        """Drop the indices."""
        self.rows = []
