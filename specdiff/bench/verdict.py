"""What the numbers say, in words: is speculation worth it for this pair on this machine, and why."""

from __future__ import annotations

from typing import Any

from specdiff.bench.cost import CostCurve

CLEAR_GAIN = 1.05
"""A first ratio above this is called a gain; between 1 and this, a draw."""


def expected_tau(acceptance_by_position: list[float | None], block: int) -> float:
    """tau if only ``block`` tokens were drafted: 1 plus the chance that each position is kept."""
    return 1.0 + sum(rate or 0.0 for rate in acceptance_by_position[:block])


def by_block(cost: CostCurve, acceptance_by_position: list[float | None]) -> list[dict[str, Any]]:
    """For each block length: expected tau, break-even tau and their quotient, the expected first ratio."""
    rows = []
    for block in range(1, min(cost.block_size, len(acceptance_by_position)) + 1):
        needed = cost.break_even(block)
        if needed is None:
            continue
        tau = expected_tau(acceptance_by_position, block)
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
        ``break_even_tau``, ``expected_ratio`` (tau over break-even), ``efficiency`` (measured over expected ratio),
        ``blocks`` (expected ratio by block length).
    """
    found = mode["ratios_without_loops" if filtered else "ratios"]
    first = (found.get("speculation") or {}).get("median")
    kernels = (found.get("kernels") or {}).get("median")
    whole = (found.get("whole") or {}).get("median")
    drafting = mode["drafting"] or {}
    tau = mode["arms"].get("specdiff", {}).get("tau")
    needed = cost.break_even() if cost is not None else None
    expected = tau / needed if tau is not None and needed else None
    rates = drafting.get("acceptance_by_position") or []
    blocks = by_block(cost, rates) if cost is not None else []
    use, headline = _headline(first)
    reasons = []
    if tau is not None and needed is not None and cost is not None:
        reasons.append(_why(cost, tau, needed, expected))
    if first is not None and expected is not None:
        lost = first / expected
        reasons.append(
            f"Measured {first:.2f} of the {expected:.2f} that tau and the cost curve allow ({lost:.0%}); "
            "the rest is bookkeeping between the passes, or a machine that was not quiet."
        )
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


def _why(cost: CostCurve, tau: float, needed: float, expected: float | None) -> str:
    block, one = cost.block_size, cost.target_at(1)
    relation = "above" if tau > needed else "below"
    return (
        f"A target pass over {block + 1} inputs costs {cost.target_at(block + 1) / one:.2f} of a pass over 1 "
        f"({one * 1e3:.1f} ms), and drafting {block} tokens {cost.drafter_at(block) / one:.2f}: a round pays from tau "
        f"{needed:.2f} on. Measured tau is {tau:.2f}, {relation} that; it allows a ratio of {expected or 0:.2f}."
    )
