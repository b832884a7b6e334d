"""Time of verification and draft sampling: torch twin against Triton kernels, and bytes moved over the floor.

    python benchmarks/verify_kernels.py                        # CPU: the torch twins; GPU: both
    python benchmarks/verify_kernels.py --vocab 151936 --batch 1 8 --block 8 16 --json out.json

The floor is the time to read the target's and the drafter's logits once, at the memory bandwidth that the same run
measures. Times are medians; on a busy machine look at --best instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from specdiff.verify import RULES, Delta, Noise, Proposal, Purpose, Sampled, Verdict, race, row_seeds
from specdiff.verify.kernels import available, fused_sample, fused_verify
from specdiff.verify.kernels.twin import twin_sample, twin_verify


def seconds(call: Callable[[], object], device: torch.device, repeats: int, best: bool = False) -> float:
    """Median (or shortest) wall time of a call, in seconds, after two calls to warm up."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once(), once()
    times = [once() for _ in range(repeats)]
    return min(times) if best else statistics.median(times)


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading a large array (a sum over 256 MiB)."""
    data = torch.ones(64 * 2**20, dtype=torch.float32, device=device)
    return data.nbytes / seconds(data.sum, device, 9, best=True)


def make_case(
    batch: int, block: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Proposal, Proposal, Noise]:
    """Target logits, a Sampled and a Delta proposal from a drafter near the target, and noise."""
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.randn(batch, block + 1, vocab, generator=generator, device=device) * 3
    logits = scores[:, :-1] + torch.randn(batch, block, vocab, generator=generator, device=device)
    noise = Noise(row_seeds(0, batch, device))
    drawn = noise.round(torch.zeros(batch, dtype=torch.long, device=device))
    tokens = race(logits.softmax(-1), drawn.exponential(Purpose.DRAFT, block, torch.arange(vocab, device=device)))
    lengths = torch.full((batch,), block, device=device)
    sampled = Proposal(tokens, lengths, Sampled(), logits.to(dtype))
    return scores.to(dtype), sampled, Proposal(tokens, lengths, Delta()), noise


def measure(batch: int, block: int, vocab: int, options: argparse.Namespace, rate: float) -> list[dict[str, object]]:
    """One row per operation of a shape."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    scores, sampled, delta, noise = make_case(batch, block, vocab, dtype, device)
    now = noise.round(torch.full((batch,), 7, device=device))
    kernels = device.type == "cuda" and available()
    assert sampled.logits is not None
    calls: list[tuple[str, int, Callable[[], object], Callable[[], object]]] = []
    for rule in RULES:
        for proposal in (sampled, delta) if rule in ("token", "block") else (delta,):
            read = scores.nbytes + (proposal.logits.nbytes if proposal.logits is not None else 0)
            arguments = (rule, scores, proposal, now, 0.7)
            name = f"verify {rule} {proposal.law!r}"
            calls.append((name, read, partial(twin_verify, *arguments), partial(fused_verify, *arguments)))
    draw = (sampled.logits, now, Purpose.DRAFT, 0.7)
    calls.append(("sample draft", sampled.logits.nbytes, partial(twin_sample, *draw), partial(fused_sample, *draw)))
    rows = []
    for name, read, twin, fused in calls:
        twin_time = seconds(twin, device, options.repeats, options.best)
        row: dict[str, object] = {
            "operation": name, "batch": batch, "block": block, "vocab": vocab, "bytes": read,
            "floor_ms": 1e3 * read / rate, "twin_ms": 1e3 * twin_time, "twin_over_floor": twin_time * rate / read,
            "kernel_ms": None, "kernel_over_floor": None,
        }  # fmt: skip
        if kernels:
            agree(name, twin(), fused())
            fused_time = seconds(fused, device, options.repeats, options.best)
            row["kernel_ms"], row["kernel_over_floor"] = 1e3 * fused_time, fused_time * rate / read
        rows.append(row)
    return rows


def agree(name: str, twin: object, fused: object) -> None:
    """Stop if a kernel decided otherwise than its twin."""

    def decided(result: object) -> list[torch.Tensor]:
        if isinstance(result, Verdict):
            return [result.accepted, result.next_token, result.bad]
        assert isinstance(result, tuple)
        return list(result)

    if not all(torch.equal(a, b) for a, b in zip(decided(twin), decided(fused), strict=True)):
        raise SystemExit(f"{name}: kernel and twin disagree: {fused} against {twin}")


def main() -> None:
    """Parse the arguments, measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--block", type=int, nargs="+", default=[8])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--best", action="store_true", help="shortest time instead of the median")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    rate = bandwidth(device)

    console = Console(width=110)
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else f"{torch.cuda.device_count()} GPU"
    console.print(f"{machine}, torch {torch.__version__}, {threads}, {rate / 1e9:.1f} GB/s, {options.dtype}")
    table = Table(box=None, padding=(0, 1))
    for heading in ("operation", "B", "K", "V", "floor ms", "twin ms", "x floor", "kernel ms", "x floor"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    rows = []
    for vocab in options.vocab:
        for block in options.block:
            for batch in options.batch:
                for row in measure(batch, block, vocab, options, rate):
                    rows.append(row)
                    cells = [
                        row[key] for key in ("floor_ms", "twin_ms", "twin_over_floor", "kernel_ms", "kernel_over_floor")
                    ]
                    shown = ["-" if c is None else f"{c:.2f}" for c in cells]
                    table.add_row(str(row["operation"]), str(batch), str(block), str(vocab), *shown)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "bandwidth": rate, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
