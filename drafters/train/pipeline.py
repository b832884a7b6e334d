"""The stages of ``specdiff train``: data, training, evaluation in the serving path, drafter with card. Each can be
resumed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specdiff.drafters.base import Drafter
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.build import Shape, build, describe, mask_id
from specdiff.drafters.train.card import card
from specdiff.drafters.train.corpus import Document, expand, read_shard, write_shard
from specdiff.drafters.train.data import Corpus, held_out
from specdiff.drafters.train.evaluate import Acceptance, evaluate
from specdiff.drafters.train.features import FeatureWriter, feature_folder
from specdiff.drafters.train.generate import Generate, Trace
from specdiff.drafters.train.loop import TrainConfig, TrainState, read_checkpoint
from specdiff.drafters.train.manifest import claim, has_checkpoint, target_key, weights_key
from specdiff.drafters.train.quoting import Passage, as_passages
from specdiff.drafters.train.regenerate import Recipe, read_prompts, regenerate
from specdiff.drafters.train.trainer import Trainer
from specdiff.errors import InvalidInputError

logger = logging.getLogger(__name__)

SHARD_DOCUMENTS = 256
"""Chats per generated shard; training takes shards in as they appear."""

Serve = Callable[[Drafter, Sequence[Sequence[int]], int], dict[str, Any]]
"""``(drafter, prompts as ids, max_new_tokens) -> {"tau": ..., ...}``: greedy decoding in the serving path."""
Progress = Callable[[str, float, float | None, str], None]
"""``(stage, done, total, note)``: called often; total None where it is not known."""


@dataclass
class Plan:
    """Everything a run needs to know.

    Attributes:
        data: corpus shards (files, folders, patterns), or JSONL files of prompts.
        folder: run folder.
        shape: of the drafter.
        start: a bound drafter to train further, ``shape`` is not looked at then; None to build one of ``shape``.
        config: of the training loop.
        chats: documents to generate from JSONL prompts.
        recipe: of the generation.
        held_out: share of documents kept for evaluation.
        top: target logits kept per position.
        served_prompts: held-out prompts decoded in the serving path at the end, 0 for none.
        served_tokens: new tokens for each.
        resume: continue an earlier run of the folder.
        name: what the card calls the target.
    """

    data: Sequence[str]
    folder: Path
    shape: Shape = field(default_factory=Shape)
    start: DFlashDrafter | None = None
    config: TrainConfig = field(default_factory=TrainConfig)
    chats: int = 2000
    recipe: Recipe = field(default_factory=Recipe)
    held_out: float = 0.04
    top: int = 32
    served_prompts: int = 8
    served_tokens: int = 96
    resume: bool = True
    name: str = "the target"

    def taps(self, target: Any) -> tuple[int, ...]:
        """Target layers that the drafter reads."""
        return self.start.taps if self.start is not None else self.shape.tap_ids(target)


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        drafter: bound, with the best weights.
        state: of the training loop.
        held_out: acceptance on held-out greedy documents; None if there were none.
        served: of the serving path, by drafter; empty if not asked for.
    """

    drafter: DFlashDrafter
    state: TrainState
    held_out: Acceptance | None
    served: dict[str, dict[str, Any]]


def is_prompt_file(name: str) -> bool:
    """Whether data of this name are prompts to be answered first, not finished text."""
    return name.endswith((".jsonl", ".json"))


def prompts_of(plan: Plan) -> list[tuple[str, str]]:
    """The prompts of the plan's JSONL files."""
    return [p for name in plan.data if is_prompt_file(name) for p in read_prompts(name)]


def claim_folder(plan: Plan, target: Any) -> None:
    """See :func:`specdiff.drafters.train.manifest.claim`."""
    training = {"--from": weights_key(plan.start.model) if plan.start is not None else "nothing"}
    claim(plan.folder, target_key(target), asdict(plan.recipe), prompts_of(plan), not plan.resume, training)


