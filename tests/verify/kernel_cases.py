"""Kernels against their torch twins in Triton's interpreter; ``test_kernels.py`` runs this with TRITON_INTERPRET=1.

The interpreter takes about half a second per call, so most of the grid is marked slow.
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from chisquare import chi_square

from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.verify import RULES, Coupled, Delta, Noise, Proposal, Purpose, Sampled, decide, race, row_seeds
from specdiff.verify.kernels import available, fused_sample, fused_verify, inverse_ids
from specdiff.verify.kernels.launch import launch_sample, launch_verify, trace_verify
from specdiff.verify.kernels.twin import twin_sample, twin_verify

assert os.environ.get("TRITON_INTERPRET") == "1", "test_kernels.py runs this file"

NAN, INF = float("nan"), float("inf")
RATIO = ("token", "block")
SIZES = [1, 2, 31, 64, 100, 257]
TILE = 64


def grid(*axes, quick):
    """The product of the axes; all but the combinations in ``quick`` are slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(*case, marks=marks[case in quick]) for case in product(*axes)]


def noise_for(rows: int, seed: int = 0):
    return Noise(row_seeds(seed, rows) + 2**40).round(torch.arange(rows) * 1000 + 7)


def case(rows: int, block: int, vocab: int, seed: int, law: str = "sampled", width: int | None = None, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, block + 1, vocab, generator=generator) * spread
    scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.2, -INF)
    scores = scores.scatter(-1, torch.randint(vocab, (rows, block + 1, 1), generator=generator), 0.3)
    width = width or vocab
    # not far from the target, so that tokens of all kinds get accepted now and then
    near = torch.where(scores[:, :-1].isinf(), -1.0, scores[:, :-1])
    ids = torch.randperm(vocab, generator=generator)[:width] if width < vocab else None
    logits = (near if ids is None else near[..., ids]) + torch.randn(rows, block, width, generator=generator)
    tokens = race(logits.softmax(-1), torch.empty(logits.shape).exponential_(generator=generator))
    return scores, Proposal(
        tokens=tokens if ids is None else ids[tokens],
        lengths=torch.randint(block + 1, (rows,), generator=generator) if rows > 2 else torch.full((rows,), block),
        law=Delta() if law == "delta" else Sampled(),
        logits=None if law == "delta" else logits,
        draft_ids=None if law == "delta" else ids,
        written=torch.randint(3, (rows, block), generator=generator) if law == "mixed" else None,
        delta=torch.rand(rows, block, generator=generator) < 0.3 if law == "mixed" else None,
    )


def same(got, expected):
    assert torch.equal(got.bad, expected.bad)
    assert torch.equal(got.accepted, expected.accepted)
    fine = ~expected.bad
    assert torch.equal(got.next_token[fine], expected.next_token[fine])


def test_triton_is_there():
    assert available()


QUICK = {(rule, vocab, law, 2) for rule in RATIO for vocab, law in ((1, "sampled"), (100, "mixed"), (64, "delta"))}
QUICK |= {(rule, 100, "sampled", 1) for rule in RULES}


@pytest.mark.parametrize(
    ("rule", "vocab", "law", "block"), grid(RULES, SIZES, ("sampled", "delta", "mixed"), (1, 2, 4), quick=QUICK)
)
def test_sizes(rule, vocab, law, block):
    scores, proposal = case(3, block, vocab, 100 * vocab + block, law)
    expected = twin_verify(rule, scores, proposal, noise_for(3))
    same(launch_verify(rule, scores, proposal, noise_for(3), tile=TILE), expected)


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("law", ["sampled", "delta", "mixed"])
def test_thresholds_lengths_and_prefix_weights(rule, law):
    scores, proposal = case(4, 4, 70, 3, law)
    trace = trace_verify(rule, scores, proposal, noise_for(4), tile=TILE)
    decision = decide(rule, scores, proposal)
    assert torch.equal(trace.lengths, decision.lengths)
    torch.testing.assert_close(trace.thresholds, decision.thresholds, atol=2e-5, rtol=2e-4)
    inside = torch.arange(4) < decision.lengths[:, None]
    assert (trace.thresholds[inside] > 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RATIO)
def test_many_rows_agree_in_every_kind_of_outcome(rule):
    scores, proposal = case(60, 3, 40, 9)
    expected = twin_verify(rule, scores, proposal, noise_for(60))
    assert set(expected.accepted.tolist()) == {0, 1, 2, 3}
    same(launch_verify(rule, scores, proposal, noise_for(60), tile=TILE), expected)


DTYPES = (torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("rule", "dtype"), grid(RULES, DTYPES, quick={("block", torch.bfloat16), ("greedy", torch.bfloat16)})
)
def test_dtypes(rule, dtype):
    scores, proposal = case(3, 2, 90, 5)
    scores = scores.to(dtype)
    proposal = Proposal(proposal.tokens, proposal.lengths, Sampled(), proposal.logits.to(torch.bfloat16))
    expected = twin_verify(rule, scores.float(), proposal, noise_for(3))
    same(launch_verify(rule, scores, proposal, noise_for(3), tile=TILE), expected)


