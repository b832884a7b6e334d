"""The rules as black boxes: shapes, refusals, guards, ragged rows, cuts, no waiting for the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.verify import RULES, Coupled, Delta, Noise, Proposal, Sampled, decide, race, row_seeds, verify
from specdiff.verify.prepare import draft_row, exposed, leading

RATIO = ("token", "block")
NAN, INF = float("nan"), float("inf")


def noise_for(rows: int, seed: int = 0):
    return Noise(row_seeds(seed, rows)).round(torch.arange(3, 3 + rows))


class FixedNoise:
    """Uniforms and exponentials given as numbers."""

    def __init__(self, uniform, exponential):
        self.u, self.e = uniform, exponential

    def uniform(self, purpose, slots):
        return self.u[:, :slots]

    def exponential(self, purpose, slots, ids):
        return self.e[:, :slots]

    def coupled(self, slots, ids):
        return self.e[:, :slots]


def delta(tokens, lengths=None):
    tokens = torch.tensor(tokens)
    if lengths is None:
        lengths = [tokens.shape[1]] * len(tokens)
    return Proposal(tokens, torch.tensor(lengths), Delta())


# greedy


def test_b17_greedy_takes_the_lowest_of_equal_maxima():
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.zeros(2, 2, 12, dtype=dtype)
        scores[:, :, [5, 9]] = 3.0
        verdict = verify("greedy", scores, delta([[5], [9]]), noise_for(2))
        assert verdict.accepted.tolist() == [1, 0]
        assert verdict.next_token.tolist() == [5, 5]
        assert torch.equal(verdict.next_token, scores[:, 0].argmax(-1))


def test_b17_ties_over_a_large_vocabulary():
    scores = torch.zeros(1, 1, 50_000)
    scores[0, 0, [31_111, 40_000]] = 1.0
    assert verify("greedy", scores, Proposal.empty(1), noise_for(1)).next_token.item() == 31_111


def test_greedy_keeps_the_agreeing_prefix_and_checks_the_first_token():
    scores = torch.full((4, 4, 7), -1.0)
    for slot, token in enumerate((1, 2, 3, 4)):
        scores[:, slot, token] = 1.0
    proposal = delta([[1, 2, 3], [1, 2, 5], [0, 2, 3], [1, 2, 3]], [3, 3, 3, 1])
    verdict = verify("greedy", scores, proposal, noise_for(4))
    assert verdict.accepted.tolist() == [3, 2, 0, 1]
    assert verdict.next_token.tolist() == [4, 3, 1, 2]


# refusals


@pytest.mark.parametrize("rule", RATIO)
def test_ratio_rules_refuse_coupled_proposals(rule):
    proposal = Proposal(torch.tensor([[1]]), torch.tensor([1]), Coupled())
    with pytest.raises(UnsupportedError, match="rule='coupled'"):
        verify(rule, torch.zeros(1, 2, 4), proposal, noise_for(1))
    with pytest.raises(UnsupportedError, match="rule='coupled'"):
        decide(rule, torch.zeros(1, 2, 4), proposal)


def test_wrong_arguments_are_named():
    with pytest.raises(InvalidInputError, match="unknown rule 'typical'"):
        verify("typical", torch.zeros(1, 2, 4), delta([[1]]), noise_for(1))
    with pytest.raises(InvalidInputError, match=r"\[1, 2, V\].*\(1, 1, 4\)"):
        verify("block", torch.zeros(1, 1, 4), delta([[1]]), noise_for(1))
    with pytest.raises(InvalidInputError, match="floating point"):
        verify("greedy", torch.zeros(1, 2, 4, dtype=torch.long), delta([[1]]), noise_for(1))
    with pytest.raises(InvalidInputError, match="noise"):
        decide("coupled", torch.zeros(1, 2, 4), delta([[1]]))


# guards


@pytest.mark.parametrize("rule", RATIO)
def test_a_uniform_of_zero_never_keeps_an_impossible_token(rule):
    scores = torch.zeros(1, 2, 3)
    scores[0, 0, 1] = -INF
    fixed = FixedNoise(torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 2, 3))
    for law, logits in ((Delta(), None), (Sampled(), torch.zeros(1, 1, 3))):
        proposal = Proposal(torch.tensor([[1]]), torch.tensor([1]), law, logits)
        verdict = verify(rule, scores, proposal, fixed)
        assert verdict.accepted.item() == 0
        assert verdict.next_token.item() != 1


@pytest.mark.parametrize("rule", RATIO)
def test_equal_laws_keep_everything(rule):
    """p = q: no residual is left and the denominator of the block rule is zero; h must be 1."""
    torch.manual_seed(0)
    logits = torch.randn(50, 4, 30)
    tokens = race(logits[:, :3].softmax(-1), torch.empty(50, 3, 30).exponential_())
    proposal = Proposal(tokens, torch.full((50,), 3), Sampled(), logits[:, :3])
    double = Proposal(tokens, proposal.lengths, Sampled(), logits[:, :3].double())
    assert (decide(rule, logits.double(), double).thresholds == 1).all()
    top = torch.full((50, 3), 1 - 2.0**-32, dtype=torch.float64)
    verdict = verify(rule, logits, proposal, FixedNoise(top, torch.ones(50, 1, 30)))
    assert (verdict.accepted == 3).all()


@pytest.mark.parametrize("rule", RATIO)
def test_b15_an_empty_residual_falls_back_to_the_target(rule):
    """Forced by asking for a rejection that has probability zero: the weights must still be a law."""
    logits = torch.tensor([[[0.0, 1.0, -INF]]])
    scores = torch.cat([logits, logits], dim=1)
    decision = decide(rule, scores, Proposal(torch.tensor([[1]]), torch.tensor([1]), Sampled(), logits))
    weights = decision.weights(torch.tensor([0]))[0]
    assert torch.isfinite(weights).all()
    assert weights[2] == 0
    assert weights.sum() > 0


@pytest.mark.parametrize("rule", RATIO)
def test_one_hot_target_rejects_everything_else(rule):
    scores = torch.full((1, 2, 4), -INF)
    scores[0, :, 2] = 0.0
    assert verify(rule, scores, delta([[2]]), noise_for(1)).accepted.item() == 1
    verdict = verify(rule, scores, delta([[3]]), noise_for(1))
    assert (verdict.accepted.item(), verdict.next_token.item()) == (0, 2)


@pytest.mark.parametrize("rule", RATIO)
def test_token_that_its_own_law_calls_impossible_is_tested_as_delta(rule):
    logits = torch.tensor([[[0.0, -INF, 0.0]]])
    scores = torch.tensor([[[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]])
    said = decide(rule, scores, Proposal(torch.tensor([[1]]), torch.tensor([1]), Sampled(), logits))
    one_hot = decide(rule, scores, delta([[1]]))
    assert torch.equal(said.thresholds, one_hot.thresholds)
    assert torch.equal(said.weights(torch.tensor([0])), one_hot.weights(torch.tensor([0])))


# ids outside the vocabulary, pruned vocabularies


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("token", [-1, 5, 10**9])
def test_b35_ids_outside_the_vocabulary_are_rejected(rule, token):
    scores = torch.zeros(1, 3, 5)
    scores[0, 0, 1] = 50.0
    proposal = delta([[1, token]])
    verdict = verify(rule, scores, proposal, noise_for(1))
    assert verdict.accepted.item() == 1
    assert 0 <= verdict.next_token.item() < 5
    assert not verdict.bad.item()


def test_draft_row_scatters_to_target_ids():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    law = logits.double().softmax(-1)[0]
    row, broken = draft_row(logits, torch.tensor([4, 0, 7]), 6, torch.float64)
    assert not broken.any()
    torch.testing.assert_close(row[0], torch.stack([law[1], *[law[0] * 0] * 3, law[0], law[0] * 0]))
    wide, _ = draft_row(logits, None, 2, torch.float64)
    torch.testing.assert_close(wide[0], law[:2])
    narrow, _ = draft_row(logits, None, 5, torch.float64)
    torch.testing.assert_close(narrow[0, :3], law)
    assert narrow[0, 3:].tolist() == [0, 0]


def test_exposed():
    written = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 2], [0, 2, 1, 1]])
    expected = [[False] * 4, [False, True, True, True], [False, False, True, False], [False, False, True, True]]
    assert exposed(written).tolist() == expected
    assert exposed(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)


@pytest.mark.parametrize("rule", RATIO)
def test_exposed_tokens_and_flagged_tokens_get_a_one_hot_law(rule):
    torch.manual_seed(1)
    scores, logits = torch.randn(1, 3, 6), torch.randn(1, 2, 6)
    tokens = torch.tensor([[2, 4]])
    flag = torch.tensor([[False, True]])

    def law(**kwargs):
        decision = decide(rule, scores, Proposal(tokens, torch.tensor([2]), Sampled(), logits, **kwargs))
        return decision.thresholds, decision.weights(torch.tensor([1]))

    plain, by_flag, by_steps = law(), law(delta=flag), law(written=torch.tensor([[1, 0]]))
    assert not torch.equal(plain[0], by_flag[0])
    assert torch.equal(by_flag[0], by_steps[0])
    assert torch.equal(by_flag[1], by_steps[1])
    assert by_flag[1][0, 4] == 0


# what is not finite

BREAK = {
    "nan": lambda row: row.index_fill(0, torch.tensor([3]), NAN),
    "first is nan": lambda row: row.index_fill(0, torch.tensor([0]), NAN),
    "last is nan": lambda row: row.index_fill(0, torch.tensor([len(row) - 1]), NAN),
    "all nan": lambda row: torch.full_like(row, NAN),
    "+inf": lambda row: row.index_fill(0, torch.tensor([2]), INF),
    "all -inf": lambda row: torch.full_like(row, -INF),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", BREAK)
@pytest.mark.parametrize("vocab", [9, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b15_a_needed_target_row_is_reported_and_others_are_not(rule, how, vocab, dtype):
    scores = torch.zeros(4, 4, vocab, dtype=dtype)
    scores[:, :, 1] = 60.0  # the target writes 1 for certain
    for row, slot in enumerate((0, 2, 3, 3)):
        scores[row, slot] = BREAK[how](scores[row, slot])
    proposal = delta([[1, 1, 1], [1, 1, 1], [1, 5, 1], [1, 1, 1]], [3, 3, 3, 2])
    verdict = verify(rule, scores, proposal, noise_for(4))
    assert verdict.bad.tolist() == [True, True, False, False]
    assert verdict.accepted.tolist() == [0, 2, 1, 2]
    assert ((verdict.next_token >= 0) & (verdict.next_token < vocab)).all()
    assert verdict.next_token[2:].tolist() == [1, 1]


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("how", BREAK)
def test_b15_a_broken_drafter_row_cuts_the_proposal_before_it(rule, how):
    torch.manual_seed(2)
    scores, logits = torch.randn(3, 4, 9), torch.randn(3, 3, 9)
    tokens = torch.tensor([[1, 2, 3]] * 3)
    hurt = logits.clone()
    for row, slot in enumerate((0, 1, 2)):
        hurt[row, slot] = BREAK[how](hurt[row, slot])
    noise = noise_for(3)
    got = verify(rule, scores, Proposal(tokens, torch.tensor([3, 3, 3]), Sampled(), hurt), noise)
    cut = verify(rule, scores, Proposal(tokens, torch.tensor([0, 1, 2]), Sampled(), logits), noise)
    assert torch.equal(got.accepted, cut.accepted)
    assert torch.equal(got.next_token, cut.next_token)
    assert not got.bad.any()


@pytest.mark.parametrize("rule", RATIO)
def test_b15_a_broken_drafter_row_of_a_delta_token_is_not_looked_at(rule):
    torch.manual_seed(3)
    scores, logits = torch.randn(2, 3, 9), torch.randn(2, 2, 9)
    hurt = logits.clone()
    hurt[:, 1] = NAN
    flag = torch.tensor([[False, True]] * 2)
    results = [
        verify(
            rule,
            scores,
            Proposal(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2]), Sampled(), rows, delta=flag),
            noise_for(2),
        )
        for rows in (logits, hurt)
    ]
    assert torch.equal(results[0].accepted, results[1].accepted)
    assert torch.equal(results[0].next_token, results[1].next_token)


# shapes and devices


@pytest.mark.parametrize("rule", RULES)
def test_empty_proposals_and_empty_rows(rule):
    torch.manual_seed(4)
    scores = torch.randn(3, 1, 11)
    plain = verify(rule, scores, Proposal.empty(3), noise_for(3))
    assert plain.accepted.tolist() == [0, 0, 0]
    padded = torch.cat([scores, torch.full((3, 2, 11), NAN)], dim=1)
    wide = verify(rule, padded, delta([[1, 2]] * 3, [0, 0, 0]), noise_for(3))
    assert torch.equal(wide.next_token, plain.next_token)
    assert not wide.bad.any()
    for field in (plain.accepted, plain.next_token):
        assert field.dtype == torch.long
    assert plain.bad.dtype == torch.bool


@pytest.mark.parametrize("rule", RULES)
def test_strided_scores_and_bfloat16(rule):
    torch.manual_seed(5)
    scores = torch.randn(2, 3, 26, dtype=torch.bfloat16)[..., ::2]
    logits = torch.randn(3, 2, 13).transpose(0, 1)[:, :2]
    proposal = Proposal(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1]), Sampled(), logits)
    packed = Proposal(proposal.tokens, proposal.lengths, Sampled(), logits.contiguous())
    first = verify(rule, scores, proposal, noise_for(2))
    second = verify(rule, scores.contiguous().float(), packed, noise_for(2))
    assert torch.equal(first.accepted, second.accepted)
    assert torch.equal(first.next_token, second.next_token)


def test_arguments_are_left_alone():
    torch.manual_seed(6)
    scores, logits = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    before = scores.clone(), logits.clone()
    for rule in RULES:
        proposal = Proposal(torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2]), Sampled(), logits)
        verify(rule, scores, proposal, noise_for(2))
    assert torch.equal(scores, before[0])
    assert torch.equal(logits, before[1])


class NoSync(TorchDispatchMode):
    """Fails on whatever makes the host wait for a device: reading values, or shapes that depend on them."""

    BANNED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "repeat_interleave")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.BANNED, name
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert not any(getattr(i, "dtype", None) == torch.bool for i in args[1] if i is not None), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("law", ["sampled", "delta", "pruned", "empty"])
def test_no_rule_waits_for_the_device(rule, law):
    scores, logits = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    tokens, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1])
    extra = {"written": torch.tensor([[0, 1], [1, 0]]), "delta": torch.zeros(2, 2, dtype=torch.bool)}
    proposal = {
        "sampled": Proposal(tokens, lengths, Sampled(), logits, **extra),
        "delta": Proposal(tokens, lengths, Delta()),
        "pruned": Proposal(tokens, lengths, Sampled(), logits[..., :5], draft_ids=torch.tensor([1, 2, 3, 4, 7])),
        "empty": Proposal.empty(2),
    }[law]
    if law == "empty":
        scores = scores[:, :1]
    noise = Noise(row_seeds(0, 2))
    lengths = torch.tensor([3, 4])
    with NoSync():
        verify(rule, scores, proposal, noise.round(lengths))


def test_the_check_for_waiting_sees_it():
    for wait in (lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], lambda x: x.nonzero()):
        with pytest.raises(AssertionError), NoSync():
            wait(torch.ones(3))


def test_leading():
    passed = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert leading(passed).tolist() == [2, 0, 4]
    assert leading(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]


# properties


@st.composite
def blocks(draw):
    rows, block, vocab = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(rows, block + 1, vocab, generator=generator) * draw(st.sampled_from([0.1, 1.0, 8.0, 60.0]))
    scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < draw(st.sampled_from([0.0, 0.4])), -INF)
    anyway = torch.randint(vocab, (rows, block + 1, 1), generator=generator)
    scores = scores.scatter(-1, anyway, 0.5)
    width = draw(st.integers(1, vocab))
    logits = torch.randn(rows, block, width, generator=generator) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    ids = torch.randperm(vocab, generator=generator)[:width]
    drawn = race(logits.softmax(-1), torch.empty(logits.shape).exponential_(generator=generator))
    law = draw(st.sampled_from(["sampled", "mixed", "delta"]))
    return scores, Proposal(
        tokens=ids[drawn],
        lengths=torch.randint(block + 1, (rows,), generator=generator),
        law=Delta() if law == "delta" else Sampled(),
        logits=logits,
        draft_ids=ids,
        written=torch.randint(3, (rows, block), generator=generator) if law == "mixed" else None,
        delta=torch.rand(rows, block, generator=generator) < 0.3 if law == "mixed" else None,
    )


def row_of(proposal: Proposal, row: int, width: int) -> Proposal:
    def cut(x):
        return None if x is None else x[row : row + 1, :width]

    return Proposal(
        cut(proposal.tokens),
        proposal.lengths[row : row + 1],
        proposal.law,
        cut(proposal.logits),
        proposal.draft_ids,
        cut(proposal.written),
        cut(proposal.delta),
    )


@settings(max_examples=150, deadline=None)
@given(blocks(), st.sampled_from(RULES), st.integers(0, 2**62))
def test_properties(case, rule, seed):
    scores, proposal = case
    rows = len(scores)
    noise = Noise(row_seeds(seed, rows))
    lengths = torch.arange(rows) + 5
    verdict = verify(rule, scores, proposal, noise.round(lengths))
    assert (verdict.accepted >= 0).all()
    assert (verdict.accepted <= proposal.lengths).all()
    assert not verdict.bad.any()
    at = scores[torch.arange(rows), verdict.accepted]
    assert (at.gather(1, verdict.next_token[:, None]) > -INF).all()  # the next token is possible
    for row in range(rows):
        kept = int(verdict.accepted[row])
        taken = scores[row, :kept].gather(1, proposal.tokens[row, :kept, None])
        assert (taken > -INF).all()  # and so is every kept one
        # alone, without padding: the very same decision
        width = int(proposal.lengths[row])
        alone = verify(
            rule,
            scores[row : row + 1, : width + 1],
            row_of(proposal, row, width),
            noise.select(torch.tensor([row])).round(lengths[row : row + 1]),
        )
        assert alone.accepted.item() == kept
        assert alone.next_token.item() == verdict.next_token[row].item()
