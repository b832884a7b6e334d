"""Prompt lookup and the combined drafter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import tiny
import torch
from every_draw import BIASED, EXACT, ListedDrafter, Lister, law_of_texts

from specdiff import SpecDiff
from specdiff.drafters.base import Drafter, DraftSession
from specdiff.drafters.combined import CombinedDrafter, Record, merge, promise
from specdiff.drafters.lookup import NgramIndex, PromptLookup
from specdiff.errors import InvalidInputError
from specdiff.testing import RandomDrafter, ReplayDrafter
from specdiff.verify.audit import LOSSLESS, target_law, total_variation
from specdiff.verify.audit_models import TableLM
from specdiff.verify.laws import Delta, Proposal, Sampled
from specdiff.verify.noise import Noise


def by_hand(text: list[int], anchor: int, smallest: int, count: int) -> tuple[int, list[int]]:
    """Longest suffix of text + anchor that occurred earlier (latest occurrence), and what followed it, cyclically."""
    whole = [*text, anchor]
    best = (0, -1)
    for end in range(1, len(whole)):
        length = 0
        while length < end and whole[end - 1 - length] == whole[len(whole) - 1 - length]:
            length += 1
        if length >= smallest and length >= best[0]:
            best = (length, end)
    if best[1] < 0:
        return 0, []
    period = len(whole) - best[1]
    return best[0], [whole[best[1] + i % period] for i in range(count)]


def test_index_against_brute_force():
    rng = random.Random(0)
    for _ in range(300):
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        anchor = rng.randrange(3)
        index = NgramIndex(2, 16)  # n-grams as long as the text: the longest match is found, not only a long one
        index.extend(text)
        assert index.match(anchor, 5) == by_hand(text, anchor, 2, 5), (text, anchor)


def test_short_ngrams_still_measure_long_matches():
    index = NgramIndex(2, 3)
    index.extend([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6])
    assert index.match(7, 3) == (7, [9, 1, 2])


def test_loops_are_continued_past_the_end():
    index = NgramIndex(2, 4)
    index.extend([8, 1, 2, 3, 1, 2, 3, 1, 2])
    assert index.match(3, 7) == (6, [1, 2, 3, 1, 2, 3, 1])
    same = NgramIndex(1, 2)
    same.extend([5])
    assert same.match(5, 4) == (1, [5, 5, 5, 5])


def test_truncate_equals_fresh():
    rng = random.Random(1)
    text = [rng.randrange(4) for _ in range(30)]
    cut = NgramIndex(2, 4)
    cut.extend(text)
    cut.truncate(12)
    fresh = NgramIndex(2, 4)
    fresh.extend(text[:12])
    for anchor in range(4):
        assert cut.match(anchor, 6) == fresh.match(anchor, 6)


def test_session_follows_rows():
    model = tiny.target()
    drafter = PromptLookup(block_size=3, smallest=1)
    session = drafter.start(tiny.request(model, 3))
    assert isinstance(drafter, Drafter) and isinstance(session, DraftSession)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 9, 0, 0], [4, 5, 4, 6]])
    session.commit(tokens, torch.tensor([4, 2, 4]), None)
    noise = Noise(torch.arange(3)).round(torch.tensor([5, 3, 5]))
    proposal = session.propose(torch.tensor([6, 3, 4]), torch.tensor([3, 3, 2]), noise)
    assert proposal.law == Delta() and proposal.lengths.tolist() == [3, 0, 2]
    assert proposal.tokens[0].tolist() == [7, 8, 6] and proposal.tokens[2, :2].tolist() == [6, 4]
    session.select(torch.tensor([2, 0]))
    session.rollback(torch.tensor([2, 4]))
    noise = Noise(torch.arange(2)).round(torch.tensor([3, 5]))
    again = session.propose(torch.tensor([4, 6]), torch.tensor([3, 3]), noise)
    assert again.tokens.tolist() == [[5, 4, 5], [7, 8, 6]]
    session.close()


@pytest.mark.parametrize(("block", "smallest", "largest"), [(0, 1, 2), (4, 0, 2), (4, 3, 2)])
def test_bad_settings(block, smallest, largest):
    with pytest.raises(InvalidInputError):
        PromptLookup(block, smallest, largest)


def test_merge_marks_copies():
    logits = torch.randn(2, 2, 7)
    drafts = Proposal(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1]), Sampled(), logits=logits)
    both = merge(drafts, [[5, 6, 6, 5], []], torch.tensor([True, False]), torch.tensor([3, 3]))
    assert both.tokens[0, :3].tolist() == [5, 6, 6] and both.lengths.tolist() == [3, 1]
    assert both.delta.tolist() == [[True] * 3, [False] * 3]
    assert torch.equal(both.logits[1, :2], logits[1]) and both.tokens[1, 0] == 3
    greedy = Proposal(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1]), Delta())
    assert merge(greedy, [[5], []], torch.tensor([True, False]), torch.tensor([3, 3])).delta is None


def test_combined_and_coupled_is_plain_decoding():
    """Copied and sampled rows in one proposal: the text is plain decoding's, token by token."""
    model = tiny.target(spread=0.3, vocab=12)
    prompt = torch.tensor([[4, 5, 6, 4, 5, 6, 4, 5, 6, 4, 5], [7, 8, 4, 9, 10, 5, 11, 6, 3, 2, 1]])
    drafter = CombinedDrafter(RandomDrafter(12, block_size=3), PromptLookup(block_size=4, smallest=1), match=2)
    sd = SpecDiff(model, drafter, rule="coupled")
    for seed in range(8):
        want = SpecDiff(model, None, rule="coupled").generate(prompt, max_new_tokens=24, do_sample=True, seed=seed)
        assert sd.generate(prompt, max_new_tokens=24, do_sample=True, seed=seed).tolist() == want.tolist()


