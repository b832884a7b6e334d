"""What a call reports about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class GenerationStats:
    """Counts of one ``generate`` call. ``B`` is the number of returned rows.

    Attributes:
        rounds: target verify passes (batched passes; the prefill is not one).
        row_rounds: verify passes that each row took part in.
        proposed: drafted tokens that were put before the target.
        accepted: drafted tokens that were kept and returned.
        emitted: per row the new tokens of each pass: first the prefill's 1, then per round; sums to its new tokens.
        proposed_by_position: how often a token was proposed at each position of a block.
        accepted_by_position: how often it was accepted there.
        seconds: wall time of ``prefill``, ``draft``, ``verify`` and ``rest``.
        accept_seconds: the part of ``verify`` behind the target pass: processors, rule, read-back. On an accelerator
            the read-back waits for the pass, so that this holds most of it.
        modelled_cost: with adaptive lengths, what the call cost by the measured cost curve relative to plain decoding.
        prompt_tokens_computed: prompt tokens that went through the target in this call.
        finish_reason: per row ``eos``, ``stop`` or ``length``.
        rule: the acceptance rule used.
        path: the target path used (``general`` or ``fast``).
        notes: fallbacks taken, and why.
    """

    rounds: int = 0
    row_rounds: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    emitted: list[list[int]] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    accept_seconds: float = 0.0
    modelled_cost: float | None = None
    prompt_tokens_computed: int = 0
    finish_reason: list[str | None] = field(default_factory=list)
    rule: str = "greedy"
    path: str = "general"
    notes: list[str] = field(default_factory=list)

    @property
    def new_tokens(self) -> list[int]:
        """New tokens per row."""
        return [sum(row) for row in self.emitted]

    @property
    def tau(self) -> float | None:
        """(new tokens - rows) / verify passes summed over rows; None when no pass was needed."""
        passes = sum(self.row_rounds)
        return (sum(self.new_tokens) - len(self.emitted)) / passes if passes else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed; None when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Accepted at i / proposed at i, unconditional; None where nothing was proposed."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return [accepted / proposed if proposed else None for accepted, proposed in pairs]

    def count(self, row: int, proposed: int, accepted: int, emitted: int) -> None:
        """Book one row's part of one round."""
        missing = proposed - len(self.proposed_by_position)
        if missing > 0:
            self.proposed_by_position += [0] * missing
            self.accepted_by_position += [0] * missing
        for position in range(proposed):
            self.proposed_by_position[position] += 1
        for position in range(accepted):
            self.accepted_by_position[position] += 1
        self.row_rounds[row] += 1
        self.proposed += proposed
        self.accepted += accepted
        self.emitted[row].append(emitted)

    def to_dict(self) -> dict[str, Any]:
        """Everything, the derived numbers included, as plain JSON types."""
        return {
            **self.__dict__,
            "new_tokens": self.new_tokens,
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
        }


@dataclass
class SpecDiffOutput(GenerateDecoderOnlyOutput):
    """``GenerateDecoderOnlyOutput`` of transformers with ``stats`` added."""

    stats: GenerationStats | None = None
