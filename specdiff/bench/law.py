"""Does specdiff sample from the target's law? A chi-square test on the user's own pair, over several rounds.

The joint law of the first ``tokens`` new tokens after a prompt is enumerated by direct, uncached forward passes of the
stock model, with the very logits processors that transformers builds for the request. A truncating filter (top-k of a
few) keeps the tree small. Many rows of the same prompt are then drawn by specdiff, each with its own seed, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.bench.chi2 import FitTest, fit_test
from specdiff.bench.greedy import Progress
from specdiff.bench.models import pad_token_of
from specdiff.drafters.base import Drafter
from specdiff.errors import InvalidInputError
from specdiff.stats import SpecDiffOutput
from specdiff.wrap import SpecDiff

MAX_CELLS = 50_000
"""Most texts that are enumerated."""

Law = dict[tuple[int, ...], float]
"""Probability of each text (new tokens; an end token ends it)."""


@dataclass
class LawReport:
    """Result of :func:`chi_square_check` for one rule and one setting.

    Attributes:
        rule: acceptance rule.
        sampling: the sampling arguments.
        tokens: new tokens per draw.
        block_size: largest proposal.
        draws: texts drawn.
        texts: texts with positive probability.
        rounds: fewest and most rounds that one draw took (ended rows aside).
        tau: new tokens per target pass over all draws.
        acceptance_rate: accepted / proposed, None when nothing was proposed.
        tests: the joint law first, then each position and each pair of neighbours.
        alpha: level of each test; the Bonferroni share of ``level``.
        level: probability that a right sampler fails this report.
        power: probability with which biases of ``detectable`` size are found.
        detectable: total variation of the joint law (over its merged cells) that is found with that power.
    """

    rule: str
    sampling: dict[str, Any]
    tokens: int
    block_size: int
    draws: int
    texts: int
    rounds: tuple[int, int]
    tau: float | None
    acceptance_rate: float | None
    tests: list[FitTest]
    alpha: float
    level: float
    power: float
    detectable: float | None
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """No test below its level, and no draw that the law excludes."""
        return all(test.p_value >= self.alpha and not test.impossible for test in self.tests)

    @property
    def joint(self) -> FitTest:
        """The test of the joint law."""
        return self.tests[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"rounds": list(self.rounds), "passed": self.passed}


class _Captured(Exception):
    def __init__(self, processors: Any, config: Any) -> None:
        self.processors, self.config = processors, config


def prepared(model: PreTrainedModel, ids: Tensor, **sampling: Any) -> tuple[Any, set[int]]:
    """The logits processors and end tokens that transformers itself builds for a request.

    Args:
        model: the target.
        ids: ``Long[1, P]``.
        **sampling: arguments of ``generate``.
    """

    def catch(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **_: Any,
    ) -> Any:
        raise _Captured(logits_processor, generation_config)

    try:
        cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), custom_generate=catch, **sampling)
    except _Captured as caught:
        eos = caught.config._eos_token_tensor
        return caught.processors, set() if eos is None else set(eos.reshape(-1).tolist())
    raise AssertionError("transformers returned without calling custom_generate")


def exact_law(model: PreTrainedModel, prompt: Tensor, tokens: int, *, rows: int = 128, **sampling: Any) -> Law:
    """The joint law of the next ``tokens`` tokens, by direct forward passes of the stock model without a cache.

    Args:
        model: the target.
        prompt: ``Long[P]``.
        tokens: length of the texts.
        rows: prefixes per forward pass.
        **sampling: arguments of ``generate`` (``do_sample=True`` among them).

    Raises:
        InvalidInputError: more than :data:`MAX_CELLS` texts.
    """
    ids = prompt[None].to(model.device)
    processors, ends = prepared(model, ids, max_new_tokens=tokens, **sampling)
    law: Law = {}
    level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(tokens):
        grown: list[tuple[tuple[int, ...], float]] = []
        for at in range(0, len(level), rows):
            part = level[at : at + rows]
            prefixes = torch.tensor([list(text) for text, _ in part], dtype=torch.long, device=model.device)
            batch = torch.cat([ids.expand(len(part), -1), prefixes.reshape(len(part), -1)], dim=1)
            with torch.no_grad():
                logits = model(input_ids=batch, attention_mask=torch.ones_like(batch), use_cache=False).logits[:, -1]
                scores = processors(batch, logits.to(torch.float32))
            probabilities = scores.double().softmax(dim=-1)
            for (text, mass), row in zip(part, probabilities, strict=True):
                for token in row.nonzero()[:, 0].tolist():
                    grown.append(((*text, token), mass * float(row[token])))
            if len(grown) + len(law) > MAX_CELLS:
                raise InvalidInputError(
                    f"more than {MAX_CELLS} texts are possible: restrict the law, for example with top_k=3, "
                    "or use fewer tokens"
                )
        level = []
        for text, mass in grown:
            if text[-1] in ends:
                law[text] = mass
            else:
                level.append((text, mass))
    law.update(level)
    return law


def marginal(law: Law, view: Callable[[tuple[int, ...]], Any]) -> dict[Any, float]:
    """Law of ``view(text)``."""
    out: dict[Any, float] = {}
    for text, mass in law.items():
        key = view(text)
        out[key] = out.get(key, 0.0) + mass
    return out


def law_tests(law: Law, drawn: Sequence[tuple[int, ...]], tokens: int, *, level: float, power: float) -> list[FitTest]:
    """The joint law, every position and every pair of neighbouring positions against draws.

    ``level`` is shared out evenly over the tests (Bonferroni).
    """
    views: list[tuple[str, Callable[[tuple[int, ...]], Any]]] = [("joint", lambda text: text)]
    views += [(f"token {i}", lambda text, i=i: text[i : i + 1]) for i in range(tokens)]  # type: ignore[misc]
    views += [(f"tokens {i}, {i + 1}", lambda text, i=i: text[i : i + 2]) for i in range(tokens - 1)]  # type: ignore[misc]
    tests = []
    for name, view in views:
        cells = marginal(law, view)
        counts = dict.fromkeys(cells, 0)
        for text in drawn:
            counts[view(text)] = counts.get(view(text), 0) + 1
        probabilities = [cells.get(key, 0.0) for key in counts]
        tests.append(fit_test(name, list(counts.values()), probabilities, alpha=level / len(views), power=power))
    return tests


def draw_texts(
    wrapped: SpecDiff,
    prompt: Tensor,
    tokens: int,
    draws: int,
    *,
    rows: int,
    seed: int | None,
    rule: str,
    block_size: int,
    progress: Progress | None = None,
    **sampling: Any,
) -> tuple[list[tuple[int, ...]], list[SpecDiffOutput]]:
    """Sample ``draws`` texts, ``rows`` at a time, every row with its own seed."""
    texts: list[tuple[int, ...]] = []
    outputs = []
    pad = pad_token_of(wrapped.ar)
    call = 0
    while len(texts) < draws:
        count = min(rows, draws - len(texts))
        ids = prompt[None].expand(count, -1).to(wrapped.device)
        own: dict[str, Any] = {"seed": None if seed is None else seed + call, "rule": rule}
        if wrapped.drafter is not None:
            own["block_size"] = block_size
        out = wrapped.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            pad_token_id=pad,
            return_dict_in_generate=True,
            **own,
            **sampling,
        )
        assert isinstance(out, SpecDiffOutput) and out.stats is not None
        width = ids.shape[1]
        for row, length in zip(out.sequences.tolist(), out.stats.new_tokens, strict=True):
            texts.append(tuple(row[width : width + length]))
        outputs.append(out)
        call += 1
        if progress is not None:
            progress(f"rule {rule}", len(texts), draws)
    return texts, outputs


def chi_square_check(
    model: PreTrainedModel,
    drafter: Drafter | str | None,
    prompt: Tensor,
    *,
    rule: str = "block",
    tokens: int | None = None,
    draws: int = 4000,
    rows: int = 128,
    seed: int | None = 0,
    block_size: int = 2,
    level: float = 0.01,
    power: float = 0.9,
    fast: str = "auto",
    law: Law | None = None,
    progress: Progress | None = None,
    **sampling: Any,
) -> LawReport:
    """Chi-square test of specdiff's samples against the target's exact joint law.

    Args:
        model: the target.
        drafter: as for :class:`SpecDiff`.
        prompt: ``Long[P]``.
        rule: ``token``, ``block`` or ``coupled``.
        tokens: new tokens per text; ``block_size`` + 3 when None, so that every text takes at least two rounds (the
            prefill gives one token, and a round at most ``block_size`` + 1).
        draws: texts to draw.
        rows: texts per ``generate`` call.
        seed: of the first call; later calls count up. None takes seeds from torch's generator.
        block_size: largest proposal (clipped to the drafter's own).
        level: probability that a right sampler fails.
        power: for the statement of what size of bias would have been found.
        fast: as for :class:`SpecDiff`.
        law: the law, when already enumerated.
        progress: told how far it is.
        **sampling: ``generate`` arguments; ``temperature=1.0, top_k=3`` when none are given.

    Raises:
        InvalidInputError: fewer than 4 tokens, fewer than 2 certain rounds, or a law too large to enumerate.
    """
    wrapped = SpecDiff(model, drafter, fast=fast)
    block = min(block_size, wrapped.block_size) if wrapped.drafter is not None else 0
    count = max(4, block + 3) if tokens is None else tokens
    if count < 4 or count - 1 <= block + 1:
        raise InvalidInputError(
            f"{count} tokens with blocks of {block} may end within one round; the check needs at least 4 tokens and "
            f"2 rounds: use at least {max(4, block + 3)} tokens"
        )
    settings = {"do_sample": True, **(sampling or {"temperature": 1.0, "top_k": 3})}
    settings.setdefault("top_k", 0)  # transformers would filter to 50 unasked
    exact = exact_law(model, prompt, count, rows=rows, **settings) if law is None else law
    texts, outputs = draw_texts(
        wrapped, prompt, count, draws, rows=rows, seed=seed, rule=rule, block_size=block, progress=progress, **settings
    )
    tests = law_tests(exact, texts, count, level=level, power=power)
    stats = [out.stats for out in outputs if out.stats is not None]
    rounds = [
        taken
        for part in stats
        for taken, why in zip(part.row_rounds, part.finish_reason, strict=True)
        if why == "length"
    ]
    proposed = sum(part.proposed for part in stats)
    passes = sum(sum(part.row_rounds) for part in stats)
    decoded = sum(sum(part.new_tokens) - len(part.new_tokens) for part in stats)
    return LawReport(
        rule=rule,
        sampling=settings,
        tokens=count,
        block_size=block,
        draws=len(texts),
        texts=len(exact),
        rounds=(min(rounds, default=0), max(rounds, default=0)),
        tau=decoded / passes if passes else None,
        acceptance_rate=sum(part.accepted for part in stats) / proposed if proposed else None,
        tests=tests,
        alpha=level / len(tests),
        level=level,
        power=power,
        detectable=tests[0].detectable,
        notes=sorted({note for part in stats for note in part.notes} | _idle(wrapped, proposed)),
    )


def _idle(wrapped: SpecDiff, proposed: int) -> set[str]:
    """A warning when the check says nothing about drafting."""
    if wrapped.drafter is None or proposed:
        return set()
    return {
        "nothing was drafted, so only plain decoding was tested; take a prompt for which this drafter proposes tokens"
    }
