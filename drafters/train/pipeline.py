"""The stages of ``specdiff train``: data, training, evaluation in the serving path, drafter with card. Each can be
resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specdiff.drafters.base import Drafter
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.build import Shape, build, describe, mask_id
from specdiff.drafters.train.corpus import Document, expand, read_shard, write_shard
from specdiff.drafters.train.data import Corpus, held_out
from specdiff.drafters.train.evaluate import Acceptance, evaluate
from specdiff.drafters.train.features import Features, FeatureWriter, feature_folder, has_room
from specdiff.drafters.train.generate import Generate, Trace
from specdiff.drafters.train.loop import TrainConfig, TrainState, read_checkpoint
from specdiff.drafters.train.manifest import claim, has_checkpoint, target_key, text_key, weights_key
from specdiff.drafters.train.overlap import N, taboo_of
from specdiff.drafters.train.processes import processes
from specdiff.drafters.train.quoting import Passage, as_passages
from specdiff.drafters.train.regenerate import Recipe, Template, is_prompt_file, read_prompts, regenerate
from specdiff.drafters.train.report import report
from specdiff.drafters.train.speed import Meter
from specdiff.drafters.train.trainer import Trainer
from specdiff.errors import InvalidInputError

logger = logging.getLogger(__name__)

SHARD_DOCUMENTS = 256
"""Chats per generated shard; training takes shards in as they appear."""

Serve = Callable[[Drafter, Iterable[Sequence[int]], int], dict[str, Any]]
"""``(drafter, prompts as ids, max_new_tokens) -> {"tau": ..., "by_position": ..., ...}``: greedy decoding in the
serving path."""
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
        exclude: JSONL files of prompts; documents that share a 13-gram with one are left out.
        start_name: what ``start`` was loaded by, for the report.
        command: the words of the command line, for the report.
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
    exclude: Sequence[str] = ()
    start_name: str | None = None
    command: Sequence[str] = ()

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


def prompts_of(plan: Plan) -> list[tuple[str, str]]:
    """The prompts of the plan's JSONL files."""
    return [p for name in plan.data if is_prompt_file(name) for p in read_prompts(name)]


def excluded_ngrams(plan: Plan, tokenizer: Any) -> set[tuple[int, ...]]:
    """The n-grams that no document may hold: those of the prompts to exclude, but for what the chat template says."""
    if not plan.exclude:
        return set()
    if tokenizer is None:
        raise InvalidInputError("prompts to exclude need a tokenizer")
    texts = [text for name in plan.exclude for text, _ in read_prompts(name, every_turn=True)]
    held = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    short = sum(len(ids) < N for ids in held)
    if short:
        logger.warning(
            "%d of the %d texts to exclude have fewer than %d tokens: nothing is found by them", short, len(held), N
        )
    template = Template.of(tokenizer) if getattr(tokenizer, "chat_template", None) else Template([], [])
    return taboo_of(held, [template.before, template.after])


def claim_folder(plan: Plan, target: Any) -> None:
    """See :func:`specdiff.drafters.train.manifest.claim`."""
    training = {
        "--from": weights_key(plan.start.model) if plan.start is not None else "nothing",
        "--exclude": text_key([text for name in plan.exclude for text, _ in read_prompts(name, every_turn=True)]),
    }
    claim(plan.folder, target_key(target), asdict(plan.recipe), prompts_of(plan), not plan.resume, training)


