"""The whole benchmark: measure, count, judge; the result is one dictionary of plain JSON types."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specdiff.bench.arms import HF, HF_LOOKUP, PLAIN, SPECDIFF, Arm, specdiff_arm, transformers_arm
from specdiff.bench.efficiency import engine_efficiency
from specdiff.bench.equality import compare_texts
from specdiff.bench.measure import Sample, batches, measure
from specdiff.bench.memory import peak_bytes
from specdiff.bench.models import redrafted
from specdiff.bench.peers import PEERS, PeerFiles, peer_arms
from specdiff.bench.prompts import Prompt, encode
from specdiff.bench.roofline import roofline
from specdiff.bench.summary import mode_numbers, sample_lines, tau_table
from specdiff.bench.verdict import verdict
from specdiff.errors import InvalidInputError
from specdiff.target import Target
from specdiff.tuning.measure import BUDGET, measure_cost
from specdiff.wrap import SpecDiff

SCHEMA = 1
SAMPLING_TEMPERATURES = (0.7, 1.0)
"""Where tau is reported when sampling is asked for."""

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BenchOptions:
    """Settings of one benchmark.

    Attributes:
        max_new_tokens: tokens per text.
        temperature: of the timed runs; 0 is greedy.
        sampling: also report tau at .7 and 1 (always done when ``temperature`` is above 0).
        rule: acceptance rule when sampling.
        batch_size: prompts per call; transformers' prompt lookup takes one only and is left out above that.
        seed: of the first call; later calls count up.
        loops_filtered: judge by the numbers without looping texts (both are always reported).
        efficiency: measure the engine with replayed texts.
        raw: prompts without the chat template.
        context: committed tokens of the cost curve.
        cost_seconds: time for repeating quick passes of the cost curve.
        texts: keep the texts in the report.
        peers: what other runners read; None leaves them out.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    sampling: bool = False
    rule: str = "auto"
    batch_size: int = 1
    seed: int = 0
    loops_filtered: bool = False
    efficiency: bool = False
    raw: bool = False
    context: int = 192
    cost_seconds: float = BUDGET
    texts: bool = False
    peers: PeerFiles | None = None


