"""Training of DFlash drafters: the shared loop with their corpus, objective and held-out acceptance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.batches import Batch
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.evaluate import Acceptance, evaluate
from specdiff.drafters.train.loop import Loop, TrainConfig, TrainState
from specdiff.drafters.train.precision import accelerator_for
from specdiff.drafters.train.step import BlockObjective

logger = logging.getLogger(__name__)


class Trainer(Loop):
    """Trains a bound drafter on a corpus.

    The order of batches is a function of the seed, the epoch and the shards taken in: a resumed run sees what an
    uninterrupted one would have seen.

    Args:
        drafter: bound to its target.
        corpus: with at least one shard taken in.
        config: how.
        folder: run folder: ``log.jsonl``, ``checkpoint/`` and ``drafter/`` (the best by held-out tau).
        on_step: called after each step with the state and measurements (for progress displays).
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        corpus: Corpus,
        config: TrainConfig,
        folder: Path,
        on_step: Callable[[TrainState, dict[str, Any]], None] | None = None,
    ) -> None:
        accelerator = accelerator_for(config.mixed_precision, drafter.head.device)
        self.drafter, self.corpus = drafter, corpus
        drafter.to(accelerator.device)
        self.head = drafter.head
        self.config = config
        objective = self.make_objective()
        if accelerator.mixed_precision == "bf16":
            objective.head = drafter.head.to(torch.bfloat16)
        super().__init__(self.trained(), objective, config, folder, accelerator, on_step)
        self.items = corpus.evaluation_items(config.evaluate_documents)
        self.began_with = len(corpus.shards)

    def make_objective(self) -> BlockObjective:
        """The loss, with the trained module's parameters as its own."""
        return BlockObjective(self.drafter, self.config.loss)

    def trained(self) -> nn.Module:
        """The module whose state checkpoints hold."""
        return self.drafter.model

    def batches(self) -> Iterator[Batch]:
        """See :class:`Loop`."""
        return self.corpus.epoch(
            self.config.rows,
            self.config.anchors,
            self.drafter.block_size,
            np.random.default_rng((self.config.seed, self.state.epoch)),
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.state.position,
        )

    def new_data(self) -> None:
        """See :class:`Loop`. Several processes take in only what all of them found at the start."""
        if self.corpus.rescan(only_known=self.accelerator.num_processes > 1):
            logger.info("new shards: %d training documents now", len(self.corpus.train))

    def data_record(self) -> dict[str, Any]:
        """See :class:`Loop`."""
        return {"shards": [shard.name for shard in self.corpus.shards.values()], "began_with": self.began_with}

    def restore_data(self, record: dict[str, Any] | None) -> None:
        """See :class:`Loop`."""
        if record is not None and self.corpus.hold(record["shards"]):
            self.began_with = record["began_with"]
        elif self.state.position:
            logger.warning(
                "the shards of the interrupted epoch are not all there: a new epoch begins with those that are"
            )
            self.state.epoch, self.state.position = self.state.epoch + 1, 0

    def measure(self) -> Acceptance | None:
        """Held-out greedy acceptance; None without held-out greedy documents."""
        return evaluate(self.drafter, self.items, device=self.accelerator.device) if self.items else None

    def write(self, folder: Path) -> None:
        """Write the drafter."""
        self.drafter.save_pretrained(folder)
