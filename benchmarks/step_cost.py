"""What a pass over several inputs costs: stock forward, specdiff's general path and its fast path, one command.

    python benchmarks/step_cost.py [--target MODEL] [--context 200] [--repeats 15] [--threads N]

Paths are interleaved, so that a slow moment of the machine hits all of them; medians are shown. The stock pass is the
model's own forward over its ``DynamicCache``, cropped back after each pass.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from specdiff import load_target
from specdiff.fast.target import FastTarget
from specdiff.target import Target

INPUTS = (1, 2, 4, 8, 9, 12, 16, 17, 24)


def stock_pass(model: PreTrainedModel, ids: torch.Tensor, context: int) -> Callable[[int], None]:
    """The model's own cached forward, with all logits."""
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=ids[:, :context], use_cache=True, logits_to_keep=1, **{name: cache})

    def run(size: int) -> None:
        model(input_ids=ids[:, context : context + size], use_cache=True, **{name: cache})
        cache.crop(-size)

    return run


def target_pass(target: Target, ids: torch.Tensor, context: int) -> Callable[[int], None]:
    """A verify pass of one of specdiff's target paths, committing nothing."""
    state = target.open(1, context + max(INPUTS) + 1)
    state.forward(ids[:, :context], torch.tensor([context]), head="last")
    state.advance([context])
    return lambda size: state.forward(ids[:, context : context + size], torch.tensor([size])) and None


def measure(passes: dict[str, Callable[[int], None]], repeats: int) -> dict[str, dict[int, float]]:
    """Median seconds by path and number of inputs; one round of all is thrown away."""
    times: dict[str, dict[int, list[float]]] = {name: {size: [] for size in INPUTS} for name in passes}
    for turn in range(repeats + 1):
        for size in INPUTS:
            for name, run in passes.items():
                run(size)  # the same pass just before: caches hold what a running loop would find
                began = time.perf_counter()
                run(size)
                if turn:
                    times[name][size].append(time.perf_counter() - began)
    return {name: {n: statistics.median(found) for n, found in sizes.items()} for name, sizes in times.items()}


def cpu_name() -> str:
    """The processor's name, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id; default: the offline default model")
    parser.add_argument("--context", type=int, default=200, help="committed tokens before each pass")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch threads; default: as torch decides")
    parser.add_argument("--json", type=Path, help="also write the medians (seconds) to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, _ = load_target(args.target, dtype=torch.float32)
    began = time.perf_counter()
    fast = FastTarget(model)
    packing = time.perf_counter() - began
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, args.context + max(INPUTS)), generator=generator)
    with torch.no_grad():
        passes = {
            "stock": stock_pass(model, ids, args.context),
            "general": target_pass(Target(model), ids, args.context),
            "fast": target_pass(fast, ids, args.context),
        }
        found = measure(passes, args.repeats)
    table = Table(title=f"milliseconds per pass behind {args.context} tokens, medians of {args.repeats}")
    for column in ("inputs", *passes, "stock / fast", "fast, relative to 1"):
        table.add_column(column, justify="right")
    for size in INPUTS:
        milliseconds = [f"{found[name][size] * 1e3:.1f}" for name in passes]
        gain, growth = found["stock"][size] / found["fast"][size], found["fast"][size] / found["fast"][1]
        table.add_row(str(size), *milliseconds, f"{gain:.2f}", f"{growth:.2f}")
    console = Console()
    console.print(f"{cpu_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    console.print(f"torch {torch.__version__}, transformers {transformers.__version__}; packed in {packing:.1f} s")
    console.print(f"kernels of the fast path: {fast.packed().kernels}")
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
