"""Arguments of ``specdiff train``, and how its progress is shown."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

from specdiff.arguments import at_least, fraction
from specdiff.drafters.train.build import Shape, continued
from specdiff.drafters.train.dual import cli as dual
from specdiff.drafters.train.loop import TrainConfig
from specdiff.drafters.train.pipeline import Outcome, Plan
from specdiff.drafters.train.regenerate import Recipe, is_prompt_file
from specdiff.drafters.train.step import LossConfig
from specdiff.errors import InvalidInputError

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, dict[str, float]] = {
    "dflash": {"rows": 8, "anchors": 64, "lr": 6e-4, "gamma": 2.5, "hard": 0.2, "average": 0.99},
    "dual": {"rows": 1, "anchors": 40, "lr": 2e-3, "gamma": 4.0, "hard": 0.3, "average": 0.98},
}
"""Options that both kinds have, with a default of their own."""
ONLY = {
    "dflash": (
        "start", "plain", "block_size", "layers", "taps", "vocabulary", "init", "correction", "markov_rank",
        "weighting", "distance", "serve_prompts",
    ),
    "dual": (
        "rank", "alpha", "block_sizes", "wsd", "drafting", "mask_ratios", "mask_level", "no_complement", "length",
        "no_packing", "annealing", "inverse_t", "confidence_term",
    ),
}  # fmt: skip
"""Options of one kind alone."""
WRITING: dict[str, float] = {
    "chats": 2000, "own_share": 0.5, "quote_share": 0.0, "prompt_tokens": 512, "new_tokens": 320
}  # fmt: skip
"""Options of text that is written first, with their defaults."""


POSITIVE = at_least(0.0, float, above=True)
"""An argparse type."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options; defaults are those of :class:`Plan` and its parts."""
    usual = Shape()
    parser.add_argument(
        "--data", action="append", required=True, metavar="PATH",
        help="corpus shards (.npz, a folder, a pattern) or a .jsonl of prompts to answer first; may be given often",
    )  # fmt: skip
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="run folder; the result is DIR/drafter or DIR/adapter"
    )
    parser.add_argument("--fresh", action="store_true", help="do not continue an earlier run of DIR")
    budget = parser.add_argument_group("budget (at least one)")
    budget.add_argument("--max-hours", type=POSITIVE, metavar="H", help="of training; the schedule ends there")
    budget.add_argument("--max-steps", type=at_least(1), metavar="N")
    data = parser.add_argument_group("data")
    data.add_argument("--chats", type=at_least(1), help="chats to generate (default 2000)")
    data.add_argument("--own-share", type=fraction, help="share whose prompt the target writes itself (default .5)")
    data.add_argument(
        "--quote-share", type=fraction,
        help="share whose prompts quote earlier answers: summaries, questions, translations (default 0)",
    )  # fmt: skip
    data.add_argument("--prompt-tokens", type=at_least(1), help="longest prompt (default 512)")
    data.add_argument("--new-tokens", type=at_least(2), help="longest response (default 320)")
    data.add_argument("--held-out", type=fraction, default=0.04, help="share kept for evaluation (default %(default)s)")
    data.add_argument(
        "--exclude", action="append", default=[], metavar="FILE",
        help="leave out text that shares 13 tokens in a row with these prompts (.jsonl); may be given often",
    )  # fmt: skip
    shape = parser.add_argument_group("drafter")
    shape.add_argument(
        "--from", dest="start", metavar="DRAFTER",
        help="train this drafter further (a folder, a zoo name); of the options below only --block-size goes with it",
    )  # fmt: skip
    shape.add_argument(
        "--plain", action="store_true", default=None, help="plain z-lab DFlash layout (can be exported everywhere)"
    )
    shape.add_argument("--block-size", type=at_least(1), metavar="K", help=f"drafted (default {usual.block_size})")
    shape.add_argument("--layers", type=at_least(1), help=f"draft layers (default {usual.layers})")
    shape.add_argument("--taps", type=_ids, metavar="I,J,...", help="target layers to read")
    shape.add_argument("--vocabulary", type=at_least(0), help=f"draft ids, 0: all (default {usual.vocabulary})")
    shape.add_argument("--init", choices=("target", "random"), help=f"starting weights (default {usual.init})")
    shape.add_argument("--correction", type=at_least(0), metavar="WIDTH", help="gated correction head")
    shape.add_argument("--markov-rank", type=at_least(0), metavar="R", help="low-rank Markov head")
    shape.add_argument("--mask-token-id", type=at_least(0), help="of a plain drafter or adapter; default: unused")
    loop = parser.add_argument_group("training")
    loop.add_argument("--rows", type=at_least(1), help="documents per step and process (default 8; dual: 1)")
    loop.add_argument("--anchors", type=at_least(1), help="random anchors per document (default 64; dual: 40 blocks)")
    loop.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    loop.add_argument("--lr", type=POSITIVE, help="peak rate (default 6e-4; dual: 2e-3)")
    loop.add_argument("--weighting", choices=("decay", "dpace"), default="decay", help="weights of the slots")
    loop.add_argument("--gamma", type=POSITIVE, help="decay exp(-(k-1)/gamma) (default 2.5; dual: 4)")
    loop.add_argument(
        "--distance", choices=("kl", "tv"), default="kl",
        help="to the target's law: KL, or total variation over its likeliest tokens and the rest (default %(default)s)",
    )  # fmt: skip
    loop.add_argument("--hard", type=fraction, help="share of cross-entropy beside it (default .2; dual: .3)")
    loop.add_argument("--average", type=fraction, help="decay of the weight average, 0: none (default .99; dual: .98)")
    loop.add_argument(
        "--evaluate-every",
        type=POSITIVE,
        default=5.0,
        metavar="MIN",
        help="between evaluations",
    )
    loop.add_argument("--evaluate-documents", type=at_least(0), default=48, metavar="N", help="default %(default)s")
    loop.add_argument(
        "--precision", choices=("auto", "bf16", "no"), default="auto", help="of the training pass; auto: what is faster"
    )
    loop.add_argument("--seed", type=int, default=0)
    loop.add_argument("--serve-prompts", type=at_least(0), default=8, help="held-out prompts decoded at the end")


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layer ids") from error


