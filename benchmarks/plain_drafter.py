"""What the zoo's plain drafter began as: least squares, no training (``specdiff.drafters.train.gather``).

    python benchmarks/plain_drafter.py --data corpus/ --features features/ --out smollm2-135m-instruct-plain

``--data`` takes corpus shards as ``specdiff train`` does, ``--features`` is where the target's states are kept (they
are computed if they are not there). Writes the drafter with its card, and prints what held-out text says.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from specdiff import load_target
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.card import sources
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.evaluate import Acceptance, evaluate
from specdiff.drafters.train.gather import GatherConfig, fit

SHARD = int(14.5 * 2**20)


def main() -> None:
    """Fit, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, metavar="PATH", help="corpus shards or folders")
    parser.add_argument("--features", type=Path, required=True, help="where the target's states are kept")
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--target", help="folder or hub id; default: the offline SmolLM2-135M-Instruct")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct (the offline default target)", help="for the card")
    parser.add_argument("--taps", default="1,8,14,20,28", help="must hold the last layer but one")
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=320, help="channels for the context")
    parser.add_argument("--ridge", type=float, default=1e-3)
    parser.add_argument("--held-out", type=float, default=0.15)
    parser.add_argument("--judge", type=int, default=16, help="held-out greedy documents that are replayed")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model, _ = load_target(args.target)
    taps = tuple(int(part) for part in args.taps.split(","))
    corpus = Corpus(args.data, args.features, taps, 32, args.held_out, model)
    corpus.rescan()
    used = {int(i) for shard, n in [*corpus.train, *corpus.held] for i in shard.documents[n].ids}
    mask = next(i for i in range(model.config.vocab_size - 1, -1, -1) if i not in used)
    settings = GatherConfig(args.block_size, mask, args.context, args.ridge)
    drafter = fit(model, [shard[n] for shard, n in corpus.train], taps, settings)
    held_out = evaluate(drafter, corpus.evaluation_items(args.judge))
    drafter.save_pretrained(args.out, dtype=torch.bfloat16, max_shard_bytes=SHARD)
    (args.out / "README.md").write_text(card(args, drafter, corpus, settings, held_out), encoding="utf-8")
    shares = ", ".join(f"{share:.3f}" for share in held_out.by_position)
    print(f"{args.out}: held-out greedy tau {held_out.tau:.3f}, accepted through slot 1, 2, ...: {shares}")


def card(args: Any, drafter: DFlashDrafter, corpus: Corpus, settings: GatherConfig, held_out: Acceptance) -> str:
    """The drafter's README."""
    config = drafter.config
    documents = [shard.documents[n] for shard, n in corpus.train]
    size = sum(p.numel() for p in drafter.model.parameters()) / 1e6
    shares = ", ".join(f"{share:.2f}" for share in held_out.by_position)
    base = "HuggingFaceTB/SmolLM2-135M-Instruct" if args.target is None else args.target
    return f"""---
license: apache-2.0
library_name: specdiff
base_model: {base}
tags: [speculative-decoding, block-diffusion, dflash]
---
# {args.out.name}

A plain DFlash drafter (z-lab layout) for {args.name}: the kind that other
engines run as it is, see docs/serving.md. It was not trained by gradient steps; least squares put a linear prediction
of the target's state into a block-diffusion layer (`specdiff.drafters.train.gather`). It accepts less than
`smollm2-135m-instruct`, which only specdiff runs.

| what | value |
|---|---|
| kind | plain DFlash (z-lab layout), full draft vocabulary |
| drafted tokens per pass (K) | {config.block_size} (the file counts the anchor: {config.block_size + 1}) |
| layers, parameters | {config.num_layers}, {size:.1f} M (bfloat16) |
| taps (state after target layer) | {", ".join(map(str, config.target_layer_ids))} |
| mask token | id {config.mask_token_id} |
| data | {len(documents)} chats, {sum(map(len, documents))} tokens, the target's own responses ({sources(documents)}) |
| recipe | ridge {settings.ridge:g}, {settings.context} channels for the context, slots weighted {settings.weights} |
| held-out greedy tau | {held_out.tau:.2f} over {held_out.rounds} rounds (accepted through slot 1, 2, ...: {shares}) |

tau is new tokens per target pass in greedy decoding; held-out text is the target's own greedy text that the fit did not
see. The command is in `benchmarks/plain_drafter.py`.
"""


if __name__ == "__main__":
    main()
