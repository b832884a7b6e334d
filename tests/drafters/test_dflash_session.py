"""The session of a DFlash drafter against direct computation: incremental, ragged, batched, rolled back."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

from specdiff.drafters import packed
from specdiff.drafters.base import Drafter, DraftSession
from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.evaluate import greedy_block
from specdiff.verify.laws import Coupled, Delta, Sampled
from specdiff.verify.noise import Noise

LIMIT = torch.tensor([4])


@pytest.fixture(scope="module")
def model():
    return tiny.target()


def noise(*lengths: int):
    return Noise(torch.arange(len(lengths)) + 11).round(torch.tensor(lengths))


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(4, tiny.VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def fed(drafter: DFlashDrafter, model, ids: Tensor, chunks: list[int], rule: str = "greedy", **options):
    """A session that got ``ids`` (all but the last, which is the anchor) in chunks."""
    session = drafter.start(tiny.request(model, 1, rule, **options))
    taps = tiny.taps_of(model, ids[:, :-1], drafter.taps)
    at = 0
    for width in chunks:
        session.commit(ids[:, at : at + width], torch.tensor([width]), taps[:, at : at + width])
        at += width
    assert at == ids.shape[1] - 1
    return session


def recomputed(drafter: DFlashDrafter, model, ids: Tensor, slots: int = 4) -> Tensor:
    """States of the block after the last of ``ids`` by the training code, from whole documents."""
    taps = tiny.taps_of(model, ids, drafter.taps)
    features = drafter.model.tap_features(taps)
    last = torch.tensor([[ids.shape[1] - 1]])
    with torch.no_grad():
        return drafter.states(features, last, ids[:, -1:], slots)[:, 0]


def test_protocols(model):
    drafter = tiny.drafter(model)
    assert isinstance(drafter, Drafter)
    assert isinstance(drafter.start(tiny.request(model)), DraftSession)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_incremental_context_equals_recompute(model, variant):
    """Serving draws what the training code computes, however the context came in."""
    drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
    ids = text(12)
    want = greedy_block(drafter, recomputed(drafter, model, ids))
    for chunks in ([11], [1] * 11, [5, 4, 2]):
        session = fed(drafter, model, ids, chunks)
        proposal = session.propose(ids[:, -1], LIMIT, noise(12))
        assert proposal.tokens.tolist() == want.tolist(), chunks
        assert proposal.law == Delta() and proposal.lengths.tolist() == [4]


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_equal_recompute(model, variant):
    """Not only the argmax: sampled logits equal those of the training code at the drawn prefix."""
    drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
    ids = text(9)
    proposal = fed(drafter, model, ids, [6, 2], rule="block").propose(ids[:, -1], LIMIT, noise(9))
    assert proposal.law == Sampled()
    states = recomputed(drafter, model, ids)
    with torch.no_grad():
        normed = drafter.model.correct(states, drafter.previous(proposal.tokens))
        want = drafter.logits(normed)
    torch.testing.assert_close(proposal.logits, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "everything"])
def test_batch_equals_rows_alone(model, variant):
    """Ragged rows: other lengths, other limits, padding inside commits."""
    drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
    texts = [text(n, seed=n) for n in (5, 11, 8)]
    session = drafter.start(tiny.request(model, 3))
    cut = [2, 4, 3]
    taps = [tiny.taps_of(model, t[:, :-1], drafter.taps) for t in texts]
    for begin, end in ((lambda i: 0, lambda i: cut[i]), (lambda i: cut[i], lambda i: texts[i].shape[1] - 1)):
        spans = [(begin(i), end(i)) for i in range(3)]
        width = max(b - a for a, b in spans)
        tokens = torch.full((3, width), 7)
        packed = torch.full((3, width, taps[0].shape[-1]), 99.0)
        for i, (a, b) in enumerate(spans):
            tokens[i, : b - a], packed[i, : b - a] = texts[i][0, a:b], taps[i][0, a:b]
        session.commit(tokens, torch.tensor([b - a for a, b in spans]), packed)
    anchors = torch.cat([t[0, -1:] for t in texts])
    limits = torch.tensor([4, 1, 3])
    proposal = session.propose(anchors, limits, noise(5, 11, 8))
    assert proposal.lengths.tolist() == limits.tolist()
    for i, t in enumerate(texts):
        alone = fed(drafter, model, t, [t.shape[1] - 1]).propose(t[:, -1], torch.tensor([4]), noise(t.shape[1]))
        n = int(limits[i])
        assert proposal.tokens[i, :n].tolist() == alone.tokens[0, :n].tolist()


def test_limits_bound_the_pass_but_not_its_law(model):
    """No limit, no pass; towards the end a row drafts the same tokens as with room for all of them."""
    drafter = tiny.drafter(model)
    ids = text(6)
    session = fed(drafter, model, ids, [5])
    none = session.propose(ids[:, -1], torch.tensor([0]), noise(6))
    assert none.lengths.tolist() == [0] and none.tokens.shape[1] == 0
    four = session.propose(ids[:, -1], LIMIT, noise(6))
    three = session.propose(ids[:, -1], torch.tensor([3]), noise(6))
    assert three.tokens.tolist() == four.tokens[:, :3].tolist() and three.lengths.tolist() == [3]
    fresh = fed(drafter, model, ids, [5])
    assert fresh.propose(ids[:, -1], torch.tensor([2]), noise(6)).tokens.shape[1] == 2


@pytest.mark.parametrize("variant", ["plain", "late"])
def test_select_and_rollback(model, variant):
    """Rows that go on are untouched by those that left; a rolled-back row equals one that never went further."""
    drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
    texts = [text(10, seed=s) for s in (1, 2, 3)]
    session = drafter.start(tiny.request(model, 3))
    ids = torch.cat(texts)
    taps = tiny.taps_of(model, ids[:, :-1], drafter.taps)
    session.commit(ids[:, :-1], torch.tensor([9, 9, 9]), taps)
    session.select(torch.tensor([2, 0]))
    proposal = session.propose(ids[[2, 0], -1], torch.tensor([4, 4]), noise(10, 10))
    for row, t in zip(proposal.tokens, (texts[2], texts[0]), strict=True):
        want = fed(drafter, model, t, [9]).propose(t[:, -1], LIMIT, noise(10)).tokens[0]
        assert row.tolist() == want.tolist()

    session.rollback(torch.tensor([4, 6]))
    assert session.lengths.tolist() == [4, 6]
    other = torch.cat([texts[1], texts[1]])
    edited = torch.cat([ids[[2, 0], :4], other[:, 4:]], 1)
    fresh = tiny.taps_of(model, edited[:, :-1], drafter.taps)
    session.rollback(torch.tensor([4, 4]))
    session.commit(edited[:, 4:9], torch.tensor([5, 5]), fresh[:, 4:9])
    got = session.propose(edited[:, -1], torch.tensor([4, 4]), noise(10, 10)).tokens
    for row, t in zip(got, edited, strict=True):
        want = fed(drafter, model, t[None], [9]).propose(t[-1:], LIMIT, noise(10)).tokens[0]
        assert row.tolist() == want.tolist()


def test_first_token_without_context(model):
    """A prompt of one token: the anchor has no position before it."""
    for variant in ("plain", "late"):
        drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
        session = drafter.start(tiny.request(model))
        proposal = session.propose(torch.tensor([5]), LIMIT, noise(1))
        assert proposal.lengths.tolist() == [4]


def test_cache_grows_past_the_announced_capacity(model):
    drafter = tiny.drafter(model, **tiny.VARIANTS["late"])
    ids = text(40)
    session = fed(drafter, model, ids, [13, 13, 13], capacity=2)
    roomy = fed(drafter, model, ids, [39], capacity=64)
    assert (
        session.propose(ids[:, -1], LIMIT, noise(40)).tokens.tolist()
        == roomy.propose(ids[:, -1], LIMIT, noise(40)).tokens.tolist()
    )


HEADS: dict[str, dict] = tiny.VARIANTS | {
    "dspark": tiny.EDGES["dspark"] | {"draft_vocab_size": 8},
    "selector": tiny.EDGES["selector"],
}


@pytest.mark.parametrize(
    ("variant", "short"),
    [
        ("plain", 0), ("late", 0), ("late", 3), ("correction", 0), ("correction", 3), ("markov", 0), ("markov", 3),
        ("everything", 3), ("dspark", 0), ("selector", 0),
    ],
)  # fmt: skip
def test_sampled_tokens_follow_the_reported_law(model, variant, short):
    """Over many seeds each slot's tokens are distributed as softmax of the logits reported for that prefix."""
    ids = text(7)
    pruned = torch.arange(10, 18)
    drafter = tiny.drafter(model, draft_ids=pruned, block_size=2, **HEADS[variant])
    drafter.runtime().shortlist = short
    rows = 4000
    session = drafter.start(tiny.request(model, rows, "block"))
    taps = tiny.taps_of(model, ids[:, :-1], drafter.taps)
    session.commit(ids[:, :-1].expand(rows, -1), torch.full((rows,), 6), taps.expand(rows, -1, -1))
    fresh = Noise(torch.arange(rows) * 7919 + 3).round(torch.full((rows,), 7))
    proposal = session.propose(ids[0, -1:].expand(rows), torch.full((rows,), 2), fresh)
    assert proposal.draft_ids is not None and proposal.draft_ids.tolist() == pruned.tolist()
    columns = proposal.tokens - 10
    law = proposal.logits.softmax(-1)
    if short:
        assert (law[:, 1] > 0).sum(-1).tolist() == [short] * rows
    for slot in range(2):
        for first in range(8):  # the second slot's law may depend on the first token: test each case by itself
            chosen = columns[:, 0] == first if slot else torch.ones(rows, dtype=torch.bool)
            count = int(chosen.sum())
            if count < 200:
                continue
            assert torch.allclose(law[chosen, slot], law[chosen, slot][:1], atol=1e-5)
            seen = torch.bincount(columns[chosen, slot], minlength=8) / count
            want = law[chosen, slot][0]
            error = 4.5 * (want * (1 - want) / count).sqrt() + 1e-9
            assert bool(((seen - want).abs() <= error).all()), (slot, first, seen, want)
    seconds = {tuple(row) for row in law[:, 1].round(decimals=3).tolist()}
    assert (len(seconds) > 1) == (variant != "plain"), "a head makes the second slot's law depend on the first token"


