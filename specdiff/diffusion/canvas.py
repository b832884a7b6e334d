"""The canvas: tokens of every row, which of them are still noisy, and which may never change.

Rows are left-aligned in *logical* positions: the padding of a batch is taken out before decoding, so a row's tensors do
not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

CLEAN_FROM_START = -(1 << 30)
"""Age of tokens that were clean before decoding began."""
NOT_YET = 1 << 30
"""Age of tokens that are noisy."""


@dataclass
class Canvas:
    """``B`` rows of ``N`` positions.

    Attributes:
        ids: ``Long[B, N]`` tokens; where ``noisy`` they are the mask id or random tokens.
        noisy: ``Bool[B, N]`` positions that are not decided yet.
        fixed: ``Bool[B, N]`` positions that never change (prompt, fixed spans, placed words).
        prompt: ``Bool[B, N]`` positions of the prompt.
        confidence: ``float32[B, N]`` confidence when the token was committed; 1 for clean ones.
        age: ``Long[B, N]`` pass of the row in which the token was committed.
        length: ``Long[B]`` positions of the row that exist; beyond it everything is padding.
        done: ``Bool[B]`` rows that have ended.
    """

    ids: Tensor
    noisy: Tensor
    fixed: Tensor
    prompt: Tensor
    confidence: Tensor
    age: Tensor
    length: Tensor
    done: Tensor

    @classmethod
    def build(cls, ids: Tensor, noisy: Tensor, fixed: Tensor, prompt: Tensor, length: Tensor) -> Canvas:
        """A canvas whose clean tokens have confidence 1 and were there from the start."""
        return cls(
            ids=ids,
            noisy=noisy,
            fixed=fixed,
            prompt=prompt,
            confidence=torch.where(noisy, 0.0, 1.0),
            age=torch.where(noisy, NOT_YET, CLEAN_FROM_START),
            length=length,
            done=torch.zeros_like(length, dtype=torch.bool),
        )

    @property
    def positions(self) -> Tensor:
        """``Long[N]`` 0, 1, 2, ..."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)

    @property
    def exists(self) -> Tensor:
        """``Bool[B, N]`` positions inside their row."""
        return self.positions < self.length[:, None]

    def select(self, rows: Tensor) -> Canvas:
        """Only ``rows``: ``Long[b]``."""
        return Canvas(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def pack(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the true entries of ``mask``, left-packed in ascending order.

    Args:
        mask: ``Bool[B, N]``.

    Returns:
        ``Long[B, W]`` positions (0 where not valid) and ``Bool[B, W]`` valid, with ``W`` the largest count.
    """
    counts = mask.sum(-1)
    width = int(counts.max()) if mask.numel() else 0
    order = torch.argsort((~mask).to(torch.uint8), dim=-1, stable=True)[:, :width]
    valid = torch.arange(width, device=mask.device) < counts[:, None]
    return torch.where(valid, order, 0), valid


def unpack(target: Tensor, positions: Tensor, valid: Tensor, values: Tensor) -> Tensor:
    """``target`` ``[B, N]`` with ``values`` ``[B, W]`` written at the valid ``positions``."""
    rows = torch.arange(target.shape[0], device=target.device)[:, None].expand_as(positions)
    out = target.clone()
    out[rows[valid], positions[valid]] = values[valid].to(target.dtype)
    return out
