"""Policies of the theory papers: MDLM's ancestral step, first hitting, any order, Mask-Predict, ReMDM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion import select
from specdiff.diffusion.draws import CHOICE, REMASK
from specdiff.diffusion.policies.base import Decision, Frame, Policy, View, committed, in_range
from specdiff.diffusion.revise import lowest, remdm_sigma, remdm_unmask
from specdiff.diffusion.schedule import alpha_linear, unmask_probability
from specdiff.errors import InvalidInputError


def _step_draw(u: Tensor, step: Tensor) -> Tensor:
    """Column ``step``: ``Long[A]`` of ``u``: ``[A, W, S]``."""
    index = step.clamp(max=u.shape[-1] - 1)[:, None, None].expand(*u.shape[:2], 1)
    return u.gather(-1, index)[..., 0]


@dataclass(frozen=True)
class Ancestral(Policy):
    """MDLM (Sahoo et al. 2024): each mask is decided with chance ``(alpha_s - alpha_t) / (1 - alpha_t)``, alpha = 1
    - t.

    The denoiser takes no time input, so a step that decides nothing needs no pass: it is skipped within this one.
    ``steps``
    is the resolution of the time grid; passes are at most that and at most the number of tokens.
    """

    name: ClassVar[str] = "ancestral"

    @property
    def looks_at_draw(self) -> bool:
        """False: positions are chosen without looking at drawn tokens."""
        return False

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        done = view.memory.get("time", torch.zeros_like(view.step))
        longest = int(view.steps.max())
        u = view.draws.uniform(CHOICE, view.positions, longest)
        chosen = torch.zeros_like(view.open)
        while True:
            waiting = ~chosen.any(-1) & (done < view.steps)
            if not bool(waiting.any()):
                break
            t = 1.0 - done.double() / view.steps
            s = 1.0 - (done + 1).double() / view.steps
            chance = unmask_probability(alpha_linear(t), alpha_linear(s))
            chosen = torch.where(waiting[:, None], view.open & (_step_draw(u, done) < chance[:, None]), chosen)
            done = torch.where(waiting, done + 1, done)
        out = committed(view, chosen | (view.open & ~chosen.any(-1, keepdim=True)), tokens, confidence)
        out.rows["time"] = done
        return out


@dataclass(frozen=True)
class FirstHitting(Policy):
    """BD3-LM's first-hitting sampler (Zheng et al. 2024): ``t <- t u^(1/n)``, one uniform masked position a pass."""

    name: ClassVar[str] = "first_hitting"

    @property
    def looks_at_draw(self) -> bool:
        """False: positions are chosen without looking at drawn tokens."""
        return False

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        u = view.draws.uniform(CHOICE, view.positions, 2)
        out = committed(view, select.best(u[..., 0], view.open), tokens, confidence)
        time = view.memory.get("time", torch.ones_like(view.step, dtype=torch.float64))
        out.rows["time"] = time * u[:, 0, 1] ** (1.0 / view.masks.clamp(min=1))
        return out


@dataclass(frozen=True)
class AnyOrder(Policy):
    """ARDM, RADD: one position at a time in a random order, or in the ``order`` given.

    Attributes:
        order: "random", "left" or "right".
    """

    name: ClassVar[str] = "any_order"
    order: str = "random"

    def check(self) -> None:
        if self.order not in ("random", "left", "right"):
            raise InvalidInputError(f"policy 'any_order': order must be random, left or right, not {self.order!r}")

    @property
    def looks_at_draw(self) -> bool:
        """False: positions are chosen without looking at drawn tokens."""
        return False

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        if self.order == "random":
            score = view.draws.uniform(CHOICE, view.positions)[..., 0]
        else:
            score = view.positions.double() * (1 if self.order == "right" else -1)
        return committed(view, select.best(score, view.open), tokens, confidence)


@dataclass(frozen=True)
class MaskPredict(Policy):
    """Mask-Predict (Ghazvininejad et al. 2019): decide all, then remask the ``N (T - t) / T`` least confident.

    A token keeps the confidence of the step in which it was last predicted. The number of masks always falls by at
    least
    one, so more steps than tokens count as one per token.
    """

    name: ClassVar[str] = "mask_predict"
    sticky: ClassVar[bool] = False

    def wants(self, frame: Frame) -> Tensor:
        return frame.editable & frame.inside

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        everything = view.valid & view.editable
        held = torch.where(view.open, confidence, view.confidence)
        left = view.initial * (view.steps - view.step - 1).clamp(min=0)
        left = torch.minimum(torch.div(left, view.steps, rounding_mode="floor"), (view.masks - 1).clamp(min=0))
        again = lowest(held, everything, left)
        return Decision(
            ids=torch.where(view.open, tokens, view.ids),
            noisy=again,
            confidence=held,
        )