SEQUENTIAL = ["late", "correction", "markov", "everything"]


@pytest.mark.parametrize("variant", SEQUENTIAL)
@pytest.mark.parametrize("rule", ["greedy", "block", "coupled"])
def test_a_shortlist_of_everything_changes_nothing(model, variant, rule):
    ids = text(9)
    drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
    found = []
    for short in (0, tiny.VOCAB):
        drafter.runtime().shortlist = short
        found.append(fed(drafter, model, ids, [8], rule).propose(ids[:, -1], LIMIT, noise(9)))
    assert torch.equal(found[0].tokens, found[1].tokens) and found[0].lengths.tolist() == [4]
    if rule != "greedy":
        assert torch.allclose(found[0].logits, found[1].logits, atol=1e-4)


@pytest.mark.parametrize("variant", SEQUENTIAL)
def test_candidates_are_chosen_before_anything_is_drawn(model, variant):
    """Whatever the noise draws, a slot's candidates are the same, and its logits there are the slot's own."""
    ids = text(9)
    drafter = tiny.drafter(model, **tiny.VARIANTS[variant])
    supports = set()
    for seed in range(6):
        drawn = []
        for short in (7, 0):
            drafter.runtime().shortlist = short
            given = Noise(torch.tensor([seed])).round(torch.tensor([9]))
            drawn.append(fed(drafter, model, ids, [8], "block").propose(ids[:, -1], LIMIT, given))
        few, whole = drawn
        inside = few.logits > -torch.inf
        assert inside[:, 0].all() and inside[:, 1:].sum(-1).eq(7).all()
        assert inside[0].gather(1, few.tokens[0][:, None]).all()
        supports.add(tuple(inside.flatten().tolist()))
        assert torch.allclose(few.logits[:, 0], whole.logits[:, 0], atol=1e-4)
        if few.tokens[0, 0] == whole.tokens[0, 0]:
            assert torch.allclose(few.logits[0, 1][inside[0, 1]], whole.logits[0, 1][inside[0, 1]], atol=1e-4)
    assert len(supports) == 1


