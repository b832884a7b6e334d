"""How the tokens of a block LM's draft are drawn: from the engine's noise, and once more for the mode "redraw"."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from specdiff.diffusion.policies import Decision, Frame, Policy, View
from specdiff.errors import UnsupportedError
from specdiff.verify.noise import Purpose, RoundNoise


@dataclass(frozen=True)
class Redraw(Policy):
    """Runs ``inner`` and draws every token anew, with fresh noise, from the marginals of the last pass."""

    name: ClassVar[str] = "redraw"
    sticky: ClassVar[bool] = False
    per_block: ClassVar[bool] = True
    inner: Policy = field(default_factory=Policy)

    def wants(self, frame: Frame) -> Tensor:
        return frame.editable & frame.inside

    def granted(self, initial: Tensor, share: Tensor | None) -> Tensor:
        return self.inner.granted(initial, share)

    def decide(self, view: View) -> Decision:
        draws = view.draws
        assert isinstance(draws, RoundDraws)
        seen = replace(view, draws=draws.other())
        decision = self.inner.decide(seen)
        last = (view.step + 1 >= view.steps) | (view.masks == 0)
        fresh = draws.categorical(view.logits, view.positions)
        decision.ids = torch.where(last[:, None], fresh, decision.ids)
        decision.noisy = decision.noisy & ~last[:, None]
        decision.keep_open = ~last
        decision.close = last
        return decision


class RoundDraws:
    """Draws of one round from the engine's noise; slot 0 is the first drafted position.

    Args:
        noise: the round's noise.
        origin: ``Long[A]`` position of slot 0.
        slots: width of the widest block.
        coupled: draw tokens with the noise the target will use.
        rows: ``Long[A]`` rows of the noise that this pass has.
        half: 1 for a second, independent set of numbers.
    """

    def __init__(
        self, noise: RoundNoise, origin: Tensor, slots: int, coupled: bool, rows: Tensor | None = None, half: int = 0
    ) -> None:
        self.noise, self.origin, self.slots, self.coupled, self.half = noise, origin, slots, coupled, half
        self.rows = torch.arange(len(origin), device=origin.device) if rows is None else rows

    def other(self) -> RoundDraws:
        """Numbers that are independent of these."""
        return RoundDraws(self.noise, self.origin, self.slots, self.coupled, self.rows, 1)

    def select(self, rows: Tensor) -> RoundDraws:
        return RoundDraws(self.noise, self.origin, self.slots, self.coupled, self.rows[rows], self.half)

    def _slot(self, positions: Tensor) -> Tensor:
        return (positions - self.origin[self.rows][:, None]).clamp(0, self.slots - 1) + self.half * self.slots

    def race(self, positions: Tensor, vocab: int) -> Tensor:
        ids = torch.arange(vocab, device=positions.device)
        if self.coupled and not self.half:
            numbers = self.noise.coupled(self.slots, ids)
        else:
            numbers = self.noise.exponential(Purpose.DRAFT, (self.half + 1) * self.slots, ids)
        slot = self._slot(positions)
        return numbers[self.rows].gather(1, slot[..., None].expand(*slot.shape, vocab))

    def uniform(self, purpose: Purpose, positions: Tensor, count: int = 1) -> Tensor:
        # drafting knows one purpose; choice and token numbers differ by their slots
        wide = self.noise.uniform(Purpose.DRAFT, 2 * self.slots * count)[self.rows]
        slot = self._slot(positions)[..., None] * count + torch.arange(count, device=positions.device)
        return wide.gather(1, slot.flatten(1)).view(*positions.shape, count)

    def categorical(self, logits: Tensor, positions: Tensor) -> Tensor:
        race = self.race(positions, logits.shape[-1])
        return (torch.softmax(logits.float(), -1) / race).argmax(-1)

    def random_ids(self, purpose: Purpose, positions: Tensor, vocab: int) -> Tensor:
        raise UnsupportedError("uniform noise cannot draft")
