"""Commits that wait: in order, ragged, for the rows that go on."""

from __future__ import annotations

import pytest
import torch
from tiny import DIRECT, drafter, request, taps_of, target

from specdiff.drafters import dflash_session
from specdiff.drafters.pending import Pending
from specdiff.verify import Noise, row_seeds


def test_taken_as_one_commit_in_order():
    pending = Pending()
    first = torch.tensor([[[1.0], [2.0], [9.0]], [[5.0], [9.0], [9.0]], [[7.0], [8.0], [9.0]]])
    pending.put(first, torch.tensor([2, 1, 2]))
    pending.put(torch.tensor([[[3.0]], [[6.0]], [[9.0]]]), torch.tensor([1, 1, 0]))
    assert len(pending) == 4
    pending.select(torch.tensor([1, 0]))
    taps, counts = pending.take()
    assert counts.tolist() == [2, 3]
    assert taps[0, :2, 0].tolist() == [5.0, 6.0] and taps[1, :3, 0].tolist() == [1.0, 2.0, 3.0]
    assert not len(pending)


def draft(made, model, most, monkeypatch):
    """A proposal after five commits, and how often their states were written to the cache."""
    ids = torch.arange(5, 29)[None]
    taps = taps_of(model, ids, made.taps)
    monkeypatch.setattr(dflash_session, "MOST", most)
    session = made.start(request(model))
    append, widths = session._cache.append, []
    session._cache.append = lambda pairs, counts, most: widths.append(int(counts)) or append(pairs, counts, most)
    at = 0
    for count in (10, 1, 1, 3, 1):
        session.commit(ids[:, at : at + count], torch.tensor([count]), taps[:, at : at + count])
        at += count
    noise = Noise(row_seeds(0, 1)).round(torch.tensor([at + 1]))
    proposal = session.propose(ids[:, at], torch.tensor([4]), noise)
    assert session.lengths.tolist() == [at]
    return proposal, widths


@pytest.mark.parametrize("options", [{}, DIRECT], ids=["plain", "direct"])
def test_waiting_changes_no_draft(options, monkeypatch):
    model = target()
    made = drafter(model, **options)
    at_once, first = draft(made, model, 1, monkeypatch)
    waited, second = draft(made, model, 1000, monkeypatch)
    assert torch.equal(at_once.tokens, waited.tokens)
    assert first == [10, 1, 1, 3, 1] and second == [16]
    assert draft(made, model, 11, monkeypatch)[1] == [11, 5]
