"""Stage 1: responses in the target's own words, by continuous batched generation with a plain Hugging Face model.

A finished row is replaced at once, so the batch stays full. Rows are right-aligned in time, not in space: each row owns
one lane of a preallocated ragged cache. Prompts come from a JSONL file, or from the target itself: given the bare
header of a user turn it writes one (Magpie, Xu et al. 2024), which is what makes a corpus look like the target's own
world.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdiff.drafters.train.corpus import Document
from specdiff.errors import FormatError, InvalidInputError

logger = logging.getLogger(__name__)

Generate = Callable[[list[list[int]], list[float], int, int], Iterable[tuple[int, list[int]]]]
"""``(prompts, temperatures, max_new_tokens, seed) -> (index, new ids)`` in any order: how text is made."""


@dataclass(frozen=True)
class Recipe:
    """What to generate.

    Attributes:
        own_share: share of prompts that the target writes itself.
        temperatures: of responses, drawn with ``weights``.
        weights: see ``temperatures``.
        max_new_tokens: of a response.
        max_prompt_tokens: longer prompts are left out.
        own_prompt_tokens: a self-written prompt that has not ended by then is dropped.
        seed: of all choices.
    """

    own_share: float = 0.5
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    weights: tuple[float, ...] = (0.6, 0.25, 0.15)
    max_new_tokens: int = 320
    max_prompt_tokens: int = 512
    own_prompt_tokens: int = 160
    seed: int = 0


def read_prompts(path: str | Path) -> list[tuple[str, str]]:
    """(prompt, source) of a JSONL file whose lines hold ``prompt`` (a string) or ``turns`` (the first one is taken).

    Raises:
        FormatError: a line has neither.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise FormatError(f"{path}, line {number}: not JSON ({error.msg})") from error
        turns = entry.get("turns") if isinstance(entry, dict) else None
        text = (entry.get("prompt") or (turns[0] if turns else None)) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise FormatError(f"{path}, line {number}: needs a string 'prompt' or a list 'turns'")
        found.append((text, str(entry.get("source", ""))))
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


