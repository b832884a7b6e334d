"""Stage 1: responses in the target's own words.

Prompts come from a JSONL file; from the target itself: given the bare header of a user turn it writes one (Magpie, Xu
et al. 2024), which is what makes a corpus look like the target's own world; and from earlier answers, quoted
(:mod:`specdiff.drafters.train.quoting`).
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.generate import Generate, Trace
from specdiff.drafters.train.quoting import Passage, quoting_prompts
from specdiff.errors import FormatError, InvalidInputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """What to generate.

    Attributes:
        own_share: share of prompts that the target writes itself.
        quote_share: share of prompts that quote earlier answers (none while there are no earlier answers).
        temperatures: of responses, drawn with ``weights``.
        weights: see ``temperatures``.
        max_new_tokens: of a response.
        max_prompt_tokens: longer prompts are left out.
        own_prompt_tokens: a self-written prompt that has not ended by then is dropped.
        seed: of all choices.
    """

    own_share: float = 0.5
    quote_share: float = 0.0
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    weights: tuple[float, ...] = (0.6, 0.25, 0.15)
    max_new_tokens: int = 320
    max_prompt_tokens: int = 512
    own_prompt_tokens: int = 160
    seed: int = 0


def is_prompt_file(name: str) -> bool:
    """Whether data of this name are prompts to be answered first, not finished text."""
    return name.endswith((".jsonl", ".json"))


def read_prompts(path: str | Path, every_turn: bool = False) -> list[tuple[str, str]]:
    """(prompt, source) of a JSONL file whose lines hold ``prompt`` (a string) or ``turns`` (a list of strings).

    Args:
        path: the file.
        every_turn: a prompt of each turn, instead of the first one.

    Raises:
        FormatError: a line has neither.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise FormatError(f"{path}, line {number}: not JSON ({error.msg})") from error
        entry = entry if isinstance(entry, dict) else {}
        turns = entry.get("turns")
        texts = [entry["prompt"]] if entry.get("prompt") else turns if isinstance(turns, list) else []
        texts = texts if every_turn else texts[:1]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise FormatError(f"{path}, line {number}: needs a string 'prompt' or a list 'turns'")
        found += [(text, str(entry.get("source", ""))) for text in texts]
    return found


@dataclass
class Template:
    """A chat template as token ids around a single user turn."""

    before: list[int]
    after: list[int]
    ends: set[int] = field(default_factory=set)

    def wrap(self, user: list[int]) -> list[int]:
        """Ids of a chat that waits for the answer."""
        return self.before + user + self.after

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """Read off by rendering a marker.

        Raises:
            InvalidInputError: the tokenizer has no chat template, or it rewrites what users say.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidInputError("this tokenizer has no chat template; give documents (.npz) instead of prompts")
        mark = "\u2301specdiff\u2301"
        chat = [{"role": "user", "content": mark}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if text.count(mark) != 1:
            raise InvalidInputError("the chat template does not render the user's text exactly once")
        before, after = text.split(mark)
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
        return cls(ids[0], ids[1], {ids[1][0]} if ids[1] else set())


def regenerate(
    generate: Generate,
    tokenizer: Any,
    prompts: list[tuple[str, str]],
    count: int,
    recipe: Recipe,
    on_document: Callable[[Document, Trace | None], None],
    passages: Sequence[Passage] = (),
) -> int:
    """Make ``count`` chats; each is handed to ``on_document`` when it is done. Returns how many were made.

    Args:
        generate: see :data:`Generate`.
        tokenizer: with the serving chat template.
        prompts: (text, source); drawn without repeats, then again from the start.
        count: chats wanted; self-written prompts that never end are dropped, so fewer may come.
        recipe: what to generate.
        on_document: receives each finished chat, and its trace if the generator keeps traces.
        passages: earlier answers that prompts may quote.
    """
    rng = random.Random(recipe.seed)
    template = Template.of(tokenizer)

    def fitting(found: Sequence[tuple[str, str]]) -> list[tuple[list[int], str]]:
        pairs = [(template.wrap(tokenizer(t, add_special_tokens=False)["input_ids"]), s) for t, s in found]
        return [(ids, source) for ids, source in pairs if len(ids) <= recipe.max_prompt_tokens]

    quoted = round(count * recipe.quote_share) if passages else 0
    own = round(count * recipe.own_share) if prompts else count - quoted
    chats: list[tuple[list[int], str]] = []
    if own:
        wanted = [template.before] * own
        for answer in generate(wanted, [1.0] * own, recipe.own_prompt_tokens, recipe.seed + 1):
            if len(answer.ids) > 8 and answer.ids[-1] in template.ends:
                chats.append((template.wrap(answer.ids[:-1]), "magpie"))
    if quoted:
        chats += fitting(quoting_prompts(passages, 2 * quoted, recipe.seed))[:quoted]
    wrapped = fitting(prompts)
    if prompts and not wrapped:
        raise InvalidInputError(f"every prompt is longer than {recipe.max_prompt_tokens} tokens")
    order: list[int] = []
    while len(chats) < count and wrapped:
        order = order or rng.sample(range(len(wrapped)), len(wrapped))
        chats.append(wrapped[order.pop()])
    rng.shuffle(chats)
    heats = rng.choices(recipe.temperatures, recipe.weights, k=len(chats))
    done = 0
    for answer in generate([c[0] for c in chats], heats, recipe.max_new_tokens, recipe.seed + 2):
        prompt, source = chats[answer.prompt]
        whole = np.array(prompt + answer.ids, np.int64)
        document = Document(whole, len(prompt), source, heats[answer.prompt], f"{source}/{answer.prompt}")
        on_document(document, answer.trace)
        done += 1
    return done
