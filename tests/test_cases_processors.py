"""Cases from public reports: logits processors (B20, B22)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
    random_prompt,
    reference,
    run,
    target,
)
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process as stock

from specdiff import SpecDiff
from specdiff.errors import UnsupportedError

path = both_paths("off")

LENGTH = 24
IDS, MASK = left_padded([[31, *random_prompt(4, seed=1)], random_prompt(9, seed=2)])
TEXT_EOS = 7


def allowed(row: int, ids: Tensor) -> list[int]:
    """A constraint that depends on the row and on the last token."""
    return [(int(ids[-1]) * 3 + step + row) % 101 for step in range(2, 60, 3)]


SETTINGS: dict[str, dict[str, Any]] = {
    "min_length": {"min_length": 20, "eos_token_id": 0},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": 0},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[0], [0, 0]]},
    "sequence_bias": {"sequence_bias": {(0,): -9.0, (11, 12): 5.0}},
    "forced_eos": {"forced_eos_token_id": 3},
    "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": TEXT_EOS},
    "suppress": {"suppress_tokens": [0]},
    "begin_suppress": {"begin_suppress_tokens": [0]},
    "remove_invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True},
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "watermark_selfhash": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3)},
    "prefix_fn": {"prefix_allowed_tokens_fn": allowed},
}
STATEFUL = {"guidance", "synthid", "prefix_fn"}

CUSTOM: dict[str, Callable[[], Any]] = {
    "temperature": lambda: stock.TemperatureLogitsWarper(0.5),
    "top_k": lambda: stock.TopKLogitsWarper(3),
    "top_p": lambda: stock.TopPLogitsWarper(0.5),
    "top_h": lambda: stock.TopHLogitsWarper(0.5),
    "min_p": lambda: stock.MinPLogitsWarper(0.3),
    "typical": lambda: stock.TypicalLogitsWarper(0.2),
    "epsilon": lambda: stock.EpsilonLogitsWarper(0.2),
    "eta": lambda: stock.EtaLogitsWarper(0.2),
    "bark": lambda: stock.BarkEosPrioritizerLogitsProcessor(5, 0.02),
    "codebooks": lambda: stock.AlternatingCodebooksLogitsProcessor(3, 20, 40),
}


def with_fault(name: str, eos: list[int], want: Tensor) -> dict[str, Any]:
    """Ids named 0 in SETTINGS stand for a token that plain decoding emits early, so that the setting matters."""
    token = eos[0]
    replaced = dict(SETTINGS[name])
    for key, value in replaced.items():
        if key in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            replaced[key] = [token if v == 0 else v for v in ([value] if isinstance(value, int) else value)]
        if key == "bad_words_ids":
            replaced[key] = [[token], [int(want[0, 4]), int(want[0, 5])]]
        if key == "sequence_bias":
            replaced[key] = {(token,): -9.0, (int(want[0, 4]), int(want[0, 5])): -20.0}
    return replaced


@functools.cache
def unprocessed(rows: int) -> Tensor:
    return reference(target(), IDS[:rows], MASK[:rows], max_new_tokens=LENGTH)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_b22_every_processor_alone(name, rows):
    plain = unprocessed(rows)
    settings = with_fault(name, [int(plain[0, 0])], plain) | {"max_new_tokens": LENGTH, "pad_token_id": 0}
    text = reference(target(), IDS[:rows], MASK[:rows], **settings)
    if name not in ("remove_invalid", "renormalize"):
        assert text.shape != plain.shape or not torch.equal(text, plain), "the setting changes nothing"
    for kind in KINDS:
        sd = SpecDiff(target(), drafter(kind, text, 4))
        out = run(sd, IDS[:rows], MASK[:rows], **settings)
        assert torch.equal(out.sequences[:, IDS.shape[1] :], text), kind
        in_step = rows > 1 and name in STATEFUL
        assert (out.stats.proposed == 0) == in_step and bool(out.stats.notes) == in_step
        if kind == "Dself" and not in_step:
            assert out.stats.acceptance_rate > 0.5


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", CUSTOM)
def test_b22_processors_that_come_as_objects(name, rows):
    arguments = {"max_new_tokens": LENGTH, "pad_token_id": 0}
    text = reference(target(), IDS[:rows], MASK[:rows], logits_processor=[CUSTOM[name]()], **arguments)
    for kind in KINDS:
        sd = SpecDiff(target(), drafter(kind, text, 4))
        out = run(sd, IDS[:rows], MASK[:rows], logits_processor=[CUSTOM[name]()], **arguments)
        assert torch.equal(out.sequences[:, IDS.shape[1] :], text), kind
        assert out.stats.proposed > 0


def test_b22_forced_bos():
    prompt = torch.tensor([[5]])
    text = reference(target(), prompt, max_new_tokens=LENGTH, forced_bos_token_id=9)
    assert text[0, 0] == 9
    for kind in KINDS:
        out = run(SpecDiff(target(), drafter(kind, text, 4)), prompt, max_new_tokens=LENGTH, forced_bos_token_id=9)
        assert torch.equal(out.sequences[:, 1:], text)


def test_b22_negative_prompt_for_guidance():
    settings = {
        "guidance_scale": 2.0,
        "negative_prompt_ids": torch.tensor([[44, 45, 46]]),
        "negative_prompt_attention_mask": torch.ones(1, 3, dtype=torch.long),
        "max_new_tokens": LENGTH,
    }
    text = reference(target(), PROMPT, **settings)
    assert not torch.equal(text, greedy_text(LENGTH))
    for kind in KINDS:
        out = run(SpecDiff(target(), drafter(kind, text, 4)), **settings)
        assert torch.equal(out.sequences[:, PROMPT.shape[1] :], text)


def test_b22_several_sequences_per_prompt_keep_their_row():
    settings = {"prefix_allowed_tokens_fn": allowed, "encoder_repetition_penalty": 1.5, "max_new_tokens": 10}
    sd = SpecDiff(target(), TableDrafter(101, 4))
    out = run(sd, IDS, MASK, do_sample=True, top_k=1, num_return_sequences=2, pad_token_id=0, **settings)
    greedy = reference(target(), IDS, MASK, pad_token_id=0, **settings)
    assert torch.equal(out.sequences[:, IDS.shape[1] :], greedy.repeat_interleave(2, dim=0))


def test_b22_refused_processors_are_named_before_anything_runs():
    sd = SpecDiff(target(), TableDrafter(101, 4))
    with pytest.raises(UnsupportedError, match="ClassifierFreeGuidanceLogitsProcessor"):
        sd.generate(PROMPT, max_new_tokens=4, logits_processor=[stock.ClassifierFreeGuidanceLogitsProcessor(2.0)])


class Witness:
    """Insists on 2-D inputs, remembers its calls, and changes the text in a way that depends on how often it ran."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.dim() == 2 and scores.dim() == 2 and ids.shape[0] == scores.shape[0]
        self.calls.append(ids.tolist())
        scores[:, (7 * len(self.calls)) % scores.shape[1]] += 3.0
        return scores


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", [False, True], ids=["length", "eos"])
def test_b22_custom_processors_see_the_calls_of_plain_decoding(kind, rows, ends):
    arguments: dict[str, Any] = {"max_new_tokens": LENGTH, "pad_token_id": 0}
    text = reference(target(), IDS[:rows], MASK[:rows], logits_processor=[Witness()], **arguments)
    if ends:
        arguments["eos_token_id"] = [int(row[6 + r]) for r, row in enumerate(text)]
    plain, ours = Witness(), Witness()
    want = reference(target(), IDS[:rows], MASK[:rows], logits_processor=[plain], **arguments)
    assert ends == (want.shape[1] < LENGTH)
    sd = SpecDiff(target(), drafter(kind, text, 8, wrong_at=(7,)))
    out = run(sd, IDS[:rows], MASK[:rows], logits_processor=[ours], **arguments)
    assert torch.equal(out.sequences[:, IDS.shape[1] :], want)
    assert ours.calls == plain.calls


