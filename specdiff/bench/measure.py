"""Interleaved, timed runs of all arms over all prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdiff.bench.arms import Arm, Run
from specdiff.bench.prompts import Prompt

WARM_UP_TOKENS = 8


@dataclass
class Sample:
    """One batch of prompts with a run of each arm.

    Attributes:
        prompts: the prompts of the batch, all of one set.
        ids: ``Long[P]`` of each.
        runs: by arm.
    """

    prompts: list[Prompt]
    ids: list[Tensor]
    runs: dict[str, Run]

    @property
    def set(self) -> str:
        """The prompt set."""
        return self.prompts[0].set


def batches(prompts: Sequence[Prompt], ids: Sequence[Tensor], size: int) -> list[tuple[list[Prompt], list[Tensor]]]:
    """Batches of at most ``size`` prompts of one set, sets in turn, so that a drifting clock touches all sets alike."""
    queues: dict[str, list[tuple[list[Prompt], list[Tensor]]]] = {}
    for prompt, row in zip(prompts, ids, strict=True):
        queue = queues.setdefault(prompt.set, [])
        if not queue or len(queue[-1][0]) == size:
            queue.append(([], []))
        queue[-1][0].append(prompt)
        queue[-1][1].append(row)
    depth = max((len(queue) for queue in queues.values()), default=0)
    return [queue[at] for at in range(depth) for queue in queues.values() if at < len(queue)]


def measure(
    arms: Mapping[str, Arm],
    work: Sequence[tuple[list[Prompt], list[Tensor]]],
    max_new_tokens: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Run every arm on every batch.

    The arms follow each other on the same batch, and which comes first rotates, so that neither a warming cache nor a
    neighbour on the machine favours one. A short run of every arm on the first batch comes before and is not counted.
    """
    names = list(arms)
    for name in names:
        arms[name](work[0][1], min(WARM_UP_TOKENS, max_new_tokens), seed)
    samples = []
    for at, (prompts, ids) in enumerate(work):
        turn = at % len(names)
        runs = {name: arms[name](ids, max_new_tokens, seed + at) for name in names[turn:] + names[:turn]}
        samples.append(Sample(prompts, ids, {name: runs[name] for name in names}))
        if progress is not None:
            progress(at + 1, len(work))
    return samples
