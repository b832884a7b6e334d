"""Logits processors over a block: always the result of plain decoding, slot by slot."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as stock

from specdiff import warp as module
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.warp import PREFIX, PURE, REFUSED, STATEFUL, WARPERS, BlockWarp, classify

VOCAB, BATCH, PROMPT = 23, 3, 4


def prompt_ids(batch: int = BATCH) -> Tensor:
    return torch.randint(3, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(5))


def whisper() -> stock.WhisperTimeStampLogitsProcessor:
    config = GenerationConfig(eos_token_id=2, bos_token_id=1)
    config.no_timestamps_token_id = 14
    return stock.WhisperTimeStampLogitsProcessor(config, begin_index=PROMPT)


MAKERS: dict[str, Callable[[], object]] = {
    "TemperatureLogitsWarper": lambda: stock.TemperatureLogitsWarper(0.7),
    "TopPLogitsWarper": lambda: stock.TopPLogitsWarper(0.6),
    "TopKLogitsWarper": lambda: stock.TopKLogitsWarper(5),
    "TopHLogitsWarper": lambda: stock.TopHLogitsWarper(0.5),
    "MinPLogitsWarper": lambda: stock.MinPLogitsWarper(0.2),
    "TypicalLogitsWarper": lambda: stock.TypicalLogitsWarper(0.5),
    "EpsilonLogitsWarper": lambda: stock.EpsilonLogitsWarper(0.05),
    "EtaLogitsWarper": lambda: stock.EtaLogitsWarper(0.1),
    "LogitNormalization": stock.LogitNormalization,
    "SuppressTokensLogitsProcessor": lambda: stock.SuppressTokensLogitsProcessor([4, 9]),
    "InfNanRemoveLogitsProcessor": stock.InfNanRemoveLogitsProcessor,
    "BarkEosPrioritizerLogitsProcessor": lambda: stock.BarkEosPrioritizerLogitsProcessor([2], 0.05),
    "MinLengthLogitsProcessor": lambda: stock.MinLengthLogitsProcessor(PROMPT + 4, 2),
    "MinNewTokensLengthLogitsProcessor": lambda: stock.MinNewTokensLengthLogitsProcessor(PROMPT, 3, [2, 5]),
    "RepetitionPenaltyLogitsProcessor": lambda: stock.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=torch.tensor([0, 2, 1])
    ),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda: stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, prompt_ids()),
    "NoRepeatNGramLogitsProcessor": lambda: stock.NoRepeatNGramLogitsProcessor(2),
    "EncoderNoRepeatNGramLogitsProcessor": lambda: stock.EncoderNoRepeatNGramLogitsProcessor(2, prompt_ids()),
    "SequenceBiasLogitsProcessor": lambda: stock.SequenceBiasLogitsProcessor({(6,): 2.5, (7, 8): -3.0, (7, 8, 9): 4.0}),
    "NoBadWordsLogitsProcessor": lambda: stock.NoBadWordsLogitsProcessor([[6], [7, 8]], eos_token_id=2),
    "ForcedBOSTokenLogitsProcessor": lambda: stock.ForcedBOSTokenLogitsProcessor(3),
    "ForcedEOSTokenLogitsProcessor": lambda: stock.ForcedEOSTokenLogitsProcessor(PROMPT + 4, [2]),
    "ExponentialDecayLengthPenalty": lambda: stock.ExponentialDecayLengthPenalty((1, 1.4), 2, PROMPT),
    "SuppressTokensAtBeginLogitsProcessor": lambda: stock.SuppressTokensAtBeginLogitsProcessor([4, 9], PROMPT + 1),
    "AlternatingCodebooksLogitsProcessor": lambda: stock.AlternatingCodebooksLogitsProcessor(PROMPT, 5, 9),
    "WhisperTimeStampLogitsProcessor": whisper,
    "WatermarkLogitsProcessor": lambda: stock.WatermarkLogitsProcessor(
        VOCAB, "cpu", seeding_scheme="lefthash", context_width=2
    ),
}


def stock_classes() -> dict[str, type]:
    return {
        name: cls
        for name, cls in inspect.getmembers(stock, inspect.isclass)
        if issubclass(cls, stock.LogitsProcessor)
        and cls.__module__ == stock.__name__
        and cls is not stock.LogitsProcessor
    }


def plain(make: Callable[[], list], ids: Tensor, scores: Tensor, row: int, batch: int = BATCH) -> Tensor:
    """What plain decoding computes for one row: fresh processors, a full batch of equally long rows."""
    every = torch.randint(3, VOCAB, (batch, len(ids)), generator=torch.Generator().manual_seed(len(ids)))
    every[row] = ids
    full = torch.randn(batch, scores.shape[-1], generator=torch.Generator().manual_seed(9))
    full[row] = scores
    return LogitsProcessorList(make())(every, full)[row]


def case(lengths: list[int], slots: int, seed: int = 0, small: bool = False):
    """Ragged rows whose ids start as the prompts do; ``small`` ids repeat often, so that n-grams match."""
    generator = torch.Generator().manual_seed(seed)
    prompts = prompt_ids(len(lengths))
    top = 10 if small else VOCAB
    ids = [
        torch.cat([prompts[r], torch.randint(2, top, (length,), generator=generator)])
        for r, length in enumerate(lengths)
    ]
    drafts = torch.randint(2, top, (len(lengths), slots - 1), generator=generator)
    scores = torch.randn(len(lengths), slots, VOCAB, generator=generator) * 3
    return ids, scores, drafts


def check(make: Callable[[], list], ids: list[Tensor], scores: Tensor, drafts: Tensor, batch: int = BATCH) -> int:
    """Compare a block bit by bit with plain decoding; returns how many places the processors changed."""
    before = scores.clone()
    got = BlockWarp(make(), batch_size=batch).block(ids, scores, drafts)
    torch.testing.assert_close(scores, before, rtol=0, atol=0, equal_nan=True)
    assert got.shape == scores.shape
    for r in range(len(ids)):
        for slot in range(scores.shape[1]):
            want = plain(make, torch.cat([ids[r], drafts[r, :slot]]), scores[r, slot], r, batch)
            torch.testing.assert_close(got[r, slot], want, rtol=0, atol=0, equal_nan=True, msg=f"row {r} slot {slot}")
    return int((got != scores).sum())


def test_every_stock_class_is_in_exactly_one_table():
    for name in stock_classes():
        tables = [name in PURE, name in PREFIX, name in STATEFUL, name in REFUSED]
        assert sum(tables) == 1, f"{name} is in {sum(tables)} tables"
    assert WARPERS <= PURE
    assert set(MAKERS) == PURE | PREFIX  # each is compared with plain decoding below


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("lengths", [[0, 0, 0], [1, 4, 2]], ids=["equal", "ragged"])
def test_b22_block_equals_plain_decoding(name, lengths):
    make = MAKERS[name]
    assert type(make()).__name__ == name
    changed = check(lambda: [make()], *case(lengths, slots=5, small=True))
    if name not in ("ForcedBOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor"):
        assert changed > 0, "the case does not exercise the processor"


def test_forced_bos_and_removal_of_invalid_values():
    ids = [torch.tensor([7]), torch.tensor([8, 9])]
    scores = torch.randn(2, 3, VOCAB)
    scores[0, 1, 3], scores[1, 2, 4] = math.nan, math.inf
    drafts = torch.tensor([[5, 6], [5, 6]])
    assert check(lambda: [stock.ForcedBOSTokenLogitsProcessor(3)], ids, scores[:, :, :], drafts, 2) > 0
    assert check(lambda: [stock.InfNanRemoveLogitsProcessor()], ids, scores, drafts, 2) > 0


@given(
    names=st.lists(st.sampled_from(sorted(set(MAKERS) - {"InfNanRemoveLogitsProcessor"})), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 6), min_size=BATCH, max_size=BATCH),
    slots=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_any_list_of_processors_in_its_order(names, lengths, slots, seed):
    check(lambda: [MAKERS[name]() for name in names], *case(lengths, slots, seed, small=True))


def test_order_matters_and_is_kept():
    orders = [
        ["TopKLogitsWarper", "RepetitionPenaltyLogitsProcessor"],
        ["RepetitionPenaltyLogitsProcessor", "TopKLogitsWarper"],
    ]
    ids, scores, drafts = case([2, 2, 2], 4, small=True)
    results = []
    for order in orders:
        check(lambda order=order: [MAKERS[n]() for n in order], ids, scores, drafts)
        results.append(BlockWarp([MAKERS[n]() for n in order]).block(ids, scores, drafts))
    assert not torch.equal(*results)


@pytest.mark.parametrize("name", sorted(module._ROW_BOUND))
def test_rows_keep_their_identity_when_others_have_gone(name):
    ids, scores, drafts = case([3, 1, 2], 4, small=True)
    warp = BlockWarp([MAKERS[name]()], batch_size=BATCH)
    whole = warp.block(ids, scores, drafts)
    keep = [2, 0]
    part = BlockWarp([MAKERS[name]()], batch_size=BATCH).block(
        [ids[r] for r in keep], scores[keep], drafts[keep], rows=keep
    )
    assert torch.equal(part, whole[keep])
    wrong = BlockWarp([MAKERS[name]()], batch_size=BATCH).block([ids[r] for r in keep], scores[keep], drafts[keep])
    assert not torch.equal(wrong, whole[keep])


@pytest.mark.parametrize("cls", ["EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"])
def test_several_sequences_per_prompt(cls):
    prompts = prompt_ids(2)
    make = lambda: [getattr(stock, cls)(1.5 if "Penalty" in cls else 2, prompts)]  # noqa: E731
    generator = torch.Generator().manual_seed(1)
    ids = [torch.cat([prompts[r // 2], torch.randint(2, 10, (2 + r,), generator=generator)]) for r in range(4)]
    drafts = torch.stack([prompts[r // 2, :3] for r in range(4)])
    assert check(make, ids, torch.randn(4, 4, VOCAB, generator=generator), drafts, batch=4) > 0


def test_padding_behind_a_short_proposal_may_be_anything():
    ids, scores, drafts = case([1, 2, 3], 4)
    names = ["RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "WatermarkLogitsProcessor"]
    want = BlockWarp([MAKERS[n]() for n in names]).block(ids, scores, drafts)
    rubbish = drafts.clone()
    rubbish[0, 1:], rubbish[2, 2:] = -100, VOCAB + 50
    got = BlockWarp([MAKERS[n]() for n in names]).block(ids, scores, rubbish)
    assert (
        torch.equal(got[0, :2], want[0, :2]) and torch.equal(got[1], want[1]) and torch.equal(got[2, :3], want[2, :3])
    )


@pytest.mark.parametrize("name", ["TopHLogitsWarper", "EtaLogitsWarper"])
def test_nan_in_one_slot_leaves_the_others_alone(name):
    ids, scores, drafts = case([0, 0, 0], 3)
    want = BlockWarp([MAKERS[name]()]).block(ids, scores, drafts)
    broken = scores.clone()
    broken[1, 2] = math.nan
    got = BlockWarp([MAKERS[name]()]).block(ids, broken, drafts)
    assert got[1, 2].isnan().all()
    got[1, 2] = want[1, 2]
    assert torch.equal(got, want)


# -- kinds -----------------------------------------------------------------------------------------------------------


class Recorder:
    """A custom processor that checks its inputs and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids, scores):
        assert input_ids.dim() == 2 and scores.dim() == 2 and input_ids.shape[0] == scores.shape[0]
        self.calls.append(input_ids.tolist())
        scores[:, 0] = -math.inf  # in place, as careless processors do
        return scores


