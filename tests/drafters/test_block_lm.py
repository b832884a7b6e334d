"""The standalone block-diffusion LM drafter: lossless in every mode, through the whole engine."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from every_draw import BIASED, EXACT, ForcedDrafter, ListedDrafter, Lister, law_of_texts
from transformers import LlamaConfig, LlamaForCausalLM

from specdiff import DiffusionLM, DLMSpec, SpecDiff
from specdiff.drafters.base import Drafter, DraftRequest
from specdiff.drafters.block_lm import BlockLMDrafter, check_same_tokenizer
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.verify import Coupled, Delta, Noise, Sampled, row_seeds
from specdiff.verify.audit import LOSSLESS, LOSSY, target_law, total_variation
from specdiff.verify.audit_models import TableLM

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


class Told(TableLM):
    """A target whose first new token is known: the rounds behind it are what matters, and cost a third."""

    def scores(self, key):
        return (0.0, *[float("-inf")] * (self.vocab - 1)) if key == () else super().scores(key)


def bias(rule, drafter, target, new, **options):
    """Distance of the law of the engine's texts from the target's own, over several chained rounds."""
    law, rounds = law_of_texts(target, drafter, rule, new, **options)
    assert float(law.sum()) == pytest.approx(1.0, abs=EXACT) and rounds > 2
    return total_variation(law, target_law(target, new))


def naive(proposal):
    """The same tokens, all called Sampled: without what says which of them are exposed or chosen by their draws."""
    return replace(proposal, written=None, delta=None)


RATIO = ("token", "block")
FEW = ("right to left, exposed tokens as Delta", "chosen by drawn token, all as Delta", "best of two as Delta",
       "redrawn from the last pass")  # fmt: skip
"""Ways with so many outcomes that two ids are enough."""


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("name", LOSSLESS)
def test_ways_to_draft_keep_the_law_through_the_engine(rule, name):
    """Blocks of three out of three ids, five new tokens: up to four rounds, every draw of all of them enumerated."""
    procedure, law = LOSSLESS[name]
    vocab = 2 if name in FEW else 3
    drafter = ListedDrafter(Lister(TableLM(vocab, 101), 3, procedure, law))
    assert bias(rule, drafter, Told(vocab, 1), 5) < EXACT


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize(
    ("name", "vocab"),
    [("confidence order, naive", 3), ("chosen by drawn token, naive", 2), ("a left token redrawn later", 2)],
)
def test_naive_ways_to_draft_show_through_the_engine(rule, name, vocab):
    procedure, law = LOSSY[name]
    drafter = ListedDrafter(Lister(TableLM(vocab, 104), 3, procedure, law))
    assert bias(rule, drafter, Told(vocab, 4), 5) > BIASED


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize(
    "name", ["confidence order, exposed tokens as Delta", "drawn and argmax tokens mixed"], ids=["written", "delta"]
)
def test_the_engine_needs_what_proposals_say_of_their_tokens(rule, name):
    """The control: stripped of ``written`` or ``delta`` the very same drafts are biased."""
    drafter = ListedDrafter(Lister(TableLM(3, 104), 3, *LOSSLESS[name]), naive)
    assert bias(rule, drafter, Told(3, 4), 5) > BIASED


@pytest.mark.parametrize("name", ["one pass, marginals", "left to right"])
def test_coupled_drafts_keep_the_law_through_the_engine(name):
    """Shared noise: the target's token given the drafted one, in closed form."""
    drafter = ListedDrafter(Lister(TableLM(2, 101), 3, LOSSLESS[name][0], Coupled()))
    assert bias("coupled", drafter, Told(2, 1), 5) < EXACT


EXACTLY = {
    "single": {"mode": "single"},
    "left": {"mode": "left"},
    "right": {"mode": "order", "policy": "any_order", "order": "right"},
    "peak": {"mode": "order", "steps": 2},
    "entropy": {"mode": "order", "policy": "entropy_budget", "bound": 1.0},
    "confident": {"mode": "left", "min_confidence": 0.4},
    "delta": {"mode": "delta", "policy": "threshold", "threshold": 0.3},
    "remasked": {"mode": "delta", "policy": "mask_predict", "steps": 2},
    "redraw": {"mode": "redraw", "steps": 2},
    "redraw by threshold": {"mode": "redraw", "policy": "threshold", "threshold": 0.3, "steps": 2},
}


def enumerable(vocab=3, change=lambda p: p, **options):
    """This drafter itself, on a denoiser with ``vocab`` ids beside the mask, every draw enumerated."""
    inner = drafter("full", seed=7, block_size=2, vocab=vocab + 1, **options)
    return ForcedDrafter(inner, options["mode"] == "redraw", change)


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("mode", EXACTLY)
def test_the_drafter_keeps_the_law_exactly(rule, mode):
    vocab = 2 if EXACTLY[mode]["mode"] == "redraw" else 3
    assert bias(rule, enumerable(vocab, **EXACTLY[mode]), TableLM(vocab, 1), 4, prompt=(1, 1, 0)) < EXACT


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("mode", ["right", "peak"])
def test_the_drafter_without_written_is_biased(rule, mode):
    assert bias(rule, enumerable(change=naive, **EXACTLY[mode]), TableLM(3, 1), 4, prompt=(1, 1, 0)) > BIASED


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
