"""Cases from public reports: stopping (B01, B02, B03)."""

from __future__ import annotations

import pytest
import torch
from cases import (
    BLOCKS,
    KINDS,
    PROMPT,
    Recorder,
    both_paths,
    build,
    characters,
    drafter,
    first_occurrences,
    greedy_text,
    left_padded,
    random_prompt,
    reference,
    run,
    target,
)

from specdiff import SpecDiff

path = both_paths("off")

LENGTH = 38


def stops(text: list[int], block: int) -> list[int]:
    """Offsets to declare EOS at: the prefill's token, places of the first two rounds, their edges and bonus places."""
    edges = {0, 1, 2, block - 1, block, block + 1, block + 2, block + 3, 2 * block + 1, 2 * block + 2}
    found = [j for j in first_occurrences(text) if j in edges]
    assert len(found) >= min(block, 6)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS)
def test_b01_greedy_ends_at_the_first_eos(kind, block):
    text = greedy_text(LENGTH)
    for j in stops(text[0].tolist(), block):
        eos = int(text[0, j])
        want = reference(target(), PROMPT, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0)
        assert want.shape[1] == j + 1
        streamer = Recorder()
        sd = SpecDiff(target(), drafter(kind, text, block, wrong_at=(min(j, block - 1),)))
        for extra in ({}, {"streamer": streamer}):
            out = run(sd, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0, **extra)
            assert torch.equal(out.sequences[:, PROMPT.shape[1] :], want), f"offset {j}"
            assert out.stats.finish_reason == ["eos"]
            assert out.stats.new_tokens == [j + 1]
            assert out.stats.accepted <= j
        assert streamer.puts[0] == PROMPT.tolist() and streamer.tokens == want[0].tolist() and streamer.ended == 1


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_b01_sampling_with_a_seed_ends_at_the_first_eos(kind, rule):
    block, settings = 4, {"do_sample": True, "top_k": 20, "seed": 11, "rule": rule, "max_new_tokens": LENGTH}
    plain = run(SpecDiff(target()), **(settings | {"rule": "coupled"})).sequences[:, PROMPT.shape[1] :]
    sd = SpecDiff(target(), drafter(kind, plain, block, wrong_at=(2,)))
    text = run(sd, **settings).sequences[0, PROMPT.shape[1] :].tolist()
    if rule == "coupled":
        assert text == plain[0].tolist()
    assert len(text) == LENGTH
    for j in stops(text, block):
        streamer = Recorder()
        out = run(sd, eos_token_id=text[j], pad_token_id=0, streamer=streamer, **settings)
        assert out.sequences[0, PROMPT.shape[1] :].tolist() == text[: j + 1], f"offset {j}"
        assert out.stats.finish_reason == ["eos"] and out.stats.new_tokens == [j + 1]
        assert streamer.tokens == text[: j + 1]


@pytest.mark.parametrize("kind", ["Dself", "Dmix"])
def test_b01_nothing_after_eos_stays_in_the_cache(kind):
    text = greedy_text(LENGTH)
    for j in stops(text[0].tolist(), 8):
        eos = int(text[0, j])
        with SpecDiff(target(), drafter(kind, text, 8, wrong_at=(5,))).session() as session:
            first = session.generate(PROMPT, max_new_tokens=LENGTH, do_sample=False, eos_token_id=eos, pad_token_id=0)
            again = torch.cat([first, torch.tensor([random_prompt(5, seed=j)])], dim=1)
            out = run(session, again, max_new_tokens=12)
            assert torch.equal(out.sequences[:, again.shape[1] :], reference(target(), again, max_new_tokens=12))
            # only the last token of the first answer and the five new ones were missing
            assert out.stats.prompt_tokens_computed == 6