@pytest.mark.parametrize(("rule",), grid(RULES, quick={("block",), ("coupled",)}))
def test_strides(rule):
    scores, proposal = case(4, 2, 90, 6)
    padded = torch.full((4, 3, 200), NAN)
    padded[..., 3:183:2] = scores
    logits = torch.full((2, 95, 4), NAN)
    logits[:, :90] = proposal.logits.permute(1, 2, 0)
    strided = Proposal(
        proposal.tokens.t().contiguous().t(), proposal.lengths, Sampled(), logits[:, :90].permute(2, 0, 1)
    )
    assert not strided.logits.is_contiguous()
    expected = twin_verify(rule, scores, proposal, noise_for(4))
    same(launch_verify(rule, padded[..., 3:183:2], strided, noise_for(4), tile=TILE), expected)


@pytest.mark.parametrize(("rule", "width"), grid(RATIO, (1, 17, 60), quick={("block", 17), ("token", 17)}))
def test_pruned_vocabulary(rule, width):
    scores, proposal = case(4, 3, 77, width, width=width)
    expected = twin_verify(rule, scores, proposal, noise_for(4))
    same(launch_verify(rule, scores, proposal, noise_for(4), tile=TILE), expected)
    inverse = inverse_ids(proposal.draft_ids, 77)
    same(fused_verify(rule, scores, proposal, noise_for(4), inverse=inverse), expected)


@pytest.mark.parametrize(("rule", "width"), grid(RATIO, (40, 90), quick={("block", 40), ("token", 90)}))
def test_b35_drafter_narrower_or_wider(rule, width):
    torch.manual_seed(width)
    scores, logits = torch.randn(4, 3, 64), torch.randn(4, 2, width)
    tokens = torch.randint(width, (4, 2))
    tokens[0, 0] = width - 1
    proposal = Proposal(tokens, torch.full((4,), 2), Sampled(), logits)
    expected = twin_verify(rule, scores, proposal, noise_for(4))
    same(launch_verify(rule, scores, proposal, noise_for(4), tile=TILE), expected)


@pytest.mark.parametrize(("rule", "token"), grid(RULES, (-1, 64, 10**9), quick={("block", 64), ("token", -1)}))
def test_b35_ids_outside(rule, token):
    torch.manual_seed(0)
    proposal = Proposal(torch.tensor([[token, 1]]), torch.tensor([2]), Delta())
    scores = torch.randn(1, 3, 64)
    got = launch_verify(rule, scores, proposal, noise_for(1), tile=TILE)
    assert got.accepted.item() == 0
    same(got, twin_verify(rule, scores, proposal, noise_for(1)))


BREAK = {
    "nan": lambda row: row.index_fill(0, torch.tensor([33]), NAN),
    "all nan": lambda row: torch.full_like(row, NAN),
    "+inf": lambda row: row.index_fill(0, torch.tensor([2]), INF),
    "all -inf": lambda row: torch.full_like(row, -INF),
}


HURT = {("block", "nan", "target"), ("token", "+inf", "target"), ("block", "all -inf", "drafter")}
HURT |= {("token", "all nan", "drafter"), ("greedy", "all nan", "target"), ("coupled", "all -inf", "target")}


@pytest.mark.parametrize(("rule", "how", "where"), grid(RULES, BREAK, ("target", "drafter"), quick=HURT))
def test_b15_rows_that_are_not_finite(rule, how, where):
    scores, proposal = case(5, 3, 50, 3)
    proposal.lengths[:] = torch.tensor([3, 3, 3, 2, 3])
    for row, slot in enumerate((0, 1, 2, 3, 3) if where == "target" else (0, 1, 2, 2, 1)):
        rows = scores if where == "target" else proposal.logits
        rows[row, slot] = BREAK[how](rows[row, slot])
    expected = twin_verify(rule, scores, proposal, noise_for(5))
    got = launch_verify(rule, scores, proposal, noise_for(5), tile=TILE)
    same(got, expected)
    assert ((got.next_token >= 0) & (got.next_token < 50)).all()
    assert expected.bad[0].item() == (where == "target")


@pytest.mark.parametrize(("rule",), grid(RULES, quick={("block",)}))
def test_temperature(rule):
    scores, proposal = case(5, 3, 50, 8)
    cooler = Proposal(proposal.tokens, proposal.lengths, Sampled(), proposal.logits / 1.3)
    expected = twin_verify(rule, scores / 0.7, cooler, noise_for(5))
    same(launch_verify(rule, scores, proposal, noise_for(5), 0.7, 1.3, tile=TILE), expected)


@pytest.mark.parametrize(("rule",), grid(RULES, quick={("block",)}))
def test_no_drafted_tokens(rule):
    scores = torch.randn(3, 1, 50)
    expected = twin_verify(rule, scores, Proposal.empty(3), noise_for(3))
    same(launch_verify(rule, scores, Proposal.empty(3), noise_for(3), tile=TILE), expected)


