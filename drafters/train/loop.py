"""The training loop of every kind of drafter: budget, schedule, optimisers, weight average, checkpoints; one process or
many (accelerate), a budget in hours or steps, resumable."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdiff.drafters.train.optim import Average, build_optimizers, load_optimizer_tensors, optimizer_tensors, schedule
from specdiff.drafters.train.step import LossConfig
from specdiff.errors import InvalidInputError

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
        mixed_precision: "bf16", "no" or "auto" (whichever is faster on this device).
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
    mixed_precision: str = "auto"
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)


@dataclass
class TrainState:
    """Where a run stands; saved with every checkpoint. ``position``: steps of the epoch that are done."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    seconds: float = 0.0
    tokens: int = 0
    anchors: int = 0
    best: float = 0.0


class Evaluation(Protocol):
    """What a held-out evaluation gives: ``tau`` chooses the best weights, all fields are logged."""

    @property
    def tau(self) -> float: ...

    @property
    def numbers(self) -> dict[str, Any]: ...


class Loop:
    """Everything of a run but its data and its loss.

    Args:
        module: what is trained; its state is what checkpoints hold.
        objective: ``objective(batch) -> (loss, info)``, with ``module``'s parameters as its own. A batch has ``valid``,
            ``anchors`` and ``to(device)``; the info has ``loss`` and, by slot, ``hits`` and ``count``.
        config: how.
        folder: run folder: ``log.jsonl``, ``checkpoint/`` and the best weights by held-out tau.
        accelerator: processes and precision.
        on_step: called after each step with the state and measurements (for progress displays).
    """

    best_folder = "drafter"

    def __init__(
        self,
        module: nn.Module,
        objective: nn.Module,
        config: TrainConfig,
        folder: Path,
        accelerator: Accelerator,
        on_step: Callable[[TrainState, dict[str, Any]], None] | None = None,
    ) -> None:
        self.module, self.config, self.folder, self.on_step = module, config, folder, on_step
        self.accelerator = accelerator
        optimizers = build_optimizers(objective, config.optimizer, config.lr, config.weight_decay, config.muon_lr)
        self.objective, *self.optimizers = accelerator.prepare(objective, *optimizers)
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.average = Average(module, config.average) if config.average else None
        self.state = TrainState()
        self.began = TrainState()
        folder.mkdir(parents=True, exist_ok=True)

    # what a kind of drafter adds ------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """The batches of the epoch ``state.epoch`` from ``state.position`` on, this process's share."""
        raise NotImplementedError

    def new_data(self) -> None:
        """Called after each epoch: take in data that appeared. Processes must agree on it."""

    def data_record(self) -> Any:
        """What checkpoints say about the data that were taken in so far."""

    def restore_data(self, record: Any) -> None:
        """Go back to the data of :meth:`data_record`; None if the checkpoint says nothing."""

    def measure(self) -> Evaluation | None:
        """Held-out evaluation of the weights as they are; None if nothing is held out."""
        raise NotImplementedError

    def write(self, folder: Path) -> None:
        """Write the weights as they are, ready to be used."""
        raise NotImplementedError

    # progress -------------------------------------------------------------------------------------------------------

    def progress(self) -> float:
        """Share of the budget used, by hours or steps, whichever is further along."""
        shares = [0.0]
        if self.config.max_hours:
            shares.append(self.state.seconds / 3600 / self.config.max_hours)
        if self.config.max_steps:
            shares.append(self.state.step / self.config.max_steps)
        return max(shares)

    def rates(self) -> dict[str, float]:
        """Tokens and anchors per second of this run, of all processes together; evaluations not counted."""
        seconds = self.state.seconds - self.began.seconds
        if seconds <= 0:
            return {}
        return {
            "tokens_per_second": (self.state.tokens - self.began.tokens) / seconds,
            "anchors_per_second": (self.state.anchors - self.began.anchors) / seconds,
        }

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
        self.began, clock = replace(self.state), time.monotonic()
        done = self._agreed(self.progress()) >= 1
        while not done:
            for batch in self.batches():
                info = self._step(batch.to(self.accelerator.device), self._agreed(self.progress()))
                now = time.monotonic()
                self.state.seconds, clock = self.state.seconds + now - clock, now
                if self.on_step:
                    self.on_step(self.state, measured(info) | self.rates())
                done = self._agreed(self.progress()) >= 1
                if done or self._agreed(self.state.seconds) >= next_evaluation:
                    if self.accelerator.is_main_process:
                        self.checkpoint(evaluated=self.evaluate())
                    next_evaluation = self.state.seconds + 60 * self.config.evaluate_every
                    clock = time.monotonic()
                if done:
                    break
            if not done:
                self.state.epoch, self.state.position = self.state.epoch + 1, 0
                self.new_data()
            self.accelerator.wait_for_everyone()
        return self.state

    def _step(self, batch: Any, progress: float) -> dict[str, Any]:
        factor = schedule(progress, self.config.warmup)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        with self.accelerator.autocast():
            loss, info = self.objective(batch)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.average:
            self.average.update(self.module)
        world = self.accelerator.num_processes
        self.state.step, self.state.position = self.state.step + 1, self.state.position + 1
        self.state.tokens += int(batch.valid.sum()) * world
        self.state.anchors += batch.anchors.numel() * world
        return info | {"norm": norm, "lr": factor, "progress": progress}

    # evaluation and checkpoints -------------------------------------------------------------------------------------

    def _averaged(self, action: Callable[[], Any]) -> Any:
        """``action()`` with the averaged weights in place."""
        if self.average:
            self.average.swap(self.module)
        try:
            return action()
        finally:
            if self.average:
                self.average.swap(self.module)

    def evaluate(self) -> Evaluation | None:
        """Held-out evaluation of the averaged weights, logged; None if nothing is held out."""

        def measured() -> Evaluation | None:
            with self.accelerator.autocast():
                return self.measure()

        result: Evaluation | None = self._averaged(measured)
        if result is None:
            return None
        line = asdict(self.state) | result.numbers | {"hours": self.state.seconds / 3600} | self.rates()
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        logger.info("step %d: held-out tau %.3f", self.state.step, result.tau)
        return result

    def checkpoint(self, evaluated: Evaluation | None = None) -> None:
        """Write the run's state; also the usable weights if they are the best so far (or nothing is held out)."""
        better = evaluated is None or evaluated.tau >= self.state.best
        if better:  # before it is recorded as the best, or an interruption would lose it
            self._averaged(lambda: self.write(self.folder / self.best_folder))
        if evaluated is not None and better:
            self.state.best = evaluated.tau
        scratch = self.folder / "checkpoint.tmp"
        scratch.mkdir(exist_ok=True)
        tensors, numbers = optimizer_tensors(self.optimizers)
        save_file(tensors, scratch / "optimizer.safetensors")
        weights = {k: v.detach().contiguous().clone() for k, v in self.module.state_dict().items()}
        save_file(weights, scratch / "weights.safetensors")
        updates = 0
        if self.average:
            save_file(self.average.values, scratch / "average.safetensors")
            updates = self.average.updates
        record = {
            "state": asdict(self.state),
            "numbers": numbers,
            "updates": updates,
            "optimizer": self.config.optimizer,
            "data": self.data_record(),
        }
        (scratch / "state.json").write_text(json.dumps(record))
        final = self.folder / "checkpoint"
        old = self.folder / "checkpoint.old"
        _remove(old)
        if final.exists():
            final.rename(old)
        scratch.rename(final)
        _remove(old)

    def resume(self) -> bool:
        """Continue from the run folder's checkpoint; False if there is none.

        Raises:
            InvalidInputError: it is the checkpoint of something else.
        """
        found = read_checkpoint(self.folder)
        if found is None:
            return False
        folder, record = found
        weights = load_file(folder / "weights.safetensors")
        self._check(folder, weights, record.get("optimizer", self.config.optimizer))
        self.state = TrainState(**record["state"])
        self.module.load_state_dict(weights)
        load_optimizer_tensors(self.optimizers, load_file(folder / "optimizer.safetensors"), record["numbers"])
        if self.average and (folder / "average.safetensors").exists():
            values = load_file(folder / "average.safetensors")
            self.average.values = {name: value.to(self.average.values[name].device) for name, value in values.items()}
            self.average.updates = record["updates"]
        self.restore_data(record.get("data"))
        return True

    def _check(self, folder: Path, weights: dict[str, Tensor], optimizer: str) -> None:
        own = {name: tuple(value.shape) for name, value in self.module.state_dict().items()}
        theirs = {name: tuple(value.shape) for name, value in weights.items()}
        differ = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        why = f"{differ[0]} has another shape" if differ else ""
        if not why and optimizer != self.config.optimizer:
            why = f"its optimizer is {optimizer}"
        if why:
            raise InvalidInputError(
                f"{folder} is the checkpoint of a run with other options ({why}): continue it with the same ones, "
                "begin anew with --fresh, or choose another --out"
            )


def measured(info: dict[str, Any]) -> dict[str, Any]:
    """What a step's info says in plain numbers; waits for the device."""
    hits = (info["hits"] / info["count"].clamp(min=1)).tolist()
    numbers = {"loss": float(info["loss"]), "accuracy": hits, "norm": float(info["norm"])}
    return numbers | {"lr": info["lr"], "progress": info["progress"]}


def read_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The last whole checkpoint of a run folder and its record; None if there is none."""
    for name in ("checkpoint", "checkpoint.old"):
        file = folder / name / "state.json"
        if file.exists():
            return folder / name, json.loads(file.read_text())
    return None


def _remove(folder: Path) -> None:
    for file in folder.glob("*") if folder.exists() else ():
        file.unlink()
    if folder.exists():
        folder.rmdir()
