"""DiffusionGemma's entropy-bound policy on a canvas of random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion import select
from specdiff.diffusion.draws import RENOISE
from specdiff.diffusion.policies.base import Decision, Frame, Policy, View, in_range
from specdiff.diffusion.sampling import probability
from specdiff.diffusion.schedule import falling_temperature
from specdiff.errors import InvalidInputError


@dataclass(frozen=True)
class EntropyBound(Policy):
    """Each step: temper, draw, accept in ascending entropy while (sum - own) <= bound; the rest becomes random again.

    Acceptance is recomputed every step and not sticky. The block ends when its argmax was stable for ``stability``
    steps and
    the mean entropy is below ``confidence``, or after ``steps``; what is emitted is the argmax. As published, its only
    temperature is that of the schedule, and there are no filters.

    Attributes:
        steps: largest number of passes per canvas (48).
        bound: nats.
        t_min: temperature towards the end.
        t_max: temperature of the first step.
        stability: steps for which the argmax must be unchanged.
        confidence: bound on the mean entropy; 0 never stops early.
    """

    name: ClassVar[str] = "entropy_bound"
    sticky: ClassVar[bool] = False
    corruption: ClassVar[str] = "uniform"
    per_block: ClassVar[bool] = True
    own_law: ClassVar[bool] = True

    steps: int | None = 48
    bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability: int = 1
    confidence: float = 0.005

    def check(self) -> None:
        if self.steps is None:
            raise InvalidInputError("policy 'entropy_bound' needs steps")
        in_range(self, "bound", 0.0, float("inf"))
        in_range(self, "stability", 0, float("inf"))
        if not 0 < self.t_min <= self.t_max:
            raise InvalidInputError(f"policy 'entropy_bound': 0 < t_min <= t_max, not {self.t_min}, {self.t_max}")

    def wants(self, frame: Frame) -> Tensor:
        return frame.editable & frame.inside

    def tempered(self, view: View) -> Tensor:
        """The logits over this step's temperature; also what self-conditioning reads next."""
        return view.logits / falling_temperature(view.steps, view.step, self.t_min, self.t_max)[:, None, None]

    @property
    def looks_at_draw(self) -> bool:
        """False: positions are chosen without looking at drawn tokens."""
        return False

    def decide(self, view: View) -> Decision:
        logits = self.tempered(view)
        tokens = view.draws.categorical(logits, view.positions)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        here = view.valid & view.editable
        accepted = select.entropy_prefix(entropy, here, self.bound, own=False)
        noise = view.draws.random_ids(RENOISE, view.positions, logits.shape[-1])
        guess = logits.argmax(-1)
        before = view.memory.get("guess", torch.full_like(guess, -1))
        run = view.memory.get("run", torch.zeros_like(view.step))
        same = ((guess == before) | ~here).all(-1)
        run = torch.where(same, run + 1, torch.zeros_like(run))
        count = here.sum(-1).clamp(min=1)
        mean = torch.where(here, entropy, 0.0).sum(-1) / count
        stop = ((run >= self.stability) & (mean < self.confidence)) | (view.step + 1 >= view.steps)
        return Decision(
            ids=torch.where(stop[:, None], guess, torch.where(accepted, tokens, noise)),
            noisy=here & ~stop[:, None],
            confidence=probability(logits, guess),
            close=stop,
            columns={"guess": guess},
            rows={"run": run},
        )
