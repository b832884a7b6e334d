"""``specdiff generate``: continue one prompt, streaming, or several as a batch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from specdiff.cli import codes
from specdiff.cli.common import add_pair_arguments, add_sampling_arguments, encode, load_pair, sampling_options
from specdiff.cli.text import TextWriter
from specdiff.errors import InvalidInputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument("prompt", nargs="*", help="one prompt, or several for a batch; none or '-': standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--stats", action="store_true", help="report speed, tau and acceptance on standard error")
    parser.add_argument("--json", action="store_true", help="write one JSON object per prompt instead of text")
    add_pair_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate."""
    prompts = args.prompt
    if not prompts or prompts == ["-"]:
        if sys.stdin.isatty():
            raise InvalidInputError("give a prompt, or pipe one in")
        prompts = [sys.stdin.read()]
    if not all(prompt.strip() for prompt in prompts):
        raise InvalidInputError("the prompt is empty")
    options = sampling_options(args)
    pair = load_pair(args)
    options |= {"max_new_tokens": args.max_new_tokens, "return_dict_in_generate": True}
    if len(prompts) == 1:
        return _one(args, pair, prompts[0], options)
    return _batch(args, pair, prompts, options)


def _one(args: argparse.Namespace, pair: Any, prompt: str, options: dict[str, Any]) -> int:
    ids = encode(pair.tokenizer, prompt, raw=args.raw).to(pair.wrapped.device)
    writer = None if args.json else TextWriter(pair.tokenizer, lambda text, _: print(text, end="", flush=True))
    began = time.perf_counter()
    out = pair.wrapped.generate(ids, streamer=writer, **_with_pad(pair, options))
    seconds = time.perf_counter() - began
    if args.json:
        _print_json(pair, [prompt], out, ids.shape[1], seconds)
    else:
        print()
    if args.stats:
        print(summary(out.stats, seconds), file=sys.stderr)
    return codes.OK


def _batch(args: argparse.Namespace, pair: Any, prompts: list[str], options: dict[str, Any]) -> int:
    rows = [encode(pair.tokenizer, prompt, raw=args.raw)[0].tolist() for prompt in prompts]
    padded = pair.tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="left")
    began = time.perf_counter()
    inputs = {name: padded[name].to(pair.wrapped.device) for name in ("input_ids", "attention_mask")}
    out = pair.wrapped.generate(**inputs, **_with_pad(pair, options))
    seconds = time.perf_counter() - began
    width = inputs["input_ids"].shape[1]
    if args.json:
        _print_json(pair, prompts, out, width, seconds)
    else:
        for at, (prompt, text) in enumerate(zip(prompts, _texts(pair, out, width), strict=True)):
            print(f"{'' if at == 0 else chr(10)}> {prompt}\n{text}")
    if args.stats:
        print(summary(out.stats, seconds), file=sys.stderr)
    return codes.OK


def _with_pad(pair: Any, options: dict[str, Any]) -> dict[str, Any]:
    pad = pair.tokenizer.pad_token_id
    return options if pad is None else {**options, "pad_token_id": pad}


def _texts(pair: Any, out: Any, width: int) -> list[str]:
    rows = zip(out.sequences.tolist(), out.stats.new_tokens, strict=True)
    return [pair.tokenizer.decode(row[width : width + count], skip_special_tokens=True) for row, count in rows]


def _print_json(pair: Any, prompts: list[str], out: Any, width: int, seconds: float) -> None:
    stats = out.stats
    for row, (prompt, text) in enumerate(zip(prompts, _texts(pair, out, width), strict=True)):
        record = {
            "prompt": prompt,
            "text": text,
            "token_ids": out.sequences[row, width : width + stats.new_tokens[row]].tolist(),
            "finish_reason": stats.finish_reason[row],
            "drafter": pair.name,
            "seconds": seconds,
            "stats": stats.to_dict(),
        }
        print(json.dumps(record, ensure_ascii=False))


def summary(stats: Any, seconds: float) -> str:
    """One line: tokens, speed, tau, acceptance. Tokens per second leave out the prefill and the token it gives."""
    new = sum(stats.new_tokens)
    parts = [f"{new} tokens in {seconds:.2f} s"]
    decoding = seconds - stats.seconds.get("prefill", 0.0)
    later = new - len(stats.new_tokens)
    if later > 0 and decoding > 0:
        parts.append(f"{later / decoding:.1f} tokens/s")
    if stats.tau is not None:
        parts.append(f"tau {stats.tau:.2f}")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.proposed} drafted accepted")
    parts += stats.notes
    return ", ".join(parts)
