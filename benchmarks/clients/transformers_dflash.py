"""Stock transformers runs our drafter: ``generate(assistant_model=..., speculation_type="dflash")``, beside specdiff.

    python benchmarks/clients/transformers_dflash.py --prompts FILE.jsonl --out benchmarks/clients/transformers.json

The drafter is exported to transformers' own layout first; specdiff runs exactly what the export holds.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import torch
from transformers import MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from specdiff import load_target
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.formats.export import export
from specdiff.drafters.loading import locate
from specdiff.drafters.saving import load


class Stock:
    """Stock transformers with the exported drafter; counts the drafts of each round as they pass."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.assistant = MuseGlimmerAssistantModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.widths: list[int] = []

    def __call__(self, ids: Sequence[int], new: int) -> dict[str, Any]:
        """As :func:`common.ours`."""
        draft = DFlashTokenCandidateGenerator.get_candidates
        self.widths = []

        def counted(generator: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            found = draft(generator, input_ids, **kwargs)
            self.widths.append(found[0].shape[1] - input_ids.shape[1])
            return found

        prompt = torch.tensor([list(ids)])
        DFlashTokenCandidateGenerator.get_candidates = counted  # type: ignore[method-assign]
        try:
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), assistant_model=self.assistant,
                speculation_type="dflash", max_new_tokens=new, do_sample=False,
            )  # fmt: skip
        finally:
            DFlashTokenCandidateGenerator.get_candidates = draft  # type: ignore[method-assign]
        tokens = out[0, len(ids) :].tolist()
        rounds = len(self.widths) - 1  # the first pass is the prompt's and drafts nothing
        return {
            "tokens": tokens,
            "rounds": rounds,
            "proposed": sum(self.widths),
            "accepted": max(len(tokens) - 1 - rounds, 0),
        }


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="smollm2-135m-instruct-plain", help="folder or zoo name")
    parser.add_argument("--target", help="folder or hub id; default: the offline SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns or prompt")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("transformers.json"))
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, tokenizer = load_target(args.target)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        export(load(locate(args.drafter), target=model), folder, "muse", target=model)
        drafter = DFlashDrafter.from_pretrained(folder, model)
        asked = common.prompts(args.prompts, args.count, tokenizer)
        about = {
            "versions": common.versions("torch", "transformers", "specdiff"),
            "drafter": args.drafter,
            "max_new_tokens": args.max_new_tokens,
        }
        result = common.compare(
            model, drafter, asked, args.max_new_tokens, Stock(model, folder),
            save=lambda found: common.write(args.out, about | found),
        )  # fmt: skip
    print(result["summary"])


if __name__ == "__main__":
    main()
