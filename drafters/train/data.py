"""Which documents are trained on and which are held out; batches from whatever shards have features by now."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdiff.drafters.train.batches import Batch, collate, draw_anchors
from specdiff.drafters.train.corpus import Document, expand, read_shard
from specdiff.drafters.train.features import (
    Features,
    FeatureShard,
    LiveShard,
    Shard,
    feature_folder,
    open_or_extract,
    read_items,
)
from specdiff.drafters.train.overlap import holding
from specdiff.errors import InvalidInputError

logger = logging.getLogger(__name__)


def held_out(document: Document, share: float) -> bool:
    """Whether a document is kept for evaluation: a hash of its ids decides, so copies in several shards go together."""
    digest = hashlib.blake2b(np.ascontiguousarray(document.ids, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


@dataclass
class Corpus:
    """Features of all shards found so far: of ``known`` ones, those that were taken in are ``shards``.

    Attributes:
        patterns: files, folders or glob patterns of corpus shards; looked at again by :meth:`rescan`.
        store: folder of the features.
        taps: layer ids.
        top: logits kept per position.
        share: share of documents held out.
        model: the target, to compute features that are missing; None to use only what is there.
        taboo: n-grams; a document that holds one of them is left out.
    """

    patterns: Sequence[str]
    store: Path
    taps: Sequence[int]
    top: int = 32
    share: float = 0.04
    model: Any = None
    taboo: Set[tuple[int, ...]] = frozenset()

    def __post_init__(self) -> None:
        self.known: dict[Path, Shard] = {}
        self._left_out: dict[Path, set[int]] = {}
        self._told = False
        self._forget()

    def _forget(self) -> None:
        self.shards: dict[Path, Shard] = {}
        self.train: list[tuple[Shard, int]] = []
        self.held: list[tuple[Shard, int]] = []
        self.tokens = 0

    def rescan(
        self, limit: int | None = None, on_progress: Callable[[int], None] | None = None, only_known: bool = False
    ) -> int:
        """Take in shards that appeared since the last call (at most ``limit``), or that wait since :meth:`hold`.

        Returns:
            How many.
        """
        added = 0
        for path in expand(self.patterns):
            if path in self.shards or (limit is not None and added >= limit):
                continue
            if path not in self.known:
                unread = self.model is None and not (feature_folder(self.store, path) / "meta.json").exists()
                if only_known or unread:
                    continue
                self._know(path, open_or_extract(self.model, path, self.store, self.taps, self.top, on_progress))
            self._take(path)
            added += 1
        return added

    def _know(self, path: Path, shard: Shard) -> None:
        self.known[path] = shard
        self._left_out[path] = set(holding((d.ids for d in shard.documents), self.taboo))
        if isinstance(shard, LiveShard) and not self._told:
            self._told = True
            logger.warning(
                "the disk of %s has no room for the features of %s: they are computed again whenever they are trained "
                "on, which takes longer. With more free space, start again to store them",
                self.store,
                path.name,
            )

    @property
    def excluded(self) -> int:
        """Documents of the shards that were taken in that are left out for what they hold of ``taboo``."""
        return sum(len(self._left_out[path]) for path in self.shards)

    def found(self) -> list[tuple[Path, bool]]:
        """The shards that were taken in, and whether their features are stored: what :meth:`adopt` needs."""
        return [(path, not isinstance(shard, LiveShard)) for path, shard in self.shards.items()]

    def adopt(self, found: Sequence[tuple[Path, bool]]) -> None:
        """Take in what another process :meth:`found`, no more and no less."""
        self._forget()
        for path, stored in found:
            documents = read_shard(path)
            folder = feature_folder(self.store, path, documents)
            shard: Shard
            if stored:
                shard = FeatureShard(folder, documents, self.taps)
            else:
                shard = LiveShard(folder.name, documents, self.model, self.taps, self.top)
            self._know(path, shard)
            self._take(path)

    def _take(self, path: Path) -> None:
        shard = self.shards[path] = self.known[path]
        for i, document in enumerate(shard.documents):
            if len(document) - document.prompt_length < 2 or i in self._left_out[path]:
                continue
            if held_out(document, self.share):
                self.held.append((shard, i))
            else:
                self.train.append((shard, i))
                self.tokens += len(document)

    def hold(self, names: Sequence[str]) -> bool:
        """Go back to the shards of these names, in their order; other known ones wait for the next :meth:`rescan`.

        Returns:
            False, with nothing changed, if a shard is not there.
        """
        left = dict(self.known)
        order: list[Path] = []
        for name in names:
            path = next((p for p, shard in left.items() if shard.name == name), None)
            if path is None:
                return False
            order.append(path)
            del left[path]
        self._forget()
        for path in order:
            self._take(path)
        return True

    def evaluation_items(self, count: int) -> list[Features]:
        """At most ``count`` held-out greedy documents, the same ones whatever shards arrive later."""
        greedy = [(s, i) for s, i in self.held if s.documents[i].temperature == 0]
        return [s[i] for s, i in greedy[:count]]

    def epoch(
        self,
        rows: int,
        anchors: int,
        block: int,
        rng: np.random.Generator,
        rank: int = 0,
        world: int = 1,
        skip: int = 0,
    ) -> Iterator[Batch]:
        """One pass over the training documents in random order, this process's share of each batch, without the first
        ``skip`` batches.

        Batches hold documents of similar length (sorted within windows of 16 batches).
        """
        if not self.train:
            raise InvalidInputError(f"no training documents with features in {self.store}")
        order = rng.permutation(len(self.train))
        window = rows * world * 16
        plan: list[np.ndarray] = []
        for start in range(0, len(order), window):
            part = sorted(
                order[start : start + window], key=lambda j: len(self.train[j][0].documents[self.train[j][1]])
            )
            missing = -len(part) % (rows * world)  # the last batch is filled up, or the longest would never be seen
            part += rng.choice(part, missing).tolist()
            plan += [np.array(part[i : i + rows * world]) for i in range(0, len(part), rows * world)]
        for number, j in enumerate(rng.permutation(len(plan))):
            seeds = np.random.default_rng(rng.integers(2**63) + rank)
            if number < skip:
                continue
            mine = plan[j][rank * rows : (rank + 1) * rows]
            items = read_items([self.train[d] for d in mine])
            yield collate(items, [draw_anchors(item, anchors, seeds) for item in items], block)
