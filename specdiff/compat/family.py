"""Run one architecture against ``transformers``' own ``generate``: every drafter, block size, batch and rule."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel

from specdiff.cache.kinds import kinds_in_words, layer_plans
from specdiff.cache.passes import ModelCall
from specdiff.compat.exceptions import DEFAULTS
from specdiff.compat.tiny import FIRST_ORDINARY_ID, VOCABULARY, WINDOW, causal_class, tiny_config, tiny_model
from specdiff.errors import UnsupportedError
from specdiff.target import Target
from specdiff.verify import Noise

NEW_TOKENS = 40
PROMPTS = (9, 4, 6)
"""Lengths of the three rows; the window of the tiny models is 8."""
BLOCKS = (1, 3, 8, WINDOW + 4)
DRAFTERS = ("reject-all", "accept-all", "accept-some")
TIE = 1e-3
"""Top-2 margin, as a share of the spread of the logits, below which a token may differ."""

Status = Literal["works", "refused", "not built", "wrong", "failed"]


@dataclass(frozen=True)
class Case:
    """One run."""

    rule: str
    batch: int
    block: int
    drafter: str


@dataclass
class FamilyResult:
    """What came out for one architecture; see ``docs/compatibility.md``."""

    model_type: str
    class_name: str = ""
    status: Status = "not built"
    why: str = ""
    kinds: str = ""
    serving: str = ""
    stepwise: bool = False
    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    ties: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    distinct_tokens: int = 0
    gap: float = 0.0
    probe_seconds: float = 0.0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def all_cases() -> list[Case]:
    """The full grid."""
    grid = itertools.product(("greedy", "coupled"), (1, 3), BLOCKS, DRAFTERS)
    return [Case(rule, batch, block, drafter) for rule, batch, block, drafter in grid]


def pairwise_cases(turn: int = 0) -> list[Case]:
    """Twelve cases in which every pair of two settings occurs; ``turn`` rotates which other settings they meet."""
    cases = []
    for block, drafter in itertools.product(range(len(BLOCKS)), range(len(DRAFTERS))):
        rule = ("greedy", "coupled")[(block + drafter + turn) % 2]
        batch = (1, 3)[(block // 2 + drafter + turn // 2) % 2]
        cases.append(Case(rule, batch, BLOCKS[block], DRAFTERS[drafter]))
    return cases


def quick_cases() -> list[Case]:
    """Four cases that meet every drafter, batch, rule and block size once, for a look at all architectures."""
    return [
        Case("greedy", 3, BLOCKS[3], "accept-some"),
        Case("greedy", 1, BLOCKS[1], "reject-all"),
        Case("coupled", 3, BLOCKS[2], "accept-all"),
        Case("coupled", 1, BLOCKS[0], "accept-some"),
    ]


MODES: dict[str, Callable[[int], list[Case]]] = {
    "full": lambda turn: all_cases(),
    "reduced": pairwise_cases,
    "quick": lambda turn: quick_cases(),
}
"""Sets of cases by name; the argument rotates what a reduced set combines."""


def default_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of an architecture's (shrunk) default configuration."""
    config = (
        DEFAULTS[model_type](CONFIG_MAPPING[model_type]) if model_type in DEFAULTS else CONFIG_MAPPING[model_type]()
    )
    return tiny_model(tiny_config(config), causal_class(model_type), seed)


def check_family(model_type: str, cases: list[Case] | None = None, new_tokens: int = NEW_TOKENS) -> FamilyResult:
    """Build, wrap and run one architecture. Errors of the model and of specdiff become results, never exceptions."""
    began = time.perf_counter()
    result = FamilyResult(model_type)
    try:
        result.class_name = causal_class(model_type).__name__
        model = default_model(model_type)
    except Exception as error:
        result.why = f"{type(error).__name__}: {_short(error)}"
        result.seconds = time.perf_counter() - began
        return result
    try:
        _check(model, result, all_cases() if cases is None else cases, new_tokens)
    except Exception as error:
        result.status, result.why = "failed", f"{type(error).__name__}: {_short(error)}"
    result.seconds = round(time.perf_counter() - began, 2)
    return result


