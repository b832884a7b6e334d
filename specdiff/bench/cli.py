"""``specdiff bench``: is it faster here, by how much, and why."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specdiff.arguments import at_least
from specdiff.cli.common import add_pair_arguments, load_pair
from specdiff.errors import InvalidInputError
from specdiff.report.progress import teller

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--prompts", metavar="FILE", help="JSON Lines file (turns or prompt, id, set); default: built-in set"
    )
    group.add_argument(
        "--prompts-per-set", type=at_least(1), metavar="N", help="at most N prompts of each set; default: all"
    )
    group.add_argument("--max-new-tokens", type=at_least(2), default=128, metavar="N", help="default: %(default)s")
    group.add_argument("--batch-size", type=at_least(1), default=1, metavar="B", help="prompts per call; default: 1")
    group.add_argument("--temperature", type=at_least(0, float), default=0.0, metavar="T", help="default: 0, greedy")
    group.add_argument("--sampling", action="store_true", help="also report tau at temperature .7 and 1")
    group.add_argument("--rule", choices=("auto", "token", "block", "coupled"), default="auto", help="when sampling")
    group.add_argument("--seed", type=at_least(0), default=0, help="default: 0")
    group.add_argument("--raw", action="store_true", help="give prompts as they are, without the chat template")
    group.add_argument(
        "--loops-filtered",
        action="store_true",
        help="judge by prompts whose text is no loop (both are reported anyway)",
    )
    group.add_argument(
        "--efficiency", action="store_true", help="also measure what the engine loses, by replayed texts"
    )
    group.add_argument(
        "--context", type=at_least(1), default=192, metavar="N", help="tokens before the passes of the cost curve"
    )
    peers = parser.add_argument_group("other runners, interleaved on the same prompts")
    peers.add_argument("--peers", action="store_true", help="run those that are installed; the others are named")
    peers.add_argument("--peer-drafter", metavar="FOLDER", help="a drafter exported for transformers' DFlash decoding")
    peers.add_argument("--peer-dflash", metavar="FOLDER", help="a drafter in the layout of the dflash package")
    peers.add_argument("--peer-gguf", metavar="FILE", help="the target as a GGUF file, for llama.cpp")
    out = parser.add_argument_group("report")
    out.add_argument(
        "--json", metavar="FILE", help="write everything as JSON ('-': to standard output, instead of tables)"
    )
    out.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    out.add_argument("--texts", action="store_true", help="keep the texts in the JSON")
    out.add_argument("--from-json", metavar="FILE", help="measure nothing, show an earlier --json again")
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 when greedy texts are not those of transformers."""
    for name in ("json", "html"):
        _check_writable(getattr(args, name), f"--{name}")
    report = _earlier(args.from_json) if args.from_json else _measured(args)
    if args.json == "-":
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        from specdiff.report.terminal import print_report

        print_report(report)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if args.html:
        from specdiff.report.html import html_page

        Path(args.html).write_text(html_page(report), encoding="utf-8")
    equality = report["equality"]
    return 0 if equality is None or all(found["passed"] for found in equality.values()) else FAILED


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    from specdiff.bench.prompts import load_prompts

    prompts = load_prompts(
        args.prompts, per_set=args.prompts_per_set
    )  # before the model: a typo should not take a minute
    if not args.peers and (args.peer_drafter or args.peer_dflash or args.peer_gguf):
        raise InvalidInputError("--peer-drafter, --peer-dflash and --peer-gguf belong to --peers")
    if args.batch_size > 1 and args.efficiency:
        raise InvalidInputError("--efficiency measures single prompts; leave out --batch-size")
    from specdiff.bench.peers import PeerFiles
    from specdiff.bench.run import BenchOptions, run_bench
    from specdiff.cli.env import collect

    pair = load_pair(args)
    options = BenchOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        sampling=args.sampling,
        rule=args.rule,
        batch_size=args.batch_size,
        seed=args.seed,
        loops_filtered=args.loops_filtered,
        efficiency=args.efficiency,
        raw=args.raw,
        context=args.context,
        texts=args.texts,
        peers=PeerFiles(args.peer_drafter, args.peer_dflash, args.peer_gguf) if args.peers else None,
    )
    environment = {section: values for section, values in collect().items() if section != "files"}
    names = {"target": args.target or "SmolLM2-135M-Instruct (offline default)", "drafter": pair.name}
    names = {key: Path(value).name if Path(value).is_dir() else value for key, value in names.items()}
    return run_bench(
        pair.wrapped, pair.tokenizer, prompts, options, names=names, environment=environment, tell=teller()
    )


def _earlier(path: str) -> dict[str, Any]:
    from specdiff.bench.run import SCHEMA

    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--from-json: cannot read {path}: {error}") from error
    if not isinstance(report, dict) or report.get("specdiff_bench") != SCHEMA:
        raise InvalidInputError(f"--from-json: {path} is no report of this version of specdiff bench")
    return report


def _check_writable(path: str | None, option: str) -> None:
    if path and path != "-" and not Path(path).resolve().parent.is_dir():
        raise InvalidInputError(f"{option}: the folder of {path} does not exist")
