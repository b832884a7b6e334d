"""The stages of ``specdiff train --kind dual``: text, training, adapter with card. Each can be resumed."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from specdiff.diffusion.dual import DualAdapter, dual_spec
from specdiff.diffusion.spec import DLMSpec
from specdiff.drafters.train.corpus import expand
from specdiff.drafters.train.dual.card import dual_card
from specdiff.drafters.train.dual.config import DualConfig
from specdiff.drafters.train.dual.trainer import Denoising, Documents, DualTrainer
from specdiff.drafters.train.generate import Generate
from specdiff.drafters.train.loop import TrainState
from specdiff.drafters.train.pipeline import Plan, Progress, claim_folder, corpus_shards, excluded_ngrams, step_note
from specdiff.drafters.train.processes import processes
from specdiff.drafters.train.report import settings, speeds
from specdiff.errors import InvalidInputError

logger = logging.getLogger(__name__)


@dataclass
class DualPlan:
    """Everything a dual-mode run needs to know.

    Attributes:
        run: data, folder and loop; its ``shape`` is not used, its ``config.anchors`` is the number of noisy blocks
            per row.
        dual: noise and loss.
        rank: of the low-rank weights.
        alpha: their scale is ``alpha / rank``.
        mask_id: a reserved token that serves as mask; None: the reserved token that the corpus never uses.
    """

    run: Plan
    dual: DualConfig = field(default_factory=DualConfig)
    rank: int = 16
    alpha: float = 32.0
    mask_id: int | None = None


@dataclass
class DualOutcome:
    """What a run gave.

    Attributes:
        adapter: with the best weights.
        spec: how to decode it.
        state: of the training loop.
        curve: held-out measurements, before any training first.
    """

    adapter: DualAdapter
    spec: DLMSpec
    state: TrainState
    curve: list[Denoising]


def choose_mask(documents: Documents, model: Any, tokenizer: Any) -> int:
    """A special token that no document uses and that is neither padding nor an end; without a tokenizer, or without
    such a token, the highest id that no document uses.

    Raises:
        InvalidInputError: the corpus uses every id.
    """
    used = {int(i) for d in [*documents.train, *documents.held] for i in d.ids}
    config = model.config.get_text_config()
    ends = [config.eos_token_id, config.bos_token_id, config.pad_token_id, model.generation_config.eos_token_id]
    for end in ends:
        used.update([] if end is None else [end] if isinstance(end, int) else end)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [i for i, token in sorted(added.items()) if token.special and i < config.vocab_size]
    candidates = [*reversed(special), *range(config.vocab_size - 1, -1, -1)]
    for token in candidates:
        if token not in used:
            return int(token)
    raise InvalidInputError("the corpus uses every id of the vocabulary: name a mask token with --mask-token-id")


def decoding_spec(model: Any, mask_id: int, dual: DualConfig) -> DLMSpec:
    """How an adapter for ``model`` is decoded: the largest trained block, the model's own end and padding ids."""
    ends = model.generation_config.eos_token_id
    ids = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    pad = model.generation_config.pad_token_id
    return dual_spec(mask_id, max(dual.block_sizes), eos_ids=ids, pad_id=pad)


def run(
    target: nn.Module,
    plan: DualPlan,
    *,
    tokenizer: Any = None,
    generate: Generate | None = None,
    tell: Progress = lambda *_: None,
) -> DualOutcome:
    """All stages.

    Args:
        target: a Hugging Face causal LM; it is frozen (``requires_grad`` off) and otherwise untouched.
        plan: see :class:`DualPlan`.
        tokenizer: needed to generate from prompts; also names special tokens for the mask.
        generate: how text is made from prompts.
        tell: progress.
    """
    team = processes(target.device.type == "cpu")
    folder, taboo = plan.run.folder, excluded_ngrams(plan.run, tokenizer)
    if team.is_main_process:
        claim_folder(plan.run, target)
    team.wait_for_everyone()
    patterns = corpus_shards(plan.run, generate, tokenizer, tell, team.process_index, team.num_processes)
    team.wait_for_everyone()
    if not expand(patterns):
        raise InvalidInputError(f"no corpus shards in {list(plan.run.data)}")
    documents = Documents(patterns, plan.dual, plan.run.held_out, taboo)
    if documents.excluded:
        logger.warning("%d documents share text with --exclude and are left out", documents.excluded)
    mask_id = choose_mask(documents, target, tokenizer) if plan.mask_id is None else plan.mask_id
    spec = decoding_spec(target, mask_id, plan.dual)
    torch.manual_seed(plan.run.config.seed)
    adapter = DualAdapter(target, mask_id, plan.rank, plan.alpha)

    def step(state: TrainState, info: dict[str, Any]) -> None:
        tell("train", info["progress"], 1.0, step_note(state, info, "agreement"))

    trainer = DualTrainer(adapter, documents, spec, plan.run.config, plan.dual, folder, step)
    if plan.run.resume and trainer.resume():
        logger.info("resumed at step %d", trainer.state.step)
    elif team.is_main_process:
        (folder / "log.jsonl").unlink(missing_ok=True)
        trainer.evaluate()
    trainer.train()
    team.wait_for_everyone()
    adapter.load_state_dict(DualAdapter.load(target, folder / DualTrainer.best_folder)[0].state_dict())
    outcome = DualOutcome(adapter, spec, trainer.state, read_curve(plan))
    if team.is_main_process:
        report(plan, documents, outcome)
    return outcome


def read_curve(plan: DualPlan) -> list[Denoising]:
    """Held-out measurements of the run's log, up to the best one by tau, which is what was kept."""
    log = plan.run.folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    curve = [Denoising(**{k: line[k] for k in Denoising.__dataclass_fields__}) for line in lines]
    best = max(range(len(curve)), key=lambda i: (curve[i].tau, i), default=-1)
    return curve[: best + 1]


def report(plan: DualPlan, documents: Documents, outcome: DualOutcome) -> None:
    """The card beside the adapter, and ``result.json``."""
    run_plan = plan.run
    text = dual_card(
        run_plan.folder.name,
        run_plan.name,
        outcome.adapter,
        documents.train,
        run_plan.config,
        plan.dual,
        outcome.state,
        outcome.curve,
    )
    (run_plan.folder / DualTrainer.best_folder / "README.md").write_text(text)
    result = {
        "state": asdict(outcome.state),
        "curve": [c.numbers for c in outcome.curve],
        "dual": asdict(plan.dual),
        "speed": speeds(run_plan.folder, outcome.state),
        **{key: value for key, value in settings(run_plan).items() if key not in ("shape", "from", "top")},
        "rank": plan.rank,
        "alpha": plan.alpha,
        "mask_id": outcome.adapter.mask_id,
    }
    (run_plan.folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
