"""How much the engine itself loses, whatever the drafter: replayed texts at a known tau (DESIGN: engine efficiency)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from specdiff.bench.arms import PLAIN, specdiff_arm
from specdiff.bench.measure import Sample
from specdiff.bench.models import redrafted
from specdiff.target import Target
from specdiff.testing import ReplayDrafter
from specdiff.tuning.measure import measure_cost
from specdiff.wrap import SpecDiff

BLOCK = 8
TAUS = (2, 4, 6, 8)


def engine_efficiency(
    plain: SpecDiff,
    samples: Sequence[Sample],
    target: Target,
    max_new_tokens: int,
    *,
    taus: Sequence[int] = TAUS,
) -> list[dict[str, Any]]:
    """Measured speed-up / (tau * t_step / (t_draft + t_verify)) with a drafter that replays the right text.

    Args:
        plain: specdiff without a drafter.
        samples: greedy samples of single prompts; their plain texts are replayed, one of ``BLOCK`` tokens wrong.
        target: the target path whose passes are timed (``t_step`` over 1 input, ``t_verify`` over ``BLOCK`` + 1).
        max_new_tokens: tokens per text.
        taus: each is a full run over the samples.

    Returns:
        One row per tau: ``tau`` (measured), ``speed_up``, ``possible``, ``efficiency`` (medians over samples).
    """
    rows = []
    arm = specdiff_arm(plain, 0.0)
    for wanted in taus:
        found: dict[str, list[float]] = {"tau": [], "speed_up": [], "possible": [], "efficiency": []}
        for sample in samples:
            text = sample.runs[PLAIN].tokens
            if len(text) != 1 or len(text[0]) < 3 * BLOCK:
                continue
            wrong = (wanted - 1,) if wanted <= BLOCK else ()
            wrapped = redrafted(plain, ReplayDrafter(torch.tensor(text), BLOCK, wrong), BLOCK)
            run = specdiff_arm(wrapped, 0.0)(sample.ids, max_new_tokens, 0)
            base = arm(sample.ids, max_new_tokens, 0)
            if run.speed is None or base.speed is None or run.tau is None:
                continue
            cost = measure_cost(
                wrapped,
                target,
                inputs=(1, BLOCK + 1),
                context=sample.ids[0].numel() + len(text[0]) // 2,
                repeats=5,
                budget=1.0,
            )
            needed = cost.break_even()
            assert needed is not None
            speed_up, possible = run.speed / base.speed, run.tau / needed
            for name, value in zip(found, (run.tau, speed_up, possible, speed_up / possible), strict=True):
                found[name].append(value)
        if found["tau"]:
            rows.append(
                {name: statistics.median(values) for name, values in found.items()} | {"texts": len(found["tau"])}
            )
    return rows