def _check(model: PreTrainedModel, result: FamilyResult, cases: list[Case], new_tokens: int) -> None:
    from specdiff import SpecDiff

    result.kinds = kinds_in_words(layer_plans(model.config))
    began = time.perf_counter()
    try:
        plain = SpecDiff(model, None, fast="off")
    except UnsupportedError as error:
        result.status, result.why = "refused", str(error)
        broken = _generate_fails(model)
        if broken:
            result.notes.append(f"transformers' own generate fails as well: {broken}")
        return
    result.probe_seconds = round(time.perf_counter() - began, 3)
    serving = plain.target.serving
    result.serving, result.stepwise = serving.mode, serving.stepwise
    result.gap = logits_gap(plain.target)
    if result.gap > TIE:
        result.wrong.append(f"logits of ragged rounds are off by {result.gap:.2g} of their spread")
    reference = _Reference(model, plain, new_tokens, result)
    for case in cases:
        name = f"{case.rule}, batch {case.batch}, block {case.block}, {case.drafter}"
        try:
            reference.run(case, name)
        except Exception as error:
            result.wrong.append(f"{name}: {type(error).__name__}: {_short(error)}")
        result.cases += 1
    result.status = "wrong" if result.wrong else "works"
    if result.wrong:
        result.why = result.wrong[0]


def logits_gap(target: Target, rounds: int = 12) -> float:
    """Largest difference to the uncached pass, as a share of the logits' spread, over ragged rounds on random tokens.

    Random models may repeat a token for ever, and their greedy text then says little; this looks past it. Rows begin at
    different lengths, accept different parts of blocks with wrong tokens behind, and go well past every window.
    """
    generator = torch.Generator().manual_seed(7)
    texts = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (3, 6 + 4 * rounds), generator=generator)
    wanted = torch.cat([target.call.uncached(text[None])[0] for text in texts]).float()
    state = target.open(3, texts.shape[1] + WINDOW + 4)
    worst = 0.0
    try:
        for turn in range(-1, rounds):
            true = [5, 2, 6] if turn < 0 else [1 + (turn + row) % 4 for row in range(3)]
            junk = [0, 0, 0] if turn < 0 else [(5 * turn + 3 * row) % (WINDOW + 3) for row in range(3)]
            width = max(map(sum, zip(true, junk, strict=True)))
            tokens = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (3, width), generator=generator)
            starts = list(state.lengths)
            for row, count in enumerate(true):
                tokens[row, :count] = texts[row, starts[row] : starts[row] + count]
            result = state.forward(tokens, torch.tensor(true) + torch.tensor(junk))
            assert result.logits is not None
            for row, count in enumerate(true):
                ours, right = result.logits[row, :count], wanted[row, starts[row] : starts[row] + count]
                worst = max(worst, float(torch.where(ours == right, 0.0, (ours - right).abs()).max()))
            state.advance(true)
    finally:
        state.close()
    return worst / float(wanted[wanted.isfinite()].std())


