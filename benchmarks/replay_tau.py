"""Greedy tau of drafters by set of prompts, alone, with prompt lookup, and beside it, without decoding once for each.

    python benchmarks/replay_tau.py PROMPTS.jsonl smollm2-135m-instruct [FOLDER ...] --work runs/replay

Greedy text is the target's answer to every prefix. So the target writes each answer once (kept in ``--work`` with its
states), every drafter drafts at every position of it, and following the accepted lengths gives the very rounds that
serving would run. The combined drafter's choices are replayed by its own rule.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from specdiff import load_target
from specdiff.bench.loops import is_loop
from specdiff.cli.train import generator
from specdiff.drafters.combined import COPIES, Record, promise
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.loading import load
from specdiff.drafters.lookup import NgramIndex, PromptLookup
from specdiff.drafters.train.corpus import Document, read_shard, write_shard
from specdiff.drafters.train.evaluate import accepted_lengths
from specdiff.drafters.train.features import FeatureShard, FeatureWriter
from specdiff.drafters.train.regenerate import Template

TOP = 32


def read_prompts(path: Path, per_set: int) -> list[tuple[str, str]]:
    """(set, first turn) of the first ``per_set`` prompts of each set."""
    seen: Counter[str] = Counter()
    found = []
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        entry = json.loads(line)
        seen[entry["set"]] += 1
        if seen[entry["set"]] <= per_set:
            found.append((entry["set"], entry["turns"][0]))
    return found


def write_texts(work: Path, prompts: Sequence[tuple[str, str]], taps: Sequence[int], tokens: int) -> None:
    """The target's greedy answers with their states, as a corpus shard and its features."""
    model, tokenizer = load_target()
    template = Template.of(tokenizer)
    ids = [template.wrap(tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in prompts]
    answers = sorted(generator(model, taps, TOP)(ids, [0.0] * len(ids), tokens, 0))
    pairs = zip(ids, answers, prompts, strict=True)
    documents = [Document(np.array(prompt + a.ids), len(prompt), name, 0.0) for prompt, a, (name, _) in pairs]
    width = model.config.get_text_config().hidden_size
    writer = FeatureWriter(work / "features" / "texts", [len(d) for d in documents], taps, TOP, width)
    for index, answer in enumerate(answers):
        assert answer.trace is not None
        writer.put(index, *answer.trace)
    writer.finish()
    write_shard(work / "texts.npz", documents)


def rounds(document: Document, drafted: Sequence[int] | None, copying: bool, cap: int) -> int:
    """Rounds of one answer after its first token.

    Args:
        document: prompt and answer.
        drafted: accepted length of a draft at every position of the answer; None without a drafter.
        copying: whether prompt lookup drafts (where the combined rule wants it, if there is a drafter too).
        cap: most copied tokens per round.
    """
    ids, start = document.ids.tolist(), document.prompt_length
    index, record, at, count = NgramIndex(2, 4), Record(), start, 0
    index.extend(ids[:start])
    while at < len(ids) - 1:
        length, proposed = index.match(ids[at], cap) if copying else (0, [])
        copied = [*(a == b for a, b in zip(proposed, ids[at + 1 :], strict=False)), False].index(False)
        copies = drafted is None or (length >= 2 and record.prefers_copy(length))
        accepted = copied if copies else drafted[at - start] if drafted is not None else 0
        record.begin(min(promise(length), cap) if copies else 0.0)
        record.settle(accepted)
        index.extend(ids[at : at + accepted + 1])
        at, count = at + accepted + 1, count + 1
    return count


def taus(documents: Sequence[Document], passes: Sequence[int], filtered: bool = False) -> dict[str, float]:
    """Tau by set, of all texts or of those that are no loops."""
    tokens: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for document, count in zip(documents, passes, strict=True):
        answer = document.ids[document.prompt_length :].tolist()
        if not (filtered and is_loop(answer)):
            tokens[document.source] += len(answer) - 1
            spent[document.source] += count
    return {key: tokens[key] / spent[key] for key in tokens if spent[key]}


def show(name: str, documents: Sequence[Document], passes: Sequence[int]) -> None:
    """One row for all texts, one for those that are no loops: tau by set and the mean of the sets."""
    for filtered in (False, True):
        found = taus(documents, passes, filtered)
        cells = "  ".join(f"{key} {tau:.2f}" for key, tau in found.items())
        mean = sum(found.values()) / max(len(found), 1)
        print(f"{name}{', loops filtered' if filtered else ''}: {cells}  mean {mean:.3f}", flush=True)


def behind(both: dict[str, float], parts: dict[str, dict[str, float]]) -> list[str]:
    """Where a combined drafter's tau is below that of one of its parts, by set."""
    return [
        f"{key}: {tau:.3f} is below {name}'s {part[key]:.3f}"
        for name, part in parts.items()
        for key, tau in both.items()
        if tau < part[key]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the texts unless they are there, then replay every drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("drafters", nargs="+", help="zoo names or folders; all read the same taps")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--per-set", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--copies", type=int, default=COPIES, help="most copied tokens beside a drafter (%(default)s)")
    parser.add_argument(
        "--check", action="store_true",
        help="exit with 1 if, on any set, a drafter with lookup is below itself alone or below lookup of --copies",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    model, _ = load_target()
    drafters: dict[str, DFlashDrafter] = {}
    for name in args.drafters:
        drafter = load(name, model)
        if not isinstance(drafter, DFlashDrafter):
            parser.error(f"{name} is no block-diffusion drafter")
        drafters[Path(name).name] = drafter
    taps = next(iter(drafters.values())).taps
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "texts.npz").exists():
        write_texts(args.work, read_prompts(args.prompts, args.per_set), taps, args.new_tokens)
    documents = read_shard(args.work / "texts.npz")
    shard = FeatureShard(args.work / "features" / "texts", documents, taps)
    usual = PromptLookup().block_size
    copied = {cap: [rounds(d, None, True, cap) for d in documents] for cap in {usual, args.copies}}
    show("prompt lookup", documents, copied[usual])
    if args.copies != usual:
        show(f"prompt lookup of {args.copies}", documents, copied[args.copies])
    faults: list[str] = []
    for name, drafter in drafters.items():
        items = [shard[i] for i in range(len(documents))]
        lengths = [accepted_lengths(drafter, i, drafter.block_size, torch.device("cpu")).tolist() for i in items]
        alone = [rounds(d, each, False, 0) for d, each in zip(documents, lengths, strict=True)]
        show(name, documents, alone)
        both = [rounds(d, each, True, args.copies) for d, each in zip(documents, lengths, strict=True)]
        show(f"{name}+lookup", documents, both)
        parts = {name: taus(documents, alone), "prompt lookup": taus(documents, copied[args.copies])}
        faults += [f"{name}+lookup on {fault}" for fault in behind(taus(documents, both), parts)]
    if args.check:
        print("\n".join(faults) or "check: nowhere below its parts", flush=True)
    return int(args.check and bool(faults))


if __name__ == "__main__":
    sys.exit(main())
