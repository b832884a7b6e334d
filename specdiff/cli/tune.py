"""``specdiff tune``: measure what passes cost here, and what block lengths follow from that."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from specdiff.arguments import at_least
from specdiff.cli import codes
from specdiff.cli.common import add_pair_arguments, load_pair
from specdiff.errors import InvalidInputError

if TYPE_CHECKING:
    from specdiff.tuning.curve import CostCurve

CHANCES = (0.3, 0.5, 0.7, 0.8, 0.9)
"""Acceptance of a position whose predecessors were accepted, for the table of best lengths."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "--batch-size", type=at_least(1), action="append", metavar="B", help="rows per call; may be given again"
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of tables")
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure anew, keep the result for later calls, print it."""
    if args.drafter == "none":
        raise InvalidInputError("plain decoding has no block length to tune; leave out --drafter none")
    if args.block_size:
        raise InvalidInputError("--block-size fixes the length that tune is there to find; leave it out")
    from specdiff.tuning.measure import Judge
    from specdiff.tuning.store import folder, forget, measure_anew, pair_name
    from specdiff.warp import BlockWarp

    pair = load_pair(args)
    forget(pair.wrapped)
    found: dict[str, CostCurve] = {}
    for rows in args.batch_size or [1]:
        for rule, words in (("greedy", "greedy"), ("block", "sampling")):
            target, _ = pair.wrapped.target_for(512)
            curve = measure_anew(pair.wrapped, target, rows, Judge(rule, BlockWarp(None)))
            near = "" if curve.batch_size == rows else f", measured with {curve.batch_size}"
            found[f"{words}, batch {rows}{near}"] = curve
    if args.json:
        print(json.dumps({name: curve.to_dict() | {"best": best(curve)} for name, curve in found.items()}, indent=1))
        return codes.OK
    for name, curve in found.items():
        _show(f"{name}, {curve.path} path, behind {curve.context} tokens", curve)
    if pair_name(pair.wrapped) is None:
        print("kept for this process only: the drafter does not say what its cost depends on (cost_key)")
    else:
        print(f"kept in {folder()}; other filters and batch sizes are measured when they first come up")
    return codes.OK


def best(curve: CostCurve) -> list[dict[str, Any]]:
    """For constant chances of acceptance: the length with the most tokens per second, and the gain it brings."""
    rising, rows = curve.rising(), []
    for chance in CHANCES:
        speeds = [1.0]
        for length in range(1, curve.block_size + 1):
            tokens = sum(chance**at for at in range(length + 1))
            seconds = rising.target_at(length + 1) + rising.drafter_at(length)
            speeds.append(tokens * rising.target_at(1) / seconds)
        length = max(range(len(speeds)), key=speeds.__getitem__)
        rows.append({"chance": chance, "length": length, "speed_up": speeds[length]})
    return rows


def _show(title: str, curve: CostCurve) -> None:
    from rich.console import Console
    from rich.table import Table

    one = curve.target_at(1)
    costs = Table(title=title)
    for column in ("drafted", "target pass (ms)", "relative", "draft (ms)", "relative", "tau to break even"):
        costs.add_column(column, justify="right")
    for inputs in sorted(curve.target):
        drafted, target = inputs - 1, curve.target[inputs]
        draft = curve.drafter_at(drafted)
        costs.add_row(
            str(drafted), f"{target * 1e3:.1f}", f"{target / one:.2f}", f"{draft * 1e3:.1f}", f"{draft / one:.2f}",
            f"{(target + draft) / one:.2f}",
        )  # fmt: skip
    lengths = Table(title="length that pays most, by the chance that a position is kept")
    for column in ("chance", "drafted", "times plain"):
        lengths.add_column(column, justify="right")
    for row in best(curve):
        lengths.add_row(f"{row['chance']:.1f}", str(row["length"]), f"{row['speed_up']:.2f}")
    console = Console()
    console.print(costs)
    console.print(f"keeping the drafter's context without drafting: {curve.warm * 1e3:.2f} ms a token; "
                  f"a prompt token: {curve.prefill * 1e3:.2f} ms")  # fmt: skip
    console.print(lengths)
