"""What a proposal of a drafter costs next to a target pass over 1 input, and what its shortlist saves.

    python benchmarks/draft_cost.py [--drafter NAME] [--tokens 3] [--shortlists 0 512 256 128] [--repeats 60]
        [--tau-prompts 0]

Shortlist 0 reads the whole head for every slot. Arms are interleaved; shown are medians of wall time and the thread's
CPU time (steadier on a busy machine). With ``--tau-prompts N`` the greedy tau of each arm over N built-in
prompts follows, because a shortlist may cost acceptance.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from step_cost import cpu_name

from specdiff import SpecDiff, load_drafter, load_target
from specdiff.bench.prompts import encode, load_prompts, spread
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.tuning.measure import Passes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="smollm2-135m-instruct", help="zoo name or folder; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=3, help="drafted tokens")
    parser.add_argument("--shortlists", type=int, nargs="+", default=[0, 512, 256, 128])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--tau-prompts", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_target()
    drafter = load_drafter(args.drafter, target=model)
    if not isinstance(drafter, DFlashDrafter):
        parser.error(f"{args.drafter} is not a DFlash drafter by itself")
    wrapped, runtime = SpecDiff(model, drafter), drafter.runtime()
    target, _ = wrapped.target_for(256)
    passes = Passes(target, drafter, args.tokens, (1,), 192, 1, 0, None)
    arms: dict[str, Callable[[], None]] = {}

    def draft(short: int) -> Callable[[], None]:
        def run() -> None:
            runtime.shortlist = short
            passes.draft(args.tokens)

        return run

    for short in args.shortlists:
        arms[f"draft, shortlist {short}" if short else "draft, whole head"] = draft(short)
    arms["target pass over 1 input"] = lambda: passes.target_pass(1)
    wall: dict[str, list[float]] = {name: [] for name in arms}
    own: dict[str, list[float]] = {name: [] for name in arms}
    with torch.no_grad():
        passes.open()
        for _ in range(args.repeats):
            for name, run in arms.items():
                run()
                began, cpu = time.perf_counter(), time.thread_time()
                run()
                own[name].append(time.thread_time() - cpu)
                wall[name].append(time.perf_counter() - began)
        passes.close()
    console = Console()
    console.print(f"{cpu_name()}, 1 thread, torch {torch.__version__}; {len(drafter.head)} draft ids")
    table = Table(title=f"proposal of {args.tokens} and commit, medians of {args.repeats}")
    for column in ("", "wall (ms)", "relative", "CPU (ms)", "relative"):
        table.add_column(column, justify="right")
    steps = [statistics.median(times["target pass over 1 input"]) for times in (wall, own)]
    for name in arms:
        cells = [name]
        for times, step in zip((wall, own), steps, strict=True):
            middle = statistics.median(times[name])
            cells += [f"{middle * 1e3:.2f}", f"{middle / step:.3f}"]
        table.add_row(*cells)
    console.print(table)
    if not args.tau_prompts:
        return
    totals = {short: [0, 0] for short in args.shortlists}
    for prompt in spread(load_prompts(None), args.tau_prompts):
        ids = encode(tokenizer, prompt.text)[None]
        for short, total in totals.items():
            runtime.shortlist = short
            out = wrapped.generate(
                ids, max_new_tokens=64, do_sample=False, return_dict_in_generate=True, block_size=args.tokens
            )
            total[0] += out.stats.new_tokens[0] - 1
            total[1] += out.stats.rounds
    for short, (tokens, rounds) in totals.items():
        console.print(f"shortlist {short}: tau {tokens / rounds:.4f} over {args.tau_prompts} prompts")


if __name__ == "__main__":
    main()