class Noting(CombinedDrafter):
    """Counts proposals that hold both copied and sampled blocks of two or more tokens; may call the copies sampled."""

    mixed, honest = 0, True

    def start(self, request):
        session = super().start(request)
        inner = session.propose

        def propose(anchor, limits, noise):
            proposal = inner(anchor, limits, noise)
            if proposal.law == Sampled():
                copied, long = proposal.delta[:, 0], proposal.lengths >= 2
                self.mixed += bool((copied & long).any()) and bool((~copied & long).any())
            elif not self.honest:  # all rows copy
                nothing = torch.zeros(*proposal.tokens.shape, request.vocab_size)
                proposal = replace(proposal, law=Sampled(), logits=nothing)
            return proposal if self.honest else replace(proposal, delta=None)

        session.propose = propose
        return session


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("honest", [True, False], ids=["as it is", "control"])
@pytest.mark.parametrize("way", ["one pass, marginals", "confidence order, exposed tokens as Delta"])
def test_combined_keeps_the_law_through_the_engine(rule, honest, way):
    """Rows that copy and rows that draw in one proposal, blocks of up to three tokens, several rounds: every draw is
    enumerated. The control calls the copies Sampled."""
    inner = ListedDrafter(Lister(TableLM(3, 104), 2, *LOSSLESS[way]))
    drafter = Noting(inner, PromptLookup(block_size=3, smallest=1), match=2)
    drafter.honest = honest
    target = TableLM(3, 4)
    law, rounds = law_of_texts(target, drafter, rule, 5, prompt=(0, 1, 2, 0, 1, 2, 0))
    assert float(law.sum()) == pytest.approx(1.0, abs=EXACT) and rounds > 2 and drafter.mixed
    error = total_variation(law, target_law(target, 5))
    assert error < EXACT if honest else error > BIASED


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_combined_takes_the_better_source(seed):
    """Rounds of 80 greedy tokens. A drafter that is always wrong costs nothing beside lookup; one that keeps any number
    of tokens loses the three rounds at most in which short copies fail; where the text loops both together beat each.
    """
    model = tiny.target(seed, spread=0.2)
    prompt = torch.randint(4, tiny.VOCAB, (1, 12), generator=torch.Generator().manual_seed(seed))
    text = tiny.greedy(model, prompt, 80)[:, prompt.shape[1] :]

    def rounds(drafter) -> int:
        sd = SpecDiff(model, drafter, block_size=8)
        out = sd.generate(prompt, max_new_tokens=80, do_sample=False, return_dict_in_generate=True)
        assert out.sequences[:, prompt.shape[1] :].tolist() == text.tolist()
        return out.stats.rounds

    lookup = PromptLookup(block_size=8, smallest=1)
    copying = rounds(lookup)
    assert rounds(CombinedDrafter(ReplayDrafter(text, 8, [0]), lookup, match=1)) == copying < 79
    for kept in ([1], [2], [4], []):
        drafter = ReplayDrafter(text, 8, kept)
        alone, both = rounds(drafter), rounds(CombinedDrafter(drafter, lookup))
        assert both <= min(alone, copying) + 3, kept
        if seed == 1 and kept:  # this text loops
            assert both < 0.9 * min(alone, copying), kept
        assert rounds(CombinedDrafter(drafter, lookup, match=99)) == alone


def test_a_row_keeps_account_of_both_sources():
    """At first any match is worth more than an unknown drafter; copies that fail hand over, longer matches come back
    first, and after enough rounds of the other drafter short ones are tried again."""
    record = Record()
    assert record.prefers_copy(2)
    tries = 0
    while record.prefers_copy(2):
        record.begin(promise(2))
        record.settle(0)
        tries += 1
    assert 1 <= tries <= 4
    assert record.prefers_copy(12), "a long match promises more"
    rounds = 0
    while not record.prefers_copy(2):
        record.begin(0.0)
        record.settle(1)
        rounds += 1
    assert 2 <= rounds <= 40
    good = Record(drafted=2.0)
    for _ in range(10):
        good.begin(promise(4))
        good.settle(8)
    assert good.prefers_copy(2), "promises kept more than once over"
    before = (good.kept, good.promised, good.drafted)
    good.settle(5)
    assert (good.kept, good.promised, good.drafted) == before, "no round was open: prefill"
