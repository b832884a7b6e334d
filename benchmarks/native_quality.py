"""Quality against passes of the shipped dual-mode adapter, as a Markdown table.

    python benchmarks/native_quality.py [--prompts-per-set N] [--new-tokens N] [--blocks B,...] [--thresholds T,...]

For every block size and threshold: what the autoregressive half thinks of the text (log-likelihood of its tokens,
share that are its own top token), how far it agrees with greedy AR text, tokens per pass and tokens per second.
Prompts are the project's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from step_cost import cpu_name

from specdiff import DiffusionLM, load_target
from specdiff.bench.native import markdown, native_quality
from specdiff.bench.prompts import encode, load_prompts
from specdiff.cli.diffuse import default_adapter


def listed(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    """A parser of comma-separated values."""
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", default=default_adapter(), help="folder; default: the shipped one")
    parser.add_argument("--prompts-per-set", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--blocks", type=listed(int), default=[1, 2, 4])
    parser.add_argument("--thresholds", type=listed(float), default=[0.5, 0.7, 0.9, 1.0])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.adapter is None:
        parser.error("no adapter is installed; give --adapter")
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load_target()
    lm = DiffusionLM.from_adapter(model, args.adapter, tokenizer=tokenizer)
    prompts = [encode(tokenizer, p.text)[None] for p in load_prompts(per_set=args.prompts_per_set)]
    rows = native_quality(lm, prompts, args.blocks, args.thresholds, args.new_tokens)
    print(f"{len(prompts)} prompts, {args.new_tokens} tokens each, {cpu_name()}, {torch.get_num_threads()} threads\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
