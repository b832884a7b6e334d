"""Cases from public reports: sampling (B09, B11, B17, B35), the laws of all rules, and seeds."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    KINDS,
    PROMPT,
    TableDrafter,
    both_paths,
    build,
    chi_square,
    drafter,
    exact_law,
    greedy_text,
    law_target,
    left_padded,
    power,
    random_prompt,
    reference,
    run,
    target,
)
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessorList

from specdiff import SpecDiff
from specdiff.errors import InvalidInputError
from specdiff.testing import RandomDrafter

path = both_paths("auto")

START = torch.tensor([1, 2])
LEVEL = 0.001
RULES = ("token", "block", "coupled")
WARPS: dict[str, dict[str, Any]] = {
    "t0.3": {"temperature": 0.3},
    "t1": {"temperature": 1.0},
    "t2": {"temperature": 2.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 0.5, "top_k": 3, "top_p": 0.7, "min_p": 0.1},
}
MORE_WARPS: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.05},
    "eta": {"eta_cutoff": 0.1},
    "top_h": {"top_h": 0.6},
    "penalty": {"repetition_penalty": 1.8, "temperature": 1.5},
    "ngram": {"no_repeat_ngram_size": 2, "temperature": 1.5},
}


def settings(warp: dict[str, Any]) -> dict[str, Any]:
    return {"do_sample": True, "top_k": 0, **warp}


@functools.cache
def law(vocab: int, steps: int, warp: str) -> np.ndarray:
    """The target's exact law after the processors that transformers itself builds for these settings."""
    model = law_target(vocab)
    config = GenerationConfig(**settings((WARPS | MORE_WARPS)[warp]), num_beams=1, num_return_sequences=1)
    processors = model._get_logits_processor(config, input_ids_seq_length=len(START), encoder_input_ids=START[None])
    return exact_law(model, START, steps, LogitsProcessorList(processors))


def draw(model: LlamaForCausalLM, spec: Any, count: int, steps: int, warp: dict[str, Any], **extra: Any) -> Any:
    """``count`` samples of ``steps`` tokens in one call: (``[count, steps]``, stats)."""
    sd = SpecDiff(model, spec)
    out = run(sd, START.expand(count, -1), max_new_tokens=steps, **settings(warp), **extra)
    return out.sequences[:, len(START) :].numpy(), out.stats


def check_law(vocab: int, steps: int, warp: str, rule: str, block: int, count: int, seeds: range) -> None:
    exact = law(vocab, steps, warp)
    for seed in seeds:
        spec = TableDrafter(vocab, block, seed=block)
        tokens, stats = draw(law_target(vocab), spec, count, steps, (WARPS | MORE_WARPS)[warp], rule=rule, seed=seed)
        assert 0 < stats.accepted < stats.proposed
        assert stats.rule == rule
        if steps > 3:
            assert max(len(row) for row in stats.emitted) >= 3  # the prefill's token, then at least two rounds
        value = chi_square(exact, tokens)
        assert value > LEVEL, f"seed {seed}: p = {value:.2g}"
        assert chi_square(exact.sum(axis=tuple(range(1, steps))), tokens[:, :1]) > LEVEL


# -- B09: the law behind filters and temperatures --------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("warp", WARPS)
def test_b09_law_over_two_rounds(warp, rule):
    """Joint law of 5 tokens of 4: the prefill's token, then at least two rounds of blocks of 2."""
    check_law(4, 5, warp, rule, block=2, count=2500, seeds=range(1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [2, 4])
def test_b09_law_when_the_budget_is_shorter_than_the_block(block, rule):
    check_law(12, 3, "all", rule, block, count=2500, seeds=range(1))


GRID = [
    *((4, 5, 2, warp) for warp in WARPS),
    *((12, 4, 2, warp) for warp in WARPS),
    *((4, 5, 4, warp) for warp in ("t1", "all")),
    *((12, 3, 4, warp) for warp in ("t1", "all")),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "steps", "block", "warp"), GRID)
