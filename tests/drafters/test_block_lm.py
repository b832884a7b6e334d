"""The standalone block-diffusion LM drafter: lossless in every mode, through the whole engine."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdiff import DiffusionLM, DLMSpec, SpecDiff
from specdiff.drafters.base import Drafter, DraftRequest
from specdiff.drafters.block_lm import BlockLMDrafter, check_same_tokenizer
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.verify import Coupled, Delta, Noise, Sampled, row_seeds

VOCAB, MASK = 12, 11


def llama(seed, vocab=VOCAB, spread=0.35, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=spread,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@functools.cache
def target(vocab=VOCAB):
    return llama(0, vocab)


SPECS = {
    "context": {"attention": "causal_context", "block_size": 4, "alignment": "prompt", "shift": 1},
    "blocks": {"attention": "block_causal", "block_size": 4, "alignment": "absolute"},
    "fast-v2": {
        "attention": "block_causal",
        "block_size": 4,
        "sub_block": 2,
        "alignment": "absolute",
        "shift": 1,
        "first_token": "ar",
    },
    "full": {"attention": "full"},
}
MODES = [
    {"mode": "single"},
    {"mode": "left"},
    {"mode": "order", "steps": 2},
    {"mode": "order", "policy": "any_order"},
    {"mode": "order", "policy": "entropy_budget", "bound": 1.0},
    {"mode": "delta", "policy": "threshold", "threshold": 0.3},
    {"mode": "delta", "policy": "mask_predict", "steps": 2},
    {"mode": "redraw", "steps": 2},
    {"mode": "redraw", "policy": "threshold", "threshold": 0.3, "steps": 3},
    {"mode": "left", "min_confidence": 0.3},
]


def drafter(kind, seed=1, block_size=3, vocab=VOCAB, mask=None, **options):
    lm = DiffusionLM(llama(seed, vocab), DLMSpec(mask_id=vocab - 1 if mask is None else mask, pad_id=0, **SPECS[kind]))
    return BlockLMDrafter(lm, block_size, **options)


def label(options):
    return "-".join(map(str, options.values()))


GREEDY = [("context", o) for o in MODES] + [(k, MODES[i]) for k in SPECS if k != "context" for i in (0, 2, 8)]


@pytest.mark.parametrize("kind,options", GREEDY, ids=lambda v: v if isinstance(v, str) else label(v))
def test_greedy_equals_plain_decoding(kind, options):
    ids = torch.tensor([[0, 0, 5, 3], [2, 8, 4, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    plain = target().generate(ids, attention_mask=mask, max_new_tokens=13, do_sample=False)
    d = drafter(kind, **options)
    assert isinstance(d, Drafter)
    out = SpecDiff(target(), d).generate(ids, attention_mask=mask, max_new_tokens=13, do_sample=False)
    assert torch.equal(out, plain)


@functools.cache
def exact_law():
    """p(x1, x2, x3 | prompt) of the target."""
    ids = torch.tensor([[2, 8, 4]])
    law = torch.zeros(VOCAB, VOCAB, VOCAB)
    with torch.no_grad():
        first = torch.softmax(target()(ids).logits[0, -1], -1)
        rows = torch.cat([ids.repeat(VOCAB, 1), torch.arange(VOCAB)[:, None]], 1)
        second = torch.softmax(target()(rows).logits[:, -1], -1)
        pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
        rows = torch.cat([ids.repeat(len(pairs), 1), pairs], 1)
        third = torch.softmax(target()(rows).logits[:, -1], -1).view(VOCAB, VOCAB, VOCAB)
    law = first[:, None, None] * second[:, :, None] * third
    return law


def chi_square(samples, law):
    counts = torch.bincount(samples, minlength=law.numel()).double()
    want = law.double() * len(samples)
    big = want > 5
    rest_c, rest_w = counts[~big].sum(), want[~big].sum()
    chi = ((counts - want)[big] ** 2 / want[big]).sum() + (rest_c - rest_w) ** 2 / rest_w.clamp(min=1e-9)
    return float(chi), int(big.sum())


QUICK = (("block", 0), ("block", 2), ("block", 3), ("block", 5), ("block", 7), ("block", 9), ("token", 3))
LAWS = [
    pytest.param(rule, options, id=f"{rule}-{label(options)}", marks=() if (rule, i) in QUICK else pytest.mark.slow)
    for rule in ("block", "token")
    for i, options in enumerate(MODES)
]


@pytest.mark.parametrize("rule,options", LAWS)
def test_sampling_keeps_the_targets_law_over_several_rounds(rule, options):
    """Three tokens behind the prefill's own: at least one chained round; the joint against the exact law."""
    law = exact_law()
    rows = 1500
    ids = torch.tensor([[2, 8, 4]]).repeat(rows, 1)
    d = drafter("context", seed=1, block_size=2, **options)
    out = SpecDiff(target(), d, rule=rule).generate(
        ids, max_new_tokens=3, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, seed=5, return_dict_in_generate=True
    )
    new = out.sequences[:, 3:]
    code = (new[:, 0] * VOCAB + new[:, 1]) * VOCAB + new[:, 2]
    chi, cells = chi_square(code, law.reshape(-1))
    assert cells > 20
    assert chi < cells + 4.5 * (2 * cells) ** 0.5, (chi, cells)
    assert out.stats.accepted > 0


