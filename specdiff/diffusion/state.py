"""All state of one decoding call, per row, so that a row can leave at any time."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from specdiff.diffusion.canvas import Canvas
from specdiff.diffusion.policies.base import Frame
from specdiff.diffusion.spec import DLMSpec
from specdiff.diffusion.visibility import block_floor, block_index
from specdiff.verify.noise import Noise


@dataclass
class RowState:
    """``A`` rows that are still being decoded.

    Attributes:
        row: ``Long[A]`` index in the caller's batch.
        canvas: tokens and noise.
        noise: one seed per row.
        origin: ``Long[A]`` where block edges are counted from.
        first: ``Long[A]`` first position that is returned as new.
        limit: ``Long[A]`` one past the last position that is returned.
        stretch: ``Bool[A]`` the next block reaches to the end of the row (infilling with a suffix in view).
        start: ``Long[A]`` first position of the open block.
        end: ``Long[A]`` one past it.
        opened: ``Bool[A]`` a block is open.
        waiting: ``Bool[A]`` the block's first token comes from a clean pass.
        step: ``Long[A]`` pass of the block.
        passes: ``Long[A]`` pass of the row.
        initial: ``Long[A]`` noisy positions when the block opened.
        granted: ``Long[A]`` steps of the block.
        block: ``Long[A]`` number of the open block.
        blocks: ``Long[A]`` blocks of the row.
        known: ``Bool[A, N]`` keys and values exist.
        fresh: ``Bool[A, N]`` they are final.
        seen_confidence: ``float32[A, N]`` last confidence of noisy positions.
        streamed: ``Long[A]`` positions before it are confirmed.
        per_row: policy memory ``[A]``.
        per_position: policy memory ``[A, N]``.
        conditioning: ``[A, W, V]`` self-conditioning logits.
        conditioned: ``Bool[A]``.
        words: per row, phrases that still need a place.
        searched: ``Long[A]`` number of the last block that was searched for places for them.
    """

    row: Tensor
    canvas: Canvas
    noise: Noise
    origin: Tensor
    first: Tensor
    limit: Tensor
    stretch: Tensor
    start: Tensor
    end: Tensor
    opened: Tensor
    waiting: Tensor
    step: Tensor
    passes: Tensor
    initial: Tensor
    granted: Tensor
    block: Tensor
    blocks: Tensor
    known: Tensor
    fresh: Tensor
    seen_confidence: Tensor
    streamed: Tensor
    per_row: dict[str, Tensor] = field(default_factory=dict)
    per_position: dict[str, Tensor] = field(default_factory=dict)
    conditioning: Tensor | None = None
    conditioned: Tensor | None = None
    words: list[list[Tensor]] = field(default_factory=list)
    searched: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @classmethod
    def build(
        cls,
        canvas: Canvas,
        noise: Noise,
        spec: DLMSpec,
        first: Tensor,
        limit: Tensor,
        stretch: Tensor | None = None,
        words: list[list[Tensor]] | None = None,
    ) -> RowState:
        """The state before the first pass."""
        rows = canvas.ids.shape[0]
        zero = torch.zeros_like(first)
        no = torch.zeros_like(canvas.done)
        origin = zero if spec.alignment == "absolute" else first.clone()
        if spec.block_size is None:
            blocks = torch.ones_like(first)
        else:
            begin = block_floor(first, origin, spec.block_size)
            blocks = torch.div(canvas.length - begin + spec.block_size - 1, spec.block_size, rounding_mode="floor")
        return cls(
            row=torch.arange(rows, device=first.device),
            canvas=canvas,
            noise=noise,
            origin=origin,
            first=first,
            limit=limit,
            stretch=no if stretch is None else stretch,
            start=first.clone(),
            end=first.clone(),
            opened=no.clone(),
            waiting=no.clone(),
            step=zero.clone(),
            passes=zero.clone(),
            initial=zero.clone(),
            granted=zero.clone(),
            block=zero - 1,
            blocks=blocks.clamp(min=1),
            known=torch.zeros_like(canvas.noisy),
            fresh=torch.zeros_like(canvas.noisy),
            seen_confidence=torch.zeros_like(canvas.confidence),
            streamed=first.clone(),
            words=words or [[] for _ in range(rows)],
            searched=zero - 1,
        )

    @property
    def size(self) -> int:
        """A."""
        return int(self.row.shape[0])

    def select(self, rows: Tensor) -> RowState:
        """Only ``rows``: ``Long[a]``."""
        out: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                out[f.name] = value[rows]
            elif isinstance(value, Canvas | Noise):
                out[f.name] = value.select(rows)
            elif isinstance(value, dict):
                out[f.name] = {k: v[rows] for k, v in value.items()}
            elif isinstance(value, list):
                out[f.name] = [value[i] for i in rows.tolist()]
            else:
                out[f.name] = value
        return RowState(**out)  # type: ignore[arg-type]

    def frame(self, spec: DLMSpec) -> Frame:
        """The open blocks as a policy sees them."""
        c = self.canvas
        position = c.positions
        inside = (position >= self.start[:, None]) & (position < self.end[:, None])
        sub = inside
        if spec.sub_block is not None:
            far = torch.where(c.noisy & ~c.fixed & inside, position, c.ids.shape[1])
            lead = torch.minimum(far.min(-1).values, self.end - 1)
            begin = block_floor(lead, self.start, spec.sub_block)
            sub = inside & (position >= begin[:, None]) & (position < (begin + spec.sub_block)[:, None])
        editable = ~c.fixed & ~c.prompt & c.exists
        return Frame(noisy=c.noisy, editable=editable, start=self.start, end=self.end, sub=sub)

    def index(self, spec: DLMSpec) -> Tensor:
        """``Long[A, N]`` block index of every position (see :mod:`specdiff.diffusion.visibility`)."""
        return block_index(spec, self.canvas.ids.shape[1], self.start, self.end, self.origin)

    def visible(self, spec: DLMSpec, window: int | None) -> Tensor:
        """``Bool[A, N]`` positions that exist for this pass.

        Args:
            spec: the model.
            window: if given, only so many positions before the open block are seen (an approximation).
        """
        c = self.canvas
        edge = torch.where(self.waiting, self.start, self.end)
        if spec.attention == "full":
            edge = c.length
        seen = c.exists & (c.positions < edge[:, None])
        if window is not None:
            seen = seen & (c.positions >= (self.start - window)[:, None])
        return seen
