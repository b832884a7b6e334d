"""Cases from public reports: outputs, statistics, state between calls.

B06, B28, B30, B32, B39, B46, B48, B50, B58.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    BLOCKS,
    KINDS,
    PROMPT,
    Recorder,
    TableDrafter,
    Watched,
    both_paths,
    build,
    drafter,
    flash,
    greedy_text,
    left_padded,
    random_prompt,
    reference,
    run,
    target,
)
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from specdiff import DiffusionLM, DLMSpec, SpecDiff
from specdiff.errors import UnsupportedError
from specdiff.testing import ReplayDrafter

path = both_paths("auto")

LENGTH = 40

# -- B48: scores and logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3}, {"logits_processor": [lambda ids, s: s * 0.5]}],
    ids=["raw", "prefix", "custom"],
)
def test_b48_one_row_of_scores_and_logits_per_new_token(kind, extra):
    want = target().generate(
        PROMPT,
        max_new_tokens=LENGTH,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **extra,
    )
    text = want.sequences[:, PROMPT.shape[1] :]
    spec = None if kind == "none" else drafter(kind, text, 8, wrong_at=(3,))
    out = run(SpecDiff(target(), spec), max_new_tokens=LENGTH, output_scores=True, output_logits=True, **extra)
    assert isinstance(out, GenerateDecoderOnlyOutput) and torch.equal(out.sequences, want.sequences)
    for ours, theirs in ((out.scores, want.scores), (out.logits, want.logits)):
        assert len(ours) == len(theirs) == LENGTH
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape == (1, 101)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    transition = target().compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert transition.shape == (1, LENGTH) and (transition < 0).all()


def test_b48_rows_that_ended_do_not_disturb_the_others():
    ids, mask = left_padded([random_prompt(n, seed=n) for n in (3, 7)])
    text = reference(target(), ids, mask, max_new_tokens=20)
    arguments = {"max_new_tokens": 20, "eos_token_id": int(text[0, 4]), "pad_token_id": 0}
    keep = {"output_scores": True, "output_logits": True}
    want = target().generate(
        ids, attention_mask=mask, do_sample=False, return_dict_in_generate=True, **keep, **arguments
    )
    out = run(SpecDiff(target(), drafter("Dmix", text, 4)), ids, mask, **keep, **arguments)
    assert torch.equal(out.sequences, want.sequences) and out.stats.new_tokens[0] == 5
    assert len(out.scores) == len(want.scores) == max(out.stats.new_tokens)
    for step, (a, b) in enumerate(zip(out.scores, want.scores, strict=True)):
        for row, count in enumerate(out.stats.new_tokens):
            if step < count:
                torch.testing.assert_close(a[row], b[row], rtol=1e-4, atol=1e-4)


def test_b48_sampling_scores_are_the_processed_ones():
    out = run(
        SpecDiff(target(), TableDrafter(101, 4)),
        do_sample=True,
        top_k=5,
        temperature=0.7,
        seed=1,
        max_new_tokens=12,
        output_scores=True,
        output_logits=True,
    )
    for token, scores, logits in zip(out.sequences[0, PROMPT.shape[1] :], out.scores, out.logits, strict=True):
        assert int(scores.isfinite().sum()) == 5 and scores[0, token].isfinite() and logits.isfinite().all()
        keep = scores.isfinite()
        torch.testing.assert_close(scores[keep], logits[keep] / 0.7)


def test_b48_nothing_is_kept_unasked():
    out = run(SpecDiff(target(), drafter("Dself", greedy_text(LENGTH), 4)), max_new_tokens=8)
    assert out.scores is None and out.logits is None and out.hidden_states is None and out.attentions is None
    plain = SpecDiff(target()).generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert isinstance(plain, torch.Tensor) and torch.equal(plain, out.sequences)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_b48_what_is_not_supported_is_refused_by_name(name):
    sd = SpecDiff(target(), drafter("Dself", greedy_text(LENGTH), 4))
    with pytest.raises(UnsupportedError, match=name):
        run(sd, max_new_tokens=8, **{name: True})
    with pytest.raises(UnsupportedError, match=name):
        sd.generate(PROMPT, generation_config=GenerationConfig(max_new_tokens=8, pad_token_id=0, **{name: True}))
    with pytest.raises(UnsupportedError, match=name):
        target().generate(PROMPT, custom_generate=sd, max_new_tokens=8, return_dict_in_generate=True, **{name: True})


@pytest.mark.parametrize(
    "bad", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}], ids=str
)
def test_other_decoding_methods_are_refused_before_the_model_runs(bad):
    sd = SpecDiff(target(), drafter("Dself", greedy_text(LENGTH), 4), fast="off")
    passes = []
    handle = target().register_forward_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(UnsupportedError, match=next(iter(bad))):
            sd.generate(PROMPT, max_new_tokens=8, **bad)
    finally:
        handle.remove()
    assert not passes


# -- B46: statistics -------------------------------------------------------------------------------------------------


def sound(out: Any, passes: int | None = None) -> dict[str, Any]:
    """What must hold for any report; returns it as it comes out of JSON."""
    stats = json.loads(json.dumps(out.stats.to_dict(), allow_nan=False))
    new = [len(row) for row in out.stats.emitted]
    assert all(row[0] == 1 and all(n >= 1 for n in row) for row in stats["emitted"]) and new
    assert [sum(row) for row in stats["emitted"]] == stats["new_tokens"]
    assert 0 <= stats["accepted"] <= stats["proposed"]
    assert stats["row_rounds"] == [len(row) - 1 for row in stats["emitted"]]
    assert stats["rounds"] == max(stats["row_rounds"])
    # each round emits what was accepted and one token of the target's own, unless the row ended inside the block
    assert 0 <= sum(stats["new_tokens"]) - len(new) - stats["accepted"] <= sum(stats["row_rounds"])
    if stats["proposed"]:
        assert stats["acceptance_rate"] == stats["accepted"] / stats["proposed"] and 0 <= stats["acceptance_rate"] <= 1
        assert sum(stats["proposed_by_position"]) == stats["proposed"]
        assert sum(stats["accepted_by_position"]) == stats["accepted"]
        assert all(0 <= rate <= 1 for rate in stats["acceptance_by_position"] if rate is not None)
    else:
        assert stats["acceptance_rate"] is None and stats["acceptance_by_position"] == []
    total = sum(stats["row_rounds"])
    assert stats["tau"] == ((sum(stats["new_tokens"]) - len(new)) / total if total else None)
    assert set(stats["seconds"]) == {"prefill", "draft", "verify", "rest"}
    assert all(math.isfinite(value) and value >= 0 for value in stats["seconds"].values())
    assert all(reason in ("eos", "stop", "length") for reason in stats["finish_reason"])
    if passes is not None:
        assert stats["rounds"] == passes
    return stats


def counted(sd: SpecDiff, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """A run, and how many target passes came after the prefill's one."""
    calls: list[int] = []
    handle = sd.ar.register_forward_hook(lambda *_: calls.append(1))
    try:
        return run(sd, *args, **kwargs), len(calls) - 1
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_b46_eos_and_budget_inside_a_block(kind):
    text = greedy_text(LENGTH)
    sd = SpecDiff(target(), drafter(kind, text, 8, wrong_at=(6,)), fast="off")
    for j in (0, 1, 3, 8, 9, 12):
        if int(text[0, j]) in text[0, :j].tolist():
            continue
        out, passes = counted(sd, max_new_tokens=LENGTH, eos_token_id=int(text[0, j]), pad_token_id=0)
        stats = sound(out, passes)
        assert stats["new_tokens"] == [j + 1] and stats["finish_reason"] == ["eos"]
    for budget in (1, 2, 5, 8, 9, 10, 17):
        out, passes = counted(sd, max_new_tokens=budget)
        stats = sound(out, passes)
        assert stats["new_tokens"] == [budget] and stats["finish_reason"] == ["length"]
        assert stats["accepted"] < budget and len(stats["proposed_by_position"]) < budget


