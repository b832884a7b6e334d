"""Noisy blocks: where they lie, what is masked in them, and the batch that holds them. Numpy draws, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.dual.config import DualConfig


@dataclass(eq=False)
class NoisyBatch:
    """R rows of T clean tokens, G noisy blocks of S tokens for each.

    Attributes:
        ids: ``Long[R, T]`` clean tokens (0 where padded).
        document: ``Long[R, T]`` which document of the row a token belongs to, -1 where padded.
        place: ``Long[R, T]`` its position in the document.
        anchors: ``Long[R, G]`` column of the clean token in front of each block.
        tokens: ``Long[R, G, S]`` what the block really holds (0 beyond the document).
        present: ``Bool[R, G, S]`` positions that lie in the document.
        masked: ``Bool[R, G, S]`` present positions that are masked.
        rate: ``float32[R, G]`` probability with which they were masked.
        drafting: ``Bool[R, G]`` blocks that are masked as a whole.
        open: ``Bool[R, G, S, S]`` who sees whom within a block.
    """

    ids: Tensor
    document: Tensor
    place: Tensor
    anchors: Tensor
    tokens: Tensor
    present: Tensor
    masked: Tensor
    rate: Tensor
    drafting: Tensor
    open: Tensor

    @property
    def valid(self) -> Tensor:
        """``Bool[R, T]`` clean tokens that exist."""
        return self.document >= 0

    def to(self, device: torch.device) -> NoisyBatch:
        """The batch on a device."""
        return NoisyBatch(**{name: value.to(device) for name, value in vars(self).items()})


Row = list[Document]
"""Documents that share a row, one after the other."""


def pack_rows(documents: Sequence[Document], length: int, pack: bool) -> list[Row]:
    """Documents cut to ``length`` tokens, several to a row where they fit (first fit, in order of arrival).

    Documents without a response token to predict after the cut are left out.
    """
    rows: list[Row] = []
    room: list[int] = []
    for document in documents:
        size = min(len(document), length)
        if size - document.prompt_length < 2 or document.prompt_length < 1:
            continue
        place = next((i for i, left in enumerate(room) if left >= size), None) if pack else None
        if place is None:
            rows.append([])
            room.append(length)
            place = len(rows) - 1
        rows[place].append(document)
        room[place] -= size
    return rows


def block_starts(sizes: Sequence[tuple[int, int, int]], size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` starts (columns of the row) of blocks of ``size``, repeated when the tiles run out.

    Blocks tile the response of every document from a random offset; when the tiles are used up, another offset gives
    more. A block has an anchor in front of it and at least two tokens of its document in it.

    Args:
        sizes: (first column, prompt length, length) of each document of the row.
        size: of a block.
        count: how many starts.
        rng: draws.
    """
    found: list[int] = []
    while len(found) < count:
        tiles: list[int] = []
        for base, prompt, length in sizes:
            offset = int(rng.integers(min(size, length - 1 - prompt)))
            tiles += range(base + prompt + offset, base + length - 1, size)
        order = rng.permutation(tiles).tolist()
        found += [tile for tile in order if tile not in found] or order
    return np.array(found[:count])


def make_batch(
    rows: Sequence[Row], count: int, size: int, opened: float, config: DualConfig, rng: np.random.Generator
) -> NoisyBatch:
    """Clean rows and their noisy blocks.

    Args:
        rows: documents of each row.
        count: blocks per row, rounded up to an even number: they come in pairs.
        size: tokens per block.
        opened: share of later positions of its own block that a position sees, see :func:`openness`.
        config: the noise.
        rng: draws.
    """
    count += count % 2
    cut = [[d.ids[: config.length] for d in row] for row in rows]
    width = max(sum(map(len, parts)) for parts in cut)
    shape = (len(rows), count)
    ids = np.zeros((len(rows), width), np.int64)
    document = np.full((len(rows), width), -1, np.int64)
    place = np.zeros((len(rows), width), np.int64)
    anchors = np.zeros(shape, np.int64)
    tokens = np.zeros((*shape, size), np.int64)
    present = np.zeros((*shape, size), bool)
    masked = np.zeros((*shape, size), bool)
    rate = np.ones(shape, np.float32)
    drafting = np.zeros(shape, bool)
    for r, parts in enumerate(cut):
        ends = np.cumsum([len(p) for p in parts])
        bases = ends - [len(p) for p in parts]
        for number, (part, base, end) in enumerate(zip(parts, bases, ends, strict=True)):
            ids[r, base:end], document[r, base:end], place[r, base:end] = part, number, np.arange(len(part))
        sizes = [(int(b), d.prompt_length, len(p)) for b, d, p in zip(bases, rows[r], parts, strict=True)]
        starts = block_starts(sizes, size, count, rng)
        drafted = np.arange(count // 2) < round(config.drafting * (count // 2))
        shared = rng.uniform(*config.band)
        for pair, draft in enumerate(rng.permutation(drafted)):
            both = slice(2 * pair, 2 * pair + 2)
            if not draft and config.complement:
                starts[2 * pair + 1] = starts[2 * pair]
            column = starts[both, None] + np.arange(size)
            end = ends[document[r, starts[both]]][:, None]
            present[r, both] = column < end
            tokens[r, both] = np.where(column < end, ids[r, np.minimum(column, width - 1)], 0)
            drafting[r, both] = draft
            if draft:
                masked[r, both] = present[r, both]
                continue
            chance = np.full(2, shared) if config.level == "sequence" else rng.uniform(*config.band, size=2)
            masked[r, both], rate[r, both] = mask_pair(present[r, both], chance, config.complement, rng)
        anchors[r] = starts - 1
    later = rng.random((*shape, size, size)) < opened
    opening = later | np.tril(np.ones((size, size), bool))
    values = (ids, document, place, anchors, tokens, present, masked, rate, drafting, opening)
    return NoisyBatch(*(torch.from_numpy(v) for v in values))


def mask_pair(
    present: np.ndarray, chance: np.ndarray, complement: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Masks ``bool[2, S]`` of two blocks, and ``float[2]`` the probability with which each position was masked.

    With ``complement`` the second masks just what the first leaves: together they cover every present position once.

    Args:
        present: ``bool[2, S]`` positions that may be masked.
        chance: ``float[2]`` mask ratios.
        complement: see above; the second ratio is then ignored.
        rng: draws.
    """
    masked = rng.random(present.shape) < chance[:, None]
    if complement:
        masked[1], chance = ~masked[0], np.array([chance[0], 1 - chance[0]])
    return masked & present, chance
