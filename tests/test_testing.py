"""The two drafters of specdiff.testing."""

from __future__ import annotations

import pytest
import torch

from specdiff.drafters.base import Drafter, DraftRequest, DraftSession
from specdiff.errors import InvalidInputError
from specdiff.testing import RandomDrafter, ReplayDrafter
from specdiff.verify.laws import Delta, Sampled
from specdiff.verify.noise import Noise, row_seeds

VOCAB = 11


def request(batch: int, vocab: int = VOCAB) -> DraftRequest:
    return DraftRequest(batch_size=batch, device=torch.device("cpu"), dtype=torch.float32, vocab_size=vocab)


def noise(batch: int, seed: int = 0, length: int = 5):
    return Noise(row_seeds(seed, batch)).round(torch.full((batch,), length))


def commit(session: DraftSession, counts: list[int]) -> None:
    width = max([*counts, 1])
    session.commit(torch.zeros(len(counts), width, dtype=torch.long), torch.tensor(counts), None)


def propose(session: DraftSession, limits: list[int]):
    batch = len(limits)
    return session.propose(torch.zeros(batch, dtype=torch.long), torch.tensor(limits), noise(batch))


def test_protocols():
    for drafter in (ReplayDrafter([[1, 2]]), RandomDrafter(VOCAB)):
        assert isinstance(drafter, Drafter)
        assert isinstance(drafter.start(request(1)), DraftSession)


def test_replay_follows_what_is_committed_per_row():
    session = ReplayDrafter([[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]], block_size=3).start(request(2))
    commit(session, [4, 2])  # prompt, in two chunks, ragged
    commit(session, [3, 0])
    proposal = propose(session, [3, 3])
    assert proposal.law == Delta() and proposal.tokens.tolist() == [[1, 2, 3], [6, 7, 8]]
    assert proposal.lengths.tolist() == [3, 3]
    commit(session, [1, 3])  # anchor alone; anchor and two drafts
    proposal = propose(session, [3, 3])
    assert proposal.tokens[0].tolist() == [2, 3, 4]
    assert proposal.tokens[1, :2].tolist() == [9, 10] and proposal.lengths.tolist() == [3, 2]
    commit(session, [4, 3])
    assert propose(session, [3, 3]).lengths.tolist() == [0, 0]


def test_replay_wrong_at_wraps_around_the_vocabulary():
    session = ReplayDrafter([[0, 10, 3, 4, 10]], block_size=4, wrong_at=(0, 3)).start(request(1))
    commit(session, [2])
    assert propose(session, [4]).tokens.tolist() == [[0, 3, 4, 0]]


def test_replay_limits_and_select_and_rollback():
    session = ReplayDrafter([[0, 1, 2, 3], [4, 5, 6, 7], [7, 8, 9, 10]], block_size=2).start(request(3))
    commit(session, [1, 1, 1])
    assert propose(session, [0, 1, 5]).lengths.tolist() == [0, 1, 2]
    commit(session, [1, 2, 3])
    session.select(torch.tensor([2, 0]))
    proposal = propose(session, [2, 2])
    assert proposal.lengths.tolist() == [0, 2] and proposal.tokens[1].tolist() == [2, 3]
    session.rollback(torch.tensor([1, 1]))
    commit(session, [5, 1])
    assert propose(session, [2, 2]).tokens.tolist() == [[8, 9], [1, 2]]


def test_replay_repeats_rows_like_num_return_sequences():
    session = ReplayDrafter([[0, 1, 2], [3, 4, 5]], block_size=2).start(request(4))
    commit(session, [1, 1, 1, 1])
    assert propose(session, [2] * 4).tokens.tolist() == [[1, 2], [1, 2], [4, 5], [4, 5]]
    with pytest.raises(InvalidInputError, match="2 rows for a batch of 3"):
        ReplayDrafter([[0], [1]]).start(request(3))


def test_replay_refuses_what_makes_no_sense():
    with pytest.raises(InvalidInputError, match="wrong_at"):
        ReplayDrafter([[0, 1]], block_size=2, wrong_at=(2,))
    with pytest.raises(InvalidInputError, match="block_size"):
        ReplayDrafter([[0, 1]], block_size=0)
    with pytest.raises(InvalidInputError, match="outside"):
        ReplayDrafter([[0, VOCAB]]).start(request(1))
    with pytest.raises(InvalidInputError, match="token ids"):
        ReplayDrafter([[0.5]])


def test_replay_of_nothing_proposes_nothing():
    session = ReplayDrafter(torch.zeros(1, 0)).start(request(1))
    commit(session, [3])
    assert propose(session, [8]).lengths.tolist() == [0]


def test_random_is_uniform_over_request_seeds():
    session = RandomDrafter(5, block_size=3, seed=7).start(request(4000, vocab=5))
    proposal = session.propose(torch.zeros(4000, dtype=torch.long), torch.full((4000,), 3), noise(4000))
    assert proposal.law == Sampled() and proposal.draft_ids is None
    assert torch.equal(proposal.logits.softmax(-1), torch.full((4000, 3, 5), 0.2))
    joint = torch.bincount(
        proposal.tokens[:, 0] * 25 + proposal.tokens[:, 1] * 5 + proposal.tokens[:, 2], minlength=125
    )
    chi2 = float(((joint - 32.0) ** 2 / 32.0).sum())
    assert 70 < chi2 < 190  # 124 degrees of freedom: 6 sigma either way is about 29 to 219


def test_random_depends_on_both_seeds_and_is_row_independent():
    def draw(seed: int, request_seed: int, rows: int = 2):
        session = RandomDrafter(1000, block_size=6, seed=seed).start(request(rows, vocab=1000))
        limits = torch.full((rows,), 6)
        return session.propose(torch.zeros(rows, dtype=torch.long), limits, noise(rows, request_seed)).tokens

    assert torch.equal(draw(0, 3), draw(0, 3))
    assert not torch.equal(draw(0, 3), draw(1, 3))
    assert not torch.equal(draw(0, 3), draw(0, 4))
    assert torch.equal(draw(0, 3, rows=1)[0], draw(0, 3, rows=5)[0])


def test_random_names_its_ids_when_smaller_than_the_target():
    session = RandomDrafter(4, block_size=2).start(request(1))
    proposal = propose(session, [2])
    assert proposal.draft_ids.tolist() == [0, 1, 2, 3] and proposal.logits.shape == (1, 2, 4)
    with pytest.raises(InvalidInputError, match="12 ids"):
        RandomDrafter(12).start(request(1))