@pytest.mark.parametrize("kind", ["context", "blocks"])
@pytest.mark.parametrize("options", [MODES[0], MODES[2], MODES[5]], ids=["single", "order", "delta"])
def test_coupled_text_is_plain_sampling_with_the_same_seed(kind, options):
    ids = torch.tensor([[0, 0, 5, 3], [2, 8, 4, 7]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    args = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": True, "top_k": 0, "temperature": 0.9, "seed": 3}
    plain = SpecDiff(target(), None, rule="coupled").generate(ids, **args)
    out = SpecDiff(target(), drafter(kind, **options), rule="coupled").generate(ids, **args)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("kind", SPECS)
def test_drafting_for_itself(kind):
    """The same weights draft and verify: the text is AR greedy, and a causal context's first slot is always right."""
    model = llama(3)
    lm = DiffusionLM(model, DLMSpec(mask_id=MASK, pad_id=0, **SPECS[kind]))
    ids = torch.tensor([[2, 8, 4]])
    args = {"max_new_tokens": 14, "do_sample": False, "suppress_tokens": [MASK]}
    plain = model.generate(ids, **args)
    out = SpecDiff(model, lm.drafter(block_size=3)).generate(ids, return_dict_in_generate=True, **args)
    assert torch.equal(out.sequences, plain)
    if kind == "context":
        assert lm.ar is model
        rate = out.stats.acceptance_by_position
        assert rate[0] == pytest.approx(1.0)  # the anchor row is causal: slot 0 is the AR argmax


def test_own_cache_equals_no_cache():
    """Proposals from the kept cache are those of a fresh session that sees the whole text."""
    d = drafter("context", block_size=3)
    text = torch.randint(0, MASK, (2, 30), generator=torch.Generator().manual_seed(0))

    def request(rows=2):
        return DraftRequest(
            batch_size=rows, device=torch.device("cpu"), dtype=torch.float32, vocab_size=VOCAB, capacity=40
        )

    kept = d.start(request())
    lengths = torch.tensor([4, 6])
    width = int(lengths.max())
    kept.commit(text[:, :width], lengths, None)
    noise = Noise(row_seeds(0, 2))
    steps = torch.tensor([[2, 1], [1, 4], [3, 3], [4, 1]])
    for step in steps:
        anchor = text.gather(1, lengths[:, None])[:, 0]
        got = kept.propose(anchor, torch.tensor([3, 3]), noise.round(lengths + 1))
        fresh = d.start(request())
        fresh.commit(text[:, : int(lengths.max())], lengths, None)
        want = fresh.propose(anchor, torch.tensor([3, 3]), noise.round(lengths + 1))
        assert torch.equal(got.tokens, want.tokens)
        place = lengths[:, None] + torch.arange(int(step.max()))
        kept.commit(text.gather(1, place), step, None)
        lengths = lengths + step
        fresh.close()
    # rollback and select, then once more
    kept.rollback(torch.tensor([5, 5]))
    kept.select(torch.tensor([1]))
    fresh = d.start(request(1))
    fresh.commit(text[1:, :5], torch.tensor([5]), None)
    anchor = text[1:, 7]
    one = Noise(row_seeds(0, 1)).round(torch.tensor([6]))
    a, b = (x.propose(anchor, torch.tensor([3]), one) for x in (kept, fresh))
    assert torch.equal(a.tokens, b.tokens)


def test_laws_by_mode_and_rule():
    def proposal(rule, **options):
        d = drafter("context", **options)
        s = d.start(
            DraftRequest(
                batch_size=1, device=torch.device("cpu"), dtype=torch.float32, vocab_size=VOCAB, rule=rule, capacity=20
            )
        )
        s.commit(torch.tensor([[1, 2, 3]]), torch.tensor([3]), None)
        return s.propose(torch.tensor([4]), torch.tensor([3]), Noise(row_seeds(1, 1)).round(torch.tensor([4])))

    assert proposal("greedy").law == Delta()
    assert proposal("coupled", mode="order", steps=2).law == Coupled()
    p = proposal("block")
    assert p.law == Sampled() and p.written is None and p.logits.shape == (1, 3, VOCAB)
    p = proposal("block", mode="order", policy="any_order", order="right")
    assert p.law == Sampled() and p.written.tolist() == [[2, 1, 0]]
    assert proposal("token", mode="left").written is None
    assert proposal("block", mode="delta").law == Delta()
    p = proposal("block", mode="redraw", steps=3)
    assert p.law == Sampled() and p.written is None
    assert not (p.tokens == MASK).any()


def test_drafts_end_before_the_first_unsure_token():
    def lengths(bound):
        d = drafter("context", block_size=3, min_confidence=bound)
        s = d.start(DraftRequest(2, torch.device("cpu"), torch.float32, VOCAB, rule="block", capacity=20))
        s.commit(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 3]), None)
        p = s.propose(torch.tensor([4, 7]), torch.tensor([3, 3]), Noise(row_seeds(1, 2)).round(torch.tensor([4, 4])))
        return p.lengths, torch.softmax(p.logits, -1).amax(-1)

    full, peaks = lengths(0.0)
    assert full.tolist() == [3, 3]
    for bound in (0.2, 0.4, 0.9):
        cut, _ = lengths(bound)
        assert cut.tolist() == (peaks >= bound).long().cumprod(-1).sum(-1).tolist()