def test_b46_drafts_behind_eos_are_not_counted_as_accepted():
    text = greedy_text(LENGTH)
    j = next(i for i in (3, 4, 5) if int(text[0, i]) not in text[0, :i].tolist())
    out = run(
        SpecDiff(target(), drafter("Dself", text, 8)),
        max_new_tokens=LENGTH,
        eos_token_id=int(text[0, j]),
        pad_token_id=0,
    )
    stats = sound(out)
    assert stats["accepted"] == j and stats["emitted"] == [[1, j]] and stats["proposed"] == 8 and stats["tau"] == j


def test_b46_everything_rejected_nothing_drafted_and_a_budget_of_one():
    text = greedy_text(LENGTH)
    wrong = ReplayDrafter(text, 4, wrong_at=(0, 1, 2, 3))
    out, passes = counted(SpecDiff(target(), wrong, fast="off"), max_new_tokens=20)
    stats = sound(out, passes)
    assert stats["accepted"] == 0 and stats["tau"] == 1.0 and stats["rounds"] == 19
    out, passes = counted(SpecDiff(target(), ReplayDrafter(text[:, :1], 4), fast="off"), max_new_tokens=20)
    stats = sound(out, passes)
    assert stats["proposed"] == 0 and stats["acceptance_rate"] is None and stats["tau"] == 1.0
    out, passes = counted(SpecDiff(target(), ReplayDrafter(text[:, :6], 4), fast="off"), max_new_tokens=20)
    assert sound(out, passes)["accepted"] == 4  # one full round, empty ones afterwards
    out, passes = counted(SpecDiff(target(), ReplayDrafter(text, 4), fast="off"), max_new_tokens=1)
    stats = sound(out, passes)
    assert stats["rounds"] == 0 and stats["tau"] is None and stats["acceptance_rate"] is None
    out, passes = counted(SpecDiff(target(), None, fast="off"), max_new_tokens=20)
    stats = sound(out, passes)
    assert stats["tau"] == 1.0 and stats["rounds"] == 19


