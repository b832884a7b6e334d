"""Adaptive parallel decoding: a diffusion draft checked against a mixture with an AR model. Lossy by design."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion import select
from specdiff.diffusion.policies.base import Decision, Policy, View, committed, in_range
from specdiff.diffusion.sampling import probability, warp


@dataclass(frozen=True)
class AdaptiveParallel(Policy):
    """APD (Israel et al. 2025), *lossy*: the text follows neither model's law.

    Draft all masks with noise g from the diffusion law; target logits are ``R * diffusion + (1 - R) * AR`` with the
    same g;
    accept left to right while draft and target agree, the first always (it is then the target's own token).
    ``R = 1`` accepts everything, ``R = 0`` greedy keeps the longest prefix that AR itself would write.

    Attributes:
        mix: R.
    """

    name: ClassVar[str] = "apd_lossy"
    needs_ar: ClassVar[bool] = True
    mix: float = 0.5

    def check(self) -> None:
        in_range(self, "mix", 0.0, 1.0)

    def draft(self, view: View) -> Tensor:
        """``Long[A, W]`` the diffusion model's draft."""
        return self._race(view, torch.log_softmax(view.logits, -1))

    def _race(self, view: View, log_law: Tensor) -> Tensor:
        law = warp(log_law, view.sampling)
        if view.sampling.temperature == 0:
            return law.argmax(-1)
        return (law - view.race().log()).argmax(-1)

    def decide(self, view: View) -> Decision:
        assert view.ar_logits is not None
        draft = self.draft(view)
        diffusion = torch.log_softmax(view.logits, -1)
        ar = torch.log_softmax(view.ar_logits, -1)
        # 0 * -inf would be NaN where an id is refused
        refused = torch.isinf(diffusion) | torch.isinf(ar)
        mixture = (self.mix * diffusion + (1.0 - self.mix) * ar).masked_fill(refused, -torch.inf)
        target = self._race(view, mixture)
        chosen = select.leading(draft == target, view.open)
        return committed(view, chosen, target, probability(mixture, target))
