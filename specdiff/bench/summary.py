"""From timed runs to the numbers of the report: pure functions, plain JSON types, None for what is not known."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specdiff.bench.arms import HF, HF_LOOKUP, LABELS, PLAIN, SPECDIFF, Run
from specdiff.bench.loops import is_loop
from specdiff.bench.measure import Sample
from specdiff.bench.peers import DFLASH, HF_DFLASH, LLAMA, LLAMA_LOOKUP, PEERS

RATIOS = (
    ("speculation", SPECDIFF, PLAIN, "specdiff over its own plain decoding (speculation)"),
    ("kernels", PLAIN, HF, "specdiff's plain decoding over transformers generate (kernels)"),
    ("whole", SPECDIFF, HF, "specdiff over transformers generate (both together)"),
    ("lookup", HF_LOOKUP, HF, "transformers' prompt lookup over its generate"),
    ("hf_dflash", SPECDIFF, HF_DFLASH, "specdiff over transformers' DFlash decoding"),
    ("dflash", SPECDIFF, DFLASH, "specdiff over the dflash package"),
    ("llama_cpp", SPECDIFF, LLAMA, "specdiff over llama.cpp (its own precision)"),
    ("llama_lookup", SPECDIFF, LLAMA_LOOKUP, "specdiff over llama.cpp with prompt lookup (its own precision)"),
)
"""Name, numerator, denominator, label. Ratios are of decoding speeds, per batch of prompts."""


def quartiles(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """Median and quartiles of what is known."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"median": None, "p25": None, "p75": None, "count": 0}
    if len(known) == 1:
        return {"median": known[0], "p25": known[0], "p75": known[0], "count": 1}
    low, _, high = statistics.quantiles(known, n=4, method="inclusive")
    return {"median": statistics.median(known), "p25": low, "p75": high, "count": len(known)}


def looping(sample: Sample) -> bool:
    """Whether any text of the batch is a loop (judged on specdiff's plain text, else on the first arm's)."""
    run = sample.runs.get(PLAIN) or next(iter(sample.runs.values()))
    return any(is_loop(row) for row in run.tokens)


def arm_numbers(samples: Sequence[Sample], name: str) -> dict[str, Any]:
    """Speed, time to first token and totals of one arm."""
    runs = [sample.runs[name] for sample in samples]
    decoded, decode = sum(run.decoded for run in runs), sum(run.decode for run in runs)
    passes = sum(run.passes for run in runs)
    return {
        "label": (LABELS | PEERS)[name],
        "decode_tokens_per_second": quartiles(run.speed for run in runs),
        "decode_tokens_per_second_total": decoded / decode if decode > 0 and decoded > 0 else None,
        "seconds_to_first_token": quartiles(run.prefill for run in runs),
        "new_tokens": sum(run.new_tokens for run in runs),
        "seconds": sum(run.prefill + run.decode for run in runs),
        "passes": passes,
        "tau": decoded / passes if passes else None,
    }


def ratio(sample: Sample, above: str, below: str) -> float | None:
    """Decoding speed of one arm over that of another on the same batch."""
    if above not in sample.runs or below not in sample.runs:
        return None
    fast, slow = sample.runs[above].speed, sample.runs[below].speed
    return fast / slow if fast is not None and slow is not None else None


def ratios(samples: Sequence[Sample]) -> dict[str, Any]:
    """All ratios whose arms were measured."""
    present = samples[0].runs if samples else {}
    return {
        name: {"label": label, **quartiles(ratio(sample, above, below) for sample in samples)}
        for name, above, below, label in RATIOS
        if above in present and below in present
    }


def tau_of(runs: Sequence[Run]) -> float | None:
    """New tokens per target pass over several runs."""
    passes = sum(run.passes for run in runs)
    return sum(run.decoded for run in runs) / passes if passes else None