@dataclass(frozen=True)
class ReMDM(Policy):
    """ReMDM (Wang et al. 2025): committed tokens are remasked with chance sigma, masks decided so that the law is kept.

    Steps in which nothing changes need no pass and are skipped.

    Attributes:
        kind: "cap", "rescale", "conf" or "loop".
        cap: bound of sigma for "cap".
        scale: factor of sigma_max for "rescale".
        loop_sigma: sigma while "loop" holds.
        hold: the clean share at which "loop" holds.
        on: time at which the hold begins.
        off: time at which it ends.
    """

    name: ClassVar[str] = "remdm"
    sticky: ClassVar[bool] = False
    kind: str = "cap"
    cap: float = 0.008
    scale: float = 0.015
    loop_sigma: float = 0.02
    hold: float = 0.9
    on: float = 0.55
    off: float = 0.05

    def check(self) -> None:
        if self.kind not in ("cap", "rescale", "conf", "loop"):
            raise InvalidInputError(f"policy 'remdm': kind must be cap, rescale, conf or loop, not {self.kind!r}")
        for name in ("cap", "scale", "loop_sigma", "hold", "on", "off"):
            in_range(self, name, 0.0, 1.0)

    def wants(self, frame: Frame) -> Tensor:
        return frame.editable & frame.inside

    def alpha(self, t: Tensor) -> Tensor:
        """Clean share at time ``t``; "loop" rescales it to reach ``hold`` early, holds, and finishes."""
        if self.kind != "loop":
            return alpha_linear(t)
        early = (1.0 - t) * self.hold / (1.0 - self.on)
        late = 1.0 - t * (1.0 - self.hold) / self.off
        return torch.where(t > self.on, early, torch.where(t <= self.off, late, torch.full_like(t, self.hold)))

    def rates(self, t: Tensor, s: Tensor, confidence: Tensor, settled: Tensor) -> tuple[Tensor, Tensor]:
        """Chances per position: ``[A, W]`` of remasking a settled token, ``[A, W]`` of deciding a mask."""
        alpha_t, alpha_s = self.alpha(t), self.alpha(s)
        if self.kind == "loop":
            holding = (t <= self.on) & (t > self.off)
            flat = torch.where(holding, self.loop_sigma, 0.0)[:, None].expand(confidence.shape)
            bound = ((1.0 - alpha_s) / alpha_t.clamp(min=1e-12)).clamp(max=1.0)[:, None]
            flat = torch.minimum(flat, bound)
            sigma, step_sigma = torch.where(settled, flat, 0.0), flat
        else:
            sigma = remdm_sigma(self.kind, alpha_t, alpha_s, confidence, settled, self.cap, self.scale)
            everywhere = torch.ones_like(settled)
            step_sigma = (
                torch.zeros_like(sigma)
                if self.kind == "conf"
                else remdm_sigma(self.kind, alpha_t, alpha_s, confidence, everywhere, self.cap, self.scale)
            )
        return sigma, remdm_unmask(alpha_t[:, None], alpha_s[:, None], step_sigma)

    @property
    def looks_at_draw(self) -> bool:
        """False: positions are chosen without looking at drawn tokens."""
        return False

    def decide(self, view: View) -> Decision:
        tokens, confidence, _ = view.propose()
        done = view.memory.get("time", torch.zeros_like(view.step))
        longest = int(view.steps.max())
        decide_u = view.draws.uniform(CHOICE, view.positions, longest)
        remask_u = view.draws.uniform(REMASK, view.positions, longest)
        settled = view.valid & view.editable & ~view.noisy
        chosen, again = torch.zeros_like(view.open), torch.zeros_like(view.open)
        while True:
            waiting = ~(chosen | again).any(-1) & (done < view.steps)
            if not bool(waiting.any()):
                break
            t = 1.0 - done.double() / view.steps
            s = 1.0 - (done + 1).double() / view.steps
            sigma, unmask = self.rates(t, s, view.confidence, settled)
            row = waiting[:, None]
            chosen = torch.where(row, view.open & (_step_draw(decide_u, done) < unmask), chosen)
            again = torch.where(row, settled & (_step_draw(remask_u, done) < sigma), again)
            done = torch.where(waiting, done + 1, done)
        over = done >= view.steps
        chosen = torch.where(over[:, None], view.open, chosen)
        again = again & ~over[:, None]
        out = committed(view, chosen, tokens, confidence)
        out.noisy = out.noisy | again
        out.rows["time"] = done
        out.keep_open = ~over
        return out