def corpus_shards(
    plan: Plan, generate: Generate | None, tokenizer: Any, tell: Progress, main: bool = True
) -> list[str]:
    """Stage 1. Patterns of corpus shards; JSONL prompts are turned into shards under ``folder/corpus`` first.

    Shards that an earlier run finished are kept; a shard is generated from its own seed, so a resumed run gives the
    same corpus as one that was not interrupted. What is missing from the last one, because fewer chats were asked for
    then, goes into a file beside it.
    """
    prompts = prompts_of(plan)
    patterns = [name for name in plan.data if not is_prompt_file(name)]
    if not prompts:
        return patterns
    where = plan.folder / "corpus"
    where.mkdir(parents=True, exist_ok=True)
    if not main:
        return [*patterns, str(where)]
    if generate is None or tokenizer is None:
        raise InvalidInputError("prompts need a tokenizer and a way to generate; give corpus shards (.npz) instead")
    quoted: list[Passage] = []
    if plan.recipe.quote_share:
        quoted = [p for path in expand(patterns) for p in as_passages(read_shard(path), tokenizer)]
    for number in range(-(-plan.chats // SHARD_DOCUMENTS)):
        held = [d for path in parts(where, number) for d in read_shard(path)]
        if len(held) < min(SHARD_DOCUMENTS, plan.chats - number * SHARD_DOCUMENTS):
            held += write_own_shard(plan, where, number, len(held), generate, tokenizer, prompts, quoted, tell)
        if plan.recipe.quote_share:
            quoted += as_passages(held, tokenizer)
    return [*patterns, str(where)]


def parts(where: Path, number: int) -> list[Path]:
    """Files of one generated shard: the first, and those that were added when more chats were asked for."""
    return [path for path in expand([str(where)]) if path.stem.split("_")[0] == f"own-{number:05d}"]


def write_own_shard(
    plan: Plan,
    where: Path,
    number: int,
    held: int,
    generate: Generate,
    tokenizer: Any,
    prompts: list[tuple[str, str]],
    passages: Sequence[Passage],
    tell: Progress,
) -> list[Document]:
    """Generate one shard, or what is missing behind the ``held`` chats of it that there are, and its features where the
    generator kept traces (taps as it was told)."""
    path = where / (f"own-{number:05d}" + (f"_{held:04d}" if held else "") + ".npz")
    before = number * SHARD_DOCUMENTS + held
    recipe = replace(plan.recipe, seed=plan.recipe.seed + 7919 * number + 29 * held)
    made: list[Document] = []
    traces: list[Trace] = []

    def keep(document: Document, trace: Trace | None) -> None:
        made.append(document)
        if trace is not None:
            traces.append(trace)
        tell("generate", before + len(made), plan.chats, f"{sum(len(d) for d in made)} tokens in this shard")

    count = min(SHARD_DOCUMENTS - held, plan.chats - before)
    regenerate(generate, tokenizer, prompts, count, recipe, keep, passages)
    taps = getattr(generate, "taps", ())
    if taps and len(traces) == len(made) > 0:
        width = traces[0].taps.shape[1] // len(taps)
        lens = [len(d) for d in made]
        folder = feature_folder(plan.folder / "features", path, made)
        writer = FeatureWriter(folder, lens, taps, traces[0].top_ids.shape[1], width)
        for index, trace in enumerate(traces):
            writer.put(index, *trace)
        writer.finish()
    write_shard(path, made)
    return made


def run(
    target: Any,
    plan: Plan,
    *,
    tokenizer: Any = None,
    generate: Generate | None = None,
    serve: Serve | None = None,
    baseline: Drafter | None = None,
    tell: Progress = lambda *_: None,
) -> Outcome:
    """All stages.

    Args:
        target: a Hugging Face causal LM; read only.
        plan: see :class:`Plan`.
        tokenizer: needed to generate from prompts.
        generate: how text is made (stage 1).
        serve: how drafters are judged in the serving path (stage 3).
        baseline: a second drafter to serve for comparison (prompt lookup).
        tell: progress.
    """
    from accelerate import PartialState

    processes = PartialState(cpu=target.device.type == "cpu")
    main, everyone = processes.is_main_process, processes.wait_for_everyone
    if main:
        claim_folder(plan, target)
    everyone()
    patterns = corpus_shards(plan, generate, tokenizer, tell, main)
    everyone()
    if not expand(patterns):
        raise InvalidInputError(f"no corpus shards in {list(plan.data)}")
    taps = plan.taps(target)
    corpus = Corpus(patterns, plan.folder / "features", taps, plan.top, plan.held_out, target)
    documents = [d for path in expand(patterns) for d in read_shard(path)]
    total = sum(map(len, documents))
    if plan.start is None and plan.shape.plain and not has_checkpoint(plan.folder):  # told before the work, not after
        kept = (d for d in documents if not held_out(d, plan.held_out))
        mask_id(plan.shape, kept, target.config.get_text_config().vocab_size)
    seen = [0]

    def count(tokens: int) -> None:
        seen[0] += tokens
        tell("features", seen[0], total, "tokens")

    if main:
        corpus.rescan(on_progress=count)
    everyone()
    corpus.rescan()
    corpus.model = target if main else None
    begin_as_before(plan, corpus)
    drafter = plan.start if plan.start is not None else build(target, corpus, plan.shape, plan.config.seed)
    logger.info(describe(drafter, taps))

    def step(state: TrainState, info: dict[str, Any]) -> None:
        accuracy = " ".join(f"{a:.2f}" for a in info["accuracy"])
        tell("train", info["progress"], 1.0, f"step {state.step}, loss {info['loss']:.2f}, accuracy {accuracy}")

    trainer = Trainer(drafter, corpus, plan.config, plan.folder, step)
    if plan.resume and trainer.resume():
        logger.info("resumed at step %d", trainer.state.step)
    trainer.train()
    everyone()
    best = DFlashDrafter.from_pretrained(plan.folder / "drafter", target)
    outcome = Outcome(best, trainer.state, None, {})
    if not main:
        return outcome
    outcome.held_out = evaluate(best, trainer.items, device=best.head.device) if trainer.items else None
    if serve is not None and plan.served_prompts and trainer.items:
        prompts = [i.document.ids[: i.document.prompt_length].tolist() for i in trainer.items[: plan.served_prompts]]
        tell("serve", 0, None, f"{len(prompts)} held-out prompts")
        outcome.served["drafter"] = serve(best, prompts, plan.served_tokens)
        if baseline is not None:
            outcome.served["prompt lookup"] = serve(baseline, prompts, plan.served_tokens)
    report(plan, corpus, outcome)
    return outcome


def begin_as_before(plan: Plan, corpus: Corpus) -> None:
    """For a run that goes on: only the shards that it began with, since the drafter's shape (its vocabulary) and the
    evaluation follow from them."""
    found = read_checkpoint(plan.folder) if plan.resume else None
    data = found[1].get("data") if found else None
    if data is not None:
        corpus.hold(data["shards"][: data["began_with"]])


def report(plan: Plan, corpus: Corpus, outcome: Outcome) -> None:
    """Stage 4: the card beside the drafter, and ``result.json``."""
    documents = [s.documents[i] for s, i in corpus.train]
    lines = {f"served greedy tau, {name}": f"{values['tau']:.2f}" for name, values in outcome.served.items()}
    text = card(
        plan.folder.name, plan.name, outcome.drafter, documents, plan.config, outcome.state, outcome.held_out, lines
    )
    (plan.folder / "drafter" / "README.md").write_text(text)
    result = {
        "state": asdict(outcome.state),
        "held_out": asdict(outcome.held_out) if outcome.held_out else None,
        "served": outcome.served,
        "shape": asdict(plan.shape) if plan.start is None else plan.start.config.to_dict(),
        "config": asdict(plan.config),
    }
    (plan.folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
