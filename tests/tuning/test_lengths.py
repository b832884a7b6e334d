"""Block lengths by modelled costs: nothing here is timed."""

from __future__ import annotations

import random

import pytest
import torch
from bench.bench_tiny import tiny_llama

from specdiff import SpecDiff
from specdiff.drafters.base import Outlook
from specdiff.drafters.combined import CombinedDrafter
from specdiff.errors import InvalidInputError
from specdiff.testing import RandomDrafter, ReplayDrafter
from specdiff.tuning.curve import CostCurve
from specdiff.tuning.lengths import BOUND, MOST_BEHIND, AdaptiveLengths, FixedLengths

TARGET = {1: 1.0, 2: 1.08, 4: 1.18, 8: 1.37, 9: 1.55}
SHALLOW = CostCurve(192, 1, "fast", TARGET, {1: 0.1, 8: 0.4}, 8, warm=0.005, prefill=0.1)
DEAR = CostCurve(192, 1, "fast", TARGET, {1: 1.5, 8: 4.0}, 8, warm=0.005, prefill=0.1)
STEEP = CostCurve(192, 16, "general", {1: 1.0, 2: 1.9, 9: 8.0}, {1: 0.3, 8: 2.0}, 8, warm=0.01, prefill=0.2)
HEAVY = CostCurve(192, 1, "general", TARGET, {1: 0.2, 8: 0.4}, 8, warm=0.2, prefill=0.1)
CURVES = {"shallow": SHALLOW, "dear": DEAR, "steep": STEEP, "heavy": HEAVY}

DRAFTED = Outlook("drafted", 8)


def drive(lengths, keep, tokens, *, prompt=40, outlook=DRAFTED, rows=1, watch=None, lazy=True):
    """Run rounds until every row has ``tokens`` new tokens; ``keep(row, at, limit)`` says how many drafts stand."""
    lengths.begin([prompt] * rows, lazy)
    done, history = [1] * rows, []
    while min(done) < tokens:
        looks = [outlook(row, done[row]) if callable(outlook) else outlook for row in range(rows)]
        caps = [max(0, min(8, tokens - n - 1)) for n in done]
        limits = lengths.choose(caps, looks) if max(caps) and not lengths.given_up else [0] * rows
        assert all(0 <= n <= min(cap, look.most) for n, cap, look in zip(limits, caps, looks, strict=True))
        kept = [min(n, keep(row, done[row], n)) for row, n in enumerate(limits)]
        lengths.settle(limits, kept, [k + 1 for k in kept])
        history.append(limits)
        done = [n + k + 1 for n, k in zip(done, kept, strict=True)]
        if watch:
            watch(lengths)
    return history


def bounded(lengths):
    assert lengths.spent <= (1 + BOUND) * lengths.plain + 1e-9


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("prompt", [1, 7, 60, 1500])
@pytest.mark.parametrize("keep", ["nothing", "by chance"])
def test_modelled_cost_stays_within_five_percent_after_every_round(curve, prompt, keep):
    rng = random.Random(prompt)
    chance = {"nothing": 0.0, "by chance": 0.25}[keep]
    lengths = AdaptiveLengths(CURVES[curve])

    def stands(row, at, limit):
        return next((i for i in range(limit) if rng.random() >= chance), limit)

    if curve == "heavy" and prompt > MOST_BEHIND:  # the context alone costs twice the prompt
        drive(lengths, stands, 400, prompt=prompt)
        assert lengths.given_up and not lengths.drafting_rounds
        return
    history = drive(lengths, stands, 400, prompt=prompt, watch=bounded)
    assert any(any(limits) for limits in history) or curve != "shallow"  # it did try


def test_without_the_bill_a_useless_drafter_would_break_the_bound():
    """The control of the test above: the same decisions without affordability cost more than 5%."""
    lengths = AdaptiveLengths(SHALLOW)
    lengths._affordable = lambda plan: True
    worst = []
    drive(lengths, lambda *_: 0, 24, prompt=1, watch=lambda found: worst.append(found.spent / found.plain))
    assert max(worst) > 1 + BOUND


def test_what_is_always_kept_is_drafted_in_full():
    lengths = AdaptiveLengths(SHALLOW)
    history = drive(lengths, lambda row, at, limit: limit, 200)
    assert sum(limits >= [7] for limits in history) > 0.6 * len(history)  # the 8th costs as much as the 4 before it
    assert lengths.spent < 0.4 * lengths.plain


