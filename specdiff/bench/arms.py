"""The ways of generating that are compared, each timed with prefill and decoding apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from specdiff.bench.models import pad_token_of
from specdiff.bench.prompts import left_padded
from specdiff.stats import GenerationStats, SpecDiffOutput
from specdiff.tuning.measure import synchronise
from specdiff.wrap import SpecDiff

HF, HF_LOOKUP, PLAIN, SPECDIFF = "hf", "hf_lookup", "plain", "specdiff"
LABELS = {
    HF: "transformers generate",
    HF_LOOKUP: "transformers prompt lookup",
    PLAIN: "specdiff, plain decoding",
    SPECDIFF: "specdiff",
}
"""What reports call the arms, slowest path first."""

LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens`` of transformers' prompt lookup; its documentation's example."""


@dataclass
class Run:
    """One timed call.

    Attributes:
        tokens: new tokens of each row, end token included.
        prefill: seconds until the first new tokens exist, preparation included (time to first token).
        decode: seconds from there to the end.
        first: new tokens of all rows that existed after ``prefill``.
        passes: target passes after ``prefill``, summed over the rows that took part.
        stats: specdiff's own account, None for transformers.
    """

    tokens: list[list[int]]
    prefill: float
    decode: float
    first: int
    passes: int
    stats: GenerationStats | None = None

    @property
    def new_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(row) for row in self.tokens)

    @property
    def decoded(self) -> int:
        """New tokens of all rows that decoding made."""
        return self.new_tokens - self.first

    @property
    def speed(self) -> float | None:
        """Decoded tokens per second; None when nothing was decoded."""
        return self.decoded / self.decode if self.decoded > 0 and self.decode > 0 else None

    @property
    def tau(self) -> float | None:
        """Decoded tokens per target pass."""
        return self.decoded / self.passes if self.passes else None


Arm = Callable[[Sequence[Tensor], int, int], Run]
"""``(prompts of one batch, new tokens, seed) -> Run``."""


class Watch(StoppingCriteria):
    """Never stops anything; notes when the first call came and how many followed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls = 0
        self.first_at = 0.0
        self.first_length = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if not self.calls:
            synchronise(self.device)
            self.first_at = time.perf_counter()
            self.first_length = input_ids.shape[1]
        self.calls += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def sampling_arguments(temperature: float) -> dict[str, Any]:
    """``generate`` arguments: greedy at 0, else the bare law at a temperature (no filters)."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def transformers_arm(model: PreTrainedModel, temperature: float, *, lookup: bool = False) -> Arm:
    """transformers' own ``generate``, plain or with its prompt lookup (which takes one row only)."""
    extra: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}
    ends = end_tokens(model)

    def call(prompts: Sequence[Tensor], max_new_tokens: int, seed: int) -> Run:
        ids, mask = (part.to(model.device) for part in left_padded(prompts, pad_token_of(model)))
        watch = Watch(model.device)
        torch.manual_seed(seed)
        synchronise(model.device)
        began = time.perf_counter()
        out = cast(Any, model).generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_of(model),
            stopping_criteria=StoppingCriteriaList([watch]),
            **sampling_arguments(temperature),
            **extra,
        )
        synchronise(model.device)
        ended = time.perf_counter()
        width = ids.shape[1]
        rows = [until_end(row, ends) for row in out[:, width:].tolist()]
        first = sum(min(len(row), watch.first_length - width) for row in rows)
        passes = watch.calls - 1 if lookup else sum(len(row) - 1 for row in rows)
        return Run(rows, watch.first_at - began, ended - watch.first_at, first, passes)

    return call


def specdiff_arm(wrapped: SpecDiff, temperature: float, rule: str = "auto") -> Arm:
    """specdiff, with or without a drafter."""

    def call(prompts: Sequence[Tensor], max_new_tokens: int, seed: int) -> Run:
        ids, mask = (part.to(wrapped.device) for part in left_padded(prompts, pad_token_of(wrapped.ar)))
        synchronise(wrapped.device)
        began = time.perf_counter()
        out = wrapped.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_of(wrapped.ar),
            return_dict_in_generate=True,
            rule=rule if temperature else "auto",
            seed=seed,
            **sampling_arguments(temperature),
        )
        synchronise(wrapped.device)
        wall = time.perf_counter() - began
        assert isinstance(out, SpecDiffOutput) and out.stats is not None
        stats = out.stats
        width = ids.shape[1]
        rows = [row[width : width + count] for row, count in zip(out.sequences.tolist(), stats.new_tokens, strict=True)]
        decode = sum(stats.seconds.get(part, 0.0) for part in ("draft", "verify", "rest"))
        return Run(rows, wall - decode, decode, len(rows), sum(stats.row_rounds), stats)

    return call


def end_tokens(model: PreTrainedModel) -> set[int]:
    """Ids that end a text."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, (list, tuple)) else {int(ends)}


def until_end(row: list[int], ends: set[int]) -> list[int]:
    """``row`` up to its first end token."""
    for at, token in enumerate(row):
        if token in ends:
            return row[: at + 1]
    return row
