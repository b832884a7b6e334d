"""Policies that commit by confidence: LLaDA, Dream, Fast-dLLM, SDAR, LLaDA2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion import select
from specdiff.diffusion.draws import CHOICE
from specdiff.diffusion.policies.base import Decision, Frame, Policy, View, committed, in_range
from specdiff.diffusion.revise import edits
from specdiff.diffusion.sampling import entropy, margin
from specdiff.diffusion.schedule import dream_quota, dream_times, even_quota
from specdiff.errors import InvalidInputError

_SCORES = ("confidence", "peak", "random", "margin", "entropy", "left")


def scored(view: View, score: str) -> tuple[Tensor, Tensor, Tensor]:
    """Proposed tokens, their confidence, and the score by which positions are ranked."""
    tokens, confidence, law = view.propose()
    if score == "confidence":
        return tokens, confidence, confidence
    if score == "peak":
        return tokens, confidence, torch.softmax(law, -1).amax(-1)
    if score == "margin":
        return tokens, confidence, margin(law)
    if score == "entropy":
        return tokens, confidence, -entropy(law)
    if score == "random":
        return tokens, confidence, view.draws.uniform(CHOICE, view.positions)[..., 0]
    return tokens, confidence, -view.positions.float()


@dataclass(frozen=True)
class Quota(Policy):
    """LLaDA (Nie et al. 2025): the ``n // S + (i < n % S)`` best positions of the block per step.

    Attributes:
        score: "confidence" (low-confidence remasking: probability of the drawn token), "peak" (of the likeliest token),
            "random", "margin", "entropy" or "left".
    """

    name: ClassVar[str] = "quota"
    score: str = "confidence"

    def check(self) -> None:
        if self.score not in _SCORES:
            raise InvalidInputError(f"policy 'quota': score must be one of {_SCORES}, not {self.score!r}")

    @property
    def looks_at_draw(self) -> bool:
        """Only "confidence" reads the drawn token's own probability."""
        return self.score == "confidence"

    def decide(self, view: View) -> Decision:
        tokens, confidence, score = scored(view, self.score)
        count = even_quota(view.initial, view.steps, view.step)
        return committed(view, select.top(score, view.open, count), tokens, confidence)


@dataclass(frozen=True)
class Threshold(Policy):
    """Fast-dLLM v1 (Wu et al. 2025): every position with confidence >= threshold, and the best one in any case."""

    name: ClassVar[str] = "threshold"
    threshold: float = 0.9

    def check(self) -> None:
        in_range(self, "threshold", 0.0, 1.0)

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        return committed(view, select.above(confidence, view.open, self.threshold), tokens, confidence)


@dataclass(frozen=True)
class Leading(Policy):
    """The leftmost mask; if it reaches the threshold, also those right behind it as long as they do.

    The text grows from left to right, so every token knows all that is before it: the careful choice for models made of
    autoregressive ones, whose first slot is the sure one.
    """

    name: ClassVar[str] = "leading"
    threshold: float = 0.9

    def check(self) -> None:
        in_range(self, "threshold", 0.0, 1.0)

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        return committed(view, select.leading(confidence >= self.threshold, view.open), tokens, confidence)


@dataclass(frozen=True)
class Factor(Policy):
    """Fast-dLLM v1's factor rule: the longest prefix of sorted confidences with ``c_i >= 1 - f / (i + 1)``."""

    name: ClassVar[str] = "factor"
    factor: float = 1.0

    def check(self) -> None:
        in_range(self, "factor", 0.0, float("inf"))

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        return committed(view, select.factor_prefix(confidence, view.open, self.factor), tokens, confidence)


@dataclass(frozen=True)
class SubBlock(Policy):
    """Fast-dLLM v2: the first unfinished sub-block; positions above the threshold, and the best one."""

    name: ClassVar[str] = "sub_block"
    threshold: float = 0.9

    def check(self) -> None:
        in_range(self, "threshold", 0.0, 1.0)

    def wants(self, frame: Frame) -> Tensor:
        return frame.noisy & frame.editable & frame.sub

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        return committed(view, select.above(confidence, view.open, self.threshold, strict=True), tokens, confidence)