def test_b09_law_full_grid(vocab, steps, block, warp, rule):
    check_law(vocab, steps, warp, rule, block, count=8000, seeds=range(1, 4))


@pytest.mark.parametrize("warp", MORE_WARPS)
def test_b22_law_of_the_other_processors(warp):
    check_law(4, 5, warp, "block", block=2, count=1500, seeds=range(1))


def test_b09_power_of_these_tests():
    """More than 99 % for a 6-point shift of the first token with 2,500 samples, 4 points with 8,000, 2 with 20,000."""
    exact = law(4, 5, "t1")
    top = int(exact.sum(axis=(1, 2, 3, 4)).argmax())
    for shift, count in ((0.06, 2500), (0.04, 8000), (0.02, 20000)):
        first = exact.sum(axis=(1, 2, 3, 4))
        moved = np.where(np.arange(4) == top, first - shift, first + shift / 3)
        first_law = first.reshape(-1)
        assert power(first_law, moved, count) > 0.99
        assert power(first_law, first_law, count) == pytest.approx(LEVEL, rel=0.05)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_b09_control_a_drafter_that_lies_about_its_law_is_found_out(rule):
    """The reported fault: drafts come from filtered logits, raw ones are stated as their law."""
    spec = TableDrafter(4, 2, seed=2, change=lambda logits: logits * 3)
    tokens, _ = draw(law_target(4), spec, 4000, 5, WARPS["t1"], rule=rule, seed=0)
    assert chi_square(law(4, 5, "t1"), tokens) < 1e-6


# -- B11: nothing is drawn with noise that was used before -----------------------------------------------------------


def after_rejection(vocab: int, spec: TableDrafter, tokens: np.ndarray, emitted: list[list[int]]) -> list[float]:
    """p-values of the second token where the first draft was rejected, for every first token seen often enough."""
    model = law_target(vocab)
    second = law(vocab, 2, "t1")
    rejected = np.array([row[1] == 1 for row in emitted])
    values = []
    for first in range(vocab):
        here = tokens[rejected & (tokens[:, 0] == first), 1]
        p = second[first] / second[first].sum()
        q = spec.table[first, 0].double().softmax(-1).numpy()
        rest = np.maximum(p - q, 0)
        if len(here) >= 200:
            values.append(chi_square(rest / rest.sum(), here[:, None]))
    assert model.config.vocab_size == vocab and values
    return values


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seeded", [True, False], ids=["seed", "no-seed"])
def test_b11_the_token_after_a_rejection(rule, seeded):
    spec = TableDrafter(3, 2, sharpness=4.0, seed=7)
    torch.manual_seed(5)
    extra = {"seed": 3} if seeded else {}
    tokens, stats = draw(law_target(3), spec, 5000, 5, WARPS["t1"], rule=rule, **extra)
    assert stats.acceptance_rate < 0.6
    assert min(after_rejection(3, spec, tokens, stats.emitted)) > LEVEL / 3
    assert chi_square(law(3, 5, "t1"), tokens) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab", [3, 12])
@pytest.mark.parametrize("seeded", [True, False], ids=["seed", "no-seed"])
def test_b11_full(rule, vocab, seeded):
    steps = 5 if vocab == 3 else 4
    for repeat in range(3):
        spec = TableDrafter(vocab, 2, sharpness=4.0, seed=7 + repeat)
        torch.manual_seed(repeat)
        extra = {"seed": repeat} if seeded else {}
        tokens, stats = draw(law_target(vocab), spec, 20000, steps, WARPS["t1"], rule=rule, **extra)
        assert chi_square(law(vocab, steps, "t1"), tokens) > LEVEL
        if rule != "coupled":
            assert min(after_rejection(vocab, spec, tokens, stats.emitted)) > LEVEL / 12


def test_b11_many_calls_with_one_row_each():
    """Per-call seeds 0, 1, 2, ... must be as independent as the rows of one call."""
    spec = TableDrafter(3, 2, sharpness=4.0, seed=7)
    sd = SpecDiff(law_target(3), spec)
    rows = [
        sd.generate(START[None], max_new_tokens=3, seed=seed, **settings(WARPS["t2"]))[0, len(START) :].tolist()
        for seed in range(100)
    ]
    assert chi_square(law(3, 3, "t2"), np.array(rows)) > LEVEL