@pytest.mark.parametrize("stand", [1, 2, 3, 5])
def test_positions_that_never_stand_are_not_proposed(stand):
    lengths = AdaptiveLengths(SHALLOW)
    history = drive(lengths, lambda row, at, limit: min(limit, stand), 300)
    late = history[len(history) // 2 :]
    assert sum(limits == [stand] for limits in late) > 0.6 * len(late)


def test_a_dear_drafter_is_left_alone_but_copies_are_taken():
    copies = Outlook("copied behind 4", 8, free=True)
    lengths = AdaptiveLengths(DEAR)
    history = drive(
        lengths, lambda row, at, limit: limit, 200, outlook=lambda row, at: copies if at % 40 > 20 else DRAFTED
    )
    assert any(limits >= [7] for limits in history)
    assert lengths.spent < 0.9 * lengths.plain


def test_plain_when_it_does_not_pay_and_back_when_it_does():
    lengths = AdaptiveLengths(SHALLOW)
    history = drive(lengths, lambda row, at, limit: 0 if at < 150 else limit, 400, watch=bounded)
    at, drafted = 1, {"useless": 0, "late": 0}
    for (limit,) in history:
        kept = 0 if at < 150 else limit
        if 50 < at < 150:
            drafted["useless"] += limit > 0
        if at >= 230:
            drafted["late"] += limit >= 7
        at += 1 + kept
    assert drafted["useless"] <= 6  # tried again, ever more rarely
    assert drafted["late"] >= 15  # of at most 19 rounds


def test_sources_are_judged_apart():
    weak, strong = Outlook("weak", 8), Outlook("strong", 8)
    lengths = AdaptiveLengths(SHALLOW)
    used: dict[str, int] = {"weak": 0, "strong": 0}

    def look(row, at):
        return (weak, strong)[at % 2]

    def keep(row, at, limit):
        used[look(row, at).source] += limit > 0
        return limit - limit % 2 if at % 2 else 0  # an even number of drafts keeps the parity mixed

    drive(lengths, keep, 300, outlook=look, watch=bounded)
    assert used["strong"] > 4 * used["weak"]


def test_rows_of_a_batch_have_lengths_of_their_own():
    lengths = AdaptiveLengths(SHALLOW)
    copies = Outlook("copied behind 4", 8, free=True)
    nothing = Outlook("copied behind 0", 0, free=True)
    history = drive(
        lengths, lambda row, at, limit: limit, 40, rows=2, outlook=lambda row, at: (copies, nothing)[row], watch=bounded
    )
    assert all(second == 0 for _, second in history) and any(first >= 7 for first, _ in history)


def test_a_drafter_too_dear_to_keep_is_let_go():
    lengths = AdaptiveLengths(HEAVY)
    drive(lengths, lambda *_: 0, 200, prompt=100, lazy=False)
    assert lengths.given_up
    kept = AdaptiveLengths(SHALLOW)
    drive(kept, lambda *_: 0, 200, prompt=100, lazy=False, watch=bounded)
    assert not kept.given_up


def test_points_that_dip_are_lifted():
    noisy = CostCurve(1, 1, "fast", {1: 1.0, 2: 1.3, 4: 1.1, 8: 1.4}, {1: 0.2, 4: 0.1}, 4)
    assert noisy.rising().target == {1: 1.0, 2: 1.3, 4: 1.3, 8: 1.4} and noisy.rising().drafter == {1: 0.2, 4: 0.2}


# -- through the engine ---------------------------------------------------------------------------------------------


class Seen(AdaptiveLengths):
    """Keeps itself where the test can look at it."""

    last: Seen

    def __init__(self, curve):
        super().__init__(curve)
        Seen.last = self


@pytest.fixture
def known_costs(monkeypatch):
    monkeypatch.setattr("specdiff.wrap.curve_for", lambda wrapped, target, rows, judge: (SHALLOW, None))
    monkeypatch.setattr("specdiff.wrap.AdaptiveLengths", Seen)


IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def plain_text(model, tokens, ids=IDS):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None)[:, ids.shape[1] :]


def run(wrapped, tokens=60, ids=IDS, **kwargs):
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, **kwargs}
    return wrapped.generate(ids, max_new_tokens=tokens, pad_token_id=0, **options)


@pytest.mark.parametrize("useless", ["random", "replay"])
@pytest.mark.parametrize("sampling", [False, True])
def test_useless_drafters_cost_at_most_five_percent(known_costs, useless, sampling):
    model = tiny_llama(vocab=997, scale=0.3)
    text = plain_text(model, 60)
    drafter = RandomDrafter(997) if useless == "random" else ReplayDrafter(text, wrong_at=range(8))
    options = {"do_sample": True, "temperature": 0.7, "seed": 3} if sampling else {}
    out = run(SpecDiff(model, drafter, block_size="auto"), **options)
    bounded(Seen.last)
    if not sampling:
        assert torch.equal(out.sequences[:, IDS.shape[1] :], text)
    # plain decoding's share of what the stats counted agrees with the bill
    assert Seen.last.rounds == out.stats.rounds and Seen.last.drafting_rounds <= 12
    assert out.stats.modelled_cost == Seen.last.spent / Seen.last.plain <= 1 + BOUND
    assert "adaptive lengths: some rounds were plain decoding" in out.stats.notes