@dataclass(frozen=True)
class Dynamic(Policy):
    """SDAR's dynamic rule and LLaDA2.0: all above the threshold if they reach the step's quota, else the quota."""

    name: ClassVar[str] = "dynamic"
    per_block: ClassVar[bool] = True
    threshold: float = 0.9

    def check(self) -> None:
        in_range(self, "threshold", 0.0, 1.0)

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        quota = even_quota(view.initial, view.steps, view.step)
        return committed(view, select.above_or_quota(confidence, view.open, self.threshold, quota), tokens, confidence)


@dataclass(frozen=True)
class Static(Quota):
    """SDAR's low-confidence static: the quota's most confident positions, steps counted per block."""

    name: ClassVar[str] = "static"
    per_block: ClassVar[bool] = True


@dataclass(frozen=True)
class Sequential(Policy):
    """SDAR's sequential: the quota's leftmost positions."""

    name: ClassVar[str] = "sequential"
    per_block: ClassVar[bool] = True

    @property
    def looks_at_draw(self) -> bool:
        """False: positions are chosen without looking at drawn tokens."""
        return False

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        count = even_quota(view.initial, view.steps, view.step)
        return committed(view, select.leftmost(view.open, count), tokens, confidence)


@dataclass(frozen=True)
class EntropyBudget(Policy):
    """SDAR's entropy-bounded: ascending entropy while the sum itself stays within the bound; at least one."""

    name: ClassVar[str] = "entropy_budget"
    per_block: ClassVar[bool] = True
    bound: float = 0.35

    def check(self) -> None:
        in_range(self, "bound", 0.0, float("inf"))

    @property
    def looks_at_draw(self) -> bool:
        """False: positions are chosen without looking at drawn tokens."""
        return False

    def decide(self, view: View) -> Decision:
        tokens, confidence, law = view.propose()
        chosen = select.entropy_prefix(entropy(law), view.open, self.bound, own=True)
        return committed(view, chosen, tokens, confidence)


@dataclass(frozen=True)
class Dream(Policy):
    """Dream (Ye et al. 2025): ``origin``, ``maskgit_plus``, ``topk_margin``, ``entropy``.

    Attributes:
        alg: the algorithm.
        alg_temp: > 0 draws positions from softmax(confidence / alg_temp) without replacement.
        eps: the last time of the grid.
    """

    name: ClassVar[str] = "dream"
    alg: str = "entropy"
    alg_temp: float | None = None
    eps: float = 1e-3

    _ALGS: ClassVar[dict[str, str]] = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"}

    def check(self) -> None:
        if self.alg != "origin" and self.alg not in self._ALGS:
            raise InvalidInputError(f"policy 'dream': alg must be origin, {', '.join(self._ALGS)}, not {self.alg!r}")
        in_range(self, "eps", 0.0, 1.0)

    def decide(self, view: View) -> Decision:
        if self.alg == "origin":
            return self._origin(view)
        tokens, confidence, score = scored(view, self._ALGS[self.alg])
        if self.alg_temp:
            # Gumbel top-k: k draws without replacement from softmax(score / alg_temp)
            u = view.draws.uniform(CHOICE, view.positions)[..., 0].clamp(min=1e-12, max=1 - 1e-12)
            score = score.double() / self.alg_temp - torch.log(-torch.log(u))
        count = dream_quota(view.masks, view.steps, view.step, self.eps)
        return committed(view, select.top(score, view.open, count), tokens, confidence)

    @property
    def looks_at_draw(self) -> bool:
        """Only ``maskgit_plus`` reads the drawn token's own probability."""
        return self.alg == "maskgit_plus"

    def _origin(self, view: View) -> Decision:
        """Each mask is decided with chance ``1 - s/t``. Steps that decide nothing need no pass: they are skipped."""
        tokens, confidence, _ = view.propose()
        done = view.memory.get("time", torch.zeros_like(view.step))
        longest = int(view.steps.max())
        u = view.draws.uniform(CHOICE, view.positions, longest)
        chosen = torch.zeros_like(view.open)
        for _ in range(longest):
            waiting = ~chosen.any(-1) & (done < view.steps)
            if not bool(waiting.any()):
                break
            t, s = dream_times(view.steps, done, self.eps)
            chance = torch.where(done >= view.steps - 1, 1.0, 1.0 - s / t)
            now = u.gather(-1, done.clamp(max=longest - 1)[:, None, None].expand(*u.shape[:2], 1))[..., 0]
            chosen = torch.where(waiting[:, None], view.open & (now < chance[:, None]), chosen)
            done = torch.where(waiting, done + 1, done)
        chosen = chosen | (view.open & ~chosen.any(-1, keepdim=True))
        out = committed(view, chosen, tokens, confidence)
        out.rows["time"] = done
        return out