def test_b46_batch_with_rows_that_end_early():
    ids, mask = left_padded([random_prompt(n, seed=n) for n in (3, 7, 5)])
    text = reference(target(), ids, mask, max_new_tokens=LENGTH)
    eos = [int(text[0, 5]), int(text[1, 11])]
    for kind in KINDS:
        sd = SpecDiff(target(), drafter(kind, text, 4), fast="off")
        out, passes = counted(sd, ids, mask, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0)
        stats = sound(out, passes)
        assert len(set(stats["new_tokens"])) > 1
        alone = []
        for r, row in enumerate([random_prompt(n, seed=n) for n in (3, 7, 5)]):
            single = SpecDiff(target(), drafter(kind, text[r : r + 1], 4))
            one = run(single, torch.tensor([row]), max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0)
            alone.append(sound(one))
            if kind != "Drand":
                assert one.stats.emitted[0] == out.stats.emitted[r]
        if kind != "Drand":
            assert stats["accepted"] == sum(one["accepted"] for one in alone)


# -- B39: block size -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 3, 8])
def test_b39_a_full_round_drafts_k_and_emits_k_plus_one(block):
    out = run(SpecDiff(target(), drafter("Dself", greedy_text(60), block)), max_new_tokens=1 + 3 * (block + 1))
    assert out.stats.emitted == [[1] + [block + 1] * 3]
    assert out.stats.proposed_by_position == [3] * block and out.stats.tau == block + 1
    assert torch.equal(out.sequences[:, PROMPT.shape[1] :], greedy_text(60)[:, : 1 + 3 * (block + 1)])


