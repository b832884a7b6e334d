"""What adaptive block lengths gain and what they can lose, by prompt set, one command.

    python benchmarks/adaptive.py [--prompts FILE] [--per-set 8] [--new-tokens 128] [--temperature 0] [--threads N]

Interleaved on each prompt: plain decoding, the pair with its whole block, the pair with adaptive lengths, two useless
drafters with adaptive lengths (random ids; the right text with every id wrong). Which comes first rotates. Shown: times
of whole calls relative to plain decoding by set (medians; below 1 is faster) and the cost that the model gave. The aim:
no set above 1.05.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from step_cost import cpu_name

from specdiff import SpecDiff, load_drafter, load_target
from specdiff.bench.arms import sampling_arguments
from specdiff.bench.models import redrafted
from specdiff.bench.prompts import encode, load_prompts
from specdiff.testing import RandomDrafter, ReplayDrafter


def timed(wrapped: SpecDiff, ids: torch.Tensor, tokens: int, temperature: float) -> tuple[float, Any, torch.Tensor]:
    """Seconds of a call, its statistics, its new tokens."""
    began = time.perf_counter()
    out = wrapped.generate(
        ids,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        seed=0,
        rule="coupled" if temperature else "auto",  # one text for all, so that all do the same work
        **sampling_arguments(temperature),
    )
    return time.perf_counter() - began, out.stats, out.sequences[:, ids.shape[1] :]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="JSON Lines, as for specdiff bench; default: its built-in set")
    parser.add_argument("--per-set", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, help="torch threads; default: as torch decides")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load_target()
    drafter = load_drafter(target=model)
    plain = SpecDiff(model)
    vocab = model.config.vocab_size
    found: dict[str, dict[str, list[float]]] = {}
    taus: dict[str, list[float]] = {}
    modelled: dict[str, list[float]] = {}
    for at, prompt in enumerate(load_prompts(args.prompts, per_set=args.per_set)):
        ids = encode(tokenizer, prompt.text)[None]
        _, _, text = timed(plain, ids, args.new_tokens, args.temperature)
        arms = {
            "plain": plain,
            "whole block": redrafted(plain, drafter, drafter.block_size),
            "adaptive": redrafted(plain, drafter, "auto"),
            "adaptive, random ids": redrafted(plain, RandomDrafter(vocab), "auto"),
            "adaptive, all wrong": redrafted(plain, ReplayDrafter(text, wrong_at=range(8)), "auto"),
        }
        if not found:
            for wrapped in arms.values():  # costs are measured and kept before anything is timed
                timed(wrapped, ids, 8, args.temperature)
        seconds = {}
        turn = at % len(arms)
        for name in [*arms][turn:] + [*arms][:turn]:
            seconds[name], stats, mine = timed(arms[name], ids, args.new_tokens, args.temperature)
            taus.setdefault(name, []).append(stats.tau or 1.0)
            modelled.setdefault(name, []).append(stats.modelled_cost or float("nan"))
            if not torch.equal(mine, text):
                print(f"{prompt.id}: {name} wrote another text (a near-tie)")
        for name, value in seconds.items():
            found.setdefault(prompt.set, {}).setdefault(name, []).append(value / seconds["plain"])
    console = Console()
    console.print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    names = list(arms)
    table = Table(title=f"time relative to plain decoding, {args.new_tokens} tokens, temperature {args.temperature:g}")
    for column in ("prompt set", *names):
        table.add_column(column, justify="right")
    for group, values in found.items():
        table.add_row(group, *(f"{statistics.median(values[name]):.2f}" for name in names))
    table.add_section()
    table.add_row("mean tau", *(f"{statistics.fmean(taus[name]):.2f}" for name in names))
    table.add_row("mean modelled cost", *(f"{statistics.fmean(modelled[name]):.2f}" for name in names))
    console.print(table)


if __name__ == "__main__":
    main()
