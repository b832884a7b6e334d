"""Greedy equality: specdiff's tokens against those of transformers' own ``generate``.

Floating-point addition is not associative, so a pass over nine inputs and a pass over one may differ in the last bits,
and an argmax whose two best logits are closer than that may go either way. Such a *near-tie* is the only difference
that lossless greedy decoding allows. The check therefore asks, at each first mismatch, the stock model itself in one
uncached pass over the reference text: how far apart are the two best logits there? A mismatch with a wider margin than
``tie_margin`` is a fault, and so is more than 2 mismatches in 100 prompts, whatever their margins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.bench.models import pad_token_of, redrafted
from specdiff.bench.prompts import left_padded
from specdiff.drafters.base import Drafter
from specdiff.errors import InvalidInputError
from specdiff.stats import SpecDiffOutput
from specdiff.wrap import SpecDiff

TIE_MARGIN = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 2.5e-1}
"""Widest top-2 margin that kernel noise explains, by compute dtype (logits of a few tens)."""

DrafterLike: TypeAlias = Drafter | str | Callable[[list[list[int]]], Drafter] | None
"""What :class:`SpecDiff` takes, or a function from the reference texts of a batch to a drafter (replays)."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""


@dataclass(frozen=True)
class Mismatch:
    """The first token of one text that is not the reference's.

    Attributes:
        prompt: the prompt's name.
        batch_size: rows of the batch in which it happened.
        position: 0-based index among the new tokens.
        expected: the reference's token, None when the reference had ended.
        got: specdiff's token, None when specdiff had ended.
        margin: best minus second-best logit there (stock model, one uncached pass over the reference).
        gap: reference token's logit minus specdiff's, same pass; None when one of them is missing.
        near_tie: whether ``margin`` is within the tie margin and specdiff's token is one of the two best.
    """

    prompt: str
    batch_size: int
    position: int
    expected: int | None
    got: int | None
    margin: float
    gap: float | None
    near_tie: bool


