"""The chi-square check, and with it the sampling cases B09 and B11 through the whole engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from bench_tiny import SlantedDrafter, tiny_llama

from specdiff import SpecDiff
from specdiff.bench.audit import chi_square_check, exact_law
from specdiff.bench.chi2 import chi2_critical, chi2_sf, detectable_variation, fit_test, noncentral_sf
from specdiff.bench.law import draw_texts, law_tests, marginal, prepared
from specdiff.errors import InvalidInputError
from specdiff.testing import RandomDrafter, ReplayDrafter

PROMPT = torch.tensor([2, 1, 2, 0, 1])
RULES = ("token", "block", "coupled")
FILTERS = {
    "temperature .3": {"temperature": 0.3},
    "temperature .5": {"temperature": 0.5},
    "temperature 1": {"temperature": 1.0},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 0.5, "top_k": 3, "top_p": 0.7, "min_p": 0.1},
}
LEVEL = 1e-4
"""Chance that one right setting fails here; the draws are fixed by their seeds."""


def test_chi_square_functions_match_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom, x in itertools.product((1, 7, 80, 300), (0.5, 7.0, 100.0, 400.0)):
        assert chi2_sf(x, freedom) == pytest.approx(stats.chi2.sf(x, freedom), rel=1e-7, abs=1e-300)
        for shift in (0.3, 12.0, 150.0):
            assert noncentral_sf(x, freedom, shift) == pytest.approx(
                stats.ncx2.sf(x, freedom, shift), rel=1e-6, abs=1e-10
            )
    assert chi2_critical(0.01, 10) == pytest.approx(stats.chi2.isf(0.01, 10), rel=1e-7)


def test_stated_power_is_reached_by_the_least_visible_bias():
    """Of all biases of one total variation, +-d everywhere has the smallest chi-square distance."""
    cells, draws, alpha = 20, 3000, 0.01
    variation = detectable_variation(draws, cells - 1, alpha, 0.9)
    law = torch.full((cells,), 1 / cells)
    biased = law * (1 + 2 * variation * torch.tensor([1.0, -1.0]).repeat(cells // 2))
    generator = torch.Generator().manual_seed(1)
    found = 0
    for _ in range(200):
        counts = torch.bincount(torch.multinomial(biased, draws, True, generator=generator), minlength=cells)
        found += fit_test("x", counts.tolist(), law.tolist()).p_value < alpha
    assert 0.84 < found / 200 < 0.96


def test_fit_test_level_and_merging():
    law = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.0099, 0.0001])
    generator = torch.Generator().manual_seed(2)
    below = 0
    for _ in range(400):
        counts = torch.bincount(torch.multinomial(law, 500, True, generator=generator), minlength=6)
        test = fit_test("x", counts.tolist(), (law.double() / law.double().sum()).tolist())
        assert test.freedom == 3 and test.impossible == 0
        below += test.p_value < 0.05
    assert 0.02 < below / 400 < 0.09
    assert fit_test("x", [5, 1], [1.0, 0.0]).impossible == 1
    with pytest.raises(InvalidInputError):
        fit_test("x", [1], [0.5, 0.5])


def test_exact_law_is_the_product_of_conditionals_and_stops_at_eos():
    model = tiny_llama(5, eos=3)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 4}
    law = exact_law(model, PROMPT, 3, rows=7, **sampling)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert all(3 not in text[:-1] for text in law) and any(text[-1] == 3 and len(text) < 3 for text in law)
    processors, ends = prepared(model, PROMPT[None], max_new_tokens=3, **sampling)
    assert ends == {3}
    text, mass = max(law.items(), key=lambda item: item[1] * (len(item[0]) == 3))
    product, ids = 1.0, PROMPT[None]
    for token in text:
        scores = processors(ids, model(ids).logits[:, -1])
        product *= float(scores.softmax(-1)[0, token].detach())
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    assert product == pytest.approx(mass, rel=1e-5)


def _b09(rule, name, block, vocab, draws):
    model, drafter = tiny_llama(vocab, scale=0.3 if block == 2 else 0.5), SlantedDrafter(vocab, block, sharp=1.5)
    options = {"rule": rule, "draws": draws, "block_size": block, "level": LEVEL, **FILTERS[name]}
    report = chi_square_check(model, drafter, PROMPT, rows=1000, seed=5, **options)
    assert report.passed, report
    assert report.rounds[0] >= 2 and report.tokens == block + 3
    assert 0 < report.acceptance_rate < 1
    assert report.joint.freedom >= 4


@pytest.mark.parametrize("rule", RULES)
def test_b09_all_filters_over_rounds(rule):
    """B09: q is what was sampled from after the filters; the first token and the token after a rejection included."""
    _b09(rule, "all", block=2, vocab=5, draws=1500)


@pytest.mark.slow
@pytest.mark.parametrize("block", [2, 4])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("rule", RULES)
def test_b09_every_filter_and_block(rule, name, block):
    _b09(rule, name, block=block, vocab=5 if block == 2 else 3, draws=4000)


@pytest.mark.parametrize("rule", RULES)
def test_b09_budget_below_the_block(rule):
    """B09: ``max_new_tokens`` smaller than K: the only round is short."""
    model = tiny_llama(4)
    wrapped = SpecDiff(model, SlantedDrafter(4, 6))
    sampling = {"do_sample": True, "top_k": 3}
    law = exact_law(model, PROMPT, 4, **sampling)
    texts, _ = draw_texts(wrapped, PROMPT, 4, 2000, rows=1000, seed=3, rule=rule, block_size=6, **sampling)
    assert all(test.p_value >= test_level and not test.impossible for test, test_level in _levels(law, texts))


def _levels(law, texts):
    tests = law_tests(law, texts, 4, level=LEVEL, power=0.9)
    return [(test, LEVEL / len(tests)) for test in tests]


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [True, False], ids=["seeds", "no seeds"])
@pytest.mark.parametrize("vocab", [3, 12])
@pytest.mark.parametrize("rule", RULES)
def test_b11_far_drafter(rule, vocab, seeded):
    """B11: draft, acceptance and recovery draws are independent: 20,000 draws, q far from p."""
    model = tiny_llama(vocab, scale=0.8)
    torch.manual_seed(11)  # what calls without a seed draw theirs from
    tokens, block = (5, 2) if vocab == 3 else (4, 1)
    options = {"rule": rule, "tokens": tokens, "block_size": block, "seed": 7 if seeded else None, "top_k": 0}
    report = chi_square_check(
        model, SlantedDrafter(vocab, 2, sharp=4.0), PROMPT, draws=20_000, rows=2000, level=LEVEL, **options
    )
    assert report.passed, report
    assert report.rounds[0] >= 2


@pytest.mark.slow
def test_b11_law_after_a_rejection():
    """B11: where the first draft was rejected the next token follows norm((p - q)+), whatever drew the draft."""
    vocab, draws = 12, 20_000
    model = tiny_llama(vocab, scale=0.5)
    drafter = SlantedDrafter(vocab, 2)
    sampling = {"do_sample": True, "top_k": 0}
    texts, outputs = draw_texts(
        SpecDiff(model, drafter), PROMPT, 4, draws, rows=2000, seed=1, rule="token", block_size=2, **sampling
    )
    emitted = [row for out in outputs for row in out.stats.emitted]
    first = max(range(vocab), key=lambda token: sum(text[0] == token for text in texts))
    after = [t[1] for t, rounds in zip(texts, emitted, strict=True) if t[0] == first and rounds[1] == 1]
    p = model(torch.cat([PROMPT, torch.tensor([first])])[None]).logits[0, -1].double().softmax(-1)
    q = drafter.table[0, first].double().softmax(-1)
    residual = (p - q).clamp(min=0)
    counts = torch.bincount(torch.tensor(after), minlength=vocab).tolist()
    test = fit_test("after a rejection", counts, (residual / residual.sum()).tolist())
    assert len(after) > 500 and test.freedom >= 3
    assert test.p_value >= LEVEL and not test.impossible, test


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_drafter_that_misstates_its_law_is_found(rule):
    """Negative control: a check that cannot fail proves nothing."""
    model = tiny_llama(4)
    report = chi_square_check(
        model, SlantedDrafter(4, 2, lie=True), PROMPT, rule=rule, draws=3000, rows=1000, temperature=1.0
    )
    assert not report.passed
    assert report.joint.p_value < 1e-6


def test_end_token_within_rounds():
    model = tiny_llama(5, eos=3)
    report = chi_square_check(model, RandomDrafter(5, 3), PROMPT, draws=1000, rows=1000, level=LEVEL, temperature=1.0)
    assert report.passed, report


def test_report_is_plain_json_and_states_its_power():
    import json

    model = tiny_llama(6)
    report = chi_square_check(model, RandomDrafter(6, 2), PROMPT, draws=500, rows=250)
    assert report.sampling["top_k"] == 3
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert 0 < data["detectable"] < 1 and data["power"] == 0.9 and data["passed"] in (True, False)
    assert sum(marginal({(1, 2): 0.25, (1, 3): 0.75}, lambda text: text[:1]).values()) == 1


def test_too_short_or_too_large_is_refused():
    model = tiny_llama(12)
    with pytest.raises(InvalidInputError, match="at least 5 tokens"):
        chi_square_check(model, SlantedDrafter(12, 2), PROMPT, tokens=4)
    with pytest.raises(InvalidInputError, match="top_k=3"):
        exact_law(model, PROMPT, 6, do_sample=True, top_k=0)


def test_a_drafter_that_proposes_nothing_is_pointed_out():
    model = tiny_llama(6)
    silent = chi_square_check(model, ReplayDrafter(torch.zeros(1, 0, dtype=torch.long)), PROMPT, draws=100, rows=100)
    assert silent.acceptance_rate is None and any("nothing was drafted" in note for note in silent.notes)
    spoken = chi_square_check(model, RandomDrafter(6, 2), PROMPT, draws=100, rows=100)
    assert not spoken.notes
