"""The greedy equality check, on tiny models and (slow) on 100 prompts of the default model."""

from __future__ import annotations

import json

import pytest
import torch
from bench_tiny import SlantedDrafter, tiny_llama
from devdata import dev_data

from specdiff.bench.audit import greedy_check, reference_texts
from specdiff.bench.greedy import GreedyRun, first_difference, judge
from specdiff.bench.prompts import encode, load_prompts, spread
from specdiff.errors import InvalidInputError
from specdiff.testing import RandomDrafter, ReplayDrafter

PROMPTS = [torch.arange(1, 3 + 2 * at) % 19 for at in range(7)]


def replay(texts: list[list[int]]) -> ReplayDrafter:
    longest = max(map(len, texts))
    return ReplayDrafter([text + [0] * (longest - len(text)) for text in texts], 6, wrong_at=(2, 4))


@pytest.mark.parametrize(
    "drafter",
    [None, "lookup", RandomDrafter(23, 3), SlantedDrafter(23, 4), replay],
    ids=["none", "lookup", "random", "slanted", "replay"],
)
def test_equal_to_generate(drafter):
    model = tiny_llama(23, eos=5)
    report = greedy_check(model, drafter, PROMPTS, max_new_tokens=24, batch_sizes=(1, 3))
    assert report.passed and not report.mismatches
    assert [run.texts for run in report.runs] == [7, 7]
    assert report.runs[0].tokens == report.runs[1].tokens == sum(map(len, reference_texts(model, PROMPTS, 24)))
    if drafter is replay:
        assert 2 < report.runs[0].tau <= 3
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_wrong_token_is_a_fault_and_has_its_margin():
    model = tiny_llama(23)
    texts = reference_texts(model, PROMPTS, 8)
    wrong = [list(text) for text in texts]
    wrong[2][5] = (wrong[2][5] + 1) % 23
    report = greedy_check(
        model, None, PROMPTS, references=wrong, max_new_tokens=8, batch_sizes=(1, 4), names=list("abcdefg")
    )
    assert not report.passed
    assert [(found.prompt, found.position, found.batch_size, found.near_tie) for found in report.mismatches] == [
        ("c", 5, 1, False),
        ("c", 5, 4, False),
    ]
    ids = torch.cat([PROMPTS[2], torch.tensor(texts[2][:5])])[None]
    logits = model(ids).logits[0, -1].detach()
    top = logits.topk(2).values
    assert report.mismatches[0].margin == pytest.approx(float(top[0] - top[1]), abs=1e-5)
    assert report.mismatches[0].gap == pytest.approx(float(logits[wrong[2][5]] - logits[texts[2][5]]), abs=1e-5)


def test_near_ties_are_told_from_faults():
    model = tiny_llama(23)
    with torch.no_grad():  # tokens 3 and 4 get the same head row, far above all others
        model.lm_head.weight[3] = model.lm_head.weight[4]
    prompt = next(
        p for seed in range(200) if _tops(model, p := torch.randint(23, (9,), generator=_generator(seed))) == {3, 4}
    )
    tie = judge(model, prompt, [3], [4], name="x", batch_size=1, tie_margin=1e-3)
    assert tie is not None and tie.near_tie and tie.margin < 1e-5
    other = judge(model, prompt, [3], [7], name="x", batch_size=1, tie_margin=1e-3)
    assert other is not None and not other.near_tie, "a token that is not among the two best is no near-tie"
    ended = judge(model, prompt, [3], [], name="x", batch_size=1, tie_margin=1e-3)
    assert ended is not None and ended.got is None and ended.gap is None and not ended.near_tie
    assert judge(model, prompt, [3], [3], name="x", batch_size=1, tie_margin=1e-3) is None


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tops(model, prompt) -> set[int]:
    return set(model(prompt[None]).logits[0, -1].topk(2).indices.tolist())


def test_more_than_two_in_a_hundred_fail():
    tie = judge(tiny_llama(23), PROMPTS[0], [1], [2], name="x", batch_size=1, tie_margin=1e9)
    assert tie is not None
    near = type(tie)(**{**tie.__dict__, "near_tie": True})
    assert GreedyRun(1, texts=100, mismatches=[near] * 2).passed
    assert not GreedyRun(1, texts=100, mismatches=[near] * 3).passed
    assert GreedyRun(1, texts=8, mismatches=[near]).passed
    assert not GreedyRun(1, texts=8, mismatches=[near] * 2).passed


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], [1]) == 0


def test_wrong_arguments():
    model = tiny_llama(23)
    with pytest.raises(InvalidInputError, match="at least one prompt"):
        greedy_check(model, None, [])
    with pytest.raises(InvalidInputError, match="as many"):
        greedy_check(model, None, PROMPTS, names=["a"])
    with pytest.raises(InvalidInputError, match="batch sizes"):
        greedy_check(model, None, PROMPTS, batch_sizes=(0,))


@pytest.mark.slow
@pytest.mark.model
def test_hundred_prompts_of_the_default_model(model_pair):
    """100 prompts, 96 new tokens, float32: batch 1 and ragged batches of 4, three drafters."""
    model, tokenizer = model_pair
    folder = dev_data()
    file = folder / "spec_bench_dev.jsonl" if folder is not None else None
    chosen = load_prompts(file)
    chosen = spread(chosen, min(100, len(chosen)))
    ids = [encode(tokenizer, prompt.text) for prompt in chosen]
    names = [prompt.id for prompt in chosen]
    texts = reference_texts(model, ids, 96)
    for drafter in (replay, "lookup", RandomDrafter(model.config.vocab_size, 3)):
        report = greedy_check(model, drafter, ids, names=names, references=texts, max_new_tokens=96, batch_sizes=(1, 4))
        for found in report.mismatches:
            print(found)
        assert report.passed, report.mismatches
