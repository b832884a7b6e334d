"""``docs/compatibility.md``: what the results say, with honest counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specdiff.compat.family import BLOCKS, NEW_TOKENS, PROMPTS, TIE, FamilyResult
from specdiff.compat.tiny import WINDOW
from specdiff.compat.upstream import UPSTREAM

_HEAD = """\
# Which architectures work

Written by `specdiff check --all{flag}`; do not edit by hand. Versions: {versions}.

For every architecture that transformers registers for causal language modelling, a tiny random model of its default
configuration (shrunk by the rules of `specdiff/compat/tiny.py`, exceptions in `specdiff/compat/exceptions.py`) decodes
{tokens} tokens with drafters whose guesses are always wrong, always right, or right up to the middle of a block, with
blocks of {blocks} (sliding windows are {window}), for one prompt and for {rows} left-padded ones of {prompts} tokens,
greedily and coupled. Greedy text must equal `transformers`' own `generate` of each row alone; coupled text must equal
specdiff's own plain decoding with the same seed. {cases} Besides, the logits of twelve ragged
rounds on random tokens, past every window, must be those of the uncached pass within {tie:g} of their spread (largest
among those that work: {gap:.1g}).

| result | architectures |
|---|---|
| works | {works} |
| refused when `SpecDiff` is built | {refused} |
| wrong text or an error while decoding | {wrong} |
| could not be built | {unbuilt} |

{share}

How they are served: **ragged**, all rows in one pass with their own positions; **rows**, one row per pass; **foreign**,
one row per pass over the model's own cache object, copied before each pass; **uncached**, one row per pass, everything
computed again. *Token by token* means that transformers' multi-token step with a filled state is wrong for this class:
drafts are then verified one token per pass, which is right but brings no speed-up.
"""


def render(results: Sequence[FamilyResult], versions: dict[str, str], *, mode: str = "full") -> str:
    """The page for a list of results.

    Args:
        results: one per architecture.
        versions: package name to version.
        mode: the set of cases that was run.
    """
    counts = Counter(result.status for result in results)
    wrong = counts["wrong"] + counts["failed"]
    buildable = len(results) - counts["not built"]
    excused = [result for result in results if result.status == "refused" and result.model_type in UPSTREAM]
    share = f"{counts['works']} of the {buildable} that can be built work ({_percent(counts['works'], buildable)})."
    if excused:
        rest = buildable - len(excused)
        share += (
            f" {len(excused)} of the refused ones fail in transformers itself, as named below; "
            f"without them it is {counts['works']} of {rest} ({_percent(counts['works'], rest)})."
        )
    cases = {
        "full": "All 48 combinations for each architecture.",
        "reduced": "Twelve combinations for each architecture, in which every pair of settings occurs.",
        "quick": "Four combinations for each architecture, in which every setting occurs once.",
    }[mode]
    head = _HEAD.format(
        flag="" if mode == "full" else f" --mode {mode}",
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        tokens=NEW_TOKENS,
        blocks=", ".join(map(str, BLOCKS)),
        window=WINDOW,
        rows=len(PROMPTS),
        prompts=", ".join(map(str, PROMPTS)),
        cases=cases,
        works=counts["works"],
        refused=counts["refused"],
        wrong=wrong,
        unbuilt=counts["not built"],
        share=share,
        tie=TIE,
        gap=max((result.gap for result in results if result.status == "works"), default=0.0),
    )
    parts = [head]
    for title, statuses in (
        ("Wrong", ("wrong", "failed")),
        ("Refused", ("refused",)),
        ("Could not be built", ("not built",)),
    ):
        rows = [result for result in results if result.status in statuses]
        if rows:
            parts.append(f"## {title}\n\n" + _reasons(rows))
    works = [result for result in results if result.status == "works"]
    if works:
        parts.append("## Works\n\n" + _works(works))
    return "\n".join(parts).rstrip() + "\n"


def _reasons(results: Sequence[FamilyResult]) -> str:
    lines = ["| model type | class | why |", "|---|---|---|"]
    for result in results:
        why = "; ".join(part for part in (UPSTREAM.get(result.model_type), result.why, *result.notes) if part)
        lines.append(f"| {result.model_type} | {result.class_name} | {_cell(why)} |")
    return "\n".join(lines) + "\n"


def _works(results: Sequence[FamilyResult]) -> str:
    lines = ["| model type | class | cache | served | notes |", "|---|---|---|---|---|"]
    for result in results:
        served = result.serving + (", token by token" if result.stepwise else "")
        notes = list(dict.fromkeys(result.notes))
        if result.ties:
            notes.append(f"{len(result.ties)} near-ties, largest margin {max(result.ties):.1g}")
        if result.model_type in UPSTREAM:
            notes.insert(0, UPSTREAM[result.model_type])
        lines.append(
            f"| {result.model_type} | {result.class_name} | {result.kinds} | {served} | {_cell('; '.join(notes))} |"
        )
    return "\n".join(lines) + "\n"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}%"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
