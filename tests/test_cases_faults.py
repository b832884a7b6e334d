"""Cases from public reports: faults of the target, the drafter, the reader and of several threads (B15, B42, B45)."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import (
    KINDS,
    PROMPT,
    TableDrafter,
    both_paths,
    build,
    characters,
    chi_square,
    drafter,
    exact_law,
    flash,
    greedy_text,
    law_target,
    left_padded,
    random_prompt,
    reference,
    run,
    target,
)
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessorList, TextIteratorStreamer

from specdiff import SpecDiff
from specdiff.errors import NumericalError
from specdiff.streaming import astream, stream

path = both_paths("auto")

IDS, MASK = left_padded([random_prompt(4, seed=1), random_prompt(9, seed=2)])
LENGTH = 16

# -- B15: logits that are no numbers ---------------------------------------------------------------------------------


@contextmanager
def broken(model: LlamaForCausalLM, change: Callable[[Tensor], None], at: int = 2) -> Iterator[list[int]]:
    """Let ``change`` alter the head's output of pass number ``at`` (0: the prefill)."""
    passes: list[int] = []

    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        passes.append(output.shape[1])
        if len(passes) == at + 1:
            output = output.clone()
            change(output)
        return output

    handle = model.lm_head.register_forward_hook(hook)
    try:
        yield passes
    finally:
        handle.remove()


# The prefill's head gives the last position of each row: two columns here, row 1's is the last. A round has 5 columns.


def nan_row(logits: Tensor) -> None:
    logits[-1, -1 if logits.shape[1] == 2 else 0] = math.nan


def one_inf(logits: Tensor) -> None:
    logits[-1, -1 if logits.shape[1] == 2 else 0, 7] = math.inf


def no_finite(logits: Tensor) -> None:
    logits[-1, -1 if logits.shape[1] == 2 else 0] = -math.inf


RULES = {"greedy": {}, **{rule: {"do_sample": True, "rule": rule, "seed": 1} for rule in ("token", "block", "coupled")}}


@pytest.mark.parametrize("at", [0, 2], ids=["prefill", "round"])
@pytest.mark.parametrize("change", [nan_row, one_inf, no_finite], ids=["nan", "inf", "none-finite"])
@pytest.mark.parametrize("rule", RULES)
def test_b15_a_broken_target_row_is_an_error_at_once(rule, change, at):
    text = reference(target(), IDS, MASK, max_new_tokens=LENGTH)
    arguments = {"max_new_tokens": LENGTH, **RULES[rule]}
    for kind in ("Dself", "Drand"):
        sd = SpecDiff(target(), drafter(kind, text, 4), fast="off")
        with broken(target(), change, at) as passes:
            with pytest.raises(NumericalError, match=r"row 1, new token \d+"):
                run(sd, IDS, MASK, **arguments)
            assert len(passes) == at + 1  # in the same round
        assert torch.equal(
            run(sd, IDS, MASK, **arguments).sequences,
            run(SpecDiff(target(), drafter(kind, text, 4)), IDS, MASK, **arguments).sequences,
        )


@pytest.mark.parametrize("rule", RULES)
def test_b15_a_processor_that_leaves_nothing(rule):
    def forbid(ids: Tensor, scores: Tensor) -> Tensor:
        return scores if ids.shape[1] < IDS.shape[1] + 5 else torch.full_like(scores, -math.inf)

    text = reference(target(), IDS, MASK, max_new_tokens=LENGTH)
    for rows in (1, 2):
        sd = SpecDiff(target(), drafter("Dself", text[:rows], 4))
        with pytest.raises(NumericalError, match=r"row 0, new token \d"):
            run(sd, IDS[:rows], MASK[:rows], max_new_tokens=LENGTH, logits_processor=[forbid], **RULES[rule])
        assert (
            run(sd, IDS[:rows], MASK[:rows], max_new_tokens=LENGTH, **RULES[rule]).stats.new_tokens == [LENGTH] * rows
        )


@pytest.mark.parametrize("rule", RULES)
def test_b15_a_broken_row_behind_a_rejection_costs_nothing(rule):
    """Only rows that are needed count: plain decoding would never compute this one."""

    def last_slot(logits: Tensor) -> None:
        logits[:, -1] = math.nan

    arguments = {"max_new_tokens": LENGTH, **RULES[rule]}
    wrong = drafter("Dmix", (greedy_text(60) + 1) % 101, 4)
    sd = SpecDiff(target(), wrong, fast="off")
    want = run(sd, **arguments)
    assert want.stats.emitted[0][2] < 4
    with broken(target(), last_slot):
        assert torch.equal(run(sd, **arguments).sequences, want.sequences)