def corpus_shards(
    plan: Plan, generate: Generate | None, tokenizer: Any, tell: Progress, rank: int = 0, world: int = 1
) -> list[str]:
    """Stage 1. Patterns of corpus shards; JSONL prompts are turned into shards under ``folder/corpus`` first.

    Shards that an earlier run finished are kept; a shard is generated from its own seed, so a resumed run gives the
    same corpus as one that was not interrupted. What is missing from the last one, because fewer chats were asked for
    then, goes into a file beside it. Of several processes each writes every ``world``-th shard; where prompts quote
    earlier answers, the first process writes all, one after the other.
    """
    prompts = prompts_of(plan)
    patterns = [name for name in plan.data if not is_prompt_file(name)]
    if not prompts:
        return patterns
    where = plan.folder / "corpus"
    where.mkdir(parents=True, exist_ok=True)
    found = [*patterns, str(where)]
    if plan.recipe.quote_share:
        if rank:
            return found
        world = 1
    if generate is None or tokenizer is None:
        raise InvalidInputError("prompts need a tokenizer and a way to generate; give corpus shards (.npz) instead")
    quoted: list[Passage] = []
    if plan.recipe.quote_share:
        quoted = [p for path in expand(patterns) for p in as_passages(read_shard(path), tokenizer)]
    meter = Meter()

    def written(done: int, document: Document) -> None:
        tell("generate", done, plan.chats, "answers " + meter.add(len(document) - document.prompt_length))

    for number in range(rank, -(-plan.chats // SHARD_DOCUMENTS), world):
        held = [d for path in parts(where, number) for d in read_shard(path)]
        if len(held) < min(SHARD_DOCUMENTS, plan.chats - number * SHARD_DOCUMENTS):
            held += write_own_shard(plan, where, number, len(held), generate, tokenizer, prompts, quoted, written)
            meter.save(plan.folder, "generate", rank)
        if plan.recipe.quote_share:
            quoted += as_passages(held, tokenizer)
    return found


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
    written: Callable[[int, Document], None],
) -> list[Document]:
    """Generate one shard, or what is missing behind the ``held`` chats of it that there are, and its features where the
    generator kept traces (taps as it was told) and the disk has room. ``written``: (chats so far, the last one)."""
    path = where / (f"own-{number:05d}" + (f"_{held:04d}" if held else "") + ".npz")
    before = number * SHARD_DOCUMENTS + held
    recipe = replace(plan.recipe, seed=plan.recipe.seed + 7919 * number + 29 * held)
    made: list[Document] = []
    traces: list[Trace] = []

    def keep(document: Document, trace: Trace | None) -> None:
        made.append(document)
        if trace is not None:
            traces.append(trace)
        written(before + len(made), document)

    count = min(SHARD_DOCUMENTS - held, plan.chats - before)
    regenerate(generate, tokenizer, prompts, count, recipe, keep, passages)
    taps = getattr(generate, "taps", ())
    if taps and len(traces) == len(made) > 0:
        store, lens = plan.folder / "features", [len(d) for d in made]
        width, top = traces[0].taps.shape[1], traces[0].top_ids.shape[1]
        if has_room(store, sum(lens), width, top):
            writer = FeatureWriter(feature_folder(store, path, made), lens, taps, top, width // len(taps))
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
    team = processes(target.device.type == "cpu")
    main, everyone = team.is_main_process, team.wait_for_everyone
    taboo = excluded_ngrams(plan, tokenizer)
    if main:
        claim_folder(plan, target)
    everyone()
    patterns = corpus_shards(plan, generate, tokenizer, tell, team.process_index, team.num_processes)
    everyone()
    if not expand(patterns):
        raise InvalidInputError(f"no corpus shards in {list(plan.data)}")
    corpus = read_corpus(plan, target, patterns, taboo, tell)
    begin_as_before(plan, corpus)
    drafter = plan.start if plan.start is not None else build(target, corpus, plan.shape, plan.config.seed)
    logger.info(describe(drafter, corpus.taps))

    def step(state: TrainState, info: dict[str, Any]) -> None:
        tell("train", info["progress"], 1.0, step_note(state, info, "accuracy"))

    trainer = Trainer(drafter, corpus, plan.config, plan.folder, step)
    if plan.resume and trainer.resume():
        logger.info("resumed at step %d", trainer.state.step)
    elif main:
        (plan.folder / "log.jsonl").unlink(missing_ok=True)
    trainer.train()
    everyone()
    best = DFlashDrafter.from_pretrained(plan.folder / "drafter", target)
    outcome = Outcome(best, trainer.state, None, {})
    if not main:
        return outcome
    outcome.held_out = evaluate(best, trainer.items, device=best.head.device) if trainer.items else None
    if serve is not None:
        contenders: dict[str, Drafter] = {"drafter": best}
        if baseline is not None:
            contenders["prompt lookup"] = baseline
        outcome.served = serve_all(plan, trainer.items[: plan.served_prompts], serve, contenders, tell)
    report(plan, corpus, outcome)
    return outcome


def step_note(state: TrainState, info: dict[str, Any], accuracy: str) -> str:
    """What the progress line says of a step; ``accuracy``: what the shares by slot are called."""
    by_slot = " ".join(f"{a:.2f}" for a in info["accuracy"])
    note = f"step {state.step}, loss {info['loss']:.2f}, {accuracy} {by_slot}"
    if "tokens_per_second" in info:
        note += f", {info['anchors_per_second']:.0f} anchors/s, {info['tokens_per_second']:.0f} tokens/s"
    return note


def read_corpus(
    plan: Plan, target: Any, patterns: Sequence[str], taboo: Set[tuple[int, ...]], tell: Progress
) -> Corpus:
    """Stage 2. The shards with their features: the first process computes them, the others take in the same."""
    from accelerate.utils import broadcast_object_list

    team, store, taps = processes(target.device.type == "cpu"), plan.folder / "features", plan.taps(target)
    corpus = Corpus(patterns, store, taps, plan.top, plan.held_out, target, taboo)
    if team.is_main_process:
        shards = {path: read_shard(path) for path in expand(patterns)}
        if plan.start is None and plan.shape.plain and not has_checkpoint(plan.folder):  # told before the work
            kept = (d for documents in shards.values() for d in documents if not held_out(d, plan.held_out))
            mask_id(plan.shape, kept, target.config.get_text_config().vocab_size)
        missing = [d for p, d in shards.items() if not (feature_folder(store, p, d) / "meta.json").exists()]
        total, meter = sum(len(d) for documents in missing for d in documents), Meter()

        def count(tokens: int) -> None:
            note = meter.add(tokens)
            tell("features", meter.tokens, total, note)

        corpus.rescan(on_progress=count)
        meter.save(plan.folder, "features")
        if corpus.excluded:
            count_all = sum(map(len, shards.values()))
            logger.warning("%d of %d documents share text with --exclude and are left out", corpus.excluded, count_all)
    found = broadcast_object_list([corpus.found()])[0]
    if not team.is_main_process:
        corpus.adopt(found)
        corpus.model = None
    return corpus


def serve_all(
    plan: Plan, items: Sequence[Features], serve: Serve, contenders: Mapping[str, Drafter], tell: Progress
) -> dict[str, dict[str, Any]]:
    """Stage 3. The serving path's answers to the prompts of ``items`` with each drafter."""
    prompts = [i.document.ids[: i.document.prompt_length].tolist() for i in items]
    total = len(prompts) * len(contenders)
    served: dict[str, dict[str, Any]] = {}

    def counted(name: str) -> Iterator[list[int]]:
        for number, prompt in enumerate(prompts, len(served) * len(prompts)):
            tell("serve", number, total, f"held-out prompts, {name}")
            yield prompt

    if prompts:
        for name, drafter in contenders.items():
            served[name] = serve(drafter, counted(name), plan.served_tokens)
        tell("serve", total, total, "held-out prompts")
    return served


def begin_as_before(plan: Plan, corpus: Corpus) -> None:
    """For a run that goes on: only the shards that it began with, since the drafter's shape (its vocabulary) and the
    evaluation follow from them."""
    found = read_checkpoint(plan.folder) if plan.resume else None
    data = found[1].get("data") if found else None
    if data is not None:
        corpus.hold(data["shards"][: data["began_with"]])
