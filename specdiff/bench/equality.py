"""Are the timed texts those of transformers' ``generate``? Near-ties are measured with the stock model, uncached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from specdiff.bench.arms import HF
from specdiff.bench.greedy import judge, tie_margin_of
from specdiff.bench.measure import Sample


def compare_texts(model: PreTrainedModel, samples: Sequence[Sample], arm: str) -> dict[str, Any]:
    """Compare one arm's greedy texts with transformers' own.

    Returns:
        ``texts``, ``equal``, ``mismatches`` (each with its margin), ``tie_margin``, ``allowed`` (2 in 100) and
        ``passed`` (every mismatch a near-tie, and no more than allowed).
    """
    margin = tie_margin_of(model.dtype)
    texts = 0
    found = []
    for sample in samples:
        for prompt, ids, expected, got in zip(
            sample.prompts, sample.ids, sample.runs[HF].tokens, sample.runs[arm].tokens, strict=True
        ):
            texts += 1
            size = len(sample.prompts)
            one = judge(model, ids, expected, got, name=prompt.id, batch_size=size, tie_margin=margin)
            if one is not None:
                found.append(one)
    allowed = math.ceil(0.02 * texts)
    return {
        "texts": texts,
        "equal": texts - len(found),
        "mismatches": [asdict(one) for one in found],
        "tie_margin": margin,
        "allowed": allowed,
        "passed": len(found) <= allowed and all(one.near_tie for one in found),
    }
