"""The training loop: one process or many (accelerate), a budget in hours or steps, resumable."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from safetensors.torch import load_file, save_file

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.evaluate import Acceptance, evaluate
from specdiff.drafters.train.optim import Average, build_optimizers, load_optimizer_tensors, optimizer_tensors, schedule
from specdiff.drafters.train.step import BlockObjective, LossConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
        max_hours: time budget of the training stage; the schedule ends there. None for no limit.
        max_steps: budget in steps; the schedule follows whichever budget is further along.
        rows: documents per step and process.
        anchors: random anchors per document.
        optimizer: "muon" or "adamw".
        lr: AdamW's peak rate.
        muon_lr: Muon's peak rate.
        weight_decay: on matrices.
        warmup: share of the budget.
        clip: largest gradient norm.
        average: decay of the weight average that is evaluated and saved, 0 for none.
        evaluate_every: minutes between evaluations (and checkpoints).
        evaluate_documents: held-out greedy documents.
        mixed_precision: "bf16" or "no".
        seed: of data order and anchors.
        loss: see :class:`LossConfig`.
    """

    max_hours: float | None = None
    max_steps: int | None = None
    rows: int = 8
    anchors: int = 64
    optimizer: str = "muon"
    lr: float = 1e-3
    muon_lr: float = 3e-3
    weight_decay: float = 0.01
    warmup: float = 0.04
    clip: float = 1.0
    average: float = 0.995
    evaluate_every: float = 5.0
    evaluate_documents: int = 48
    mixed_precision: str = "bf16"
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)


@dataclass
class TrainState:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0
    epoch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    anchors: int = 0
    best: float = 0.0


