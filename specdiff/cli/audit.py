"""``specdiff audit``: is anything lost? On paper (exact enumeration), then on your own pair of models."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from specdiff.arguments import at_least
from specdiff.cli import codes
from specdiff.cli.common import add_pair_arguments, encode, inside, load_pair

RULES = ("token", "block", "coupled")
PROMPT = "Tell me something about the sea."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("--prompts", metavar="FILE", help="JSON Lines file with prompts for the greedy check")
    parser.add_argument("--per-set", type=at_least(1), default=2, metavar="N", help="prompts of each set; default: 2")
    parser.add_argument(
        "--max-new-tokens", type=at_least(2), default=64, metavar="N", help="greedy; default: %(default)s"
    )
    parser.add_argument("--batch-sizes", type=at_least(1), nargs="+", default=[1, 4], metavar="B", help="default: 1 4")
    parser.add_argument(
        "--draws", type=at_least(100), default=2000, metavar="N", help="samples per rule; default: 2000"
    )
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="sampling rules; default: all")
    parser.add_argument("--temperature", type=at_least(0, float, above=True), default=1.0, help="default: %(default)s")
    parser.add_argument("--top-k", type=at_least(2), default=3, help="keeps the law small enough to list; default: 3")
    parser.add_argument(
        "--level", type=inside, default=0.01, help="risk of a false alarm per rule; default: %(default)s"
    )
    parser.add_argument("--power", type=inside, default=0.9, help="for the statement of power; default: %(default)s")
    parser.add_argument("--seed", type=at_least(0), default=0, help="default: %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=("enumeration", "greedy", "sampling"), help="run these parts; default: all"
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the parts; the exit code is 1 when any of them fails."""
    parts = args.only or ["enumeration", "greedy", "sampling"]
    report: dict[str, Any] = {}
    show = not args.json
    if "enumeration" in parts:
        report["enumeration"] = _enumeration(show)
    pair = load_pair(args) if set(parts) - {"enumeration"} else None
    if "greedy" in parts:
        report["greedy"] = _greedy(args, pair, show)
    if "sampling" in parts:
        report["sampling"] = _sampling(args, pair, show)
    report["passed"] = _passed(report)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"\naudit {'passed' if report['passed'] else 'FAILED'}")
    return codes.OK if report["passed"] else codes.FAILED


def _passed(report: dict[str, Any]) -> bool:
    rows = report.get("enumeration", [])
    rules = report.get("sampling", [])
    greedy = report.get("greedy", {"passed": True})
    return all(row["ok"] for row in rows) and greedy["passed"] and all(rule["passed"] for rule in rules)


def _enumeration(show: bool) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from specdiff.verify.audit import BIASED, EXACT, run_enumeration

    rows = run_enumeration()
    if show:
        print("Enumeration: every rule and law over two chained rounds, total variation from the target's law")
        print(f"  (exact is below {EXACT:g}; a biased method must show more than {BIASED:g})")
        for row in rows:
            word = "ok" if row.ok else "FAILED"
            kind = "biased" if row.biased else "exact"
            print(f"  {word:<7} {row.rule:<8} {row.name:<44} {row.total_variation:.1e} ({kind})")
        sys.stdout.flush()
    return [asdict(row) for row in rows]


def _greedy(args: argparse.Namespace, pair: Any, show: bool) -> dict[str, Any]:
    from specdiff.bench.greedy import greedy_check
    from specdiff.bench.prompts import load_prompts
    from specdiff.report.progress import teller

    chosen = load_prompts(args.prompts, per_set=args.per_set)
    result = greedy_check(
        pair.model,
        pair.drafter,
        [encode(pair.tokenizer, prompt.text)[0] for prompt in chosen],
        names=[prompt.id for prompt in chosen],
        max_new_tokens=args.max_new_tokens,
        batch_sizes=tuple(args.batch_sizes),
        block_size=args.block_size,
        fast=args.fast,
        progress=teller(),
    )
    if show:
        print(f"\nGreedy: {len(chosen)} prompts, {args.max_new_tokens} new tokens, against transformers' own generate")
        for one in result.runs:
            word = "ok" if one.passed else "FAILED"
            tau = "" if one.tau is None else f", tau {one.tau:.2f}"
            ties = f"{len(one.mismatches)} texts differ (near-ties allowed: {one.allowed})"
            print(f"  {word:<7} batch {one.batch_size}: {one.tokens} tokens in {one.rounds} rounds{tau}; {ties}")
            for found in one.mismatches:
                kind = "near-tie" if found.near_tie else "FAULT"
                print(f"          {found.prompt}: token {found.position}, margin {found.margin:.1e}: {kind}")
        sys.stdout.flush()
    return result.to_dict()


def _sampling(args: argparse.Namespace, pair: Any, show: bool) -> list[dict[str, Any]]:
    from specdiff.bench.law import chi_square_check, exact_law
    from specdiff.report.progress import teller

    prompt = encode(pair.tokenizer, PROMPT)[0]
    block = min(2, pair.wrapped.block_size)
    tokens = max(4, block + 3)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k}
    law = exact_law(pair.model, prompt, tokens, **sampling)
    if show:
        print(f"\nSampling: {len(law)} possible texts of {tokens} tokens, listed by direct passes of the stock model")
    reports = []
    for rule in args.rules:
        result = chi_square_check(
            pair.model,
            pair.drafter,
            prompt,
            rule=rule,
            tokens=tokens,
            draws=args.draws,
            seed=args.seed,
            block_size=block or 1,
            level=args.level,
            power=args.power,
            fast=args.fast,
            law=law,
            progress=teller(),
            temperature=args.temperature,
            top_k=args.top_k,
        )
        reports.append(result.to_dict())
        if show:
            _show_law(result)
    return reports


def _show_law(result: Any) -> None:
    word = "ok" if result.passed else "FAILED"
    worst = min(result.tests, key=lambda test: test.p_value)
    tau = "-" if result.tau is None else f"{result.tau:.2f}"
    first, last = result.rounds
    print(
        f"  {word:<7} {result.rule:<8} {result.draws} draws over {first} to {last} rounds, tau {tau}; "
        f"joint p {result.joint.p_value:.3f}, smallest of {len(result.tests)} p {worst.p_value:.3f} ({worst.name}), "
        f"failing below {result.alpha:.4f}"
    )
    if result.detectable is not None:
        print(
            f"          power: a bias of {result.detectable:.3f} total variation or more would be found "
            f"with probability {result.power:g}; a right sampler fails with probability {result.level:g}"
        )
    for note in result.notes:
        print(f"          note: {note}")
    sys.stdout.flush()