@pytest.mark.parametrize("poison", [(0,), (1,), (0, 1, 2, 3)], ids=str)
def test_b15_a_broken_drafter_costs_only_speed(poison):
    sd = SpecDiff(target(), TableDrafter(101, 4, poison=poison))
    out = run(sd, max_new_tokens=LENGTH)
    assert torch.equal(out.sequences[:, PROMPT.shape[1] :], greedy_text(60)[:, :LENGTH])
    start = torch.tensor([1, 2])
    law = exact_law(law_target(4), start, 4, LogitsProcessorList())
    for rule in ("token", "block", "coupled"):
        sd = SpecDiff(law_target(4), TableDrafter(4, 4, poison=poison), rule=rule)
        out = run(sd, start.expand(1000, -1), do_sample=True, top_k=0, max_new_tokens=4, seed=3)
        assert chi_square(law, out.sequences[:, 2:].numpy()) > 0.001


def test_b15_a_dflash_drafter_with_broken_weights_costs_only_speed():
    spec = flash(target(), 4)
    with torch.no_grad():
        next(p for p in spec.parameters() if p.dim() == 2).fill_(math.nan)
    out = run(SpecDiff(target(), spec), max_new_tokens=LENGTH)
    assert torch.equal(out.sequences[:, PROMPT.shape[1] :], greedy_text(60)[:, :LENGTH])
    out = run(SpecDiff(target(), spec), max_new_tokens=LENGTH, do_sample=True, seed=1)
    assert out.stats.new_tokens == [LENGTH] and out.sequences.max() < 101


# -- B42: errors reach the reader ------------------------------------------------------------------------------------


class Fails:
    """A processor that raises at new token ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.error = ZeroDivisionError("in the processor")

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] >= PROMPT.shape[1] + self.at:
            raise self.error
        return scores


def letters(count: int) -> str:
    return characters().decode(greedy_text(60)[0, :count].tolist())


class Spiteful:
    """A tokenizer whose decode fails once more than ``most`` ids are to be shown."""

    def __init__(self, most: int) -> None:
        self.most = most

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        if len(ids) > self.most:
            raise UnicodeError("cannot decode")
        return characters().decode(ids) + " "


@pytest.mark.parametrize("kind", KINDS)
def test_b42_the_reader_of_a_stream_gets_the_tokens_and_the_original_exception(kind):
    sd = SpecDiff(target(), drafter(kind, greedy_text(60), 8, wrong_at=(3,)))
    before = threading.active_count()
    began = time.monotonic()

    fails = Fails(5)
    reader, seen = stream(sd, PROMPT, max_new_tokens=LENGTH, do_sample=False, logits_processor=[fails]), []
    with pytest.raises(ZeroDivisionError) as caught:
        for token in reader:
            seen.append(token)
    assert caught.value is fails.error
    assert seen == greedy_text(60)[0, : len(seen)].tolist() and 1 <= len(seen) <= 5

    with pytest.raises(ValueError, match="num_beams"):
        list(stream(sd, PROMPT, max_new_tokens=LENGTH, num_beams=2))

    reader, pieces = stream(sd, PROMPT, tokenizer=Spiteful(6), max_new_tokens=LENGTH, do_sample=False), []
    with pytest.raises(UnicodeError):
        for piece in reader:
            pieces.append(piece)
    assert pieces

    assert threading.active_count() == before and time.monotonic() - began < 30
    assert "".join(stream(sd, PROMPT, tokenizer=characters(), max_new_tokens=LENGTH, do_sample=False)) == letters(
        LENGTH
    )


def test_b42_transformers_own_iterator_never_waits_for_ever():
    for failing in ({"logits_processor": [Fails(5)]}, {"tokenizer": Spiteful(6)}, {"num_beams": 2}, {"top_q": 1}):
        tokenizer = failing.pop("tokenizer", characters())
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
        sd = SpecDiff(target(), drafter("Dself", greedy_text(60), 8))
        errors: list[BaseException] = []

        def call(sd=sd, streamer=streamer, failing=failing, errors=errors) -> None:
            try:
                sd.generate(PROMPT, streamer=streamer, max_new_tokens=LENGTH, do_sample=False, **failing)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        "".join(streamer)
        thread.join(20)
        assert not thread.is_alive() and isinstance(errors[0], (ZeroDivisionError, UnicodeError, ValueError))


def test_b42_leaving_a_stream_ends_the_generation():
    sd = SpecDiff(target(), drafter("Drand", greedy_text(60), 4))
    before = threading.active_count()
    with stream(sd, PROMPT, max_new_tokens=200, do_sample=False) as reader:
        assert next(reader) == int(greedy_text(60)[0, 0])
    assert threading.active_count() == before

    async def main() -> list[int]:
        async with astream(sd, PROMPT, max_new_tokens=200, do_sample=False) as tokens:
            return [await anext(tokens) for _ in range(5)]

    assert asyncio.run(main()) == greedy_text(60)[0, :5].tolist()
    assert threading.active_count() <= before + 1  # asyncio's own helper thread may stay


def test_streams_of_a_batch():
    text = reference(target(), IDS, MASK, max_new_tokens=LENGTH)
    sd = SpecDiff(target(), drafter("Dself", text, 4))
    reader = stream(sd, IDS, attention_mask=MASK, max_new_tokens=LENGTH, do_sample=False)
    assert list(reader) == text.T.tolist()
    assert torch.equal(reader.result[:, IDS.shape[1] :], text)
    with pytest.raises(ValueError, match="batch size 1"):
        list(stream(sd, IDS, tokenizer=characters(), attention_mask=MASK, max_new_tokens=4))


# -- B45: threads ----------------------------------------------------------------------------------------------------


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run the jobs in threads that start at once; results or exceptions, in order."""
    barrier = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def work(index: int) -> None:
        barrier.wait()
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def cases_for_threads() -> list[dict[str, Any]]:
    return [
        {
            "inputs": torch.tensor([random_prompt(n, seed=n)]),
            "max_new_tokens": 6 + n,
            "seed": n,
            "do_sample": n % 2 == 0,
        }
        for n in (4, 7, 10, 13)
    ]