class _Reference:
    """The texts that are right, and the runs that must give them."""

    def __init__(self, model: PreTrainedModel, plain: Any, new_tokens: int, result: FamilyResult) -> None:
        self.model: Any = model
        self.new_tokens, self.result = new_tokens, result
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (1, size), generator=generator) for size in PROMPTS]
        self.seeds = [11, 12, 13]
        width = max(PROMPTS)
        self.ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=0) for row in self.rows])
        self.mask = torch.cat(
            [torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in self.rows]
        )
        self.uncached: dict[int, Tensor] = {}
        self.texts = {"greedy": self._greedy(), "coupled": self._coupled(plain)}
        result.distinct_tokens = len(set(self.texts["greedy"].flatten().tolist()))

    def _greedy(self) -> Tensor:
        """``Long[3, n]`` from transformers' own generate, row by row, checked against the uncached pass."""
        texts: list[Tensor] = []
        for row in self.rows:
            out = self.model.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=self.new_tokens, do_sample=False
            )
            text = out[0, row.shape[1] :]
            at = self._first_fault(row, text)
            if at is not None:
                self.result.notes.append("generate with its cache leaves the model's own uncached pass")
                self.uncached[len(texts)] = self._uncached_text(row)
            texts.append(text)
        texts = [torch.nn.functional.pad(text, (0, self.new_tokens - len(text))) for text in texts]
        together = self.model.generate(
            self.ids, attention_mask=self.mask, max_new_tokens=self.new_tokens, do_sample=False
        )[:, self.ids.shape[1] :]
        if not torch.equal(together, torch.stack(texts)):
            self.result.notes.append("generate gives other text for a left-padded batch than for its rows alone")
        return torch.stack(texts)

    def _first_fault(self, row: Tensor, text: Tensor) -> int | None:
        """Where a greedy text is not the uncached argmax though the margin is clear."""
        whole = torch.cat([row, text[None]], dim=1)
        logits = ModelCall(self.model).uncached(whole)[0][0, row.shape[1] - 1 : -1].float()
        top = logits.topk(2, dim=-1)
        spread = float(logits.std())
        for at in range(len(text)):
            lead = float(logits[at].max() - logits[at, text[at]]) / spread
            if lead > TIE and int(top.indices[at, 0]) != int(text[at]):
                return at
        return None

    def _uncached_text(self, row: Tensor) -> Tensor:
        call, text = ModelCall(self.model), row
        for _ in range(self.new_tokens):
            text = torch.cat([text, call.uncached(text)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
        return text[0, row.shape[1] :]

    def _coupled(self, plain: Any) -> Tensor:
        """``Long[3, n]`` from specdiff's plain decoding with the same seeds, row by row."""
        outs = [
            plain.generate(
                row, max_new_tokens=self.new_tokens, do_sample=True, top_k=0, rule="coupled", seed=[self.seeds[at]]
            )
            for at, row in enumerate(self.rows)
        ]
        return torch.stack([out[0, row.shape[1] :] for out, row in zip(outs, self.rows, strict=True)])

    def run(self, case: Case, name: str) -> None:
        """One run; a mismatch that is no near-tie is recorded as wrong."""
        from specdiff import SpecDiff
        from specdiff.testing import ReplayDrafter

        right = self.texts[case.rule][: case.batch]
        wrong_at = {"reject-all": (0,), "accept-all": (), "accept-some": (case.block // 2,)}[case.drafter]
        sd = SpecDiff(self.model, ReplayDrafter(right, block_size=case.block, wrong_at=wrong_at), fast="off")
        own: dict[str, Any] = {"do_sample": False}
        if case.rule == "coupled":
            own = {"do_sample": True, "top_k": 0, "rule": "coupled", "seed": self.seeds[: case.batch]}
        width = self.rows[0].shape[1]
        out = sd.generate(
            self.ids[: case.batch], attention_mask=self.mask[: case.batch], max_new_tokens=self.new_tokens, **own
        )
        for at, (got, wanted) in enumerate(zip(out[:, width:], right, strict=True)):
            if torch.equal(got, wanted):
                continue
            if case.rule == "greedy" and at in self.uncached and torch.equal(got, self.uncached[at]):
                self.result.notes.append("the text is that of the uncached pass, not that of generate")
                continue
            place = int((got != wanted).nonzero()[0])
            margin = self._margin(at, wanted, place, int(got[place]), case.rule)
            if margin < TIE:
                self.result.ties.append(margin)
            else:
                self.result.wrong.append(f"{name}: row {at} differs at token {place} (margin {margin:.2g})")

    def _margin(self, at: int, wanted: Tensor, place: int, other: int, rule: str) -> float:
        """How far the best token of one place leads over the two that were chosen, in the uncached pass.

        A share of the logits' spread. Coupled decoding takes the largest log p + g, with the Gumbel noise
        g = -log(exponential) of that position.
        """
        whole = torch.cat([self.rows[at], wanted[None, :place]], dim=1)
        logits = ModelCall(self.model).uncached(whole)[0][0, -1].float()
        scores = logits
        if rule == "coupled":
            noise = Noise(torch.tensor([self.seeds[at]])).round(torch.tensor([whole.shape[1]]))
            scores = logits.log_softmax(-1) - noise.coupled(1, torch.arange(len(logits)))[0, 0].log()
        lowest = min(float(scores[int(wanted[place])]), float(scores[other]))
        return (float(scores.max()) - lowest) / float(logits.std())


def _generate_fails(model: Any) -> str | None:
    """Why the model's own generate fails on text alone, or None when it does not."""
    try:
        row = torch.full((1, 4), FIRST_ORDINARY_ID)
        model.generate(row, generation_config=GenerationConfig(pad_token_id=0, max_new_tokens=2, do_sample=False))
    except Exception as error:
        return f"{type(error).__name__}: {_short(error)}"
    return None


def model_types() -> Iterator[str]:
    """Every model type that the installed transformers registers for causal language modelling."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    yield from sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