class Trainer:
    """Trains a bound drafter on a corpus.

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
        self.config, self.corpus, self.folder, self.on_step = config, corpus, folder, on_step
        self.accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=not torch.cuda.is_available())
        self.drafter = drafter
        device = self.accelerator.device
        drafter.to(device)
        self.head = drafter.head
        objective = BlockObjective(drafter, config.loss)
        if config.mixed_precision == "bf16":
            objective.head = drafter.head.to(torch.bfloat16)
        optimizers = build_optimizers(objective, config.optimizer, config.lr, config.weight_decay, config.muon_lr)
        self.objective, *prepared = self.accelerator.prepare(objective, *optimizers)
        self.optimizers = prepared
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.average = Average(drafter.model, config.average) if config.average else None
        self.state = TrainState()
        self.items = corpus.evaluation_items(config.evaluate_documents)
        folder.mkdir(parents=True, exist_ok=True)

    # progress -------------------------------------------------------------------------------------------------------

    def progress(self) -> float:
        """Share of the budget used, by hours or steps, whichever is further along."""
        shares = [0.0]
        if self.config.max_hours:
            shares.append(self.state.seconds / 3600 / self.config.max_hours)
        if self.config.max_steps:
            shares.append(self.state.step / self.config.max_steps)
        return max(shares)

    def _agreed(self, value: float) -> float:
        """The main process's value, on every process."""
        if self.accelerator.num_processes == 1:
            return value
        return float(broadcast(torch.tensor([value], device=self.accelerator.device)).item())

    # the loop -------------------------------------------------------------------------------------------------------

    def train(self) -> TrainState:
        """Run until the budget is used up; evaluates and saves at the end."""
        if not (self.config.max_hours or self.config.max_steps):
            raise ValueError("give max_hours or max_steps")
        next_evaluation = self.state.seconds + 60 * self.config.evaluate_every
        clock = time.monotonic()
        done = self._agreed(self.progress()) >= 1
        while not done:
            rng = np.random.default_rng((self.config.seed, self.state.epoch))
            batches = self.corpus.epoch(
                self.config.rows, self.config.anchors, self.drafter.block_size, rng,
                self.accelerator.process_index, self.accelerator.num_processes,
            )  # fmt: skip
            for batch in batches:
                self._step(batch.to(self.accelerator.device), self._agreed(self.progress()))
                now = time.monotonic()
                self.state.seconds, clock = self.state.seconds + now - clock, now
                done = self._agreed(self.progress()) >= 1
                if done or self._agreed(self.state.seconds) >= next_evaluation:
                    if self.accelerator.is_main_process:
                        self.checkpoint(evaluated=self.evaluate())
                    next_evaluation = self.state.seconds + 60 * self.config.evaluate_every
                    clock = time.monotonic()
                if done:
                    break
            self.state.epoch += 1
            if self.accelerator.num_processes == 1 and self.corpus.rescan():  # processes must agree on the documents
                logger.info("new shards: %d training documents now", len(self.corpus.train))
            self.accelerator.wait_for_everyone()
        return self.state

    def _step(self, batch: Any, progress: float) -> None:
        factor = schedule(progress, self.config.warmup)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        started = time.monotonic()
        with self.accelerator.autocast():
            loss, info = self.objective(batch)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.average:
            self.average.update(self.drafter.model)
        world = self.accelerator.num_processes
        self.state.step += 1
        self.state.tokens += int(batch.valid.sum()) * world
        self.state.anchors += batch.anchors.numel() * world
        if self.on_step:
            hits = (info["hits"] / info["count"].clamp(min=1)).tolist()
            took = time.monotonic() - started
            measured = {"loss": float(info["loss"]), "accuracy": hits, "norm": float(norm), "lr": factor, "took": took}
            self.on_step(self.state, measured | {"progress": progress, "slots": int(info["count"].sum())})

    # evaluation and checkpoints -------------------------------------------------------------------------------------

    def evaluate(self) -> Acceptance | None:
        """Held-out greedy acceptance of the averaged weights; None without held-out greedy documents."""
        if not self.items:
            return None
        model = self.drafter.model
        if self.average:
            self.average.swap(model)
        try:
            with self.accelerator.autocast():
                result = evaluate(self.drafter, self.items, device=self.accelerator.device)
        finally:
            if self.average:
                self.average.swap(model)
        line = asdict(self.state) | {"tau": result.tau, "by_position": result.by_position, "mean": result.mean}
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line | {"hours": self.state.seconds / 3600}) + "\n")
        logger.info("step %d: held-out tau %.3f", self.state.step, result.tau)
        return result

    def checkpoint(self, evaluated: Acceptance | None = None) -> None:
        """Write the run's state; also the drafter itself if it is the best so far (or nothing is held out)."""
        better = evaluated is None or evaluated.tau >= self.state.best
        if evaluated is not None and better:
            self.state.best = evaluated.tau
        scratch = self.folder / "checkpoint.tmp"
        scratch.mkdir(exist_ok=True)
        tensors, numbers = optimizer_tensors(self.optimizers)
        save_file(tensors, scratch / "optimizer.safetensors")
        weights = {k: v.detach().contiguous().clone() for k, v in self.drafter.model.state_dict().items()}
        save_file(weights, scratch / "weights.safetensors")
        updates = 0
        if self.average:
            save_file(self.average.values, scratch / "average.safetensors")
            updates = self.average.updates
        record = {"state": asdict(self.state), "numbers": numbers, "updates": updates}
        (scratch / "state.json").write_text(json.dumps(record))
        final = self.folder / "checkpoint"
        old = self.folder / "checkpoint.old"
        _remove(old)
        if final.exists():
            final.rename(old)
        scratch.rename(final)
        _remove(old)
        if better:
            self.save_drafter(self.folder / "drafter")

    def save_drafter(self, folder: Path) -> None:
        """Write the averaged weights as a drafter."""
        if self.average:
            self.average.swap(self.drafter.model)
        try:
            self.drafter.save_pretrained(folder)
        finally:
            if self.average:
                self.average.swap(self.drafter.model)

    def resume(self) -> bool:
        """Continue from the run folder's checkpoint; False if there is none."""
        folder = self.folder / "checkpoint"
        if not (folder / "state.json").exists():
            folder = self.folder / "checkpoint.old"
            if not (folder / "state.json").exists():
                return False
        record = json.loads((folder / "state.json").read_text())
        self.state = TrainState(**record["state"])
        self.drafter.model.load_state_dict(load_file(folder / "weights.safetensors"))
        load_optimizer_tensors(self.optimizers, load_file(folder / "optimizer.safetensors"), record["numbers"])
        if self.average and (folder / "average.safetensors").exists():
            self.average.values = load_file(folder / "average.safetensors")
            self.average.updates = record["updates"]
        return True


def _remove(folder: Path) -> None:
    for file in folder.glob("*") if folder.exists() else ():
        file.unlink()
    if folder.exists():
        folder.rmdir()
