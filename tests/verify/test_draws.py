"""The real draws, with the counter noise: whole ``verify`` calls against the target's law."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from chisquare import chi_square

from specdiff.verify import Coupled, Delta, Noise, Proposal, Purpose, Sampled, race, row_seeds, verify
from specdiff.verify.audit_models import TableLM

ROWS = 20_000


class Models:
    """A target and a drafter over ``vocab`` ids as dense tables of float32 logits, by committed tokens (at most 4)."""

    def __init__(self, vocab: int, depth: int, spread: float = 1.5) -> None:
        self.vocab = vocab
        self.target = [self._level(vocab, d, 1, spread) for d in range(depth)]
        self.drafter = [self._level(vocab, d, 2, spread) for d in range(depth)]

    @staticmethod
    def _level(vocab: int, depth: int, seed: int, spread: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + depth)
        return torch.randn(vocab**depth, vocab, generator=generator) * spread

    def rows(self, table: list[torch.Tensor], codes: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        """``[B, V]`` logits after the texts ``codes`` (read in base V) of length ``depth``."""
        out = torch.zeros(len(codes), self.vocab)
        for d, level in enumerate(table):
            out = torch.where((depth == d)[:, None], level[codes.clamp(max=len(level) - 1)], out)
        return out


def decode(rule: str, models: Models, noise: Noise, law: str, block: int, horizon: int) -> torch.Tensor:
    """``Long[B]`` codes of the first ``horizon`` tokens, one text per row of noise, drafted and verified for real."""
    rows = len(noise.seeds)
    codes, depth = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    ids = torch.arange(models.vocab)
    rounds = 0
    while bool((depth < horizon).any()):
        rounds += 1
        lengths = (horizon - 1 - depth).clamp(0, block)
        now = noise.round(depth + 1)
        exponential = now.coupled(block, ids) if law == "coupled" else now.exponential(Purpose.DRAFT, block, ids)
        text, at, tokens, logits, scores = codes, depth, [], [], []
        for slot in range(block):
            scores.append(models.rows(models.target, text, at))
            logits.append(models.rows(models.drafter, text, at))
            weights = logits[-1].softmax(-1)
            tokens.append(weights.argmax(-1) if law == "delta" else race(weights, exponential[:, slot]))
            text, at = text * models.vocab + tokens[-1], at + 1
        scores.append(models.rows(models.target, text, at))
        proposal = Proposal(
            tokens=torch.stack(tokens, 1),
            lengths=lengths,
            law={"sampled": Sampled, "delta": Delta, "coupled": Coupled}[law](),
            logits=torch.stack(logits, 1) if law == "sampled" else None,
        )
        verdict = verify(rule, torch.stack(scores, 1), proposal, now)
        assert not verdict.bad.any()
        assert (verdict.accepted <= lengths).all()
        active = depth < horizon
        for slot in range(block):
            take = active & (slot < verdict.accepted)
            codes = torch.where(take, codes * models.vocab + proposal.tokens[:, slot], codes)
            depth = depth + take
        codes = torch.where(active, codes * models.vocab + verdict.next_token, codes)
        depth = depth + active
    assert rounds >= 2
    return codes


def target_law(models: Models, horizon: int) -> torch.Tensor:
    law = torch.ones(1, dtype=torch.float64)
    for level in models.target[:horizon]:
        law = (law[:, None] * level.double().softmax(-1)).flatten()
    return law


CASES = [(r, k) for r in ("token", "block") for k in ("sampled", "delta")] + [
    ("coupled", k) for k in ("coupled", "sampled", "delta")
]


@pytest.mark.parametrize(("rule", "law"), CASES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_b11_four_tokens_several_rounds(rule, law, seed):
    """Draft, acceptance and recovery draws are independent: the text of 4 tokens has the target's joint law."""
    models = Models(3, 5)
    codes = decode(rule, models, Noise(row_seeds(seed, ROWS)), law, block=2, horizon=4)
    assert chi_square(torch.bincount(codes, minlength=81), target_law(models, 4)) > 1e-3


@pytest.mark.parametrize("rule", ["token", "block"])
def test_b11_vocabulary_of_twelve(rule):
    models = Models(12, 4)
    codes = decode(rule, models, Noise(row_seeds(4, ROWS)), "sampled", block=2, horizon=3)
    assert chi_square(torch.bincount(codes, minlength=12**3), target_law(models, 3)) > 1e-3


