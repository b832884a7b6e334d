"""Quality against passes of a dual-mode model: what its texts are worth to its own autoregressive half."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdiff import DiffusionLM, SpecDiff
from specdiff.errors import UnsupportedError


@dataclass(frozen=True)
class NativeRow:
    """One setting, over all prompts.

    Attributes:
        name: "greedy AR", the policy ("leading" goes from left to right, "threshold" takes the surest tokens first),
            or "drafts for itself".
        block: tokens per block, or drafted tokens per round; None for AR.
        threshold: confidence needed to commit more than the leftmost token in a pass; None where it does not apply.
        log_likelihood: mean log-probability (nats) that the AR model gives the text's tokens.
        top_share: share of tokens that are the AR model's own top token after what is before them.
        prefix_share: share of the text that equals greedy AR text before the first difference.
        tokens_per_pass: new tokens per pass of the model (a draft and its verification are two passes).
        tokens_per_second: new tokens per second, prompt included.
        speed: ``tokens_per_second`` against greedy AR's.
    """

    name: str
    block: int | None
    threshold: float | None
    log_likelihood: float
    top_share: float
    prefix_share: float
    tokens_per_pass: float
    tokens_per_second: float
    speed: float = 1.0


@torch.no_grad()
def judge(ar: Any, ids: Tensor, prompt: int, refused: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """What the AR model thinks of a text.

    Args:
        ar: a causal LM.
        ids: ``Long[1, N]``.
        prompt: leading tokens that are not judged.
        refused: ids that cannot be written and do not count as its top token.

    Returns:
        ``float32[N - prompt]`` log-probability of each token, and ``Bool[N - prompt]`` whether it is the top one.
    """
    logits = ar(ids).logits[0, prompt - 1 : -1].float()
    new = ids[0, prompt:]
    law = torch.log_softmax(logits, -1).gather(1, new[:, None])[:, 0]
    allowed = logits.index_fill(-1, torch.tensor(list(refused), dtype=torch.long, device=logits.device), -torch.inf)
    return law, allowed.argmax(-1) == new


def common_prefix(a: Tensor, b: Tensor) -> int:
    """Number of equal leading tokens."""
    width = min(len(a), len(b))
    return int((a[:width] == b[:width]).long().cumprod(0).sum())


class _Tally:
    """Sums over prompts."""

    def __init__(self, lm: DiffusionLM) -> None:
        self.lm = lm
        self.law = self.top = self.same = self.tokens = self.passes = 0.0
        self.seconds = 0.0

    def add(self, ids: Tensor, prompt: int, reference: Tensor, passes: float, seconds: float) -> None:
        law, top = judge(self.lm.ar, ids, prompt, self.lm.spec.refused_ids)
        self.law += float(law.sum())
        self.top += int(top.sum())
        self.same += common_prefix(ids[0, prompt:], reference[0, prompt:])
        self.tokens += len(law)
        self.passes += passes
        self.seconds += seconds

    def row(self, name: str, block: int | None, threshold: float | None, base: float | None = None) -> NativeRow:
        n, rate = max(self.tokens, 1), self.tokens / max(self.seconds, 1e-9)
        return NativeRow(
            name, block, threshold, self.law / n, self.top / n, self.same / n, self.tokens / max(self.passes, 1), rate,
            1.0 if base is None else rate / base,
        )  # fmt: skip


def native_quality(
    lm: DiffusionLM,
    prompts: Sequence[Tensor],
    blocks: Sequence[int],
    thresholds: Sequence[float],
    new_tokens: int,
) -> list[NativeRow]:
    """The table: greedy AR; diffusion by both policies for every block size and threshold; drafting for itself.

    All texts have the same length: end ids do not stop a row. Every prompt runs through all settings before the next
    one, so that a change of the machine's load touches all of them.

    Args:
        lm: a dual-mode model (:meth:`DiffusionLM.from_adapter`).
        prompts: ``Long[1, P]`` each.
        blocks: block sizes; 1 is AR.
        thresholds: 1 commits one token per pass.
        new_tokens: length of every text.
    """
    if lm.adapter is None:
        raise UnsupportedError(f"{lm.spec.name}: this table compares a dual-mode model with its own AR half")
    settings = [(p, b, t) for p in ("leading", "threshold") for b in blocks for t in thresholds if b > 1]
    if 1 in blocks:
        settings.insert(0, ("leading", 1, 1.0))  # whatever the policy and the threshold, it is one token at a time
    ar, texts = _Tally(lm), {s: _Tally(lm) for s in settings}
    own = {b: _Tally(lm) for b in blocks if b > 1}
    plain: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    suppressed = {"suppress_tokens": list(lm.spec.refused_ids)}
    for ids in prompts:
        length = ids.shape[1]
        mask = torch.ones_like(ids)
        begin = time.perf_counter()
        reference = lm.ar.generate(ids, attention_mask=mask, **plain, **suppressed)
        ar.add(reference, length, reference, new_tokens, time.perf_counter() - begin)
        for policy, block, threshold in settings:
            out = lm.generate(
                ids,
                max_new_tokens=new_tokens,
                block_size=block,
                policy=policy,
                threshold=threshold,
                eos_token_id=(),
                return_dict_in_generate=True,
            )
            texts[policy, block, threshold].add(out.sequences, length, reference, out.stats.nfe[0], out.stats.seconds)
        for block, tally in own.items():
            begin = time.perf_counter()
            drafted = SpecDiff(lm.ar, lm.drafter(block_size=block)).generate(
                ids, attention_mask=mask, return_dict_in_generate=True, **plain, **suppressed
            )
            passes = 2 * drafted.stats.row_rounds[0]
            tally.add(drafted.sequences, length, reference, passes, time.perf_counter() - begin)
    first = ar.row("greedy AR", None, None)
    base = first.tokens_per_second
    rows = [texts[p, b, t].row(p, b, t, base) for p, b, t in settings]
    return [first, *rows, *(tally.row("drafts for itself", b, None, base) for b, tally in own.items())]


def markdown(rows: Sequence[NativeRow]) -> str:
    """The table as Markdown."""
    head = (
        "| mode | block | threshold | log-likelihood | AR's top token | equal to greedy AR | tokens per pass | speed |",
        "|---|---|---|---|---|---|---|---|",
    )
    lines = [
        f"| {r.name} | {'' if r.block is None else r.block} | {'' if r.threshold is None else f'{r.threshold:g}'} | "
        f"{r.log_likelihood:.2f} | {r.top_share:.0%} | {r.prefix_share:.0%} | {r.tokens_per_pass:.2f} | "
        f"{r.speed:.2f} x ({r.tokens_per_second:.1f}/s) |"
        for r in rows
    ]
    return "\n".join([*head, *lines])