# -- B17: ties -------------------------------------------------------------------------------------------------------


@functools.cache
def tied(dtype: torch.dtype) -> LlamaForCausalLM:
    """T with two equal output rows, 5 and 9, that win often."""
    model = build(1)
    with torch.no_grad():
        model.lm_head.weight[5] *= 2.5
        model.lm_head.weight[9] = model.lm_head.weight[5]
    return model.to(dtype)


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_b17_the_lowest_of_equal_logits_wins(dtype, block):
    model = tied(dtype)
    text = reference(model, PROMPT, max_new_tokens=40)
    assert 5 in text and 9 not in text
    swapped = torch.where(text == 5, 9, text)
    for spec in (*(drafter(kind, text, block, wrong_at=(0,)) for kind in KINDS), drafter("Dself", swapped, block)):
        out = run(SpecDiff(model, spec), max_new_tokens=40)
        new = out.sequences[:, PROMPT.shape[1] :]
        assert 9 not in new
        if dtype == torch.float32:
            assert torch.equal(new, text)


@pytest.mark.parametrize("warp", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.3}, {"top_p": 0.55}], ids=str)
def test_b17_filters_that_cut_at_a_tie_keep_what_transformers_keeps(warp):
    model = build(5, vocab=6, spread=0.15, layers=1, hidden=32)
    with torch.no_grad():
        model.lm_head.weight[[1, 2, 4]] = 0.0  # three logits that are exactly 0, whatever the kernel
        model.lm_head.weight[[0, 3, 5]] *= 2.0
    config = GenerationConfig(**settings(warp), num_beams=1, num_return_sequences=1)
    exact = exact_law(model, START, 3, model._get_logits_processor(config))
    for rule in RULES:
        tokens, _ = draw(model, TableDrafter(6, 2, seed=1), 1500, 3, warp, rule=rule, seed=2)
        assert np.isin(tokens, [1, 2, 4]).any()
        assert chi_square(exact, tokens) > LEVEL


# -- B35: unequal vocabularies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [101, 128, 160])
def test_b35_greedy_with_a_drafter_of_another_width(width):
    model = build(2, vocab=128)
    with torch.no_grad():
        model.lm_head.weight[101:] *= 1.5
    text = reference(model, PROMPT, max_new_tokens=40)
    assert (text >= 101).any()
    out = run(SpecDiff(model, TableDrafter(width, 4)), max_new_tokens=40)
    assert torch.equal(out.sequences[:, PROMPT.shape[1] :], text)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [9, 12, 16])
def test_b35_law_with_a_drafter_of_another_width(width, rule):
    model = law_target(12)
    tokens, stats = draw(model, TableDrafter(width, 2, seed=4), 1500, 3, {"temperature": 2.5}, rule=rule, seed=1)
    config = GenerationConfig(**settings({"temperature": 2.5}), num_beams=1, num_return_sequences=1)
    assert chi_square(exact_law(model, START, 3, model._get_logits_processor(config)), tokens) > LEVEL
    assert stats.accepted > 0 and tokens.max() < 12


def test_b35_a_drafter_that_cannot_fit_says_so_with_both_sizes():
    with pytest.raises(InvalidInputError, match=r"160.*128"):
        run(SpecDiff(build(2, vocab=128), RandomDrafter(160, 4)), max_new_tokens=4)


# -- coupled, and seeds ----------------------------------------------------------------------------------------------

BATCH = [random_prompt(n, seed=n) for n in (3, 9, 5, 4, 7)]
SAMPLE = {"do_sample": True, "top_k": 40, "top_p": 0.95, "max_new_tokens": 30}