@pytest.mark.parametrize("block", [1, 3, 8])
def test_b39_saved_and_loaded(block, tmp_path):
    from specdiff.drafters.dflash import DFlashDrafter

    inner = flash(target(), block)
    watched = Watched(inner)
    text = run(SpecDiff(target(), watched), max_new_tokens=12).sequences
    assert {len(row) for rows in watched.rounds[:-block] for row in rows} == {block}
    inner.save_pretrained(tmp_path)
    again = Watched(DFlashDrafter.from_pretrained(tmp_path, target=target()))
    assert again.block_size == block
    assert torch.equal(run(SpecDiff(target(), again), max_new_tokens=12).sequences, text)
    assert again.rounds == watched.rounds


def test_b39_smaller_blocks_per_call_and_none_at_all():
    sd = SpecDiff(target(), drafter("Dself", greedy_text(60), 8))
    for block, rounds in ((0, 20), (1, 10), (3, 5), (8, 3)):
        out = run(sd, max_new_tokens=21, block_size=block)
        assert torch.equal(out.sequences[:, PROMPT.shape[1] :], greedy_text(60)[:, :21]) and out.stats.rounds == rounds
    for bad in (-1, 9, 2.5, True):
        with pytest.raises(ValueError, match="block_size"):
            run(sd, max_new_tokens=4, block_size=bad)


# -- B28: nothing of one call lives on in the next -------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: flash(target(), 4), lambda: TableDrafter(101, 4)], ids=["dflash", "table"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_b28_every_call_is_as_of_a_fresh_object(make, sampling):
    calls: list[tuple[list[list[int]], bool]] = [
        ([random_prompt(60, seed=1)], False),
        ([random_prompt(5, seed=2)], False),
        ([random_prompt(5, seed=2)], False),
        ([random_prompt(n, seed=n) for n in (4, 9, 6)], False),
        ([random_prompt(7, seed=3)], True),
        ([random_prompt(5, seed=2)], False),
    ]
    arguments: dict[str, Any] = {"max_new_tokens": 16, "do_sample": sampling}
    if sampling:
        arguments |= {"seed": 5, "temperature": 1.5}
    kept = SpecDiff(target(), make())
    diffusion = DiffusionLM(target(), DLMSpec(name="same weights", mask_id=100, shift=1, block_size=4))
    for number, (prompts, streaming) in enumerate(calls):
        ids, mask = left_padded(prompts)
        if number == len(calls) - 1:  # the same model object decodes in native mode in between
            denoised = diffusion.generate(torch.tensor([prompts[0]]), max_new_tokens=8)
            assert denoised.shape == (1, len(prompts[0]) + 8)
        one, two = Recorder(), Recorder()
        got = run(kept, ids, mask, **arguments, **({"streamer": one} if streaming else {}))
        want = run(SpecDiff(target(), make()), ids, mask, **arguments, **({"streamer": two} if streaming else {}))
        assert torch.equal(got.sequences, want.sequences) and one.puts == two.puts
        assert got.stats.emitted == want.stats.emitted and got.stats.proposed == want.stats.proposed
        if not sampling:
            assert torch.equal(got.sequences[:, ids.shape[1] :], reference(target(), ids, mask, max_new_tokens=16))


# -- B30: the drafter's context --------------------------------------------------------------------------------------


