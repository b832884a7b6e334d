"""Conversations: both caches kept between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdiff.cache.rope import turning_point
from specdiff.drafters.base import DraftSession
from specdiff.drafters.common_start import common_start
from specdiff.errors import UnsupportedError
from specdiff.fingerprint import Fingerprint, fingerprint
from specdiff.loop import Decoding, Job, Row
from specdiff.stats import SpecDiffOutput
from specdiff.target import Target, TargetState

if TYPE_CHECKING:
    from specdiff.wrap import SpecDiff


class Session:
    """``generate`` for a conversation: the common prefix with what was last seen stays in both caches.

    One row per call. An edited history is rolled back to where it differs.
    """

    def __init__(self, owner: SpecDiff) -> None:
        self.owner = owner
        self.cached: list[int] = []
        self.target = owner.target
        self.state: TargetState | None = None
        self.draft: DraftSession | None = None
        self.seen: Fingerprint = ()
        self.inference = False

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Tensor | SpecDiffOutput:
        """As :meth:`SpecDiff.generate`, for one row."""
        return self.owner.run_call(inputs, {"generation_config": generation_config, **kwargs}, resume=self)

    def run(self, job: Job, target: Target) -> list[Row]:
        """Decode one prepared job on top of what is cached, on ``target``."""
        if len(job.pads) != 1:
            raise UnsupportedError("a session holds one row per call; use SpecDiff.generate for batches")
        prompt = job.ids[0, job.pads[0] :].tolist()
        same = common_start(self.cached, prompt[:-1])
        seen = fingerprint(self.owner.ar) if job.seen is None else job.seen
        if target is not self.target or not self._fits(seen, len(prompt)):
            self.close()  # everything is computed again
            self.target = target
        self.seen, self.inference = seen, torch.is_inference_mode_enabled()
        if self.state is not None:
            self.state.rollback([same])
            kept = list(self.state.lengths)  # fewer than asked where a state cannot go back: it is computed again
            if self.draft is not None:
                self.draft.rollback(torch.tensor(kept, device=self.owner.device))
        decoding = Decoding(job, target, self.owner.drafter, self.state, self.draft, keep_rows=True)
        try:
            rows = decoding.run()
        except BaseException:
            decoding.close()
            self.state = self.draft = None
            self.cached = []
            raise
        self.state, self.draft = decoding.state, decoding.session
        assert self.state is not None
        self.cached = (prompt + rows[0].new)[: self.state.lengths[0]]
        return rows

    def _fits(self, seen: Fingerprint, prompt: int) -> bool:
        """Whether what is cached can be gone on from.

        It must be that of the weights as they are now, with the rotary frequencies of a prompt of this length, in
        tensors that may be written here.
        """
        if self.state is None:
            return True
        turn = turning_point(self.owner.config)
        same_side = turn is None or (len(self.cached) <= turn[1]) == (prompt <= turn[1])
        writable = torch.is_inference_mode_enabled() or not self.inference
        return self.seen == seen and same_side and writable

    def close(self) -> None:
        """Release both caches."""
        for held in (self.state, self.draft):
            if held is not None:
                held.close()
        self.state = self.draft = None
        self.cached = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