@dataclass(frozen=True)
class Edit(Dynamic):
    """LLaDA2.1: as ``dynamic``, and each step committed tokens of the block are overwritten where ``p >
    edit_threshold``.

    When no mask is left the block stays open for at most ``extra`` more steps, and closes when nothing changes.
    """

    name: ClassVar[str] = "edit"
    sticky: ClassVar[bool] = False
    threshold: float = 0.7
    edit_threshold: float = 0.5
    extra: int = 16

    def check(self) -> None:
        in_range(self, "threshold", 0.0, 1.0)
        in_range(self, "edit_threshold", 0.0, 1.0)
        in_range(self, "extra", 0, float("inf"))

    def wants(self, frame: Frame) -> Tensor:
        return frame.editable & frame.inside

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        quota = even_quota(view.initial, view.steps, view.step)
        chosen = select.above_or_quota(confidence, view.open, self.threshold, quota)
        editable = view.valid & view.editable & ~view.noisy
        changed = edits(view.ids, tokens, confidence, editable, self.edit_threshold)
        out = committed(view, chosen | changed, tokens, confidence)
        had_masks = view.masks > 0
        used = view.memory.get("extra", torch.zeros_like(view.step)) + (~had_masks).long()
        out.rows["extra"] = used
        out.keep_open = (had_masks | changed.any(-1)) & (used < self.extra)
        return out


@dataclass(frozen=True)
class StableSkip(Threshold):
    """Jump-share: as ``threshold``, and what kept its argmax for ``patience`` passes is committed too."""

    name: ClassVar[str] = "stable_skip"
    patience: float = 3

    def check(self) -> None:
        super().check()
        in_range(self, "patience", 1, float("inf"))

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        guess = view.logits.argmax(-1)
        before = view.memory.get("guess", torch.full_like(guess, -1))
        run = torch.where(guess == before, view.memory.get("run", torch.zeros_like(guess)) + 1, 0)
        stable = view.open & (run >= self.patience)
        chosen = select.above(confidence, view.open, self.threshold) | stable
        out = committed(view, chosen, tokens, confidence)
        out.columns.update(guess=guess, run=run)
        return out


@dataclass(frozen=True)
class Mixed(Threshold):
    """Token-level mixing: with chance ``share`` a step commits the leftmost mask alone (AR), otherwise as
    ``threshold``.

    With ``share`` 1 and causal attention the text is plain AR decoding.
    """

    name: ClassVar[str] = "mixed"
    share: float = 0.5

    def check(self) -> None:
        super().check()
        in_range(self, "share", 0.0, 1.0)

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        parallel = select.above(confidence, view.open, self.threshold)
        single = select.leftmost(view.open, torch.ones_like(view.step))
        left = view.draws.uniform(CHOICE, view.positions[:, :1])[:, 0] < self.share
        return committed(view, torch.where(left, single, parallel), tokens, confidence)