def test_broken_weights_cut_a_shortlisted_block_too(model):
    ids = text(6)
    drafter = tiny.drafter(model, **tiny.VARIANTS["late"])
    drafter.runtime().shortlist = 5
    session = fed(drafter, model, ids, [5])
    assert session.lengths.tolist() == [5]  # nothing waits any more
    session._last[:] = float("nan")
    assert session.propose(ids[:, -1], LIMIT, noise(6)).lengths.tolist() == [0]


def test_only_large_vocabularies_are_shortlisted(model, monkeypatch):
    monkeypatch.setattr(packed, "SHORTLIST", 6)
    assert tiny.drafter(model, **tiny.VARIANTS["late"]).runtime().shortlist == 6  # 50 ids are more than 8 times 6
    monkeypatch.setattr(packed, "SHORTLIST", 7)
    assert tiny.drafter(model, **tiny.VARIANTS["late"]).runtime().shortlist == 0


def test_warp_is_applied_before_sampling(model):
    """Temperature and filters of the request shape the reported law."""

    def top2(logits: Tensor) -> Tensor:
        kept = logits / 0.5
        return kept.masked_fill(kept < kept.topk(2, -1).values[..., -1:], float("-inf"))

    ids = text(7)
    drafter = tiny.drafter(model, **tiny.VARIANTS["late"])
    proposal = fed(drafter, model, ids, [6], rule="token", warp=top2).propose(ids[:, -1], LIMIT, noise(7))
    assert torch.isfinite(proposal.logits).sum(-1).tolist() == [[2, 2, 2, 2]]
    assert bool(torch.isfinite(proposal.logits.gather(-1, proposal.tokens[..., None])).all())


