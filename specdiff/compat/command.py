"""``specdiff check --all``: run every architecture and write the table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdiff.compat.family import FamilyResult

PAGE = Path("docs/compatibility.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``--all``."""
    group = parser.add_argument_group("every architecture")
    group.add_argument(
        "--all", dest="every", action="store_true", help="run tiny random models of every causal LM of transformers"
    )
    group.add_argument(
        "--mode", choices=("full", "reduced", "quick"), default="full", help="full: 48 runs each; reduced: 12; quick: 4"
    )
    group.add_argument("--reduced", dest="mode", action="store_const", const="reduced", help="same as --mode reduced")
    group.add_argument("--only", nargs="+", metavar="TYPE", help="these model types; the table is not written then")
    group.add_argument("--again", action="store_true", help="run also what the log already holds")
    group.add_argument("--log", type=Path, help="JSONL log to resume from (default: in specdiff's cache folder)")
    group.add_argument("--output", type=Path, default=PAGE, help=f"where the table goes (default: {PAGE})")
    group.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="per architecture")


def run_all(args: argparse.Namespace) -> int:
    """Run, print one line per architecture, write the table.

    Returns:
        0 when no architecture gave wrong text or failed, else 1.
    """
    from specdiff.compat.runner import run_families
    from specdiff.compat.table import render
    from specdiff.hub.store import cache_folder

    log = args.log if args.log is not None else cache_folder() / "families.jsonl"
    report = None if args.json else _line
    results = run_families(log, names=args.only, mode=args.mode, again=args.again, time_limit=args.limit, report=report)
    counts = Counter(result.status for result in results)
    if args.json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    if args.only is None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(render(results, package_versions(), mode=args.mode), encoding="utf-8")
    if not args.json:
        print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
        if args.only is None:
            print(f"table written to {args.output}; log: {log}")
    return 1 if counts["wrong"] or counts["failed"] else 0


def package_versions() -> dict[str, str]:
    """What the table was made with."""
    return {name: importlib.metadata.version(name) for name in ("specdiff", "transformers", "torch")}


def _line(result: FamilyResult, done: int, total: int) -> None:
    served = result.serving + (", token by token" if result.stepwise else "")
    words = [f"[{done}/{total}]", result.model_type, result.status, f"({served})" if served else "", result.why[:160]]
    print(" ".join(word for word in words if word), flush=True)