def run_bench(
    wrapped: SpecDiff,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: BenchOptions,
    *,
    names: dict[str, str] | None = None,
    environment: dict[str, Any] | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        wrapped: target and drafter.
        tokenizer: the target's.
        prompts: what to write about.
        options: settings.
        names: what to call ``target`` and ``drafter`` in the report.
        environment: versions and machine, for the report.
        tell: told what is being done and how far it is.

    Raises:
        InvalidInputError: settings out of range, or a prompt too long for the target.
    """
    _check(options)
    model = wrapped.ar
    ids = [encode(tokenizer, prompt.text, raw=options.raw) for prompt in prompts]
    _check_lengths(wrapped, prompts, ids, options.max_new_tokens)
    work = batches(prompts, ids, options.batch_size)
    plain = redrafted(wrapped, None)
    arms = _arms(wrapped, plain, options, options.temperature)
    notes = []
    if options.peers is not None:
        others, refused = peer_arms(model, options.temperature, options.batch_size, options.peers)
        arms |= others
        notes += [f"{PEERS[name]} left out: {why}" for name, why in refused.items()]
    samples = measure(arms, work, options.max_new_tokens, seed=options.seed, progress=_step(tell, "timed runs"))
    mode = mode_numbers(samples, options.temperature)
    target = target_in_use(wrapped, samples)
    if tell is not None:
        tell("cost curve", 0, 1)
    cost = measure_cost(
        wrapped,
        target,
        context=options.context,
        batch_size=options.batch_size,
        budget=options.cost_seconds,
        seed=options.seed,
    )
    equality: dict[str, Any] | None = None
    if options.temperature == 0:
        equality = {name: compare_texts(model, samples, name) for name in (PLAIN, SPECDIFF) if name in arms}
    if HF_LOOKUP not in arms:
        notes.append("transformers' prompt lookup takes one prompt at a time and was left out")
    if wrapped.drafter is None:
        notes.append("no drafter: there is nothing to compare plain decoding with")
    judged = SPECDIFF if SPECDIFF in arms else PLAIN
    report: dict[str, Any] = {
        "specdiff_bench": SCHEMA,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "names": names or {},
        "environment": environment or {},
        "settings": asdict(options)
        | {
            "prompts": len(prompts),
            "block_size": wrapped.block_size,
            "fast": wrapped.fast,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "threads": torch.get_num_threads(),
        },
        "notes": notes,
        "mode": mode,
        "equality": equality,
        "cost": cost.to_dict(),
        "verdict": verdict(
            cost, mode, filtered=options.loops_filtered, equality=equality[judged] if equality is not None else None
        ),
        "sampling": _sampling(wrapped, options, work, samples, tell),
        "memory": _memory(arms, work, options, model.device),
        "efficiency": None,
        "roofline": roofline(cost, target),
        "samples": sample_lines(samples, tokenizer.decode if options.texts else None),
    }
    if options.efficiency and options.temperature == 0 and options.batch_size == 1:
        if tell is not None:
            tell("engine efficiency", 0, 1)
        report["efficiency"] = engine_efficiency(plain, samples[:6], target, options.max_new_tokens)
    return report


def target_in_use(wrapped: SpecDiff, samples: Sequence[Sample]) -> Target:
    """The target path that the timed runs took (general or fast)."""
    path = next((stats.path for s in samples for r in s.runs.values() if (stats := r.stats) is not None), None)
    fast = wrapped.fast_target
    return fast if fast is not None and fast.name == path else wrapped.target


def _arms(wrapped: SpecDiff, plain: SpecDiff, options: BenchOptions, temperature: float) -> dict[str, Arm]:
    arms: dict[str, Arm] = {HF: transformers_arm(wrapped.ar, temperature)}
    if options.batch_size == 1:
        arms[HF_LOOKUP] = transformers_arm(wrapped.ar, temperature, lookup=True)
    arms[PLAIN] = specdiff_arm(plain, temperature, options.rule)
    if wrapped.drafter is not None:
        arms[SPECDIFF] = specdiff_arm(wrapped, temperature, options.rule)
    return arms


def _sampling(
    wrapped: SpecDiff,
    options: BenchOptions,
    work: list[tuple[list[Prompt], list[Tensor]]],
    timed: Sequence[Sample],
    tell: Tell | None,
) -> list[dict[str, Any]]:
    """tau at the sampling temperatures, specdiff alone."""
    if wrapped.drafter is None or not (options.sampling or options.temperature):
        return []
    rows = []
    for temperature in SAMPLING_TEMPERATURES:
        samples = timed
        if temperature != options.temperature:
            arms = {SPECDIFF: specdiff_arm(wrapped, temperature, options.rule)}
            say = _step(tell, f"temperature {temperature:g}")
            samples = measure(arms, work, options.max_new_tokens, seed=options.seed, progress=say)
        rule = next((r.stats.rule for s in samples if (r := s.runs[SPECDIFF]).stats is not None), None)
        rows.append({"temperature": temperature, "rule": rule, "tau": tau_table(samples)})
    return rows


def _memory(
    arms: dict[str, Arm], work: list[tuple[list[Prompt], list[Tensor]]], options: BenchOptions, device: torch.device
) -> dict[str, int | None]:
    """Peak memory of each arm on the batch with the longest prompt, above what was in use before."""
    _, ids = max(work, key=lambda item: max(row.numel() for row in item[1]))
    tokens = min(16, options.max_new_tokens)
    return {name: peak_bytes(lambda arm=arm: arm(ids, tokens, options.seed), device) for name, arm in arms.items()}  # type: ignore[misc]


def _step(tell: Tell | None, what: str) -> Callable[[int, int], None] | None:
    return None if tell is None else lambda done, total: tell(what, done, total)


def _check(options: BenchOptions) -> None:
    if options.max_new_tokens < 2:
        raise InvalidInputError("max_new_tokens must be at least 2: the first token is the prefill's")
    if options.batch_size < 1:
        raise InvalidInputError(f"batch_size must be at least 1, got {options.batch_size}")
    if options.temperature < 0:
        raise InvalidInputError(f"temperature must not be negative, got {options.temperature}")
    if options.rule == "greedy" and options.temperature > 0:
        raise InvalidInputError("rule greedy contradicts a temperature above 0")


def _check_lengths(wrapped: SpecDiff, prompts: Sequence[Prompt], ids: Sequence[Tensor], new: int) -> None:
    most = wrapped.target.max_positions
    for prompt, row in zip(prompts, ids, strict=True):
        if most is not None and row.numel() + new > most:
            raise InvalidInputError(
                f"prompt {prompt.id} has {row.numel()} tokens; with {new} new ones that is more than the target's "
                f"{most} positions"
            )