def test_b01_rows_of_a_batch_end_each_at_its_own_eos():
    prompts = [random_prompt(n, seed=n) for n in (3, 7, 5)]
    ids, mask = left_padded(prompts)
    text = reference(target(), ids, mask, max_new_tokens=LENGTH)
    eos = [int(text[0, 5]), int(text[1, 11])]
    want = reference(target(), ids, mask, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0)
    for kind in KINDS:
        for streamer in (None, Recorder()):
            sd = SpecDiff(target(), drafter(kind, text, 4))
            out = run(sd, ids, mask, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=0, streamer=streamer)
            assert torch.equal(out.sequences[:, ids.shape[1] :], want)
            ends = [next((i + 1 for i, t in enumerate(row) if t in eos), LENGTH) for row in text.tolist()]
            assert out.stats.new_tokens == ends and len(set(ends)) > 1
            assert out.stats.finish_reason == [
                "eos" if any(t in eos for t in row) else "length" for row in text.tolist()
            ]
            if streamer is not None:
                assert streamer.puts[0] == ids.tolist() and streamer.puts[1:] == want.T.tolist()
                assert out.stats.proposed > 0 and not out.stats.notes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS)
def test_b02_a_stop_inside_the_budget_wins_and_the_budget_is_never_exceeded(kind, block):
    text = greedy_text(LENGTH)
    sd = SpecDiff(target(), drafter(kind, text, block, wrong_at=(block // 2,)))
    j = [i for i in first_occurrences(text[0].tolist()) if i <= block + 1][-2]
    eos = int(text[0, j])
    for budget in range(max(j, 1), j + block + 1):
        out = run(sd, max_new_tokens=budget, eos_token_id=eos, pad_token_id=0)
        assert out.sequences[0, PROMPT.shape[1] :].tolist() == text[0, : min(budget, j + 1)].tolist()
        assert out.stats.finish_reason == ["eos" if budget > j else "length"]
    for budget in (1, block - 1, block, block + 1, 2 * block + 1):
        out = run(sd, max_new_tokens=budget)
        assert torch.equal(out.sequences[:, PROMPT.shape[1] :], text[:, :budget])
        assert out.stats.finish_reason == ["length"] and out.stats.new_tokens == [budget]


def test_b02_a_budget_of_nothing_fails_as_in_transformers():
    with pytest.raises(ValueError) as plain:
        reference(target(), PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError) as ours:
        run(SpecDiff(target(), drafter("Dself", greedy_text(LENGTH), 4)), max_new_tokens=0)
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_b02_budgets_hold_when_sampling(rule):
    text = greedy_text(LENGTH)
    for kind in KINDS:
        sd = SpecDiff(target(), drafter(kind, text, 4), rule=rule)
        for budget in (1, 3, 4, 5, 9):
            out = run(sd, max_new_tokens=budget, do_sample=True, temperature=0.3, seed=1)
            assert out.stats.new_tokens == [budget] and out.sequences.shape[1] == PROMPT.shape[1] + budget


@pytest.mark.parametrize(("kind", "block"), [("Drand", 4), ("Dself", 4), ("Dmix", 4), ("Dself", 16), ("Dmix", 16)])
def test_b03_stop_strings_inside_a_block_and_across_its_edge(kind, block):
    tokenizer = characters()
    text = greedy_text(LENGTH)
    letters = [tokenizer.decode([i]) for i in text[0].tolist()]
    sd = SpecDiff(target(), drafter(kind, text, block, wrong_at=(block - 1,)))
    for start in (1, block - 1, 2 * block - 1):
        for width in (1, 3, 6):
            piece = "".join(letters[start : start + width])
            stop = {"stop_strings": piece, "tokenizer": tokenizer, "max_new_tokens": LENGTH}
            want = reference(target(), PROMPT, **stop)
            out = run(sd, **stop)
            assert torch.equal(out.sequences[:, PROMPT.shape[1] :], want), (start, width)
            assert out.stats.finish_reason == ["stop"] and want.shape[1] < LENGTH


def test_b03_two_stop_strings_and_every_way_to_pass_them():
    tokenizer = characters()
    text = greedy_text(LENGTH)
    letters = [tokenizer.decode([i]) for i in text[0].tolist()]
    pieces = ["".join(letters[9:12]), "".join(letters[5:7]), "never there"]
    want = reference(target(), PROMPT, max_new_tokens=LENGTH, stop_strings=pieces, tokenizer=tokenizer)
    assert want.shape[1] <= 7
    spec = drafter("Dself", text, 16)
    sd, known = SpecDiff(target(), spec), SpecDiff(target(), spec, tokenizer=tokenizer)
    plain = {"max_new_tokens": LENGTH, "do_sample": False}
    ways = [
        sd.generate(PROMPT, stop_strings=pieces, tokenizer=tokenizer, **plain),
        known.generate(PROMPT, stop_strings=pieces, **plain),
        target().generate(PROMPT, custom_generate=sd.bind(stop_strings=pieces, tokenizer=tokenizer), **plain),
    ]
    for out in ways:
        assert torch.equal(out[:, PROMPT.shape[1] :], want)
    with pytest.raises(ValueError, match="tokenizer"):
        sd.generate(PROMPT, stop_strings=pieces, **plain)


def test_b03_stop_strings_of_the_models_own_generation_config():
    tokenizer = characters()
    model = build()
    text = greedy_text(LENGTH)
    model.generation_config.stop_strings = [tokenizer.decode(text[0, 4:6].tolist())]
    want = reference(model, PROMPT, max_new_tokens=LENGTH, tokenizer=tokenizer)
    assert want.shape[1] <= 6
    sd = SpecDiff(model, drafter("Dself", text, 8), tokenizer=tokenizer)
    out = run(sd, max_new_tokens=LENGTH)
    assert torch.equal(out.sequences[:, PROMPT.shape[1] :], want) and out.stats.finish_reason == ["stop"]
    assert model.generation_config.stop_strings


def test_b03_stop_strings_in_a_batch_end_each_row():
    tokenizer = characters()
    prompts = [random_prompt(n, seed=n) for n in (3, 7)]
    ids, mask = left_padded(prompts)
    text = reference(target(), ids, mask, max_new_tokens=LENGTH)
    piece = tokenizer.decode(text[0, 4:7].tolist())
    for kind in KINDS:
        sd = SpecDiff(target(), drafter(kind, text, 4))
        out = run(sd, ids, mask, max_new_tokens=LENGTH, stop_strings=piece, tokenizer=tokenizer, pad_token_id=0)
        new = out.sequences[:, ids.shape[1] :].tolist()
        for r, row in enumerate(prompts):
            alone = reference(
                target(), torch.tensor([row]), max_new_tokens=LENGTH, stop_strings=piece, tokenizer=tokenizer
            )[0].tolist()
            assert new[r][: len(alone)] == alone and set(new[r][len(alone) :]) <= {0}
            assert out.stats.new_tokens[r] == len(alone)
        assert out.stats.finish_reason[0] == "stop" and out.stats.new_tokens[0] == 7


def test_custom_criteria_see_every_token_in_order():
    text = greedy_text(LENGTH)
    seen: list[list[int]] = []

    def criterion(ids, scores):
        assert ids.dim() == 2
        seen.append(ids[0].tolist())
        return ids.shape[1] >= PROMPT.shape[1] + 10

    out = run(SpecDiff(target(), drafter("Dself", text, 8)), max_new_tokens=LENGTH, stopping_criteria=[criterion])
    whole = PROMPT[0].tolist() + text[0, :10].tolist()
    assert seen == [whole[: PROMPT.shape[1] + n] for n in range(1, 11)]
    assert out.sequences[0].tolist() == whole and out.stats.finish_reason == ["stop"]


def test_custom_criteria_of_a_batch_get_the_calls_of_plain_decoding():
    ids, mask = left_padded([random_prompt(n, seed=n) for n in (3, 7)])
    text = reference(target(), ids, mask, max_new_tokens=LENGTH)

    def make(seen):
        def criterion(batch, scores):
            seen.append(batch.tolist())
            return batch[:, -1] == text[0, 6]

        return criterion

    eos = int(text[1, 9])
    arguments = {"max_new_tokens": LENGTH, "eos_token_id": eos, "pad_token_id": 0}
    plain_calls: list = []
    want = reference(target(), ids, mask, stopping_criteria=[make(plain_calls)], **arguments)
    calls: list = []
    out = run(SpecDiff(target(), drafter("Dself", text, 4)), ids, mask, stopping_criteria=[make(calls)], **arguments)
    assert torch.equal(out.sequences[:, ids.shape[1] :], want) and calls == plain_calls
    assert out.stats.notes
