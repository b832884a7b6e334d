"""What the target says about the corpus: taps and top logits, computed once and kept on disk as memory-mapped float16,
or computed whenever they are asked for where the disk has no room.

One folder per corpus shard. With 4 taps of a 576-wide model and 32 logits that is 4.8 KB a token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdiff.drafters.train.corpus import Document, read_shard
from specdiff.errors import FormatError, InvalidInputError

logger = logging.getLogger(__name__)

FLOAT16_MAX = 65504.0
KEPT_FREE = 2 << 30
"""Bytes of the disk that features leave to others, the run's checkpoints among them."""


@dataclass(frozen=True, eq=False)
class Features:
    """The target's view of one document of T tokens.

    Attributes:
        document: the ids.
        taps: ``float16[T, n, H]`` state after each tapped layer.
        top_ids: ``int[T, k]`` ids of the k largest logits for the *next* token, largest first.
        top_logprobs: ``float16[T, k]`` their log-probabilities under the full softmax.
    """

    document: Document
    taps: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@torch.no_grad()
def target_pass(model: Any, ids: Tensor, taps: Sequence[int], top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Taps ``[B, T, n, H]``, top ids ``[B, T, k]`` and log-probabilities of a right-padded causal batch.

    Padding on the right needs no mask: nothing real looks at it.
    """
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = torch.stack([out.hidden_states[i + 1] for i in taps], 2)
    values, top_ids = out.logits.topk(top, -1)
    return states, top_ids, values.float() - out.logits.float().logsumexp(-1, keepdim=True)


def _batches(documents: Sequence[Document], tokens: int) -> Iterator[list[int]]:
    """Indices of documents of similar length, at most about ``tokens`` padded tokens a batch."""
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * len(documents[i]) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def extract(
    model: Any,
    documents: Sequence[Document],
    folder: Path,
    taps: Sequence[int],
    top: int = 32,
    batch_tokens: int = 1024,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Run the target over documents and write their features to ``folder`` (whole or not at all).

    Args:
        model: a causal LM; its dtype and device are used as they are.
        documents: of one shard.
        taps: layer ids; the state *after* each layer is kept.
        top: number of logits kept per position.
        batch_tokens: padded tokens per target pass.
        on_progress: called with the number of tokens just done.
    """
    lens = [len(d) for d in documents]
    writer = FeatureWriter(folder, lens, checked(model, taps), top, model.config.get_text_config().hidden_size)
    for batch in _batches(documents, batch_tokens):
        for i, item in zip(batch, compute(model, [documents[i] for i in batch], taps, top), strict=True):
            writer.put(i, item.taps, item.top_ids, item.top_logprobs)
        if on_progress:
            on_progress(sum(lens[i] for i in batch))
    writer.finish()


def checked(model: Any, taps: Sequence[int]) -> Sequence[int]:
    """``taps``, if they are layers of ``model``.

    Raises:
        InvalidInputError: they are not.
    """
    layers = model.config.get_text_config().num_hidden_layers
    if not taps or not all(0 <= t < layers for t in taps):
        raise InvalidInputError(f"taps {tuple(taps)} must be layer ids in 0..{layers - 1}")
    return taps


def compute(model: Any, documents: Sequence[Document], taps: Sequence[int], top: int) -> list[Features]:
    """Features of documents in one pass of the target."""
    lens = [len(d) for d in documents]
    ids = torch.zeros(len(documents), max(lens), dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : lens[row]] = torch.from_numpy(document.ids)
    states, top_ids, logprobs = target_pass(model, ids.to(next(model.parameters()).device), taps, top)
    states = states.float()
    if bool((states.abs() > FLOAT16_MAX).any()):
        _tell_clipped()
    found = (
        states.clamp(-FLOAT16_MAX, FLOAT16_MAX).half().cpu().numpy(),
        top_ids.int().cpu().numpy(),
        logprobs.clamp(min=-60000).half().cpu().numpy(),
    )
    return [Features(document, *(f[row, : lens[row]] for f in found)) for row, document in enumerate(documents)]


@cache
def _tell_clipped() -> None:
    """Once is enough."""
    logger.warning("tap values beyond float16 are clipped")


def has_room(store: Path, tokens: int, width: int, top: int) -> bool:
    """Whether the disk of ``store`` takes features of that many tokens and leaves :data:`KEPT_FREE`.

    Args:
        store: where they would be written; it need not exist yet.
        tokens: of the texts.
        width: numbers per token of all taps.
        top: logits kept per token.
    """
    there = next(folder for folder in (store, *store.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free - tokens * (2 * width + 6 * top) >= KEPT_FREE


class FeatureWriter:
    """Writes one shard's features; the folder appears whole or not at all.

    Args:
        folder: where :meth:`finish` puts them.
        lens: tokens of each document.
        taps: layer ids.
        top: logits kept per position.
        hidden: width of a state.
    """

    def __init__(self, folder: Path, lens: Sequence[int], taps: Sequence[int], top: int, hidden: int) -> None:
        self._folder, self._scratch = folder, folder.with_name(folder.name + ".tmp")
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        self._starts = np.concatenate([[0], np.cumsum(np.array(lens, np.int64))])
        total = int(self._starts[-1])
        self._meta = {"taps": list(taps), "top": top, "documents": len(lens), "tokens": total}
        make = np.lib.format.open_memmap
        self._files = (
            make(self._scratch / "taps.npy", "w+", np.float16, (total, len(taps), hidden)),
            make(self._scratch / "top_ids.npy", "w+", np.int32, (total, top)),
            make(self._scratch / "top_logprobs.npy", "w+", np.float16, (total, top)),
        )

    def put(self, index: int, *values: np.ndarray) -> None:
        """States, top ids and log-probabilities of document ``index``; states may be ``[T, n * H]``."""
        span = slice(self._starts[index], self._starts[index + 1])
        for file, value in zip(self._files, values, strict=True):
            file[span] = value.reshape(len(value), *file.shape[1:])

    def finish(self) -> None:
        """Make the folder appear."""
        for file in self._files:
            file.flush()
        (self._scratch / "meta.json").write_text(json.dumps(self._meta))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._scratch.rename(self._folder)


class FeatureShard:
    """Features of one corpus shard, memory-mapped. Its ``name`` is its folder's, which tells its text from any other.

    Args:
        folder: what :func:`extract` wrote.
        documents: the shard's documents, in the same order.
        taps: which of the stored taps to read, by layer id (default: all of them).
    """

    def __init__(self, folder: Path, documents: Sequence[Document], taps: Sequence[int] | None = None) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        self.name = folder.name
        self.documents = list(documents)
        stored: list[int] = meta["taps"]
        self.taps = list(stored if taps is None else taps)
        missing = set(self.taps) - set(stored)
        if missing:
            raise FormatError(f"{folder}: taps {sorted(missing)} were not stored; remove the folder to compute them")
        self._columns = [stored.index(t) for t in self.taps]
        self._starts = np.concatenate([[0], np.cumsum([len(d) for d in documents])])
        if meta["documents"] != len(documents) or meta["tokens"] != int(self._starts[-1]):
            raise FormatError(f"{folder}: features belong to another version of the shard; remove the folder")
        self._taps = np.load(folder / "taps.npy", mmap_mode="r")
        self._ids = np.load(folder / "top_ids.npy", mmap_mode="r")
        self._logprobs = np.load(folder / "top_logprobs.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Features:
        span = slice(self._starts[index], self._starts[index + 1])
        return Features(
            self.documents[index], self._taps[span][:, self._columns], self._ids[span], self._logprobs[span]
        )


class LiveShard:
    """Features of one corpus shard that are not stored: each time they are asked for, the target computes them.

    Args:
        name: as a stored shard of this text would have.
        documents: the shard's documents.
        model: the target.
        taps: layer ids.
        top: logits per position.
    """

    def __init__(self, name: str, documents: Sequence[Document], model: Any, taps: Sequence[int], top: int) -> None:
        self.name, self.documents = name, list(documents)
        self.model, self.taps, self.top = model, list(checked(model, taps)), top

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Features:
        return compute(self.model, [self.documents[index]], self.taps, self.top)[0]


Shard = FeatureShard | LiveShard


def read_items(picks: Sequence[tuple[Shard, int]]) -> list[Features]:
    """Features of documents of shards, those that are not stored in one pass of the target."""
    live = [(shard, i) for shard, i in picks if isinstance(shard, LiveShard)]
    made: Iterator[Features] = iter(())
    if live:
        first = live[0][0]
        made = iter(compute(first.model, [shard.documents[i] for shard, i in live], first.taps, first.top))
    return [next(made) if isinstance(shard, LiveShard) else shard[i] for shard, i in picks]


def feature_folder(store: Path, shard: Path, documents: Sequence[Document] | None = None) -> Path:
    """Where the features of a shard lie: by its name and its ids, since shards of two runs may have the same name.

    Args:
        store: folder of all features.
        shard: the file.
        documents: its documents, read if not given.
    """
    digest = hashlib.blake2b(digest_size=6)
    for document in read_shard(shard) if documents is None else documents:
        digest.update(np.ascontiguousarray(document.ids, np.int64).tobytes())
        digest.update(document.prompt_length.to_bytes(8, "little"))
    return store / f"{shard.stem}-{digest.hexdigest()}"


def open_or_extract(
    model: Any,
    shard: Path,
    store: Path,
    taps: Sequence[int],
    top: int = 32,
    on_progress: Callable[[int], None] | None = None,
) -> Shard:
    """Features of a corpus shard from ``store``, computed first if they are not there yet; where the disk has no room,
    they are computed whenever they are asked for."""
    documents = read_shard(shard)
    folder = feature_folder(store, shard, documents)
    if not (folder / "meta.json").exists():
        tokens, hidden = sum(map(len, documents)), model.config.get_text_config().hidden_size
        if not has_room(store, tokens, len(taps) * hidden, top):
            return LiveShard(folder.name, documents, model, taps, top)
        extract(model, documents, folder, taps, top, on_progress=on_progress)
    return FeatureShard(folder, documents, taps)