def settle(args: argparse.Namespace, kind: str) -> None:
    """Fill in the defaults of ``kind`` and refuse options that would change nothing.

    Raises:
        InvalidInputError: an option was given that ``kind`` does not have, or that nothing else given makes use of.
    """
    reference = argparse.ArgumentParser()
    add_arguments(reference)
    dual.add_arguments(reference)
    for other, names in ONLY.items():
        wrong = [n for n in names if other != kind and getattr(args, n) != reference.get_default(n)]
        if wrong:
            flags = ", ".join("--" + n.replace("_", "-") for n in wrong)
            raise InvalidInputError(f"{flags} belongs to --kind {other}, not to --kind {kind}")
    given = [name for name in WRITING if getattr(args, name) is not None]
    if given and not any(is_prompt_file(name) for name in args.data):
        flags = ", ".join("--" + n.replace("_", "-") for n in given)
        raise InvalidInputError(f"{flags}: for text that is written first, and --data names no .jsonl of prompts")
    if args.weighting == "dpace" and args.gamma is not None:
        raise InvalidInputError("--gamma is the decay of --weighting decay; --weighting dpace has none")
    for name, value in {**DEFAULTS[kind], **WRITING}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


SHAPE_OPTIONS = ("plain", "layers", "taps", "vocabulary", "init", "correction", "markov_rank", "mask_token_id")
"""Arguments that describe a new drafter; each is None unless it was given."""