def test_coupled_uses_the_positions_noise(model):
    """Coupled drafts equal the argmax of log q + g with g keyed by position alone."""
    ids = text(7)
    drafter = tiny.drafter(model, **tiny.VARIANTS["late"])
    round_noise = noise(7)
    proposal = fed(drafter, model, ids, [6], rule="coupled").propose(ids[:, -1], LIMIT, round_noise)
    assert proposal.law == Coupled()
    g = -round_noise.coupled(4, torch.arange(tiny.VOCAB)).log()
    assert proposal.tokens.tolist() == (proposal.logits.log_softmax(-1) + g).argmax(-1).tolist()


def test_ids_beyond_the_targets_vocabulary_are_never_proposed(model):
    drafter = tiny.drafter(model, **tiny.VARIANTS["late"])
    ids = text(7)
    for rule in ("greedy", "block"):
        session = fed(drafter, model, ids, [6], rule=rule, vocab_size=5)
        assert int(session.propose(ids[:, -1], LIMIT, noise(7)).tokens.max()) < 5


def test_broken_weights_cost_speed_only(model):
    """A NaN in the drafter's logits cuts the proposal before it."""
    drafter = tiny.drafter(model, **tiny.VARIANTS["late"])
    with torch.no_grad():
        drafter.model.option("slot").weight[2] = float("nan")
    ids = text(7)
    for rule in ("greedy", "block"):
        proposal = fed(drafter, model, ids, [6], rule=rule).propose(ids[:, -1], LIMIT, noise(7))
        assert proposal.lengths.tolist() == [0] or bool(torch.isfinite(proposal.logits[0, : proposal.lengths[0]]).all())
        assert int(proposal.lengths[0]) < 4