def test_b30_a_drafter_sees_the_same_context_cold_in_a_batch_and_in_a_session():
    """Random weights: any missing context token changes what is proposed."""
    prompts = [random_prompt(n, seed=n) for n in (12, 5, 9, 12)]
    cold = []
    for prompt in prompts:
        watched = Watched(flash(target(), 4))
        run(SpecDiff(target(), watched), torch.tensor([prompt]), max_new_tokens=12)
        cold.append([rows[0] for rows in watched.rounds])
    assert len({tuple(map(tuple, rounds)) for rounds in cold}) == 3  # the last prompt is the first one again

    ids, mask = left_padded(prompts)
    watched = Watched(flash(target(), 4))
    out = run(SpecDiff(target(), watched), ids, mask, max_new_tokens=12)
    if all(len(rounds) == len(cold[0]) for rounds in cold):
        assert [[rows[r] for rows in watched.rounds] for r in range(4)] == cold
    assert watched.rounds[0] == [rounds[0] for rounds in cold]
    assert out.stats.prompt_tokens_computed == sum(map(len, prompts))

    for turns in ([4], [8], [11], [4, 9]):
        watched = Watched(flash(target(), 4))
        with SpecDiff(target(), watched).session() as session:
            for turn in turns:  # the beginning of the prompt first, then all of it
                session.generate(torch.tensor([prompts[0][:turn]]), max_new_tokens=3, do_sample=False)
            watched.rounds.clear()
            out = run(session, torch.tensor([prompts[0]]), max_new_tokens=12)
        assert [rows[0] for rows in watched.rounds] == cold[0]
        assert out.stats.prompt_tokens_computed == len(prompts[0]) - turns[-1]
        assert torch.equal(out.sequences[:, 12:], reference(target(), torch.tensor([prompts[0]]), max_new_tokens=12))


def test_b30_second_turn_and_cropped_turn_compute_only_what_is_new():
    rows: list[int] = []
    handle = target().model.embed_tokens.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[1]))
    try:
        with SpecDiff(target(), flash(target(), 4), fast="off").session() as session:
            first = session.generate(PROMPT, max_new_tokens=10, do_sample=False)
            second = torch.cat([first, torch.tensor([random_prompt(6, seed=8)])], dim=1)
            for prompt, fresh in ((second, 7), (second[:, :9], 1), (second, None)):
                rows.clear()
                out = run(session, prompt, max_new_tokens=8)
                want = reference(target(), prompt, max_new_tokens=8)
                assert torch.equal(out.sequences[:, prompt.shape[1] :], want)
                assert rows[0] == out.stats.prompt_tokens_computed
                if fresh is not None:
                    assert out.stats.prompt_tokens_computed == fresh
    finally:
        handle.remove()


# -- B32: ragged acceptance ------------------------------------------------------------------------------------------


def uneven(text: torch.Tensor) -> torch.Tensor:
    """Drafts of which row 0 never keeps any, row 1 keeps two per round and row 2 all."""
    wrong = (text + 1) % 101
    out = text.clone()
    out[0] = wrong[0]
    out[1, 3::3] = wrong[1, 3::3]
    return out


@pytest.mark.parametrize("block", [4, 8])
def test_b32_rows_that_accept_differently_are_each_as_alone(block):
    prompts = [random_prompt(n, seed=n) for n in (3, 9, 20)]
    ids, mask = left_padded(prompts)
    text = reference(target(), ids, mask, max_new_tokens=60)
    drafts = uneven(text)
    out = run(SpecDiff(target(), ReplayDrafter(drafts, block)), ids, mask, max_new_tokens=60)
    assert torch.equal(out.sequences[:, ids.shape[1] :], text)
    assert [row[1] for row in out.stats.emitted] == [1, 3, block + 1]
    for r, prompt in enumerate(prompts):
        alone = run(
            SpecDiff(target(), ReplayDrafter(drafts[r : r + 1], block)), torch.tensor([prompt]), max_new_tokens=60
        )
        assert torch.equal(alone.sequences[0, len(prompt) :], text[r])
        assert alone.stats.emitted[0] == out.stats.emitted[r]
    order = [2, 0, 1]
    mixed = run(SpecDiff(target(), ReplayDrafter(drafts[order], block)), ids[order], mask[order], max_new_tokens=60)
    assert torch.equal(mixed.sequences, out.sequences[order])
    assert mixed.stats.emitted == [out.stats.emitted[r] for r in order]
    twins = [1, 0, 1]
    same = run(SpecDiff(target(), ReplayDrafter(drafts[twins], block)), ids[twins], mask[twins], max_new_tokens=60)
    assert torch.equal(same.sequences[0], same.sequences[2]) and same.stats.emitted[0] == same.stats.emitted[2]
    assert torch.equal(same.sequences, out.sequences[twins])


