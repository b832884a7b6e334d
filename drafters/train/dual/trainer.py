"""Training of dual-mode adapters: the shared loop with noisy blocks, and what is measured on held-out documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdiff.diffusion.dual import DualAdapter
from specdiff.diffusion.spec import DLMSpec
from specdiff.drafters.train.corpus import Document, expand, read_shard
from specdiff.drafters.train.data import held_out
from specdiff.drafters.train.dual.config import DualConfig, largest_block, openness
from specdiff.drafters.train.dual.noise import NoisyBatch, Row, make_batch, pack_rows
from specdiff.drafters.train.dual.objective import DualObjective
from specdiff.drafters.train.loop import Loop, TrainConfig, TrainState
from specdiff.drafters.train.overlap import holding
from specdiff.drafters.train.precision import accelerator_for
from specdiff.errors import InvalidInputError

HELD_OUT_SEED = 20_011


@dataclass(frozen=True)
class Denoising:
    """Measured on held-out greedy documents with fixed noise.

    Attributes:
        loss: of the run's own objective.
        kl: mean KL to the causal model's law over all trained positions, in nats.
        kl_by_slot: the same in drafting blocks, by trained slot (the second token after the anchor is the first).
        by_position: share of drafting blocks whose top tokens are the causal model's own through slot 1, 2, ...; slot 1
            is the causal model itself.
        kl_partial: mean KL in partly masked blocks.
    """

    loss: float
    kl: float
    kl_by_slot: tuple[float, ...]
    by_position: tuple[float, ...]
    kl_partial: float

    @property
    def tau(self) -> float:
        """New tokens per verification of the model drafting for itself: 1 + accepted."""
        return 1.0 + sum(self.by_position)

    @property
    def numbers(self) -> dict[str, Any]:
        """What the run's log keeps."""
        return {"tau": self.tau, **vars(self)}


class Documents:
    """Training rows and held-out documents of corpus shards.

    Args:
        patterns: files, folders or glob patterns of corpus shards.
        config: cutting and packing.
        share: share of documents held out.
        taboo: n-grams; a document that holds one of them is left out.
    """

    def __init__(
        self, patterns: Sequence[str], config: DualConfig, share: float, taboo: Set[tuple[int, ...]] = frozenset()
    ) -> None:
        documents = [d for path in expand(patterns) for d in read_shard(path)]
        out = set(holding((d.ids for d in documents), taboo))
        self.excluded = len(out)
        documents = [d for i, d in enumerate(documents) if i not in out]
        self.train = [d for d in documents if not held_out(d, share)]
        self.rows: list[Row] = pack_rows(self.train, config.length, config.pack)
        self.held = [d for d in documents if held_out(d, share) and d.temperature == 0]
        if not self.rows:
            raise InvalidInputError(
                f"no training document in {list(patterns)} has two response tokens within the first {config.length} "
                "tokens: give more data, or raise the length"
            )


class DualTrainer(Loop):
    """Trains a dual-mode adapter.

    A batch is a pure function of seed and step: a resumed run sees what an uninterrupted one would have seen.

    Args:
        adapter: over the frozen base.
        documents: what it learns from.
        spec: how the finished adapter is to be decoded; saved with it.
        config: the loop; ``anchors`` is the number of noisy blocks per row.
        dual: noise and loss.
        folder: run folder: ``log.jsonl``, ``checkpoint/`` and ``adapter/`` (the best by held-out tau).
        on_step: called after each step.
    """

    best_folder = "adapter"

    def __init__(
        self,
        adapter: DualAdapter,
        documents: Documents,
        spec: DLMSpec,
        config: TrainConfig,
        dual: DualConfig,
        folder: Path,
        on_step: Callable[[TrainState, dict[str, Any]], None] | None = None,
    ) -> None:
        accelerator = accelerator_for(config.mixed_precision, adapter.base.device)
        self.adapter, self.documents, self.spec, self.dual = adapter, documents, spec, dual
        adapter.base.requires_grad_(False)
        super().__init__(adapter, DualObjective(adapter, dual), config, folder, accelerator, on_step)
        self.held = held_out_batches(documents.held[: config.evaluate_documents], dual, config.anchors)

    def batches(self) -> Iterator[NoisyBatch]:
        """See :class:`Loop`."""
        rows, config = self.documents.rows, self.config
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        each = config.rows * world
        steps = max(len(rows) // each, 1)
        order = np.random.default_rng((config.seed, 1, self.state.step // steps)).permutation(len(rows))
        for index in range(self.state.step % steps, steps):
            rng = np.random.default_rng((config.seed, 2, self.state.step))
            progress = self.progress()
            size = min(int(rng.choice(self.dual.block_sizes)), largest_block(self.dual, progress))
            chosen = np.resize(order[index * each : (index + 1) * each], each)[rank * config.rows :][: config.rows]
            opened = openness(self.dual, progress)
            yield make_batch([rows[i] for i in chosen], config.anchors, size, opened, self.dual, rng)

    @torch.no_grad()
    def measure(self) -> Denoising | None:
        """Held-out denoising; None without held-out greedy documents."""
        if not self.held:
            return None
        device = self.accelerator.device
        objective = self.accelerator.unwrap_model(self.objective)
        return summary([objective(batch.to(device))[1] for batch in self.held])

    def write(self, folder: Path) -> None:
        """Write the adapter, in bfloat16."""
        self.adapter.save(folder, self.spec, dtype=torch.bfloat16)


def held_out_batches(documents: Sequence[Document], config: DualConfig, blocks: int) -> list[NoisyBatch]:
    """One batch per document with the same noise whenever it is asked for, largest blocks, full attention in them."""
    rows = pack_rows(documents, config.length, False)
    size = max(config.block_sizes)
    return [
        make_batch([row], blocks, size, 1.0, config, np.random.default_rng((HELD_OUT_SEED, i)))
        for i, row in enumerate(rows)
    ]


def summary(measured: Sequence[dict[str, Any]]) -> Denoising:
    """Means over batches of the objective's sums."""
    total = {k: sum(m[k] for m in measured) for k in measured[0]}
    blocks = max(int(total["blocks"]), 1)
    kl, other = total["kl"], float(total["other_kl"])
    count, other_count = total["count"].clamp(min=1), max(int(total["other_count"]), 1)
    return Denoising(
        loss=float(total["loss"]) / len(measured),
        kl=(float(kl.sum()) + other) / max(int(total["count"].sum() + total["other_count"]), 1),
        kl_by_slot=tuple((kl / count).tolist()),
        by_position=(1.0, *(total["through"] / blocks).tolist()),
        kl_partial=other / other_count,
    )
