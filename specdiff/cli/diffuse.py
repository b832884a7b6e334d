"""``specdiff diffuse``: write with a diffusion language model, the canvas shown live; fill gaps in a text."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from typing import Any

from specdiff.arguments import at_least, share
from specdiff.cli import codes
from specdiff.cli.common import add_target_arguments, encode, load_model, ready_device, target_options
from specdiff.errors import InvalidInputError

GAP = "[...]"
GAP_TOKENS, NEW_TOKENS = 8, 128
"""Defaults."""
_FLAGS = ("max_new_tokens", "policy", "cache", "temperature", "top_k", "top_p", "seed", "stretch", "block_size")
"""Arguments of the calls that the command has a flag for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "prompt", nargs="?", help="text to continue, or with --infill a text with gaps; none or '-': stdin"
    )
    parser.add_argument("--infill", action="store_true", help=f"fill the gaps, written {GAP}, of the text")
    parser.add_argument(
        "--gap-tokens", type=at_least(1), metavar="N", help=f"with --infill: tokens per gap; default: {GAP_TOKENS}"
    )
    parser.add_argument(
        "--stretch",
        action="store_true",
        help="with --infill: one canvas from a gap's block to the end, for models whose blocks do not reach the end",
    )
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--model", metavar="MODEL", help="folder or hub id of a diffusion language model")
    parser.add_argument("--adapter", metavar="FOLDER", help="dual-mode adapter for --target; default: the shipped one")
    parser.add_argument("--preset", help="with --model: its family, where the checkpoint does not say")
    add_target_arguments(parser)
    group = parser.add_argument_group("decoding")
    group.add_argument("--max-new-tokens", type=at_least(1), metavar="N", help=f"default: {NEW_TOKENS}")
    group.add_argument("--policy", help="decoder; default: the model's own")
    group.add_argument("--cache", help="block cache; default: the model's own")
    group.add_argument("--block-size", type=at_least(1), metavar="B", help="tokens per block; default: the model's own")
    group.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the policy, e.g. threshold=0.9, steps=64",
    )
    group.add_argument("--temperature", type=at_least(0, float), default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=at_least(1), metavar="K")
    group.add_argument("--top-p", type=share, metavar="P")
    group.add_argument("--seed", type=at_least(0), help="repeat a sampled run")
    out = parser.add_argument_group("output")
    out.add_argument("--plain", action="store_true", help="no live canvas (also if the output is no terminal)")
    out.add_argument("--delay", type=at_least(0, float), default=0.0, metavar="S", help="seconds between frames")
    out.add_argument("--stats", action="store_true", help="report passes and tokens per pass on standard error")
    out.add_argument("--json", action="store_true", help="write one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Diffuse."""
    refuse_idle(args)
    text = args.prompt
    if text is None or text == "-":
        if sys.stdin.isatty():
            raise InvalidInputError("give a prompt, or pipe one in")
        text = sys.stdin.read()
    if not text.strip():
        raise InvalidInputError("the prompt is empty")
    if args.infill and GAP not in text:
        raise InvalidInputError(f"--infill needs a gap, written {GAP}, in the text")
    options = _options(args.option)
    lm = load_lm(args)
    if lm.tokenizer is None:
        raise InvalidInputError("the model has no tokenizer of its own")
    settings: dict[str, Any] = {
        "policy": args.policy,
        "cache": args.cache,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "return_dict_in_generate": True,
        **options,
    }
    live = not (args.plain or args.json) and sys.stdout.isatty()
    if args.infill:
        from specdiff.diffusion.pieces import filled

        size = args.gap_tokens or GAP_TOKENS
        ids, hole, places = gaps(lm, text, size)
        first = int(hole[0].nonzero().min())
        with _screen(lm, live, args.delay, ids[0, :first]) as streamer:
            # clean text is causal in such a model: to be seen, what follows a gap must lie in its canvas
            stretch = args.stretch or lm.spec.attention == "causal_context"
            out = lm.infill(ids, hole, stretch=stretch, streamer=streamer, **settings)
        written = out.sequences[0]
        answer = filled(lm.tokenizer, _parts(text, size), written.tolist(), places)
    else:
        ids = encode(lm.tokenizer, text, raw=args.raw).to(lm.device)
        with _screen(lm, live, args.delay, ids[0, :0]) as streamer:
            new = args.max_new_tokens or NEW_TOKENS
            out = lm.generate(ids, max_new_tokens=new, block_size=args.block_size, streamer=streamer, **settings)
        written = out.sequences[0, ids.shape[1] : ids.shape[1] + out.stats.new_tokens[0]]
        answer = lm.tokenizer.decode(written, skip_special_tokens=True)
    if args.json:
        stats = dict(vars(out.stats))
        print(
            json.dumps(
                {"prompt": text, "text": answer, "token_ids": written.tolist(), "stats": stats}, ensure_ascii=False
            )
        )
    else:
        print(answer)
    if args.stats:
        s = out.stats
        rate = "" if s.tokens_per_pass[0] is None else f", {s.tokens_per_pass[0]:.2f} tokens per pass"
        notes = "".join(f", {n}" for n in s.notes)
        print(f"{s.new_tokens[0]} tokens in {s.nfe[0]} passes{rate}, {s.seconds:.2f} s{notes}", file=sys.stderr)
    return codes.OK


def refuse_idle(args: argparse.Namespace) -> None:
    """Refuse options that would change nothing beside the others.

    Raises:
        InvalidInputError: naming them.
    """

    def given(*names: str) -> str:
        return ", ".join("--" + name.replace("_", "-") for name in names if getattr(args, name) not in (None, False))

    if args.infill and (idle := given("raw", "max_new_tokens", "block_size")):
        raise InvalidInputError(
            f"{idle} is for texts that go on; --infill takes the text as it stands, and the canvas of a gap follows "
            "from the gap"
        )
    if not args.infill and (idle := given("gap_tokens", "stretch")):
        raise InvalidInputError(f"{idle} is for gaps: give --infill too")
    if args.model is not None and (idle := given("target", "adapter", "trust_remote_code")):
        raise InvalidInputError(
            f"--model is a diffusion model of its own, loaded into native classes: leave out {idle}, which is for a "
            "base with an adapter"
        )
    if args.model is None and args.preset is not None:
        raise InvalidInputError("--preset is for --model; an adapter says itself how it is decoded")
    if args.delay and (args.plain or args.json):
        raise InvalidInputError("--delay is for the live canvas, which --plain and --json turn off")


def _options(items: list[str]) -> dict[str, Any]:
    """Options of the policy; arguments of the calls themselves are refused."""
    from specdiff import DiffusionLM

    options = dict(_option(item) for item in items)
    taken = {n for call in (DiffusionLM.generate, DiffusionLM.infill) for n in inspect.signature(call).parameters}
    for name in sorted(taken.intersection(options)):
        flag = "--" + name.replace("_", "-")
        hint = f"use {flag}" if name in _FLAGS else "this command has none for it; use specdiff.DiffusionLM in Python"
        raise InvalidInputError(f"--option {name}: not an option of a policy but an argument of the call; {hint}")
    return options


def _option(item: str) -> tuple[str, Any]:
    """``NAME=VALUE`` with a JSON value, or a plain word."""
    name, sign, value = item.partition("=")
    if not sign or not name:
        raise InvalidInputError(f"--option needs NAME=VALUE, got {item!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def load_lm(args: argparse.Namespace) -> Any:
    """The diffusion model that the options name: a checkpoint, or a causal LM with a dual-mode adapter."""
    from specdiff import DiffusionLM

    if args.model is not None:
        device = ready_device(args)
        lm = DiffusionLM.from_pretrained(args.model, args.preset, **target_options(args))
        lm.model.to(device)
        return lm
    folder = args.adapter or default_adapter()
    if folder is None:
        raise InvalidInputError("no dual-mode adapter is installed: give --model, or --adapter with --target")
    if args.target is not None and args.adapter is None:
        raise InvalidInputError(
            "the shipped adapter belongs to the default target; give --adapter for another --target"
        )
    base, tokenizer = load_model(args)
    return DiffusionLM.from_adapter(base, folder, tokenizer=tokenizer)


def default_adapter() -> str | None:
    """Folder of the dual-mode adapter that ships in the zoo, if there is one."""
    from specdiff.drafters.dual import adapters

    return next((str(folder) for folder in adapters().values()), None)


def gaps(lm: Any, text: str, tokens: int) -> tuple[Any, Any, list[slice]]:
    """Ids of a text whose gaps are ``tokens`` positions each, which positions those are (both ``[1, N]``), and for each
    gap its place."""
    import torch

    from specdiff.diffusion.pieces import gapped

    filler = lm.spec.pad if lm.spec.mask_id is None else lm.spec.mask_id
    ids, hole, places = gapped(lm.tokenizer, _parts(text, tokens), int(filler))
    return torch.tensor([ids], device=lm.device), torch.tensor([hole], device=lm.device), places


def _parts(text: str, tokens: int) -> list[str | int]:
    """Pieces of text with the size of a gap between each two."""
    parts: list[str | int] = []
    for number, piece in enumerate(text.split(GAP)):
        parts += [tokens, piece] if number else [piece]
    return parts


class _screen:
    """The canvas as a rich live display, or nothing."""

    def __init__(self, lm: Any, on: bool, delay: float, before: Any) -> None:
        self.streamer = None
        if on:
            from specdiff.cli.canvas import LiveCanvas

            self.streamer = LiveCanvas(lm.tokenizer, delay=delay, before=before.tolist())

    def __enter__(self) -> Any:
        return self.streamer

    def __exit__(self, *error: object) -> None:
        if self.streamer is not None:
            self.streamer.end()