# -- B06 and B58: the mask token is a token like any other -----------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_b06_a_mask_id_that_the_target_really_emits(rows):
    ids, mask = left_padded([random_prompt(n, seed=n) for n in (4, 9, 6)][:rows])
    text = reference(target(), ids, mask, max_new_tokens=LENGTH)
    token = int(text[0, 5])
    out = run(SpecDiff(target(), flash(target(), 8, mask_token_id=token)), ids, mask, max_new_tokens=LENGTH)
    assert torch.equal(out.sequences[:, ids.shape[1] :], text) and token in text


@pytest.mark.parametrize("place", ["inside", "end", "all"])
def test_b58_the_mask_token_in_the_prompt(place):
    token = 50
    prompt = {"inside": [5, token, token, 8, 9], "end": [5, 8, 9, token], "all": [token] * 5}[place]
    ids = torch.tensor([prompt])
    text = reference(target(), ids, max_new_tokens=LENGTH)
    for spec in (flash(target(), 4, mask_token_id=token), drafter("Dself", text, 4)):
        out = run(SpecDiff(target(), spec), ids, max_new_tokens=LENGTH)
        assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
        assert torch.equal(out.sequences[:, ids.shape[1] :], text)


# -- B50: memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Dself", "flash"])
def test_b50_the_head_computes_one_row_in_prefill_and_k_plus_one_in_verification(kind):
    model = build(0, vocab=5000, layers=3, hidden=64, max_position_embeddings=1400)
    prompt = torch.tensor([random_prompt(1300, seed=1, vocab=5000)])
    text = reference(model, prompt, max_new_tokens=12)
    spec = flash(model, 4) if kind == "flash" else drafter("Dself", text, 4, vocab=5000)
    sd = SpecDiff(model, spec, fast="off")
    rows: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _, inputs, output: rows.append(output.shape[:-1].numel()))
    try:
        out = run(sd, prompt, max_new_tokens=12)
    finally:
        handle.remove()
    assert torch.equal(out.sequences[:, 1300:], text)
    prefill = len(rows) - out.stats.rounds
    assert 1 <= prefill <= 3 and set(rows[:prefill]) == {1}
    assert max(rows[prefill:]) == 5


PEAK = """
import resource, sys, torch
sys.path.insert(0, {tests!r})
from cases import build, drafter, random_prompt
from specdiff import SpecDiff
model = build(0, vocab=50000, layers=2, hidden=32, num_attention_heads=2, max_position_embeddings=4200)
prompt = torch.tensor([random_prompt(4000, seed=1, vocab=50000)])
sd = SpecDiff(model, drafter("Drand", None, 8, vocab=50000))
caller = model if {plain} else sd
caller.generate(prompt[:, :8], max_new_tokens=2, do_sample=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
caller.generate(prompt, max_new_tokens=8, do_sample=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_b50_peak_memory_is_close_to_plain_decoding():
    """Full-prompt float32 logits alone would be 800 MB."""
    peaks = []
    for plain in (True, False):
        code = PEAK.format(tests=str(Path(__file__).parent), plain=plain)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
        peaks.append(float(done.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 100, f"plain {peaks[0]:.0f} MB, speculative {peaks[1]:.0f} MB"


def test_all_block_sizes_and_drafters_give_the_reference():
    for block in BLOCKS:
        for kind in KINDS:
            out = run(
                SpecDiff(target(), drafter(kind, greedy_text(60), block, wrong_at=(block // 2,))), max_new_tokens=60
            )
            assert torch.equal(out.sequences[:, PROMPT.shape[1] :], greedy_text(60))
