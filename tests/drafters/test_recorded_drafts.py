"""Drafts as recordings: the proposals and texts of drafts that run operator by operator."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from fast.tape import Tape
from tiny import DIRECT, drafter, target
from torch import Tensor

from specdiff import SpecDiff
from specdiff.drafters.combined import CombinedDrafter
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.dflash_session import DFlashSession
from specdiff.fast.graphs import GraphTarget
from specdiff.fast.recording import Recordings

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "direct": DIRECT | {"correction_window": 3},
    "direct, late mlp": DIRECT | {"correction_window": 3, "late_mlp": True},
    "markov": {"markov_rank": 4},
}
SAMPLING = {"do_sample": True, "seed": [1, 2], "temperature": 0.7, "top_k": 20}
REQUESTS = {"greedy": {"do_sample": False}, "block": SAMPLING, "coupled": SAMPLING | {"rule": "coupled"}}
PROMPTS = torch.tensor([[0, 0, 5, 7, 9, 11], [2, 4, 6, 8, 10, 12]])


def pair(kind: str, recorded: bool) -> tuple[SpecDiff, Tape]:
    model = target()
    tape = Tape()
    wrapped = SpecDiff(model, drafter(model, **KINDS[kind]), fast="off")
    if recorded:
        wrapped.fast_target = GraphTarget(model, tape)
    return wrapped, tape


def text(wrapped: SpecDiff, prompts: Tensor = PROMPTS, **options: Any) -> Any:
    defaults = {"max_new_tokens": 24, "return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}
    return wrapped.generate(prompts, attention_mask=(prompts != 0).long(), **defaults | options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_texts_and_rounds_are_the_same(kind: str, request_name: str) -> None:
    plain = text(pair(kind, False)[0], **REQUESTS[request_name])
    wrapped, tape = pair(kind, True)
    before = tape.replays
    out = text(wrapped, **REQUESTS[request_name])
    assert torch.equal(out.sequences, plain.sequences)
    assert out.stats.emitted == plain.stats.emitted and out.stats.proposed == plain.stats.proposed > 0
    drafts = sum(1 for recording in tape.recordings if len(recording.outputs) == 6 and recording.replays)
    assert drafts and tape.replays - before >= 2 * out.stats.rounds - 2  # the last round may draft nothing


def test_rows_that_end_and_texts_past_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(2, 482).view(2, 240) % 48 + 2
    plain = text(pair("direct", False)[0], ids, do_sample=False, max_new_tokens=30)
    eos = int(plain.sequences[0, 250])
    plain = text(pair("direct", False)[0], ids, do_sample=False, max_new_tokens=30, eos_token_id=eos)
    wrapped, _ = pair("direct", True)
    out = text(wrapped, ids, do_sample=False, max_new_tokens=30, eos_token_id=eos)
    assert torch.equal(out.sequences, plain.sequences) and out.stats.emitted == plain.stats.emitted


def test_a_conversation_with_another_temperature_is_recorded_anew() -> None:
    outs = []
    for recorded in (False, True):
        wrapped, _ = pair("direct", recorded)
        session = wrapped.session()
        ids = PROMPTS[1:]
        for temperature in (0.5, 1.5):
            ids = session.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, seed=3, temperature=temperature,
                max_new_tokens=12, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        outs.append(ids)
    assert torch.equal(*outs)


def test_beside_lookup() -> None:
    outs = []
    for recorded in (False, True):
        wrapped, _ = pair("direct", recorded)
        combined = SpecDiff(wrapped.ar, CombinedDrafter(wrapped.drafter), fast="off")
        combined.fast_target = wrapped.fast_target
        outs.append(text(combined, PROMPTS[1:].repeat(1, 3), do_sample=False))
    assert torch.equal(outs[0].sequences, outs[1].sequences) and outs[0].stats.emitted == outs[1].stats.emitted


def test_a_draft_that_cannot_be_recorded_is_run_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = text(pair("direct", False)[0], do_sample=False)
    states = DFlashSession._states

    def reading(self: DFlashSession, anchor: Tensor, slots: int) -> Tensor:
        assert int(anchor.max()) >= 0
        return states(self, anchor, slots)

    wrapped, _ = pair("direct", True)
    monkeypatch.setattr(DFlashSession, "_states", reading)
    with caplog.at_level(logging.WARNING):
        out = text(wrapped, do_sample=False)
    assert torch.equal(out.sequences, plain.sequences) and out.stats.emitted == plain.stats.emitted
    assert [r.message for r in caplog.records if "cannot be recorded" in r.message]


def test_stale_state_in_a_recording_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a round whose lengths are those of the recording drafts otherwise."""
    plain = text(pair("direct", False)[0], do_sample=False)
    call = Recordings.__call__

    def stale(self: Recordings, key: Any, run: Any, inputs: Any) -> Any:
        if len(inputs) == 9:
            first = self.__dict__.setdefault("first", inputs[6])
            inputs = (*inputs[:6], first, *inputs[7:])
        return call(self, key, run, inputs)

    monkeypatch.setattr(Recordings, "__call__", stale)
    out = text(pair("direct", True)[0], do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)  # lossless all the same
    assert out.stats.emitted != plain.stats.emitted


@torch.no_grad()
def turn_round(wrapped: SpecDiff) -> None:
    """Write a weight of the drafter."""
    assert isinstance(wrapped.drafter, DFlashDrafter)
    wrapped.drafter.model.fc.weight.mul_(-1.0)


def test_a_drafter_that_has_been_recorded_can_be_copied() -> None:
    wrapped, _ = pair("direct", True)
    first = text(wrapped, PROMPTS[1:], do_sample=False)
    other = SpecDiff(wrapped.ar, copy.deepcopy(wrapped.drafter), fast="off")
    assert text(other, PROMPTS[1:], do_sample=False).stats.emitted == first.stats.emitted


def test_a_conversation_closed_in_another_mode_leaves_buffers_that_fit() -> None:
    wrapped, _ = pair("direct", True)
    session = wrapped.session()
    with torch.inference_mode():
        session.generate(PROMPTS[1:], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    session.close()
    plain = text(pair("direct", False)[0], PROMPTS[1:], do_sample=False, max_new_tokens=8)
    assert torch.equal(text(wrapped, PROMPTS[1:], do_sample=False, max_new_tokens=8).sequences, plain.sequences)


def test_a_second_request_records_nothing_new_and_sees_weights_written_since() -> None:
    wrapped, tape = pair("direct", True)
    first = text(wrapped, PROMPTS[1:], do_sample=False)
    seen = len(tape.recordings)
    again = text(wrapped, PROMPTS[1:], do_sample=False)
    assert len(tape.recordings) == seen
    assert torch.equal(again.sequences, first.sequences) and again.stats.emitted == first.stats.emitted
    turn_round(wrapped)
    changed = text(wrapped, PROMPTS[1:], do_sample=False)
    fresh, _ = pair("direct", False)
    turn_round(fresh)
    assert changed.stats.emitted == text(fresh, PROMPTS[1:], do_sample=False).stats.emitted
    assert len(tape.recordings) > seen