@dataclass
class GreedyRun:
    """One batch size of the check."""

    batch_size: int
    texts: int = 0
    tokens: int = 0
    rounds: int = 0
    tau: float | None = None
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def allowed(self) -> int:
        """Near-ties that are not a fault: 2 in 100 texts, and one in a small set."""
        return max(1, self.texts // 50)

    @property
    def passed(self) -> bool:
        """Whether every mismatch is a near-tie and there are few enough of them."""
        return all(found.near_tie for found in self.mismatches) and len(self.mismatches) <= self.allowed


@dataclass
class GreedyReport:
    """Result of :func:`greedy_check`."""

    dtype: str
    max_new_tokens: int
    tie_margin: float
    runs: list[GreedyRun]
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every batch size passed."""
        return all(run.passed for run in self.runs)

    @property
    def mismatches(self) -> list[Mismatch]:
        """Those of all batch sizes."""
        return [found for run in self.runs for found in run.mismatches]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        runs = [asdict(run) | {"allowed": run.allowed, "passed": run.passed} for run in self.runs]
        return asdict(self) | {"runs": runs, "passed": self.passed}


def tie_margin_of(dtype: torch.dtype) -> float:
    """The widest near-tie of a compute dtype."""
    return TIE_MARGIN.get(dtype, 1e-3)


def reference_texts(
    model: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int, progress: Progress | None = None
) -> list[list[int]]:
    """New tokens of transformers' own greedy ``generate``, one prompt at a time."""
    texts = []
    for at, prompt in enumerate(prompts):
        ids = prompt[None].to(model.device)
        out = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad_token_of(model),
        )
        texts.append(out[0, ids.shape[1] :].tolist())
        if progress is not None:
            progress("transformers generate", at + 1, len(prompts))
    return texts


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter text included; None when equal."""
    for at, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def judge(
    model: PreTrainedModel,
    prompt: Tensor,
    expected: Sequence[int],
    got: Sequence[int],
    *,
    name: str,
    batch_size: int,
    tie_margin: float,
) -> Mismatch | None:
    """Compare one text with its reference; a difference is measured with the stock model, uncached.

    Args:
        model: the stock target.
        prompt: ``Long[P]``.
        expected: the reference's new tokens.
        got: specdiff's new tokens.
        name: what to call the prompt.
        batch_size: for the record.
        tie_margin: widest margin of a near-tie.
    """
    at = first_difference(expected, got)
    if at is None:
        return None
    ids = torch.cat([prompt.cpu(), torch.tensor(list(expected[:at]), dtype=torch.long)])[None].to(model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1].float()
    best = logits.topk(2)
    margin = float(best.values[0] - best.values[1])
    wanted = expected[at] if at < len(expected) else None
    found = got[at] if at < len(got) else None
    gap = float(logits[wanted] - logits[found]) if wanted is not None and found is not None else None
    contenders = best.indices.tolist()
    tie = margin <= tie_margin and wanted in contenders and found in contenders
    return Mismatch(name, batch_size, at, wanted, found, margin, gap, tie)


def greedy_check(
    model: PreTrainedModel,
    drafter: DrafterLike,
    prompts: Sequence[Tensor],
    *,
    names: Sequence[str] | None = None,
    references: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = 96,
    batch_sizes: Sequence[int] = (1, 4),
    block_size: int | None = None,
    fast: str = "auto",
    tie_margin: float | None = None,
    progress: Progress | None = None,
) -> GreedyReport:
    """Compare greedy specdiff with transformers' own greedy ``generate``, token by token.

    Args:
        model: the target, as its owner loaded it.
        drafter: as for :class:`SpecDiff`, or a function from the reference texts of a batch to a drafter.
        prompts: ``Long[P]`` each.
        names: what to call the prompts.
        references: what transformers wrote, when already known (batch of one, same ``max_new_tokens``).
        max_new_tokens: tokens per text.
        batch_sizes: each is a full run over all prompts; batches are ragged and left-padded.
        block_size: as for :class:`SpecDiff`.
        fast: as for :class:`SpecDiff`.
        tie_margin: widest top-2 margin of a near-tie; by dtype when None (:data:`TIE_MARGIN`).
        progress: told how far it is.

    Raises:
        InvalidInputError: no prompts, or lists of unequal length.
    """
    if not prompts:
        raise InvalidInputError("the greedy check needs at least one prompt")
    if not batch_sizes or min(batch_sizes) < 1:
        raise InvalidInputError(f"batch sizes must be at least 1, got {list(batch_sizes)}")
    names = [f"prompt {at}" for at in range(len(prompts))] if names is None else list(names)
    if len(names) != len(prompts) or (references is not None and len(references) != len(prompts)):
        raise InvalidInputError("prompts, names and references must be as many as each other")
    margin = tie_margin_of(model.dtype) if tie_margin is None else tie_margin
    known = (
        reference_texts(model, prompts, max_new_tokens, progress)
        if references is None
        else [list(r) for r in references]
    )
    build = drafter if callable(drafter) and not isinstance(drafter, Drafter) else None
    given = None if build is not None else cast(Drafter | str | None, drafter)
    base = SpecDiff(model, given, block_size=None if build is not None else block_size, fast=fast)
    report = GreedyReport(str(model.dtype).removeprefix("torch."), max_new_tokens, margin, [])
    for size in batch_sizes:
        run = GreedyRun(size)
        passes = decoded = 0
        for at in range(0, len(prompts), size):
            part = slice(at, at + size)
            wrapped = base if build is None else redrafted(base, build(known[part]), block_size)
            out = greedy_batch(wrapped, prompts[part], max_new_tokens)
            assert out.stats is not None
            width = out.sequences.shape[1] - max(out.stats.new_tokens)
            passes += sum(out.stats.row_rounds)
            decoded += sum(out.stats.new_tokens) - len(out.stats.new_tokens)
            run.rounds += out.stats.rounds
            report.notes += [note for note in out.stats.notes if note not in report.notes]
            for offset, count in enumerate(out.stats.new_tokens):
                got = out.sequences[offset, width : width + count].tolist()
                found = judge(
                    model,
                    prompts[at + offset],
                    known[at + offset],
                    got,
                    name=names[at + offset],
                    batch_size=size,
                    tie_margin=margin,
                )
                run.texts += 1
                run.tokens += count
                if found is not None:
                    run.mismatches.append(found)
            if progress is not None:
                progress(f"specdiff, batch {size}", min(at + size, len(prompts)), len(prompts))
        run.tau = decoded / passes if passes else None
        report.runs.append(run)
    return report


def greedy_batch(wrapped: SpecDiff, prompts: Sequence[Tensor], max_new_tokens: int) -> SpecDiffOutput:
    """Greedy specdiff on one left-padded batch, with stats."""
    pad = pad_token_of(wrapped.ar)
    ids, mask = left_padded(prompts, pad)
    out = wrapped.generate(
        ids.to(wrapped.device),
        attention_mask=mask.to(wrapped.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
        return_dict_in_generate=True,
    )
    assert isinstance(out, SpecDiffOutput)
    return out
