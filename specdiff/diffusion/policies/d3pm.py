"""D3PM's reverse step (Austin et al. 2021; SEDD has the same processes): absorbing and uniform noise in one formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion.policies.base import Decision, Frame, Policy, View
from specdiff.diffusion.sampling import probability, warp
from specdiff.diffusion.schedule import alpha_linear


def posterior(clean: Tensor, ids: Tensor, alpha_t: Tensor, alpha_s: Tensor, mask_id: int | None) -> Tensor:
    """``q(x_s | x_t, x_0 ~ clean)`` for ``s < t``: ``q(x_t | x_s) q(x_s | x_0)``, summed over x_0 and normalised.

    Args:
        clean: ``[..., V]`` the denoiser's law of x_0; for "mask" corruption without mass on the mask.
        ids: ``Long[...]`` x_t.
        alpha_t: ``[...]`` clean share at t.
        alpha_s: ``[...]`` clean share at s.
        mask_id: the absorbing state, or None for uniform corruption.

    Returns:
        float64 ``[..., V]``.
    """
    clean, vocab = clean.double(), clean.shape[-1]
    alpha_s = alpha_s.double()[..., None]
    keep = alpha_t.double()[..., None] / alpha_s
    here = torch.nn.functional.one_hot(ids, vocab).double()
    if mask_id is None:
        forward = keep * here + (1.0 - keep) / vocab
        marginal = alpha_s * clean + (1.0 - alpha_s) / vocab
    else:
        absorbed = torch.zeros_like(clean)
        absorbed[..., mask_id] = 1.0
        # x_t is the mask: every x_s may lead there; otherwise x_s = x_t
        forward = torch.where((ids == mask_id)[..., None], 1.0 - keep + keep * absorbed, keep * here)
        marginal = alpha_s * clean + (1.0 - alpha_s) * absorbed
    law = forward * marginal
    return law / law.sum(-1, keepdim=True)


@dataclass(frozen=True)
class UniformAncestral(Policy):
    """Ancestral sampling under uniform corruption: every position is drawn from the posterior, ``steps`` times."""

    name: ClassVar[str] = "uniform_ancestral"
    sticky: ClassVar[bool] = False
    corruption: ClassVar[str] = "uniform"
    per_block: ClassVar[bool] = True

    steps: int | None = 64

    @property
    def looks_at_draw(self) -> bool:
        """False: every position is drawn in every step."""
        return False

    def wants(self, frame: Frame) -> Tensor:
        return frame.editable & frame.inside

    def decide(self, view: View) -> Decision:
        logits = warp(view.logits, view.sampling)
        law = torch.softmax(logits, -1)
        if view.sampling.temperature == 0:
            law = torch.nn.functional.one_hot(law.argmax(-1), law.shape[-1]).to(law.dtype)
        t = (1.0 - view.step.double() / view.steps)[:, None].expand(view.ids.shape)
        s = (1.0 - (view.step + 1).double() / view.steps)[:, None].expand(view.ids.shape)
        step = posterior(law, view.ids, alpha_linear(t), alpha_linear(s), None)
        ids = view.draws.categorical(step.log().float(), view.positions)
        last = view.step + 1 >= view.steps
        return Decision(
            ids=ids,
            noisy=(view.valid & view.editable) & ~last[:, None],
            confidence=probability(logits, ids),
            close=last,
        )