def test_a_row_may_start_drafting_later_than_the_others():
    """The cache has room for rows that had nothing to draft in the first round."""

    def drafts(limits):
        s = drafter("context", block_size=3).start(
            DraftRequest(2, torch.device("cpu"), torch.float32, VOCAB, capacity=20)
        )
        s.commit(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 3]), None)
        noise = Noise(row_seeds(1, 2)).round(torch.tensor([4, 4]))
        for limit in limits:
            p = s.propose(torch.tensor([4, 7]), torch.tensor(limit), noise)
        return p.tokens

    assert torch.equal(drafts([[0, 3], [3, 3]]), drafts([[3, 3]]))


def test_a_smaller_and_a_larger_drafter_vocabulary():
    ids = torch.tensor([[2, 8, 4, 7]])
    for vocab, mask in ((9, 8), (20, 19), (20, 5)):
        d = drafter("context", vocab=vocab, mask=mask)
        plain = target().generate(ids, max_new_tokens=10, do_sample=False)
        assert int(plain.max()) >= 9  # also ids that the smallest drafter lacks
        assert torch.equal(SpecDiff(target(), d).generate(ids, max_new_tokens=10, do_sample=False), plain)
    d = drafter("context", vocab=20, mask=19)
    out = SpecDiff(target(), d).generate(ids, max_new_tokens=10, do_sample=True, seed=1)
    assert int(out.max()) < VOCAB


def test_a_broken_drafter_costs_speed_only():
    class Broken:
        def __init__(self, inner):
            self.inner = inner
            for name in ("spec", "vocab_size", "supports_cache", "device", "new_cache", "select"):
                setattr(self, name, getattr(inner, name))

        def logits(self, batch, cache=None):
            out = self.inner.logits(batch, cache)
            out[:, -1] = torch.nan
            return out

    d = drafter("context")
    d.lm.denoiser = Broken(d.lm.denoiser)
    ids = torch.tensor([[2, 8, 4, 7]])
    plain = target().generate(ids, max_new_tokens=10, do_sample=False)
    out = SpecDiff(target(), d).generate(ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert out.stats.proposed < 3 * out.stats.rounds


def test_refusals():
    lm = DiffusionLM(llama(1), DLMSpec(mask_id=MASK, **SPECS["context"]))
    with pytest.raises(UnsupportedError, match="redraw"):
        lm.drafter(mode="order", policy="threshold")
    with pytest.raises(UnsupportedError, match="revealed"):
        lm.drafter(mode="redraw", min_confidence=0.5)
    with pytest.raises(InvalidInputError, match="mode"):
        lm.drafter(mode="tree")
    with pytest.raises(InvalidInputError, match="fixes its passes"):
        lm.drafter(mode="single", steps=3)
    with pytest.raises(InvalidInputError, match="more than the model"):
        drafter("blocks", block_size=9)
    with pytest.raises(UnsupportedError, match="masked diffusion"):
        BlockLMDrafter(
            DiffusionLM(llama(1), DLMSpec(corruption="uniform", policy="entropy_bound", attention="causal_context"))
        )

    class Words:
        def __init__(self, words):
            self.words = words

        def get_vocab(self):
            return self.words

    check_same_tokenizer(Words({"a": 0}), Words({"a": 0}))
    with pytest.raises(UnsupportedError, match="different tokenizers"):
        check_same_tokenizer(Words({"a": 0}), Words({"b": 0}))