@pytest.mark.parametrize("rule", ["token", "block"])
def test_b11_the_check_sees_a_reused_draw(rule):
    """The same test fails when recovery uses the very noise that chose the draft."""

    class Reused:
        def __init__(self, inner):
            self.inner = inner

        def uniform(self, purpose, slots):
            return self.inner.uniform(purpose, slots)

        def exponential(self, purpose, slots, ids):
            return self.inner.exponential(Purpose.DRAFT, slots, ids)

        def coupled(self, slots, ids):
            return self.inner.coupled(slots, ids)

    class ReusedNoise(Noise):
        def round(self, lengths):
            return Reused(super().round(lengths))

    models = Models(3, 5)
    codes = decode(rule, models, ReusedNoise(row_seeds(1, ROWS)), "sampled", block=2, horizon=4)
    assert chi_square(torch.bincount(codes, minlength=81), target_law(models, 4)) < 1e-6


@pytest.mark.parametrize("rule", ["token", "block"])
def test_b11_token_after_a_rejection(rule):
    """Among rows whose first draft was rejected, the next token has the law of the residual."""
    p = torch.tensor([0.1, 0.6, 0.2, 0.1]).log()
    q = torch.tensor([0.4, 0.2, 0.1, 0.3]).log()
    noise = Noise(row_seeds(8, 60_000)).round(torch.full((60_000,), 3))
    tokens = race(q.softmax(-1), noise.exponential(Purpose.DRAFT, 1, torch.arange(4))[:, 0])
    proposal = Proposal(tokens[:, None], torch.ones_like(tokens), Sampled(), q.expand(len(tokens), 1, 4))
    verdict = verify(rule, p.expand(len(tokens), 2, 4), proposal, noise)
    rejected = verdict.accepted == 0
    counts = torch.bincount(verdict.next_token[rejected], minlength=4)
    assert chi_square(counts, (p.exp() - q.exp()).clamp(min=0)) > 1e-3
    first = torch.where(rejected, verdict.next_token, tokens)
    assert chi_square(torch.bincount(first, minlength=4), p.exp()) > 1e-3
    # the test is not blind: had the rejected rows followed p, it would have shown
    assert chi_square(counts, p.exp()) < 1e-6


def test_coupled_text_is_that_of_plain_decoding():
    """Path by path: any drafter, any block size, the same seed, the same text (B = many rows and alone)."""
    models = Models(6, 8)
    noise = Noise(row_seeds(5, 300))
    plain = _plain(models, noise, 7)
    for law in ("coupled", "sampled", "delta"):
        for block in (1, 2, 3, 5):
            assert torch.equal(decode("coupled", models, noise, law, block, 7), plain), (law, block)
    alone = decode("coupled", models, noise.select(torch.tensor([17])), "coupled", 3, 7)
    assert alone.item() == plain[17].item()


def _plain(models: Models, noise: Noise, horizon: int) -> torch.Tensor:
    rows = len(noise.seeds)
    codes = torch.zeros(rows, dtype=torch.long)
    for d in range(horizon):
        scores = models.rows(models.target, codes, torch.full((rows,), d))[:, None]
        verdict = verify("coupled", scores, Proposal.empty(rows), noise.round(torch.full((rows,), d + 1)))
        codes = codes * models.vocab + verdict.next_token
    return codes


def test_race_has_the_law_of_its_weights():
    weights = torch.tensor([0.0, 3.0, 1e-3, 0.5, 0.0, 1.0])
    noise = Noise(row_seeds(2, 50_000)).round(torch.full((50_000,), 1))
    ids = race(weights, noise.exponential(Purpose.BONUS, 1, torch.arange(6))[:, 0])
    assert chi_square(torch.bincount(ids, minlength=6), weights) > 1e-3


def test_block_keeps_more_than_token_in_the_same_draws():
    """Three positions, drafter unlike target: mean accepted length, 20,000 rows each."""
    kept = Counter()
    table, denoiser = TableLM(8, 3), TableLM(8, 4)
    rows = 20_000
    ids = torch.arange(8)
    noise = Noise(row_seeds(3, rows)).round(torch.full((rows,), 2))
    logits = torch.tensor([denoiser.scores(i) for i in range(3)]).expand(rows, 3, 8)
    scores = torch.tensor([table.scores(i) for i in range(4)]).expand(rows, 4, 8)
    tokens = race(logits.softmax(-1), noise.exponential(Purpose.DRAFT, 3, ids))
    for rule in ("token", "block"):
        proposal = Proposal(tokens, torch.full((rows,), 3), Sampled(), logits)
        kept[rule] = verify(rule, scores, proposal, noise).accepted.double().mean().item()
    assert kept["block"] > kept["token"] + 0.01