@pytest.mark.parametrize(
    "make", [lambda: flash(target(), 4), lambda: TableDrafter(101, 4), lambda: None], ids=["dflash", "table", "none"]
)
@pytest.mark.parametrize("objects", [1, 2])
def test_b45_threads_do_not_mix(make, objects):
    if objects == 1:
        sds = [SpecDiff(target(), make())] * 4
    else:
        sds = [SpecDiff(target(), make()) for _ in range(2)] * 2
    jobs = cases_for_threads()
    want = [sd.generate(**job) for sd, job in zip(sds, jobs, strict=True)]
    for _ in range(5):
        got = together([lambda sd=sd, job=job: sd.generate(**job) for sd, job in zip(sds, jobs, strict=True)])
        for mine, alone in zip(got, want, strict=True):
            assert isinstance(mine, torch.Tensor), mine
            assert torch.equal(mine, alone)


@pytest.mark.slow
def test_b45_twenty_rounds():
    sd = SpecDiff(target(), flash(target(), 4))
    jobs = cases_for_threads()
    want = [sd.generate(**job) for job in jobs]
    for _ in range(20):
        got = together([lambda job=job: sd.generate(**job) for job in jobs])
        assert all(isinstance(m, torch.Tensor) and torch.equal(m, w) for m, w in zip(got, want, strict=True)), got


def test_b45_a_thread_that_fails_leaves_the_others_alone():
    sd = SpecDiff(target(), flash(target(), 4))
    job = cases_for_threads()[0] | {"do_sample": False}
    want = sd.generate(**job)
    good, bad = together(
        [lambda: sd.generate(**job), lambda: sd.generate(PROMPT, max_new_tokens=12, logits_processor=[Fails(3)])]
    )
    assert torch.equal(good, want) and isinstance(bad, ZeroDivisionError)


def test_the_target_is_left_as_it_was():
    model = build(4)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    sd = SpecDiff(model, flash(model, 4))
    sd.generate(PROMPT, max_new_tokens=12, do_sample=False)
    with pytest.raises(ZeroDivisionError):
        sd.generate(PROMPT, max_new_tokens=12, logits_processor=[Fails(3)])
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert model.config.to_dict() == config and model.generation_config.to_dict() == generation
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
