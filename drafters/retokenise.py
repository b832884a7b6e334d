"""A drafter whose tokenizer is not the target's: its drafts travel as text.

The text of what is committed is encoded for the drafter; what it drafts is decoded, and the new text encoded for the
target. How tokens came about does not matter for the law ``Delta``, so the target's text or distribution is kept,
whatever is lost on the way: a bad translation costs accepted tokens only. What must not be lost is the text itself, or
the drafter would continue another one: tokenizers that do not give back the text they encode are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, as_limits, move_drafter
from specdiff.drafters.common_start import common_start
from specdiff.errors import UnsupportedError
from specdiff.verify.laws import Delta, Proposal
from specdiff.verify.noise import RoundNoise

PROBES = (
    "Hello, World!",
    " two  spaces\n\nand\ttabs ",
    "naïve café 1234567.89",
    "def f(x): return x[0] # ok",
    "東京 🙂",
)
"""Texts that a tokenizer must give back as they were."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoding gives for bytes that are no character yet."""


def retokenised(drafter: Drafter, tokenizer: Any, target_tokenizer: Any) -> Drafter:
    """``drafter`` itself where both tokenizers are the same, else a drafter that translates.

    Args:
        drafter: proposes ids of ``tokenizer``.
        tokenizer: the drafter's own.
        target_tokenizer: the target's.

    Raises:
        UnsupportedError: a tokenizer does not give text back, or the drafter reads the target's states, which belong to
            the target's tokens.
    """
    if tokenizer.get_vocab() == target_tokenizer.get_vocab():
        return drafter
    return Retokenised(drafter, tokenizer, target_tokenizer)


class Retokenised:
    """See :func:`retokenised`. Under every rule it proposes the drafter's greedy choice, as ``Delta``."""

    taps: Sequence[int] = ()

    def __init__(self, drafter: Drafter, tokenizer: Any, target_tokenizer: Any) -> None:
        if tuple(drafter.taps):
            raise UnsupportedError(
                f"{type(drafter).__name__} reads the target's states token by token: it needs the target's tokenizer"
            )
        for whose, one in (("drafter", tokenizer), ("target", target_tokenizer)):
            for probe in PROBES:
                back = decode(one, encode(one, probe))
                if back != probe:
                    raise UnsupportedError(
                        f"the {whose}'s tokenizer does not give text back as it was ({probe!r} becomes {back!r}), so a "
                        "drafter with another tokenizer cannot follow it"
                    )
        self.drafter, self.tokenizer, self.target_tokenizer = drafter, tokenizer, target_tokenizer
        self.block_size = drafter.block_size

    def start(self, request: DraftRequest) -> RetokenisedSession:
        """Open the state for one call of ``generate``."""
        return RetokenisedSession(self, request)

    def to(self, *args: Any, **kwargs: Any) -> Retokenised:
        """Move the drafter inside, where it can be moved."""
        move_drafter(self.drafter, *args, **kwargs)
        return self


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, nothing added."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids, nothing left out or tidied up."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class RetokenisedSession:
    """Committed target ids by row, and how many of their text's drafter ids the inner session holds."""

    def __init__(self, owner: Retokenised, request: DraftRequest) -> None:
        self.owner = owner
        self._request = request
        self._ids: list[list[int]] = [[] for _ in range(request.batch_size)]
        self._held: list[list[int]] = [[] for _ in range(request.batch_size)]
        self._inner: DraftSession = owner.drafter.start(self._own(request))

    def _own(self, request: DraftRequest) -> DraftRequest:
        """The inner request: greedy, with the drafter's own vocabulary; texts may be longer in its tokens."""
        size = max(self.owner.tokenizer.get_vocab().values()) + 1
        plain = DraftRequest(request.batch_size, request.device, request.dtype, size, capacity=2 * request.capacity)
        return replace(plain, rule="greedy")

    @property
    def request(self) -> DraftRequest:
        """The request in force."""
        return self._request

    @request.setter
    def request(self, request: DraftRequest) -> None:
        self._request = request
        self._inner.request = self._own(request)

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        """The inner drafter's continuation of the text, in target ids."""
        limits = as_limits(limits, self.owner.block_size)
        texts, inner = [], []
        for ids, last in zip(self._ids, anchor.tolist(), strict=True):
            text = decode(self.owner.target_tokenizer, [*ids, last])
            texts.append(text)
            # half a character, or nothing to anchor on: no draft this time
            inner.append([] if text.endswith(BROKEN) else encode(self.owner.tokenizer, text))
        self._follow([ids[:-1] for ids in inner])
        able = torch.tensor([bool(ids) for ids in inner], device=anchor.device)
        starts = torch.tensor([ids[-1] if ids else 0 for ids in inner], device=anchor.device)
        full = torch.full_like(limits, self.owner.block_size)
        drafted = self._inner.propose(starts, torch.where(able & (limits > 0), full, 0), noise)
        rows = []
        for row, (ids, last) in enumerate(zip(self._ids, anchor.tolist(), strict=True)):
            new = drafted.tokens[row, : int(drafted.lengths[row])].tolist()
            rows.append(self._translate([*ids, last], texts[row], inner[row], new)[: int(limits[row])])
        width = max([1, *map(len, rows)])
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=anchor.device).view(-1, width)
        return Proposal(tokens, torch.tensor([len(row) for row in rows], device=anchor.device), Delta())

    def _translate(self, ids: list[int], text: str, inner: list[int], drafted: list[int]) -> list[int]:
        """Target ids of the drafted text, as far as they are whole."""
        if not drafted:
            return []
        longer = decode(self.owner.tokenizer, [*inner, *drafted]).rstrip(BROKEN)
        if not longer.startswith(text) or longer == text:
            return []
        target = self.owner.target_tokenizer
        joined = encode(target, longer)
        # where encoding the whole text cuts differently from what is committed, the new text is encoded alone
        new = joined[len(ids) :] if joined[: len(ids)] == ids else encode(target, longer[len(text) :])
        outside = [i for i, token in enumerate(new) if token >= self._request.vocab_size]
        return new[: outside[0]] if outside else new

    def _follow(self, wanted: list[list[int]]) -> None:
        """Bring the inner session to ``wanted``: drafter ids by row."""
        kept = [common_start(held, ids) for held, ids in zip(self._held, wanted, strict=True)]
        device = self._request.device
        if any(keep < len(held) for keep, held in zip(kept, self._held, strict=True)):
            self._inner.rollback(torch.tensor(kept, device=device))
        new = [ids[keep:] for keep, ids in zip(kept, wanted, strict=True)]
        counts = [len(part) for part in new]
        width = max(counts, default=0)
        if width:
            table = torch.tensor([part + [0] * (width - len(part)) for part in new], device=device)
            self._inner.commit(table, torch.tensor(counts, device=device), None)
        self._held = wanted

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        """Append; the inner session learns of it with the next draft."""
        for ids, row, count in zip(self._ids, tokens.tolist(), counts.tolist(), strict=True):
            ids.extend(row[:count])

    def select(self, rows: Tensor) -> None:
        """Keep ``rows``, in that order."""
        chosen = rows.tolist()
        self._ids = [list(self._ids[row]) for row in chosen]
        self._held = [list(self._held[row]) for row in chosen]
        self._inner.select(rows)

    def rollback(self, lengths: Tensor) -> None:
        """Forget committed tokens past ``lengths``."""
        self._ids = [ids[:length] for ids, length in zip(self._ids, lengths.tolist(), strict=True)]

    def close(self) -> None:
        """Close the inner session."""
        self._inner.close()