def test_a_perfect_replay_is_taken_in_full_and_a_fixed_block_stays_fixed(known_costs):
    model = tiny_llama(vocab=97)
    text = plain_text(model, 90)
    wrapped = SpecDiff(model, ReplayDrafter(text), block_size="auto")
    out = run(wrapped, 90)
    assert torch.equal(out.sequences[:, IDS.shape[1] :], text)
    assert out.stats.tau > 4 and max(out.stats.emitted[0]) >= 8
    wrong = SpecDiff(model, ReplayDrafter(text, wrong_at=range(8)), block_size="auto")
    fixed = run(wrong, 30, block_size=2).stats  # the call's own int fixes it
    assert fixed.proposed_by_position == [28, 27] and fixed.modelled_cost is None and not fixed.notes
    small = SpecDiff(model, ReplayDrafter(text, wrong_at=range(8)))  # a tiny target: None is fixed
    assert isinstance(small.lengths_for(small.target, None, None), FixedLengths)
    assert run(small, 30).stats.proposed > 100


def test_ragged_rows_and_rows_that_end(known_costs):
    model = tiny_llama(vocab=97)
    ids = torch.cat([IDS, IDS.flip(1)])
    text = plain_text(model, 50, ids)
    wrong = text.clone()
    wrong[1] = (wrong[1] + 1) % 97
    eos = int(text[0, 30])
    stop = [row.tolist().index(eos) + 1 if eos in row.tolist() else 50 for row in text]
    out = run(SpecDiff(model, ReplayDrafter(wrong), block_size="auto"), 50, ids, eos_token_id=eos)
    for row, count in enumerate(stop):
        assert out.sequences[row, ids.shape[1] :][:count].tolist() == text[row, :count].tolist()
    bounded(Seen.last)


def test_same_request_same_lengths(known_costs):
    model = tiny_llama(vocab=97)
    wrapped = SpecDiff(model, RandomDrafter(97), block_size="auto")
    runs = [run(wrapped, 40, do_sample=True, seed=5) for _ in range(2)]
    assert torch.equal(runs[0].sequences, runs[1].sequences) and runs[0].stats.emitted == runs[1].stats.emitted


def test_the_coupled_text_does_not_depend_on_lengths(known_costs):
    model = tiny_llama(vocab=97)
    text = plain_text(model, 50)
    given = {"do_sample": True, "seed": 11, "rule": "coupled"}
    plain = run(SpecDiff(model), 50, **given).sequences
    for block in ("auto", 3, 8):
        assert torch.equal(run(SpecDiff(model, ReplayDrafter(text), block_size=block), 50, **given).sequences, plain)


def test_combined_drafters_tell_their_sources(known_costs):
    model = tiny_llama(vocab=97)
    loop = torch.tensor([[5, 6, 7, 8] * 24])
    inner = RandomDrafter(97, block_size=3)
    session_looks = []
    drafter = CombinedDrafter(inner)
    start = drafter.start

    def watched(request):
        session = start(request)
        look = session.outlook
        session.outlook = lambda anchor: session_looks.append(look(anchor)) or session_looks[-1]
        return session

    drafter.start = watched
    out = run(SpecDiff(model, drafter, block_size="auto"), 60, loop)
    assert torch.equal(out.sequences[:, loop.shape[1] :], plain_text(model, 60, loop))
    sources = {look.source for (look,) in session_looks}
    assert "drafted" in sources and any(source.startswith("copied") for source in sources)
    assert all(look.free == look.source.startswith("copied") for (look,) in session_looks)
    bounded(Seen.last)


def test_a_drafter_is_closed_once_when_let_go(monkeypatch):
    monkeypatch.setattr("specdiff.wrap.curve_for", lambda *_: (HEAVY, None))
    model = tiny_llama(vocab=97)
    drafter = RandomDrafter(97)
    closed = []
    start = drafter.start

    def watched(request):
        session = start(request)
        session.close = lambda: closed.append(1)
        return session

    drafter.start = watched
    out = run(SpecDiff(model, drafter, block_size="auto"), 60)
    assert closed == [1] and any("let go" in note for note in out.stats.notes)
    with SpecDiff(model, drafter, block_size="auto").session() as session:
        first = session.generate(IDS, max_new_tokens=20, do_sample=False, eos_token_id=None)
        again = session.generate(
            first, attention_mask=torch.ones_like(first), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
    assert torch.equal(again[:, IDS.shape[1] :], plain_text(model, 40)) and closed == [1, 1]


@pytest.mark.parametrize("block", ["long", -1, True, 2.5, 9])
def test_block_size_says_what_it_takes(block):
    with pytest.raises(InvalidInputError, match="block_size"):
        SpecDiff(tiny_llama(), RandomDrafter(12), block_size=block)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.6, 0.95])
def test_looking_first_whether_anything_can_pay_changes_no_choice(curve, chance):
    histories = []
    for first in (True, False):
        rng = random.Random(7)
        lengths = AdaptiveLengths(CURVES[curve])
        if not first:
            lengths._may_pay = lambda plain, reach: True

        def stands(row, at, limit, rng=rng):
            return next((i for i in range(limit) if rng.random() >= chance), limit)

        histories.append(drive(lengths, stands, 300, prompt=60))
    assert histories[0] == histories[1]
