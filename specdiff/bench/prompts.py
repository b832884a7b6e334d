"""Prompts: the project's own small set, or a JSON Lines file of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdiff.errors import InvalidInputError

DEFAULT_SET = "prompts"
"""The set of prompts that name none."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique within a file.
        set: the prompt set it belongs to; tau is averaged within sets first.
        text: the user's message (the first turn of a conversation).
    """

    id: str
    set: str
    text: str


def load_prompts(path: str | Path | None = None, *, per_set: int | None = None) -> list[Prompt]:
    """Read prompts, at most ``per_set`` of each set, in file order.

    Args:
        path: a JSON Lines file whose lines hold ``{"turns": [...]}`` (the first turn is used) or ``{"prompt": "..."}``,
            with optional ``id`` and ``set``. None: the project's own set, 6 sets of 8 prompts.
        per_set: how many prompts to take of each set; all when None.

    Raises:
        InvalidInputError: a missing or empty file, or a line that is no prompt; the line number is named.
    """
    if per_set is not None and per_set < 1:
        raise InvalidInputError(f"prompts per set must be at least 1, got {per_set}")
    if path is None:
        name = "bench_prompts.jsonl"
        text = resources.files("specdiff").joinpath("data", name).read_text(encoding="utf-8")
    else:
        name = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"cannot read prompts from {path}: {error}") from error
    prompts: list[Prompt] = []
    taken: dict[str, int] = {}
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{name}, line {number}", number)
        if prompt.id in seen:
            raise InvalidInputError(f"{name}, line {number}: id {prompt.id!r} appears twice")
        seen.add(prompt.id)
        taken[prompt.set] = taken.get(prompt.set, 0) + 1
        if per_set is None or taken[prompt.set] <= per_set:
            prompts.append(prompt)
    if not prompts:
        raise InvalidInputError(f"{name} holds no prompts")
    return prompts


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{where}: not valid JSON ({error.msg}); each line must be one JSON object") from error
    if not isinstance(entry, dict):
        raise InvalidInputError(f"{where}: expected a JSON object, got {type(entry).__name__}")
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise InvalidInputError(f'{where}: "turns" must be a list of at least one string')
        text = turns[0]
    elif "prompt" in entry:
        text = entry["prompt"]
    else:
        raise InvalidInputError(
            f'{where}: neither "turns" nor "prompt" given (keys: {", ".join(map(str, entry)) or "none"})'
        )
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError(f"{where}: the prompt must be a non-empty string")
    return Prompt(id=str(entry.get("id", f"line-{number}")), set=str(entry.get("set", DEFAULT_SET)), text=text)


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts taken from all sets in turn.

    Raises:
        InvalidInputError: when there are fewer.
    """
    if count < 1 or count > len(prompts):
        raise InvalidInputError(f"cannot take {count} prompts: there are {len(prompts)}")
    queues: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.set, []).append(prompt)
    picked: list[Prompt] = []
    depth = 0
    while len(picked) < count:
        picked += [queue[depth] for queue in queues.values() if depth < len(queue)]
        depth += 1
    return picked[:count]


def encode(tokenizer: Any, prompt: str | list[dict[str, str]], *, raw: bool = False) -> Tensor:
    """``Long[P]`` ids of a prompt: messages, or one user message, under the tokenizer's chat template.

    A text is used bare with ``raw`` and for tokenizers without a chat template.

    Raises:
        InvalidInputError: the prompt is empty, or messages are given and the tokenizer has no chat template.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(prompt, str) and (raw or not template):
        ids = tokenizer(prompt)["input_ids"]
    elif not template:
        raise InvalidInputError("this model's tokenizer has no chat template; use specdiff generate")
    else:
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    if not ids:
        raise InvalidInputError("the prompt is empty")
    return torch.tensor(ids, dtype=torch.long)


def left_padded(rows: Iterable[Tensor], pad_token: int) -> tuple[Tensor, Tensor]:
    """``Long[B, P]`` ids padded on the left, and the ``Long[B, P]`` attention mask."""
    listed = list(rows)
    width = max(row.numel() for row in listed)
    ids = torch.full((len(listed), width), pad_token, dtype=torch.long)
    mask = torch.zeros(len(listed), width, dtype=torch.long)
    for at, row in enumerate(listed):
        ids[at, width - row.numel() :] = row
        mask[at, width - row.numel() :] = 1
    return ids, mask