class MyTopK(stock.TopKLogitsWarper):
    pass


def test_kinds():
    assert BlockWarp(None).kind == "none" and not BlockWarp([]).needs_ids
    assert BlockWarp([MAKERS["TopKLogitsWarper"]()]).kind == "pure"
    assert BlockWarp([MAKERS["TopKLogitsWarper"](), MAKERS["MinLengthLogitsProcessor"]()]).kind == "prefix"
    for custom in (Recorder(), MyTopK(3), lambda ids, scores: scores):
        assert classify(custom) == "stateful"
        assert BlockWarp([MAKERS["MinLengthLogitsProcessor"](), custom]).kind == "stateful"
    prefixed = stock.PrefixConstrainedLogitsProcessor(lambda row, ids: [1], 1)
    assert BlockWarp([prefixed]).kind == "stateful"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_by_name(name):
    processor = object.__new__(stock_classes()[name])
    with pytest.raises(UnsupportedError, match=name):
        BlockWarp([processor])


def test_stateful_steps_see_two_dimensions_and_never_touch_the_scores():
    recorder = Recorder()
    warp = BlockWarp([recorder, MAKERS["TopKLogitsWarper"]()])
    scores = torch.randn(1, VOCAB)
    before = scores.clone()
    out = warp.step([torch.tensor([4, 5])], scores)
    assert recorder.calls == [[[4, 5]]] and out[0, 0] == -math.inf and torch.equal(scores, before)
    both = torch.randn(2, VOCAB)
    before = both.clone()
    out = warp.lockstep(torch.tensor([[4, 5], [6, 7]]), both)
    assert recorder.calls[1] == [[4, 5], [6, 7]] and (out[:, 0] == -math.inf).all() and torch.equal(both, before)
    with pytest.raises(InvalidInputError, match="stateful"):
        warp.block([torch.tensor([4])], torch.randn(1, 2, VOCAB), torch.tensor([[3]]))
    with pytest.raises(InvalidInputError, match="equal length"):
        warp.step([torch.tensor([4]), torch.tensor([4, 5])], both)


