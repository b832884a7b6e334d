"""Statistics added up over several calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Totals:
    """Sums over calls of ``generate``.

    Attributes:
        calls: how many.
        tokens: new tokens.
        later: new tokens without each row's first, which the prefill gives.
        passes: verify passes, summed over rows.
        proposed: drafted tokens.
        accepted: drafted tokens kept.
        seconds: wall time in all.
        decoding: wall time without prefills.
        proposed_by_position: how often a token was proposed at each position.
        accepted_by_position: how often it was kept there.
    """

    calls: int = 0
    tokens: int = 0
    later: int = 0
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0
    decoding: float = 0.0
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def add(self, stats: Any, seconds: float) -> None:
        """Add one call's ``GenerationStats`` and its wall time."""
        self.calls += 1
        self.tokens += sum(stats.new_tokens)
        self.later += sum(stats.new_tokens) - len(stats.new_tokens)
        self.passes += sum(stats.row_rounds)
        self.proposed += stats.proposed
        self.accepted += stats.accepted
        self.seconds += seconds
        self.decoding += max(0.0, seconds - stats.seconds.get("prefill", 0.0))
        self.proposed_by_position = _sums(self.proposed_by_position, stats.proposed_by_position)
        self.accepted_by_position = _sums(self.accepted_by_position, stats.accepted_by_position)

    @property
    def tau(self) -> float | None:
        """New tokens per verify pass, the prefills' own tokens not counted; None without a pass."""
        return self.later / self.passes if self.passes else None

    def table(self) -> str:
        """A few lines for a reader."""
        lines = [f"answers          {self.calls}", f"new tokens       {self.tokens}"]
        if self.decoding > 0 and self.later:
            lines.append(f"tokens/s         {self.later / self.decoding:.1f} (prompts left out)")
        if self.tau is not None:
            lines.append(f"tau              {self.tau:.2f} new tokens per target pass")
        if self.proposed:
            lines.append(
                f"accepted         {self.accepted} of {self.proposed} drafted ({self.accepted / self.proposed:.0%})"
            )
            pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
            lines.append(
                "by position      " + " ".join(f"{kept / shown:.0%}" if shown else "-" for kept, shown in pairs)
            )
        return "\n".join(lines)


def _sums(one: list[int], other: list[int]) -> list[int]:
    width = max(len(one), len(other))
    padded = [values + [0] * (width - len(values)) for values in (one, other)]
    return [a + b for a, b in zip(*padded, strict=True)]