class Generator:
    """Continuous batched generation through a ragged cache: B lanes, a finished one is refilled at once.

    Args:
        open_state: ``(batch, capacity) -> state`` with ``forward(tokens, counts, head=)``, ``advance``, ``rollback``
            as the engine's target states have them; passed in, since drafters never import the engine.
        ends: ids that end a text.
        device: of the target.
        lanes: B.
        top_k: samples come from the k largest logits.
    """

    def __init__(
        self,
        open_state: Callable[[int, int], Any],
        ends: Iterable[int],
        device: torch.device,
        lanes: int = 32,
        top_k: int = 128,
    ) -> None:
        self.open_state, self.ends, self.device = open_state, frozenset(ends), device
        self.lanes, self.top_k = lanes, top_k

    @torch.no_grad()
    def __call__(
        self, prompts: list[list[int]], temperatures: list[float], max_new_tokens: int, seed: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yields (index of the prompt, new ids, the end token included) as rows finish."""
        if not prompts:
            return
        random_state = torch.Generator(device="cpu").manual_seed(seed)
        lanes = min(self.lanes, len(prompts))
        state = self.open_state(lanes, max(map(len, prompts)) + max_new_tokens + 1)
        queue = iter(range(len(prompts)))
        owner: list[int | None] = [None] * lanes
        new: list[list[int]] = [[] for _ in range(lanes)]
        feed: list[list[int]] = [[] for _ in range(lanes)]

        def refill(lane: int) -> None:
            owner[lane] = index = next(queue, None)
            new[lane] = []
            feed[lane] = list(prompts[index]) if index is not None else []

        for lane in range(lanes):
            refill(lane)
        try:
            while any(index is not None for index in owner):
                width = pass_width([len(f) for f in feed])
                now = [f[:width] for f in feed]
                feed = [f[width:] for f in feed]
                counts = [len(n) for n in now]
                table = torch.tensor([n + [0] * (width - len(n)) for n in now], device=self.device)
                result = state.forward(table, torch.tensor(counts, device=self.device), head="last")
                state.advance(counts)
                warmth = torch.tensor([0.0 if i is None else temperatures[i] for i in owner])
                drawn = draw(result.logits[:, 0].float().cpu(), warmth, self.top_k, random_state)
                lengths = list(state.lengths)
                for lane, token in enumerate(drawn.tolist()):
                    index = owner[lane]
                    if index is None or feed[lane]:
                        continue
                    new[lane].append(token)
                    feed[lane] = [token]
                    if token in self.ends or len(new[lane]) >= max_new_tokens:
                        yield index, new[lane]
                        refill(lane)
                        lengths[lane] = 0
                if lengths != list(state.lengths):
                    state.rollback(lengths)
        finally:
            state.close()


def pass_width(pending: list[int]) -> int:
    """Inputs per lane of the next pass: the most for which at least half of what is computed is needed.

    A lane with a new prompt then does not make the others wait for it, and a batch of new prompts goes in whole.
    """
    for width in sorted(set(pending), reverse=True):
        if width and 2 * sum(min(p, width) for p in pending) >= width * sum(p > 0 for p in pending):
            return width
    return 1


def draw(logits: Tensor, temperatures: Tensor, top_k: int, random_state: torch.Generator) -> Tensor:
    """``Long[B]``: the argmax where a temperature is 0, else a draw from the ``top_k`` largest logits."""
    values, ids = logits.topk(min(top_k, logits.shape[-1]), -1)
    probs = (values / temperatures.clamp(min=1e-3)[:, None]).softmax(-1)
    picked = torch.multinomial(probs, 1, generator=random_state)
    picked = torch.where((temperatures > 0)[:, None], picked, torch.zeros_like(picked))
    return ids.gather(1, picked)[:, 0]


def regenerate(
    generate: Generate,
    tokenizer: Any,
    prompts: list[tuple[str, str]],
    count: int,
    recipe: Recipe,
    on_document: Callable[[Document], None],
) -> int:
    """Make ``count`` chats; each is handed to ``on_document`` when it is done. Returns how many were made.

    Args:
        generate: see :data:`Generate`.
        tokenizer: with the serving chat template.
        prompts: (text, source); drawn without repeats, then again from the start.
        count: chats wanted; self-written prompts that never end are dropped, so fewer may come.
        recipe: what to generate.
        on_document: receives each finished chat.
    """
    rng = random.Random(recipe.seed)
    template = Template.of(tokenizer)
    own = round(count * recipe.own_share) if prompts else count
    chats: list[tuple[list[int], str]] = []
    if own:
        wanted = [template.before] * own
        for _, ids in generate(wanted, [1.0] * own, recipe.own_prompt_tokens, recipe.seed + 1):
            if len(ids) > 8 and ids[-1] in template.ends:
                chats.append((template.wrap(ids[:-1]), "magpie"))
    wrapped = [
        (ids, source)
        for text, source in prompts
        if len(ids := template.wrap(tokenizer(text, add_special_tokens=False)["input_ids"])) <= recipe.max_prompt_tokens
    ]
    if prompts and not wrapped:
        raise InvalidInputError(f"every prompt is longer than {recipe.max_prompt_tokens} tokens")
    order: list[int] = []
    while len(chats) < count and wrapped:
        order = order or rng.sample(range(len(wrapped)), len(wrapped))
        chats.append(wrapped[order.pop()])
    rng.shuffle(chats)
    heats = rng.choices(recipe.temperatures, recipe.weights, k=len(chats))
    done = 0
    for index, ids in generate([c[0] for c in chats], heats, recipe.max_new_tokens, recipe.seed + 2):
        prompt, source = chats[index]
        whole = np.array(prompt + ids, np.int64)
        on_document(Document(whole, len(prompt), source, heats[index], f"{source}/{index}"))
        done += 1
    return done
