"""Arguments of ``specdiff train --kind dual``."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdiff.drafters.train.dual.config import DualConfig
from specdiff.drafters.train.dual.pipeline import DualOutcome, DualPlan
from specdiff.drafters.train.dual.trainer import DualTrainer
from specdiff.drafters.train.pipeline import Plan

DEFAULT = DualConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options; defaults are those of :class:`DualConfig` and :class:`DualPlan`."""
    group = parser.add_argument_group("dual-mode adapter (--kind dual)")
    group.add_argument("--rank", type=int, default=16, help="of the low-rank weights (default %(default)s)")
    group.add_argument("--alpha", type=float, default=32.0, help="their scale is alpha / rank (default %(default)s)")
    group.add_argument(
        "--block-sizes", type=_whole, default=DEFAULT.block_sizes, metavar="B,...",
        help="sizes of noisy blocks, one drawn per step (default 4,8)",
    )  # fmt: skip
    group.add_argument(
        "--wsd", type=_pair, default=DEFAULT.wsd, metavar="W,D",
        help="shares of the run in which the block size grows at first and falls back at last (default 0,0)",
    )  # fmt: skip
    group.add_argument(
        "--drafting", type=float, default=DEFAULT.drafting, help="share of blocks masked as a whole (default .5)"
    )
    group.add_argument(
        "--mask-ratios", type=_pair, default=DEFAULT.band, metavar="LOW,HIGH",
        help="band of the other blocks' mask ratios (default .3,1)",
    )  # fmt: skip
    group.add_argument(
        "--mask-level", choices=("block", "sequence"), default=DEFAULT.level, help="who shares a mask ratio"
    )
    group.add_argument("--no-complement", action="store_true", help="no second copy with the other tokens masked")
    group.add_argument("--length", type=int, default=DEFAULT.length, help="tokens per row (default %(default)s)")
    group.add_argument("--no-packing", action="store_true", help="one document per row")
    group.add_argument(
        "--annealing", type=float, default=DEFAULT.annealing, metavar="SHARE",
        help="share of the run in which attention within blocks goes from causal to bidirectional (default 0)",
    )  # fmt: skip
    group.add_argument("--inverse-t", action="store_true", help="partly masked blocks weigh 1/t")
    group.add_argument(
        "--confidence-term", type=float, default=DEFAULT.confidence, metavar="WEIGHT",
        help="CAP: weight of the entropy where the top token is right (default 0)",
    )  # fmt: skip


def _whole(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from error


def _pair(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of numbers, e.g. .3,1") from error
    return first, second


def plan_of(args: argparse.Namespace, run: Plan) -> DualPlan:
    """The dual-mode run that the arguments describe, on top of what both kinds share."""
    dual = DualConfig(
        block_sizes=args.block_sizes,
        wsd=args.wsd,
        drafting=args.drafting,
        band=args.mask_ratios,
        level=args.mask_level,
        complement=not args.no_complement,
        length=args.length,
        pack=not args.no_packing,
        annealing=args.annealing,
        inverse_rate=args.inverse_t,
        gamma=run.config.loss.gamma,
        hard=run.config.loss.hard,
        confidence=args.confidence_term,
    )
    return DualPlan(run, dual, args.rank, args.alpha, args.mask_token_id)


def show(outcome: DualOutcome, folder: Path) -> None:
    """The result, on standard output."""
    print(f"adapter: {folder / DualTrainer.best_folder}")
    if outcome.curve:
        first, last = outcome.curve[0], outcome.curve[-1]
        shares = " ".join(f"{share:.3f}" for share in last.by_position)
        print(f"held-out loss {first.loss:.3f} before, {last.loss:.3f} after")
        print(f"held-out KL {first.kl:.3f} before, {last.kl:.3f} after")
        print(f"held-out tau {last.tau:.3f}, accepted through slot 1, 2, ...: {shares}")