@pytest.mark.parametrize("rows", [1, 5])
def test_coupled_equals_plain_decoding_with_the_same_seed(rows):
    ids, mask = left_padded(BATCH[:rows])
    plain = run(SpecDiff(target()), ids, mask, seed=4, rule="coupled", **SAMPLE).sequences
    new = plain[:, ids.shape[1] :]
    assert len({tuple(row) for row in new.tolist()}) == rows
    for block in (1, 2, 5, 16):
        specs = [TableDrafter(101, block), drafter("Dself", new, block), drafter("Dmix", new, block)]
        for spec in specs:
            out = run(SpecDiff(target(), spec), ids, mask, seed=4, rule="coupled", **SAMPLE)
            assert torch.equal(out.sequences, plain)
            if spec is specs[1]:
                assert out.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_a_row_of_a_batch_equals_its_solo_run_with_its_seed(rule):
    ids, mask = left_padded(BATCH)
    seeds = [3, 1, 2**62 + 1, 7, 8]
    sd = SpecDiff(target(), TableDrafter(101, 4))
    both = run(sd, ids, mask, seed=seeds, rule=rule, **SAMPLE).sequences[:, ids.shape[1] :]
    for r, prompt in enumerate(BATCH):
        alone = run(sd, torch.tensor([prompt]), seed=seeds[r], rule=rule, **SAMPLE).sequences[:, len(prompt) :]
        assert torch.equal(both[r], alone[0])
    first = run(sd, ids, mask, seed=3, rule=rule, **SAMPLE).sequences[:1, ids.shape[1] :]
    assert torch.equal(first[0], both[0])  # row 0 of one seed has that seed


def test_seeds_and_generators():
    sd = SpecDiff(target(), TableDrafter(101, 4))

    def text(**extra: Any) -> list[int]:
        return sd.generate(PROMPT, **SAMPLE, **extra)[0].tolist()

    def manual(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return text()

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert manual(1) == manual(1) != manual(2)
    torch.manual_seed(1)
    assert text() != text()
    assert text(generator=torch.Generator().manual_seed(9)) == text(generator=torch.Generator().manual_seed(9))
    state = torch.get_rng_state()
    text(seed=1)
    text(generator=torch.Generator())
    sd.generate(PROMPT, max_new_tokens=5, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(InvalidInputError, match="not both"):
        text(seed=1, generator=torch.Generator())
    with pytest.raises(InvalidInputError, match="2 seeds for 1 rows"):
        text(seed=[1, 2])
    with pytest.raises(InvalidInputError, match="greedy"):
        text(rule="greedy")


def test_num_return_sequences_are_separate_rows():
    sd = SpecDiff(target(), TableDrafter(101, 4))
    out = sd.generate(PROMPT, num_return_sequences=4, seed=5, **SAMPLE)
    assert out.shape[0] == 4 and len({tuple(row) for row in out.tolist()}) == 4
    again = sd.generate(PROMPT.expand(4, -1), seed=5, **SAMPLE)
    assert torch.equal(out, again)


def test_inside_transformers_own_generate():
    sd = SpecDiff(target(), TableDrafter(101, 4))
    a = target().generate(PROMPT, custom_generate=sd, seed=3, rule="token", block_size=2, **SAMPLE)
    b = sd.generate(PROMPT, seed=3, rule="token", block_size=2, **SAMPLE)
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="another model"):
        build(1).generate(PROMPT, custom_generate=sd, max_new_tokens=3)


def test_temperature_near_zero_is_greedy():
    text = greedy_text(30)
    for rule, kind in itertools.product(RULES, KINDS):
        out = run(
            SpecDiff(target(), drafter(kind, text, 4)),
            do_sample=True,
            temperature=1e-4,
            max_new_tokens=30,
            rule=rule,
            seed=0,
        )
        assert torch.equal(out.sequences[:, PROMPT.shape[1] :], text)


def test_bias_of_the_first_token_is_seen():
    """Control of the set-up itself: a processor that moves the law by a few points fails the same check."""

    def nudge(ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.tensor([0.25, 0.0, 0.0, 0.0])

    tokens, _ = draw(law_target(4), None, 4000, 3, WARPS["t1"], seed=0, logits_processor=LogitsProcessorList([nudge]))
    assert chi_square(law(4, 3, "t1"), tokens) < LEVEL
