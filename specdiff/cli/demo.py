"""``specdiff demo``: the default pair on a few prompts; the same text, plain and speculative, and how fast."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdiff.arguments import at_least
from specdiff.cli import codes
from specdiff.cli.common import add_pair_arguments, encode, load_pair
from specdiff.cli.text import Mark, TextWriter

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "A shop sells pens at 3 dollars each. Anna buys 4 and pays with a 20 dollar bill. How much change does she get?",
    "Write a short email to a colleague asking to move our meeting to Thursday afternoon.",
    "List five tips for learning a new language.",
)
METHODS = ("generate", "plain", "specdiff")
TITLES = {"generate": "Hugging Face generate", "plain": "specdiff, plain", "specdiff": "specdiff, speculative"}
REFRESH = 6.0
"""Screen updates a second of the live view; more would cost the decoding time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt of your own instead; may be repeated"
    )
    parser.add_argument("--max-new-tokens", type=at_least(2), default=96, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_pair_arguments(parser)


@dataclass
class Demo:
    """What was measured.

    Attributes:
        seconds: per method, one wall time per prompt (whole call, prompt included).
        tokens: new tokens per prompt.
        tau: new tokens per target pass, per prompt.
        texts: the speculative texts.
        differences: one per text that is not Hugging Face's, near-ties among them.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    tokens: list[int] = field(default_factory=list)
    tau: list[float | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    differences: list[Any] = field(default_factory=list)

    def ratio(self, over: str) -> float:
        """Total time of ``over`` through that of the speculative runs."""
        return sum(self.seconds[over]) / sum(self.seconds["specdiff"])


def run(args: argparse.Namespace) -> int:
    """Show it."""
    from specdiff import SpecDiff

    pair = load_pair(args)
    plain = SpecDiff(pair.model, None, tokenizer=pair.tokenizer, fast=args.fast)
    stage = Stage(pair, plain, args.max_new_tokens)
    prompts = args.prompt or list(PROMPTS)
    say: Callable[..., None] = (lambda *_: None) if args.json else print
    say("warming up ...", flush=True) if not args.json else None
    stage.warm_up(prompts[0])
    demo = Demo()
    for number, prompt in enumerate(prompts, 1):
        if not args.json:
            print(f"\n[{number}/{len(prompts)}] {prompt}", flush=True)
        stage.show(prompt, demo, live=sys.stdout.isatty() and not args.json, quiet=args.json)
    faults = [found for found in demo.differences if not found.near_tie]
    if args.json:
        print(json.dumps(_as_dict(demo, prompts, pair.name), indent=2))
    else:
        _conclude(demo, len(prompts), pair.name)
    return codes.FAILED if faults else codes.OK


class Stage:
    """Runs the three methods on a prompt and shows them.

    Args:
        pair: target and drafter.
        plain: the target wrapped without a drafter.
        max_new_tokens: length of each text.
    """

    def __init__(self, pair: Any, plain: Any, max_new_tokens: int) -> None:
        self.pair, self.plain, self.max_new = pair, plain, max_new_tokens

    def warm_up(self, prompt: str) -> None:
        """A few tokens each way: first calls allocate, plan and cache."""
        ids = encode(self.pair.tokenizer, prompt).to(self.pair.wrapped.device)
        for method in METHODS:
            self._call(method, ids, None, tokens=min(16, self.max_new))

    def show(self, prompt: str, demo: Demo, *, live: bool, quiet: bool) -> None:
        """Run one prompt three ways, show the two specdiff texts side by side, and book the result."""
        from specdiff.bench.greedy import judge, tie_margin_of

        tokenizer, model = self.pair.tokenizer, self.pair.model
        ids = encode(tokenizer, prompt).to(self.pair.wrapped.device)
        results = {}
        with _Columns(live) as columns:
            for method in METHODS:
                writer = None
                if live and method != "generate":
                    writer = TextWriter(tokenizer, columns.writer(method))
                began = time.perf_counter()
                results[method] = self._call(method, ids, writer, tokens=self.max_new)
                demo.seconds[method].append(time.perf_counter() - began)
                if method != "generate":
                    columns.done(method, self._line(method, results[method], demo))
        texts = {name: self._new_ids(name, out, ids.shape[1]) for name, out in results.items()}
        for method in ("plain", "specdiff"):
            found = judge(
                model, ids[0], texts["generate"], texts[method],
                name=f"{prompt} ({TITLES[method]})", batch_size=1, tie_margin=tie_margin_of(model.dtype),
            )  # fmt: skip
            if found is not None:
                demo.differences.append(found)
        stats = results["specdiff"].stats
        demo.tokens.append(stats.new_tokens[0])
        demo.tau.append(stats.tau)
        demo.texts.append(tokenizer.decode(texts["specdiff"], skip_special_tokens=True))
        if not live and not quiet:
            print(demo.texts[-1])
            for method in ("plain", "specdiff"):
                print(f"  {TITLES[method]:<22} {self._line(method, results[method], demo)}")
            print(f"  texts are {'equal' if texts['plain'] == texts['specdiff'] else 'NOT equal'}", flush=True)

    def _call(self, method: str, ids: Any, streamer: Any, *, tokens: int) -> Any:
        import torch

        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": tokens,
            "do_sample": False,
            "return_dict_in_generate": True,
            "pad_token_id": self.pair.tokenizer.pad_token_id,
        }
        if method == "generate":
            return self.pair.model.generate(ids, **options)
        wrapped = self.plain if method == "plain" else self.pair.wrapped
        return wrapped.generate(ids, streamer=streamer, **options)

    @staticmethod
    def _new_ids(method: str, out: Any, width: int) -> list[int]:
        new = out.sequences[0, width:].tolist()
        return new if method == "generate" else new[: out.stats.new_tokens[0]]

    @staticmethod
    def _line(method: str, out: Any, demo: Demo) -> str:
        seconds, new = demo.seconds[method][-1], out.stats.new_tokens[0]
        tau = "" if method == "plain" or out.stats.tau is None else f", tau {out.stats.tau:.2f}"
        return f"{new} tokens in {seconds:5.2f} s, {new / seconds:5.1f} tokens/s{tau}"


class _Columns:
    """Two texts beside each other on a terminal, growing as they are written; nothing when not live."""

    def __init__(self, live: bool) -> None:
        self._live: Any = None
        self._on = live
        self._texts = {"plain": "", "specdiff": ""}
        self._lines = dict.fromkeys(self._texts, "")

    def __enter__(self) -> _Columns:
        if self._on:
            from rich.live import Live

            self._live = Live(get_renderable=self._panels, refresh_per_second=REFRESH, vertical_overflow="visible")
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            with contextlib.suppress(BrokenPipeError):
                self._live.__exit__(*error)

    def writer(self, method: str) -> Callable[[str, Mark], None]:
        """What takes one column's text."""

        def write(piece: str, mark: Mark) -> None:
            self._texts[method] += piece

        return write

    def done(self, method: str, line: str) -> None:
        """Close one column with its speed."""
        self._lines[method] = line

    def _panels(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(
            *(
                Panel(Text(self._texts[name]), title=TITLES[name], subtitle=self._lines[name] or None, height=None)
                for name in self._texts
            )
        )
        return grid


def _conclude(demo: Demo, prompts: int, drafter: str) -> None:
    taus = [tau for tau in demo.tau if tau is not None]
    print()
    if not demo.differences:
        print(
            f"The texts are equal: {prompts} of {prompts} prompts; plain, speculative and Hugging Face generate alike."
        )
    for found in demo.differences:
        kind = "a near-tie" if found.near_tie else "a FAULT, please report it"
        print(f"A text differs from token {found.position} on, margin {found.margin:.1e}: {kind}. {found.prompt}")
    if taus:
        print(f"Drafter {drafter}: {sum(taus) / len(taus):.2f} new tokens per target pass (tau, mean of the prompts).")
    print(f"Speed of specdiff over its own plain decoding: {demo.ratio('plain'):.2f} times (what drafting gives)")
    print(f"Speed of specdiff over Hugging Face generate:  {demo.ratio('generate'):.2f} times (drafting and engine)")
    print("Times are whole calls, one after the other on this machine. specdiff bench measures with more care.")


def _as_dict(demo: Demo, prompts: list[str], drafter: str) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "equal": not demo.differences,
        "ratio_over_plain": demo.ratio("plain"),
        "ratio_over_generate": demo.ratio("generate"),
        "drafter": drafter,
        "prompts": prompts,
        **asdict(demo),
    }