def test_b22_a_constraint_never_sees_a_prefix_that_breaks_it():
    """A trie walk raises on a forbidden prefix, so a rejected draft must not reach it."""

    def walk(row: int, ids: Tensor) -> list[int]:
        for before, after in zip(ids[PROMPT.shape[1] - 1 :].tolist(), ids[PROMPT.shape[1] :].tolist(), strict=False):
            assert after in allowed(row, torch.tensor([before]))
        return allowed(row, ids)

    arguments = {"prefix_allowed_tokens_fn": walk, "max_new_tokens": LENGTH}
    text = reference(target(), PROMPT, **arguments)
    for kind in KINDS:
        out = run(SpecDiff(target(), drafter(kind, text, 8)), **arguments)
        assert torch.equal(out.sequences[:, PROMPT.shape[1] :], text)


def test_b22_block_becomes_token_with_a_stateful_processor_and_says_so():
    def nudge(ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 3.0 * torch.nn.functional.one_hot(ids[:, -1], scores.shape[1])

    sd = SpecDiff(law_target(4), TableDrafter(4, 2))
    start = torch.tensor([1, 2])
    law = exact_law(law_target(4), start, 3, LogitsProcessorList([nudge]))
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "logits_processor": [nudge]}
    rows = []
    for seed in range(120):
        out = run(sd, start[None], seed=seed, **arguments)
        rows.append(out.sequences[0, 2:].tolist())
    assert out.stats.rule == "token" and "block" in out.stats.notes[0] and out.stats.proposed > 0
    assert chi_square(law, torch.tensor(rows).numpy()) > 0.001
    without = exact_law(law_target(4), start, 3, LogitsProcessorList())
    assert chi_square(without, torch.tensor(rows).numpy()) < 1e-6  # the check has teeth


# -- B20 -------------------------------------------------------------------------------------------------------------


@functools.cache
def repeater() -> LlamaForCausalLM:
    """A T that repeats a few tokens for ever."""
    model = build(3, spread=0.08)
    text = reference(model, PROMPT, max_new_tokens=60)
    assert len(set(text[0].tolist())) <= 6
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}],
    ids=["penalty", "ngram", "both"],
)
def test_b20_penalties_know_the_tokens_accepted_in_the_same_block(kind, settings):
    model = repeater()
    often = reference(model, PROMPT, max_new_tokens=20)[0, -4:].tolist()
    for prompt in (PROMPT, torch.tensor([[9, *often, 30]])):
        text = reference(model, prompt, max_new_tokens=60, **settings)
        assert not torch.equal(text, reference(model, prompt, max_new_tokens=60))
        out = run(SpecDiff(model, drafter(kind, text, 8, wrong_at=(5,))), prompt, max_new_tokens=60, **settings)
        assert torch.equal(out.sequences[:, prompt.shape[1] :], text)
        if kind == "Dself":
            assert out.stats.acceptance_rate == 1.0


def test_b20_in_a_ragged_batch():
    model = repeater()
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 40, "pad_token_id": 0}
    ids, mask = left_padded([random_prompt(n, seed=n) for n in (2, 9, 5)])
    text = reference(model, ids, mask, **settings)
    for kind in KINDS:
        out = run(SpecDiff(model, drafter(kind, text, 8, wrong_at=(2,))), ids, mask, **settings)
        assert torch.equal(out.sequences[:, ids.shape[1] :], text)
