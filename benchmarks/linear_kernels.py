"""Which kernel multiplies few rows fastest here: every matrix of a decoder layer, and all products of a pass.

    python benchmarks/linear_kernels.py [--target MODEL] [--rows 1 4 9 17 24] [--repeats 15] [--threads N]

Weights are those of the model, a copy per layer, so that none is in the cache when its turn comes. Kernels are
interleaved; shown are medians. ``specdiff/fast/linear.py`` chooses among them when a shape is first packed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from step_cost import cpu_name
from torch import Tensor
from transformers import PreTrainedModel

from specdiff import load_target
from specdiff.fast.linear import PackedLinear, half_exponent, pack
from specdiff.fast.recognise import recognise

KERNELS = ("plain", "onednn", "half")


def matrices(model: PreTrainedModel) -> dict[str, list[Tensor]]:
    """The weights of a pass by name, those that run as one product joined."""
    parts = recognise(model)
    layers = parts.layers
    return {
        "q, k, v": [torch.cat([x.q.weight, x.k.weight, x.v.weight]).detach() for x in layers],
        "out": [x.o.weight.detach() for x in layers],
        "gate, up": [torch.cat([x.gate.weight, x.up.weight]).detach() for x in layers],
        "down": [x.down.weight.detach() for x in layers],
        "head": [parts.head.weight.detach()],
    }


def seconds(linears: Sequence[PackedLinear], x: Tensor) -> float:
    """Of one product each."""
    began = time.perf_counter()
    for linear in linears:
        linear(x)
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub id; default: the offline default model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 9, 17, 24])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch threads; default: as torch decides")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, _ = load_target(args.target, dtype=torch.float32)
    weights = matrices(model)
    packed: dict[str, dict[str, list[PackedLinear]]] = {}
    for kernel in KERNELS:
        if kernel == "half" and any(half_exponent(w) is None for group in weights.values() for w in group):
            continue  # these weights do not fit float16 exactly
        packed[kernel] = {name: [pack(w, kernel=kernel) for w in group] for name, group in weights.items()}
    found: dict[tuple[str, str, int], list[float]] = {}
    for rows in args.rows:
        inputs = {name: torch.randn(rows, group[0].shape[1]) for name, group in weights.items()}
        for repeat in range(args.repeats + 1):
            for kernel, by_name in packed.items():
                for name, group in by_name.items():
                    spent = seconds(group, inputs[name])
                    if repeat:
                        found.setdefault((kernel, name, rows), []).append(spent)
    console = Console()
    console.print(f"{cpu_name()}, {torch.get_num_threads()} threads; torch {torch.__version__}")
    table = Table(title=f"microseconds per product, medians of {args.repeats}; all of a pass in milliseconds")
    for column in ("matrix", "kernel", *(f"{rows} row{'s' * (rows > 1)}" for rows in args.rows)):
        table.add_column(column, justify="left" if column in ("matrix", "kernel") else "right")
    middle = {key: statistics.median(times) for key, times in found.items()}
    for name, group in weights.items():
        shape = f"{name} {group[0].shape[0]} x {group[0].shape[1]}"
        for kernel in packed:
            cells = [f"{middle[kernel, name, rows] / len(group) * 1e6:.0f}" for rows in args.rows]
            table.add_row(shape if kernel == KERNELS[0] else "", kernel, *cells)
    for kernel in packed:
        cells = [f"{sum(middle[kernel, name, rows] for name in weights) * 1e3:.1f}" for rows in args.rows]
        table.add_row("all of a pass" if kernel == KERNELS[0] else "", kernel, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
