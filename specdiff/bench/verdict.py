"""What the numbers say, in words: is speculation worth it for this pair on this machine, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdiff.tuning.curve import CostCurve

CLEAR_GAIN = 1.05
"""A first ratio above this is called a gain; between 1 and this, a draw."""


NOISE = 1.1
"""A measured ratio this far above the possible one can only be noise."""


def expected_tau(kept_per_round: Sequence[float], block: int) -> float:
    """tau if at most ``block`` tokens were drafted: 1 plus the chance that each position is kept in a round."""
    return 1.0 + sum(kept_per_round[:block])


def by_block(cost: CostCurve, kept_per_round: Sequence[float], lengths: dict[int, int]) -> list[dict[str, Any]]:
    """For each largest block: expected tau, the tau that breaks even, and their quotient, the expected first ratio.

    Args:
        cost: the cost curve.
        kept_per_round: share of rounds in which each position was kept.
        lengths: how many rounds drafted each number of tokens; shorter limits cut them.
    """
    rows = []
    for block in range(1, len(kept_per_round) + 1):
        needed = cost.round_cost(lengths, block)
        if needed is None:
            continue
        tau = expected_tau(kept_per_round, block)
        rows.append({"block_size": block, "tau": tau, "break_even_tau": needed, "expected_ratio": tau / needed})
    return rows


def verdict(
    cost: CostCurve | None, mode: dict[str, Any], *, filtered: bool = False, equality: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Judge one mode.

    Args:
        cost: the cost curve, None when none was measured.
        mode: numbers of :func:`specdiff.bench.summary.mode_numbers`.
        filtered: judge by the ratios without loops.
        equality: the token comparison with transformers, when there is one.

    Returns:
        ``use`` (True, False, or None for a draw or when nothing was compared), ``headline``, ``reasons`` (sentences),
        ``break_even_tau`` (for rounds as they were drafted),
        ``expected_ratio`` (tau over that), ``efficiency`` (measured over expected ratio),
        ``blocks`` (expected ratio by block length).
    """
    found = mode["ratios_without_loops" if filtered else "ratios"]
    first = (found.get("speculation") or {}).get("median")
    kernels = (found.get("kernels") or {}).get("median")
    whole = (found.get("whole") or {}).get("median")
    drafting = mode["drafting"] or {}
    tau = mode["arms"].get("specdiff", {}).get("tau")
    lengths = {int(n): count for n, count in (drafting.get("proposed_lengths") or {}).items()}
    needed = cost.round_cost(lengths) if cost is not None else None
    expected = tau / needed if tau is not None and needed else None
    rates = drafting.get("kept_per_round") or []
    blocks = by_block(cost, rates, lengths) if cost is not None else []
    use, headline = _headline(first)
    reasons = []
    if tau is not None and needed is not None and cost is not None:
        reasons.append(_why(cost, lengths, tau, needed))
    if first is not None and expected is not None:
        reasons.append(_lost(first, expected))
    if not (first is not None and first > 1) and blocks:
        best = max(blocks, key=lambda row: row["expected_ratio"])
        if best["expected_ratio"] > CLEAR_GAIN and best["block_size"] != cost.block_size:  # type: ignore[union-attr]
            reasons.append(
                f"A shorter block may pay: with {best['block_size']} drafted tokens the same acceptance gives tau "
                f"{best['tau']:.2f} at a break-even of {best['break_even_tau']:.2f}. "
                f"Try --block-size {best['block_size']}."
            )
        elif not rates or best["expected_ratio"] <= 1:
            reasons.append(
                "No block length of this drafter is expected to pay here; a drafter with a higher tau might."
            )
    if kernels is not None and whole is not None and use is not True and kernels > CLEAR_GAIN:
        reasons.append(
            f"Without a drafter specdiff is still {kernels:.2f} times as fast as transformers generate: use it so."
        )
    if equality is not None and not equality["passed"]:
        headline = "Do not use it here: the texts are not those of transformers generate. Please report this."
        use = False
    return {
        "use": use,
        "headline": headline,
        "reasons": reasons,
        "ratio": first,
        "break_even_tau": needed,
        "expected_ratio": expected,
        "efficiency": first / expected if first is not None and expected else None,
        "blocks": blocks,
    }


def _headline(first: float | None) -> tuple[bool | None, str]:
    if first is None:
        return None, "Nothing to judge: speculation was not compared with plain decoding."
    if first > CLEAR_GAIN:
        return True, f"Use it here: speculation makes decoding {first:.2f} times as fast as the same engine without it."
    if first > 1:
        return None, f"A draw: speculation gives {first:.2f} of plain decoding's speed, too little to notice."
    return False, f"Do not use it here: speculation gives only {first:.2f} of plain decoding's speed."


def _why(cost: CostCurve, lengths: dict[int, int], tau: float, needed: float) -> str:
    block, one = cost.block_size, cost.target_at(1)
    mean = sum(length * count for length, count in lengths.items()) / sum(lengths.values())
    return (
        f"A target pass over {block + 1} inputs costs {cost.target_at(block + 1) / one:.2f} of a pass over 1 "
        f"({one * 1e3:.1f} ms), and drafting {block} tokens {cost.drafter_at(block) / one:.2f}. Rounds "
        f"drafted {mean:.1f} tokens on average, so that a round pays from tau {needed:.2f} on. "
        f"Measured tau is {tau:.2f}, {'above' if tau > needed else 'below'} that; "
        f"it allows a ratio of {tau / needed:.2f}."
    )


def _lost(first: float, expected: float) -> str:
    share = first / expected
    if share > NOISE:
        return (
            f"Measured {first:.2f} where tau and the cost curve allow {expected:.2f}: the machine was not quiet, "
            "measure again."
        )
    return (
        f"Measured {first:.2f} of the {expected:.2f} that tau and the cost curve allow ({share:.0%}); the rest is "
        "bookkeeping between the passes, or a machine that was not quiet."
    )