def plan_of(args: argparse.Namespace, name: str, target: Any) -> Plan:
    """The run that the arguments describe, after :func:`settle`, for ``target``, which the card calls ``name``.

    Raises:
        InvalidInputError: a shape is given for a drafter that has one already.
    """
    given = {key: value for key in SHAPE_OPTIONS if (value := getattr(args, key)) is not None}
    if args.start is not None and given:
        options = ", ".join("--" + key.replace("_", "-") for key in given)
        raise InvalidInputError(f"--from keeps the drafter's own shape: leave out {options}")
    for key in ("correction", "markov_rank"):
        if args.plain and given.get(key):
            raise InvalidInputError(f"--plain is the plain layout, without --{key.replace('_', '-')}")
    if args.mask_token_id is not None and args.kind == "dflash" and not args.plain:
        raise InvalidInputError("--mask-token-id is for --plain drafters and --kind dual; others need no mask")
    if args.own_share + args.quote_share > 1:
        raise InvalidInputError("--own-share and --quote-share are shares of the same prompts: at most 1 together")
    if args.block_size is not None:
        given["block_size"] = args.block_size
    return Plan(
        data=args.data,
        folder=args.out,
        shape=Shape(**given),
        start=continued(args.start, target, args.block_size) if args.start is not None else None,
        start_name=args.start,
        config=TrainConfig(
            max_hours=args.max_hours,
            max_steps=args.max_steps,
            rows=args.rows,
            anchors=args.anchors,
            optimizer=args.optimizer,
            lr=args.lr,
            average=args.average,
            evaluate_every=args.evaluate_every,
            evaluate_documents=args.evaluate_documents,
            mixed_precision=args.precision,
            seed=args.seed,
            loss=LossConfig(args.weighting, args.gamma, args.hard, distance=args.distance),
        ),
        chats=args.chats,
        recipe=Recipe(
            own_share=args.own_share,
            quote_share=args.quote_share,
            max_new_tokens=args.new_tokens,
            max_prompt_tokens=args.prompt_tokens,
            seed=args.seed,
        ),
        held_out=args.held_out,
        exclude=args.exclude,
        served_prompts=args.serve_prompts,
        resume=not args.fresh,
        name=name,
        command=command_words(args),
    )


def command_words(args: argparse.Namespace) -> list[str]:
    """The command line that was given, without a secret; empty where there was none."""
    words = getattr(args, "words", [])
    return [word.replace(args.token, "TOKEN") if args.token else word for word in words]


class Display:
    """Progress bars with the time left on a terminal; elsewhere a line every half minute.

    Args:
        interval: seconds between lines.
        shown: False shows nothing (one of several processes speaks for all).
    """

    def __init__(self, interval: float = 30.0, shown: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr)
        self._live, self._shown = console.is_terminal and shown, shown
        columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
        self._tasks: dict[str, Any] = {}
        self._began: dict[str, tuple[float, float]] = {}
        self._told: dict[str, float] = {}
        self._interval = interval

    def __enter__(self) -> Display:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bars.stop()

    def __call__(self, stage: str, done: float, total: float | None, note: str) -> None:
        """Show where a stage is."""
        if not self._shown:
            return
        if self._live:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total, note=note)
            self._bars.update(self._tasks[stage], completed=done, total=total, note=note)
            return
        now = time.monotonic()
        began, first = self._began.setdefault(stage, (now, done))
        if now - self._told.get(stage, -1e9) < self._interval and done != total:
            return
        self._told[stage] = now
        seconds = time_left(now - began, done - first, total - done) if total is not None else None
        left = f", {seconds / 60:.0f} min left" if seconds is not None else ""
        share = f" {100 * done / total:.0f}%" if total else ""
        print(f"{stage}{share}{left}: {note}", file=sys.stderr, flush=True)


def time_left(elapsed: float, done: float, left: float) -> float | None:
    """Seconds for what is left, at the pace of what was ``done`` in ``elapsed`` seconds; None where there is no pace.

    Both are this run's: what an earlier one did cost no time here.
    """
    return elapsed * left / done if done > 0 and elapsed > 0 else None


def show(outcome: Outcome, folder: Path) -> None:
    """The result, on standard output."""
    print(f"drafter: {folder / 'drafter'}")
    if outcome.held_out:
        shares = " ".join(f"{s:.3f}" for s in outcome.held_out.by_position)
        print(f"held-out greedy tau {outcome.held_out.tau:.3f}, accepted through slot 1, 2, ...: {shares}")
    for name, values in outcome.served.items():
        rest = values.get("without_loops")
        beside = f", without {values['loops']} looping answers {rest['tau']:.3f}" if rest and values["loops"] else ""
        print(f"served greedy tau, {name}: {values['tau']:.3f}{beside}")