@pytest.mark.parametrize("rule", RATIO)
def test_equal_laws_keep_everything(rule):
    torch.manual_seed(1)
    logits = torch.randn(6, 4, 50)
    tokens = race(logits[:, :3].softmax(-1), torch.empty(6, 3, 50).exponential_())
    proposal = Proposal(tokens, torch.full((6,), 3), Sampled(), logits[:, :3])
    assert (launch_verify(rule, logits, proposal, noise_for(6), tile=TILE).accepted == 3).all()


def test_refusals():
    proposal = Proposal(torch.tensor([[1]]), torch.tensor([1]), Coupled())
    with pytest.raises(UnsupportedError, match="Coupled"):
        fused_verify("block", torch.zeros(1, 2, 4), proposal, noise_for(1))
    for value in (0.0, -1.0, NAN):
        with pytest.raises(InvalidInputError, match="temperature"):
            fused_sample(torch.zeros(1, 1, 4), noise_for(1), Purpose.DRAFT, value)


SAMPLES = {(100, Purpose.DRAFT, torch.bfloat16), (257, Purpose.COUPLED, torch.float32)}


@pytest.mark.parametrize(
    ("vocab", "purpose", "dtype"),
    grid(SIZES, (Purpose.DRAFT, Purpose.COUPLED), (torch.float32, torch.bfloat16), quick=SAMPLES),
)
def test_sampling(vocab, purpose, dtype):
    """The very tokens of the twin: same bits of noise, also with ids of a pruned vocabulary and strided logits."""
    torch.manual_seed(vocab)
    logits = (torch.randn(3, vocab, 2) * 3).to(dtype).transpose(1, 2)
    logits = logits.masked_fill(torch.rand(logits.shape) < 0.2, -INF).index_fill(2, torch.tensor([0]), 0.1)
    for ids in (None, torch.randperm(1000)[:vocab]):
        for temperature in (1.0, 0.4):
            got = launch_sample(logits, noise_for(3), purpose, temperature, ids, tile=TILE)
            expected = twin_sample(logits, noise_for(3), purpose, temperature, ids)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])


@pytest.mark.slow
def test_sampling_has_the_law():
    logits = torch.tensor([0.0, 1.0, -INF, 2.0, -1.0]).expand(3000, 1, 5)
    tokens, _ = launch_sample(logits, Noise(row_seeds(0, 3000)).round(torch.full((3000,), 4)), Purpose.DRAFT, tile=8)
    assert chi_square(torch.bincount(tokens.flatten(), minlength=5), logits[0, 0].softmax(-1)) > 1e-3


def test_sampling_agrees_with_the_coupled_rule():
    """Drafts drawn by the kernel from the target's own logits are what the coupled rule keeps."""
    scores = torch.randn(4, 3, 60)
    tokens, _ = launch_sample(scores[:, :2], noise_for(4), Purpose.COUPLED, tile=TILE)
    proposal = Proposal(tokens, torch.full((4,), 2), Coupled())
    assert (twin_verify("coupled", scores, proposal, noise_for(4)).accepted == 2).all()


def test_b17_argmax_takes_the_lowest_of_equals():
    logits = torch.zeros(1, 2, 100)
    logits[0, 0, [40, 41, 90]] = 1.0
    tokens, bad = launch_sample(logits, None, Purpose.DRAFT, tile=TILE)
    assert tokens.tolist() == [[40, 0]]
    assert not bad.any()


def test_rows_that_cannot_be_sampled_are_flagged():
    logits = torch.zeros(1, 4, 100)
    for slot, how in enumerate(BREAK.values()):
        logits[0, slot] = how(logits[0, slot])
    for noise in (noise_for(1), None):
        tokens, bad = launch_sample(logits, noise, Purpose.DRAFT, tile=TILE)
        assert bad.all()
        assert ((tokens >= 0) & (tokens < 100)).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_engine_decodes_through_the_kernels(monkeypatch, rule):
    """The dispatch of ``verify``, as on a GPU: same texts and statistics as torch, and the kernels did the work."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdiff import SpecDiff
    from specdiff.testing import RandomDrafter
    from specdiff.verify import kernels

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=37, initializer_range=0.6, **sizes)).eval()
    wrapped = SpecDiff(model, RandomDrafter(29, block_size=3))
    options = {"do_sample": rule != "greedy", "eos_token_id": None, "pad_token_id": 0, "seed": 4, "rule": rule}
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    runs, calls = [], []
    launch = kernels.fused_verify
    monkeypatch.setattr(kernels, "fused_verify", lambda *given: calls.append(given[0]) or launch(*given))
    for on in (False, True):
        monkeypatch.setattr(kernels, "serve", lambda scores, noise, on=on: on)
        out = wrapped.generate(ids, max_new_tokens=8, return_dict_in_generate=True, **options)
        runs.append((out.sequences.tolist(), out.stats.emitted))
    assert runs[0] == runs[1]
    assert len(calls) == out.stats.rounds + 1 and set(calls) == {rule}  # the prefill is judged as well