def tau_table(samples: Sequence[Sample], arm: str = SPECDIFF) -> dict[str, Any]:
    """tau by prompt set, and its mean over sets, with and without the batches that hold a loop."""
    sets: dict[str, list[Sample]] = {}
    for sample in samples:
        sets.setdefault(sample.set, []).append(sample)
    table = {}
    for name, members in sets.items():
        kept = [sample for sample in members if not looping(sample)]
        table[name] = {
            "prompts": sum(len(sample.prompts) for sample in members),
            "loops": sum(len(sample.prompts) for sample in members) - sum(len(sample.prompts) for sample in kept),
            "tau": tau_of([sample.runs[arm] for sample in members]),
            "tau_without_loops": tau_of([sample.runs[arm] for sample in kept]),
            "speculation": quartiles(ratio(sample, SPECDIFF, PLAIN) for sample in members),
        }
    return {
        "by_set": table,
        "macro": _mean(row["tau"] for row in table.values()),
        "macro_without_loops": _mean(row["tau_without_loops"] for row in table.values()),
    }


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def drafting(samples: Sequence[Sample], arm: str = SPECDIFF) -> dict[str, Any]:
    """What became of the drafts: acceptance by position, accepted lengths, and where a round's time goes."""
    all_stats = [stats for sample in samples if (stats := sample.runs[arm].stats) is not None]
    proposed: list[int] = []
    accepted: list[int] = []
    lengths: dict[int, int] = {}
    seconds: dict[str, float] = {}
    for stats in all_stats:
        _add(proposed, stats.proposed_by_position)
        _add(accepted, stats.accepted_by_position)
        for row in stats.emitted:
            for emitted in row[1:]:
                lengths[emitted - 1] = lengths.get(emitted - 1, 0) + 1
        for part, value in stats.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + value
    passes = sum(sum(stats.row_rounds) for stats in all_stats)
    total, kept = sum(stats.proposed for stats in all_stats), sum(stats.accepted for stats in all_stats)
    rounds = sum(stats.rounds for stats in all_stats)
    return {
        "rule": all_stats[0].rule if all_stats else None,
        "path": all_stats[0].path if all_stats else None,
        "notes": sorted({note for stats in all_stats for note in stats.notes}),
        "rounds": rounds,
        "proposed": total,
        "accepted": kept,
        "acceptance_rate": kept / total if total else None,
        "acceptance_by_position": [a / p if p else None for a, p in zip(accepted, proposed, strict=True)],
        "kept_per_round": [a / passes for a in accepted] if passes else [],
        "proposed_lengths": _lengths(proposed, passes),
        "accepted_lengths": {str(n): lengths.get(n, 0) for n in range(max(lengths) + 1)} if lengths else {},
        "seconds_per_round": {
            part: seconds.get(part, 0.0) / rounds if rounds else None for part in ("draft", "verify", "rest")
        },
        "accept_seconds_per_round": sum(stats.accept_seconds for stats in all_stats) / rounds if rounds else None,
    }


def _lengths(proposed: Sequence[int], passes: int) -> dict[str, int]:
    """How many rounds drafted each number of tokens, from how many drafted at least so many."""
    at_least = [passes, *proposed, 0]
    return {str(n): at_least[n] - at_least[n + 1] for n in range(len(proposed) + 1)} if passes else {}


def _add(totals: list[int], counts: Sequence[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for at, count in enumerate(counts):
        totals[at] += count


def mode_numbers(samples: Sequence[Sample], temperature: float) -> dict[str, Any]:
    """Everything about one temperature."""
    kept = [sample for sample in samples if not looping(sample)]
    names = list(samples[0].runs)
    return {
        "temperature": temperature,
        "batches": len(samples),
        "batches_without_loops": len(kept),
        "arms": {name: arm_numbers(samples, name) for name in names},
        "ratios": ratios(samples),
        "ratios_without_loops": ratios(kept),
        "tau": tau_table(samples) if SPECDIFF in names else None,
        "drafting": drafting(samples) if SPECDIFF in names else None,
    }


def sample_lines(samples: Sequence[Sample], decode: Callable[[list[int]], str] | None = None) -> list[dict[str, Any]]:
    """One entry per batch, with each arm's own times."""
    lines = []
    for sample in samples:
        arms = {
            name: {
                "new_tokens": run.new_tokens,
                "seconds_to_first_token": run.prefill,
                "decode_seconds": run.decode,
                "decode_tokens_per_second": run.speed,
                "tau": run.tau,
            }
            for name, run in sample.runs.items()
        }
        entry: dict[str, Any] = {
            "ids": [prompt.id for prompt in sample.prompts],
            "set": sample.set,
            "prompt_tokens": [row.numel() for row in sample.ids],
            "loop": looping(sample),
            "arms": arms,
        }
        if decode is not None and SPECDIFF in sample.runs:
            entry["texts"] = [decode(row) for row in sample.runs[SPECDIFF].tokens]
        lines.append(entry)
    return lines
