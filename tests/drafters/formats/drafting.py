"""One proposal of a drafter, outside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tiny
import torch

from specdiff.verify.laws import Proposal
from specdiff.verify.noise import Noise

IDS = [5, 9, 2, 14, 30, 7, 21, 11, 40, 3, 3, 18]
ANCHOR = 17


def propose(
    drafter: Any, model: Any, rule: str = "greedy", ids: Sequence[int] = IDS, rows: int = 1, **options: Any
) -> Proposal:
    """A full block after :data:`ANCHOR`, the committed tokens given in two pieces; ``rows`` seeds at once."""
    session = drafter.start(tiny.request(model, rows, rule, **options))
    tokens = torch.tensor([list(ids)])
    taps = tiny.taps_of(model, tokens, drafter.taps).expand(rows, -1, -1)
    tokens = tokens.expand(rows, -1)
    for piece in (slice(0, 7), slice(7, None)):
        part = tokens[:, piece]
        session.commit(part, torch.full((rows,), part.shape[1]), taps[:, piece])
    noise = Noise(torch.arange(rows)).round(torch.full((rows,), len(ids)))
    return session.propose(torch.full((rows,), ANCHOR), torch.full((rows,), drafter.block_size), noise)
