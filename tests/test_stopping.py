"""Stop tests one token at a time."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specdiff.stopping import StopTests


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def letters() -> PreTrainedTokenizerFast:
    vocab = {chr(ord("a") + i): i for i in range(26)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


class Custom(StoppingCriteria):
    def __init__(self, answer) -> None:
        self.answer = answer
        self.seen: list[tuple] = []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.dim() == 2
        self.seen.append((input_ids.tolist(), scores))
        return self.answer(input_ids) if callable(self.answer) else self.answer


def test_quick_lists_need_no_tensors():
    tests = StopTests([MaxLengthCriteria(5), EosTokenCriteria([7, 9]), MaxLengthCriteria(6)])
    assert tests.quick and tests.rowwise and tests.eos == {7, 9} and tests.max_length == 5
    assert tests.quick_check(7, 5) == "eos" and tests.quick_check(9, 2) == "eos"
    assert tests.quick_check(8, 5) == "length" and tests.quick_check(8, 4) is None
    assert tests.check(ids(1, 2, 7)) == "eos" and tests.check(ids(1, 7, 2)) is None


def test_empty_list_never_stops():
    tests = StopTests(None)
    assert tests.quick and tests.max_length == sys.maxsize and tests.quick_check(3, 10**9) is None


@pytest.mark.parametrize("at", [3, 4, 5])
def test_b02_stop_inside_the_budget_wins_over_length(at):
    tests = StopTests([MaxLengthCriteria(5), Custom(lambda x: x[:, -1] == 4), EosTokenCriteria(7)])
    row = [1] * (at - 1)
    assert tests.check(ids(*row, 7)) == "eos"
    assert tests.check(ids(*row, 4)) == "stop"
    assert tests.check(ids(*row, 1)) == ("length" if at == 5 else None)


@pytest.mark.parametrize(
    "answer", [True, torch.tensor(True), torch.tensor([True]), torch.tensor([[True]])], ids=["bool", "0d", "1d", "2d"]
)
def test_any_shape_of_answer(answer):
    assert StopTests([Custom(answer)]).check(ids(1, 2)) == "stop"
    assert StopTests([Custom(not bool(answer))]).check(ids(1, 2)) is None
    assert StopTests([Custom(answer)]).check_batch(torch.tensor([[1, 2], [1, 3]])) == ["stop", "stop"]


def test_every_criterion_sees_every_token_and_the_scores():
    first, second = Custom(True), Custom(False)
    tests = StopTests([first, EosTokenCriteria(7), second])
    scores = (torch.zeros(1, 9),)
    assert not tests.quick and not tests.rowwise
    tests.check(ids(1, 7), scores)
    assert first.seen == second.seen == [([[1, 7]], scores)]


def test_eos_named_by_the_caller_only_names():
    tests = StopTests([Custom(lambda x: x[:, -1] == 3)], eos_token_ids=torch.tensor([3, 4]))
    assert tests.check(ids(1, 3)) == "eos" and tests.check(ids(1, 4)) is None
    assert tests.eos == frozenset()


def test_subclasses_are_called():
    class MyEos(EosTokenCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == 5

    tests = StopTests([MyEos(7)])
    assert not tests.quick and not tests.rowwise
    assert tests.check(ids(1, 5)) == "stop" and tests.check(ids(1, 7)) is None


def test_time():
    tests = StopTests([MaxTimeCriteria(10.0, initial_timestamp=time.time() - 11)])
    assert tests.rowwise and not tests.quick and tests.check(ids(1)) == "stop"
    assert StopTests([MaxTimeCriteria(1000.0)]).check(ids(1)) is None


def test_stop_string_only_where_it_ends():
    text = [ord(c) - ord("a") for c in "xxstopx"]
    tests = StopTests([StopStringCriteria(letters(), ["stop", "zz"])])
    assert tests.rowwise and not tests.quick
    reasons = [tests.check(ids(*text[: n + 1])) for n in range(len(text))]
    assert reasons == [None] * 5 + ["stop", None]


def test_batch_names_each_row():
    tests = StopTests([MaxLengthCriteria(3), Custom(lambda x: x[:, -1] == 4), EosTokenCriteria(7)])
    assert tests.check_batch(torch.tensor([[1, 2, 7], [1, 2, 4], [1, 2, 1]])) == ["eos", "stop", "length"]
    assert tests.check_batch(torch.tensor([[2, 7], [2, 4], [2, 1]])) == ["eos", "stop", None]


@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    prompt=st.integers(1, 3),
    eos=st.sets(st.integers(0, 5), max_size=2),
    bad=st.integers(0, 8),
    limit=st.integers(2, 16),
)
def test_ends_where_the_stock_list_does(text, prompt, eos, bad, limit):
    """Token by token, the row ends exactly where transformers' own list says so."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(limit), Custom(lambda x: x[:, -1] == bad)])
    if eos:
        criteria.append(EosTokenCriteria(sorted(eos)))
    row = [0] * prompt
    tests = StopTests(criteria)
    for token in text:
        row.append(token)
        reason = tests.check(ids(*row))
        assert (reason is not None) == bool(criteria(ids(*row), None))
        if token in eos:
            assert reason == "eos"
