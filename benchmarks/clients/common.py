"""What the client scripts share: prompts, our side of the comparison, and how both sides are compared."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specdiff import SpecDiff
from specdiff.drafters.dflash import DFlashDrafter


def prompts(path: Path, count: int, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """``(id, ids)`` of ``count`` prompts of a JSON-lines file, spread evenly over it: first turns, as chats."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    count = min(count, len(lines))
    chosen = [lines[i * len(lines) // count] for i in range(count)]
    found = []
    for number, line in enumerate(chosen):
        text = line["turns"][0] if "turns" in line else line["prompt"]
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        found.append((str(line.get("id", number)), list(ids)))
    return found


@torch.no_grad()
def ours(model: Any, drafter: DFlashDrafter, ids: Sequence[int], new: int) -> dict[str, Any]:
    """Greedy tokens of specdiff, with what its rounds proposed and accepted."""
    prompt = torch.tensor([list(ids)])
    out = SpecDiff(model, drafter, block_size=drafter.block_size).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    stats = out.stats
    return {
        "tokens": out.sequences[0, len(ids) :].tolist(),
        "rounds": int(stats.rounds),
        "proposed": int(stats.proposed),
        "accepted": int(stats.accepted),
    }


@torch.no_grad()
def mismatch(model: Any, ids: Sequence[int], one: Sequence[int], other: Sequence[int]) -> dict[str, Any] | None:
    """Where two texts part, and by how much the target preferred its first choice there; None if they do not."""
    if list(one) == list(other):
        return None
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    logits = model(torch.tensor([[*ids, *one[:at]]])).logits[0, -1].float()
    best = logits.topk(2).values
    return {"at": at, "ours": one[at : at + 1], "theirs": other[at : at + 1], "margin": float(best[0] - best[1])}


def compare(
    model: Any, drafter: DFlashDrafter, asked: Sequence[tuple[str, list[int]]], new: int,
    theirs: Callable[[Sequence[int], int], dict[str, Any]], save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Both sides on every prompt.

    Args:
        model: the target.
        drafter: bound, exactly what the other side runs.
        asked: of :func:`prompts`.
        new: tokens per prompt.
        theirs: the other side: as :func:`ours`, for a prompt and a number of tokens.
        save: takes the result so far, after every prompt.
    """
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for number, (name, ids) in enumerate(asked):
        mine, other = ours(model, drafter, ids, new), theirs(ids, new)
        parted = mismatch(model, ids, mine["tokens"], other["tokens"])
        rows.append({"id": name, "ours": mine, "theirs": other, "mismatch": parted})
        result = {"summary": summary(rows), "prompts": rows}
        save(result)
        print(f"{number + 1}/{len(asked)} {name}: {'same' if parted is None else parted}", flush=True)
    return result


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Totals of both sides; prompts on which the texts part count for the texts only."""
    same = [row for row in rows if row["mismatch"] is None]
    totals = {
        side: {key: sum(row[side][key] for row in same) for key in ("rounds", "proposed", "accepted")}
        for side in ("ours", "theirs")
    }
    mine, other = totals["ours"]["accepted"], totals["theirs"]["accepted"]
    return {
        "prompts": len(rows),
        "same_text": len(same),
        "mismatches": [row["mismatch"] for row in rows if row["mismatch"] is not None],
        "tokens": sum(len(row["ours"]["tokens"]) for row in rows),
        **totals,
        "accepted_ratio": other / mine if mine else None,
    }


def versions(*names: str) -> dict[str, str]:
    """Versions of packages in this environment, and of Python and the machine."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(path: Path, result: dict[str, Any]) -> None:
    """One JSON file; token lists on one line each."""
    text = json.dumps(result, indent=1)
    compact = []
    inside = False
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.endswith("[") and '"tokens"' in stripped:
            inside = True
            compact.append(line)
        elif inside:
            compact[-1] += stripped + (" " if stripped.endswith(",") else "")
            inside = not stripped.startswith("]")
        else:
            compact.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(compact) + "\n", encoding="utf-8")