def test_a_processor_with_more_arguments_fails_as_in_transformers():
    class Needy:
        def __call__(self, ids, scores, temperature):
            return scores

    with pytest.raises(ValueError, match="required parameters"):
        BlockWarp([Needy()]).step([torch.tensor([1])], torch.randn(1, VOCAB))


def test_step_of_a_prefix_list_takes_ragged_rows():
    make = lambda: [MAKERS[n]() for n in ("NoRepeatNGramLogitsProcessor", "TopPLogitsWarper")]  # noqa: E731
    ids, scores, _ = case([1, 5, 3], 1, small=True)
    got = BlockWarp(make()).step(ids, scores[:, 0])
    for r in range(BATCH):
        assert torch.equal(got[r], plain(make, ids[r], scores[r, 0], r))


def test_scores_without_processors_come_back_as_they_are():
    scores = torch.randn(2, 3, VOCAB)
    assert BlockWarp([]).block([], scores, torch.zeros(2, 2, dtype=torch.long)) is scores


# -- a drafter's own logits ------------------------------------------------------------------------------------------


def test_draft_warp_applies_what_needs_no_ids():
    names = [
        "RepetitionPenaltyLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
    ]
    warp = BlockWarp([MAKERS[n]() for n in names]).draft_warp()
    logits = torch.randn(2, 4, VOCAB)
    before = logits.clone()
    got = warp(logits)
    want = logits / 0.7
    want = want.masked_fill(want < want.topk(5, dim=-1).values[..., -1:], -math.inf)
    assert torch.equal(got, want) and torch.equal(logits, before)


@pytest.mark.parametrize("name", sorted(WARPERS))
@pytest.mark.parametrize("shape", [(1,), (3,), (7, 3), (2, 4, 301), (0, 4, 9)])
def test_draft_warp_takes_any_width(name, shape):
    warp = BlockWarp([MAKERS[name]()]).draft_warp()
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    got = warp(logits)
    assert got.shape == logits.shape
    if logits.numel():
        assert got.isfinite().any(dim=-1).all()
        want = MAKERS[name]()(None, logits.reshape(-1, shape[-1])).view(shape)
        assert torch.equal(got, want)


def test_draft_warp_survives_nan():
    warp = BlockWarp([MAKERS[n]() for n in sorted(WARPERS)]).draft_warp()
    logits = torch.randn(3, VOCAB)
    logits[1, 4] = math.nan
    got = warp(logits)
    assert got[1].isnan().any() and not got[[0, 2]].isnan().any()
