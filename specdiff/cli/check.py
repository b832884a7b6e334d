"""``specdiff check MODEL``: can this model be served, and if not why. Loads no weights unless asked to try it out."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from specdiff.cli import codes
from specdiff.cli.common import add_pair_arguments, load_pair, one_target, quiet_libraries, target_options
from specdiff.compat import command as families
from specdiff.errors import UnsupportedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub id; default: the offline model")
    parser.add_argument(
        "--run", dest="try_out", action="store_true", help="load it and compare a short greedy text with generate's own"
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_pair_arguments(parser)
    families.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check."""
    if args.every:
        quiet_libraries()
        return families.run_all(args)
    args.target = one_target(args)
    report = inspect_model(args)
    if report["served"] and args.try_out:
        report["run"] = _try(args)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if not report["served"]:
        return codes.UNSUPPORTED
    return codes.OK if report.get("run", {}).get("equal", True) else codes.FAILED


def inspect_model(args: argparse.Namespace) -> dict[str, Any]:
    """Build the model without memory for its weights and wrap it, which is where refusals are made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from specdiff import SpecDiff
    from specdiff.compat.probing import probe_configuration
    from specdiff.hub import ensure_default

    quiet_libraries()
    name = args.target if args.target is not None else ensure_default()
    options = target_options(args)
    options.pop("dtype", None)
    remote = {"trust_remote_code": True} if options.pop("trust_remote_code", False) else {}
    config = AutoConfig.from_pretrained(name, **options, **remote)
    report: dict[str, Any] = {"model": str(name), "type": config.model_type, "served": False}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **remote)
    except ValueError as error:
        report["why"] = f"transformers has no causal LM for it: {str(error).splitlines()[0]}"
        return report
    report["class"] = type(model).__name__
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    report["cache"] = dict(Counter(_layers(config)))
    try:
        SpecDiff(model, None)
    except UnsupportedError as error:
        report["why"] = str(error)
        return report
    serving, why = probe_configuration(config)
    if why is not None:
        report["why"] = why
        return report
    if serving is not None:
        report["serving"] = serving.words
        report["note"] = serving.note
    report["served"] = True
    return report


def _layers(config: Any) -> list[str]:
    """Class names of the cache layers that transformers itself would make for the model."""
    from transformers.cache_utils import DynamicCache

    try:
        return [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    except (KeyError, AttributeError, TypeError, ValueError):  # a cache of its own; the refusal says what it means
        return []


def _try(args: argparse.Namespace) -> dict[str, Any]:
    """A short greedy text through specdiff and through the model's own generate."""
    from specdiff.bench.greedy import greedy_check
    from specdiff.cli.common import encode

    pair = load_pair(args)
    prompts = [encode(pair.tokenizer, text)[0] for text in ("Name three colours.", "What is 17 plus 25?")]
    result = greedy_check(
        pair.model,
        pair.drafter,
        prompts,
        max_new_tokens=24,
        batch_sizes=(1, 2),
        block_size=args.block_size,
        fast=args.fast,
    )
    tokens = sum(run.tokens for run in result.runs)
    return {"equal": result.passed, "tokens": tokens, "drafter": pair.name, "details": result.to_dict()}


def _print(report: dict[str, Any]) -> None:
    print(f"{report['model']}: {report.get('class', report['type'])}", end="")
    print(f", {report['parameters'] / 1e6:.0f}M parameters" if "parameters" in report else "")
    if report.get("cache"):
        print("cache: " + ", ".join(f"{count} x {kind}" for kind, count in report["cache"].items()))
    how = f", {report['serving']}" if report.get("serving") else ""
    how += f"; {report['note']}" if report.get("note") else ""
    print(f"can be served{how}" if report["served"] else f"cannot be served: {report['why']}")
    if "run" in report:
        outcome = report["run"]
        word = "equal to" if outcome["equal"] else "NOT equal to"
        print(f"tried with drafter {outcome['drafter']}: {outcome['tokens']} greedy tokens {word} generate's own")
