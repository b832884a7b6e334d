"""One loop, two target paths: the same tokens from both, over rules, batches, drafters and stops."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fast_models import COMMON, MASK, NEW, PROMPTS, TAKEN, build
from torch import Tensor
from transformers import MistralConfig, PreTrainedModel

from specdiff import SpecDiff
from specdiff.errors import UnsupportedError
from specdiff.testing import RandomDrafter, ReplayDrafter

FAMILIES = ("gemma3", "llama", "qwen2", "qwen3", "smollm")


@functools.cache
def model(family: str) -> PreTrainedModel:
    return build(TAKEN[family]())


def both(family: str, drafter: Any, **arguments: Any) -> tuple[Any, Any]:
    """Outputs of the general and of the fast path, which must be the ones that were asked for."""
    outs = []
    for fast, path in (("off", "general"), ("on", "fast")):
        sd = SpecDiff(model(family), drafter, fast=fast)
        out = sd.generate(PROMPTS, attention_mask=MASK, max_new_tokens=NEW, return_dict_in_generate=True, **arguments)
        assert out.stats.path == path
        outs.append(out)
    return outs[0], outs[1]


@functools.cache
def greedy(family: str) -> Tensor:
    with torch.no_grad():
        out = model(family).generate(PROMPTS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False)
    return out[:, PROMPTS.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["none", "replay", "random"])
def test_greedy_tokens_equal_plain_generate(family: str, kind: str) -> None:
    drafter = {
        "none": None,
        "replay": ReplayDrafter(greedy(family), 6, wrong_at=(3,)),
        "random": RandomDrafter(COMMON["vocab_size"], 5),
    }[kind]
    general, fast = both(family, drafter, do_sample=False)
    assert torch.equal(general.sequences, fast.sequences)
    assert torch.equal(fast.sequences[:, PROMPTS.shape[1] :], greedy(family))
    assert general.stats.emitted == fast.stats.emitted and general.stats.accepted == fast.stats.accepted


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_equal_for_equal_seeds(family: str, rule: str) -> None:
    drafter = ReplayDrafter(greedy(family), 6)
    general, fast = both(family, drafter, do_sample=True, temperature=0.8, top_k=20, seed=[3, 4], rule=rule)
    assert torch.equal(general.sequences, fast.sequences)
    assert general.stats.emitted == fast.stats.emitted


def test_an_early_stop_of_one_row_leaves_the_other_right() -> None:
    text = greedy("llama")
    eos = int(text[0, 5])
    general, fast = both("llama", ReplayDrafter(text, 6), do_sample=False, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(general.sequences, fast.sequences)
    assert general.stats.finish_reason == fast.stats.finish_reason and "eos" in fast.stats.finish_reason


def test_scores_and_logits_agree() -> None:
    general, fast = both("qwen3", None, do_sample=False, output_scores=True, output_logits=True)
    for left, right in zip(general.logits + general.scores, fast.logits + fast.scores, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_a_session_goes_on_and_follows_an_edited_history() -> None:
    base = model("llama")
    sd = SpecDiff(base, ReplayDrafter(greedy("llama")[:1], 4), fast="on")
    with sd.session() as session:
        history = PROMPTS[1:]
        for turn in range(3):
            out = session.generate(history, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
            wanted = base.generate(history, max_new_tokens=6, do_sample=False)
            assert torch.equal(out.sequences, wanted) and out.stats.path == "fast"
            if turn:
                assert out.stats.prompt_tokens_computed < history.shape[1]
            history = torch.cat([wanted, torch.tensor([[7 + turn]])], 1)
            if turn == 1:
                history = history[:, :-5]


def test_a_session_starts_over_when_weights_change() -> None:
    changed = build(TAKEN["llama"](), seed=8)
    sd = SpecDiff(changed, fast="on")
    with sd.session() as session:
        session.generate(PROMPTS[1:], max_new_tokens=6, do_sample=False)
        with torch.no_grad():
            changed.model.layers[0].mlp.down_proj.weight.mul_(-2.0)
        out = session.generate(PROMPTS[1:], max_new_tokens=6, do_sample=False)
    assert torch.equal(out, changed.generate(PROMPTS[1:], max_new_tokens=6, do_sample=False))


def test_long_requests_of_windowed_models_take_the_general_path_and_say_so() -> None:
    windowed = build(MistralConfig(**COMMON, sliding_window=20))
    sd = SpecDiff(windowed)
    for new, path in ((8, "fast"), (40, "general")):
        out = sd.generate(PROMPTS[1:], max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
        assert out.stats.path == path
        assert any("window of 20" in note for note in out.stats.notes) == (path == "general")
        assert torch.equal(out.sequences, windowed.generate(PROMPTS[1:], max_new_tokens=new, do_sample=False))
    with pytest.raises(UnsupportedError, match="window of 20"):
        SpecDiff(windowed, fast="on").generate(PROMPTS[1:], max_new_tokens=40)


def test_models_off_the_pattern_say_why_and_fast_on_insists() -> None:
    half = build(TAKEN["llama"]()).to(torch.bfloat16)
    out = SpecDiff(half).generate(PROMPTS[1:], max_new_tokens=4, return_dict_in_generate=True)
    assert out.stats.path == "general" and any("bfloat16" in note for note in out.stats.notes)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        SpecDiff(half, fast="on")
    assert SpecDiff(half, fast="off").notes == []


def test_plain_generate_is_the_same_before_during_and_after() -> None:
    base = build(TAKEN["qwen2"](), seed=9)
    before = base.generate(PROMPTS, attention_mask=MASK, max_new_tokens=8, do_sample=False)
    sd = SpecDiff(base, fast="on")
    during = base.generate(PROMPTS, attention_mask=MASK, max_new_tokens=8, do_sample=False)
    inside = base.generate(PROMPTS, attention_mask=MASK, max_new_tokens=8, do_sample=False, custom_generate=sd)
    after = base.generate(PROMPTS, attention_mask=MASK, max_new_tokens=8, do_sample=False)
    assert torch.equal(before, during) and torch.equal(before, inside) and torch.equal(before, after)
