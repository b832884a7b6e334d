"""Peak memory and time to the first token beside plain ``generate``, one command (Linux).

    python benchmarks/memory.py [--target MODEL] [--drafter NAME] [--prompts 64 512 2048] [--batch 1 4] [--json FILE]

Every figure is a process of its own, which loads the model, runs once on a short prompt and then on the measured one.
Memory is the peak of the resident set above its value before the measured call, read from the kernel's own counter.
The time to the first token is a call with ``max_new_tokens=1``, the median of ``--repeats``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ARMS = ("generate", "general", "fast", "speculative")
"""Hugging Face; specdiff without a drafter on the general and on the fast path; specdiff with the drafter."""


def status(word: str) -> float:
    """MiB of a line of ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(word)) / 1024


def measure(arm: str, prompt: int, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """The figures of one arm, in this process."""
    from specdiff import SpecDiff, load_drafter, load_target

    torch.set_num_threads(args.threads)
    model, _ = load_target(args.target)
    if arm == "generate":
        run: Any = model.generate
    elif arm == "speculative":
        run = SpecDiff(model, load_drafter(args.drafter, target=model)).generate
    else:
        run = SpecDiff(model, fast="on" if arm == "fast" else "off").generate
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 20000, (batch, prompt), generator=generator)
    call: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    run(ids[:, :16], max_new_tokens=4, **call)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or memory freed while loading hides what the call takes
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    before = status("VmRSS")
    run(ids, max_new_tokens=args.new_tokens, **call)
    memory = status("VmHWM") - before
    seconds = []
    for _ in range(args.repeats):
        began = time.perf_counter()
        run(ids, max_new_tokens=1, **call)
        seconds.append(time.perf_counter() - began)
    return {"peak_mib": memory, "first_token_s": statistics.median(seconds), "held_mib": before}


def show(title: str, what: str, form: str, rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table(title=title)
    for name in ("batch", "prompt", *ARMS):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(str(row["batch"]), str(row["prompt"]), *(format(row[arm][what], form) for arm in ARMS))
    Console().print(table)


def main() -> None:
    """Run every arm in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the offline model")
    parser.add_argument("--drafter", help="default: the offline model's own")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048], help="prompt lengths")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--one", nargs=3, metavar=("ARM", "PROMPT", "BATCH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), int(args.one[2]), args)))
        return
    rows = []
    for batch in args.batch:
        for prompt in args.prompts:
            found = {}
            for arm in ARMS:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", arm, str(prompt), str(batch)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                found[arm] = json.loads(done.stdout.splitlines()[-1])
            rows.append({"batch": batch, "prompt": prompt, **found})
    show("peak memory above the start, MiB", "peak_mib", ".0f", rows)
    show("time to the first token, s", "first_token_s", ".2f", rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
