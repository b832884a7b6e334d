"""Gumbel coupling: Daliri, Musco and Suresh 2024 (arXiv:2408.07978).

The target's token at a position is ``argmax(log p + g)`` with noise ``g`` keyed by the position alone. A drafted token
is kept while it equals the target's token, so the text is that of plain sampling with the same seed, for any drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff.verify.draw import race
from specdiff.verify.noise import RoundNoise
from specdiff.verify.prepare import compute_dtype


def choices(scores: Tensor, noise: RoundNoise) -> tuple[Tensor, Tensor]:
    """The target's own tokens under the coupled noise.

    Args:
        scores: ``[B, K+1, V]`` warped target logits.
        noise: the round's noise.

    Returns:
        ``Long[B, K+1]`` tokens ``argmax(log p + g)`` and ``Bool[B, K+1]`` rows that have NaN, +inf or nothing but -inf.
    """
    slots, vocab = scores.shape[1:]
    exponential = noise.coupled(slots, torch.arange(vocab, device=scores.device))
    tokens, broken = [], []
    for slot in range(slots):  # one [B, V] row of probabilities at a time
        law = torch.softmax(scores[:, slot], dim=-1, dtype=compute_dtype(scores))
        broken.append(law[:, 0].isnan())
        tokens.append(race(law, exponential[:, slot]))
    return torch.stack(tokens, dim=1), torch.stack(broken, dim=1)
