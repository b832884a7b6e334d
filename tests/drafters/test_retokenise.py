"""Drafters with a tokenizer of their own: lossless through the engine, useful, or refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdiff import DiffusionLM, DLMSpec, SpecDiff
from specdiff.drafters.base import Drafter
from specdiff.drafters.block_lm import BlockLMDrafter
from specdiff.drafters.retokenise import Retokenised, decode, encode, retokenised
from specdiff.errors import UnsupportedError
from specdiff.testing import RandomDrafter
from specdiff.verify import Delta, Proposal

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café, 東京 🙂 and 1234567.89",
    "a b c aa bb ab ba abc abab",
]


def byte_pairs(vocab: int, texts: Sequence[str], normalizer=None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges learnt from ``texts``."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def theirs():
    return byte_pairs(300, TEXT)


@pytest.fixture(scope="module")
def ours():
    return byte_pairs(330, [" ".join(t) + t for t in TEXT[::-1]])


@pytest.fixture(scope="module")
def model(theirs):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(theirs), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.5, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Told:
    """Drafts the given text in its own tokens, wherever the committed text is a prefix of it."""

    taps = ()

    def __init__(self, tokenizer, texts: Sequence[str], block_size: int = 6) -> None:
        self.tokenizer, self.texts, self.block_size = tokenizer, list(texts), block_size

    def start(self, request):
        owner, rows = self, [[] for _ in range(request.batch_size)]

        class Session:
            def __init__(self):
                self.request = request
                self.rows = rows

            def propose(self, anchor, limits, noise):
                assert self.request.greedy
                out = []
                for ids, last, limit in zip(self.rows, anchor.tolist(), limits.tolist(), strict=True):
                    text = decode(owner.tokenizer, [*ids, last])
                    full = next((t for t in owner.texts if t.startswith(text)), text)
                    out.append(encode(owner.tokenizer, full)[len(ids) + 1 :][:limit])
                width = max([1, *map(len, out)])
                table = torch.tensor([row + [0] * (width - len(row)) for row in out])
                return Proposal(table, torch.tensor([len(row) for row in out]), Delta())

            def commit(self, tokens, counts, taps):
                for ids, row, count in zip(self.rows, tokens.tolist(), counts.tolist(), strict=True):
                    ids.extend(row[:count])

            def select(self, keep):
                self.rows = [self.rows[i] for i in keep.tolist()]

            def rollback(self, lengths):
                self.rows = [ids[:n] for ids, n in zip(self.rows, lengths.tolist(), strict=True)]

            def close(self):
                self.rows = []

        return Session()


def plain(model, prompt, new=30):
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)


def test_same_tokenizer_needs_no_translation(theirs):
    drafter = RandomDrafter(len(theirs))
    assert retokenised(drafter, theirs, theirs) is drafter


def test_greedy_text_is_the_targets(model, ours, theirs):
    drafter = retokenised(RandomDrafter(len(ours), 4), ours, theirs)
    assert isinstance(drafter, Drafter)
    prompt = torch.tensor([encode(theirs, t)[:6] for t in TEXT])
    out = SpecDiff(model, drafter).generate(prompt, max_new_tokens=25, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(model, prompt, 25))
    assert out.stats.proposed > 0


def test_a_drafter_that_knows_the_text_is_accepted(model, ours, theirs):
    """What the target will write, said in other tokens, arrives in the target's own."""
    prompt = torch.tensor([encode(theirs, "the quick brown")])
    truth = plain(model, prompt, 40)
    drafter = retokenised(Told(ours, [decode(theirs, truth[0].tolist())]), ours, theirs)
    out = SpecDiff(model, drafter).generate(prompt, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, truth)
    whole = decode(theirs, truth[0].tolist())
    if encode(theirs, whole) == truth[0].tolist():
        assert out.stats.tau > 2


def test_translation_of_one_round(ours, theirs, model):
    """Ordinary text: the proposal is exactly how the target's tokenizer would go on."""
    text, prefix = "the quick brown fox jumps over the lazy dog", "the quick"
    drafter = retokenised(Told(ours, [text], 8), ours, theirs)
    ids = encode(theirs, prefix)
    assert encode(theirs, text)[: len(ids)] == ids and encode(ours, text) != encode(theirs, text)
    from specdiff.drafters.base import DraftRequest

    session = drafter.start(DraftRequest(1, torch.device("cpu"), torch.float32, len(theirs), rule="block", capacity=64))
    session.commit(torch.tensor([ids[:-1]]), torch.tensor([len(ids) - 1]), None)
    proposal = session.propose(torch.tensor([ids[-1]]), torch.tensor([8]), None)
    got = proposal.tokens[0, : int(proposal.lengths[0])].tolist()
    assert proposal.law == Delta() and len(got) > 2
    assert encode(theirs, text)[len(ids) : len(ids) + len(got) - 1] == got[:-1], "the last token may be cut short"
    assert text.startswith(prefix + decode(theirs, got))


def test_half_a_character_waits(ours, theirs):
    """A prompt that ends inside a character drafts nothing; a drafted half is left out."""
    from specdiff.drafters.base import DraftRequest

    ids = theirs.encode("🙂", add_special_tokens=False)
    raw = [
        theirs.convert_tokens_to_ids(c)
        for c in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🙂")[0][0]
    ]
    assert decode(theirs, raw) == "🙂" and ids
    drafter = retokenised(Told(ours, ["🙂🙂"], 8), ours, theirs)
    session = drafter.start(DraftRequest(1, torch.device("cpu"), torch.float32, len(theirs), capacity=64))
    session.commit(torch.tensor([raw[:1]]), torch.tensor([1]), None)
    assert int(session.propose(torch.tensor(raw[1:2]), torch.tensor([8]), None).lengths[0]) == 0


def test_sampled_law_is_the_targets(model, ours, theirs):
    """Seeds repeat, and the coupled text is plain sampling's own, for a drafter that translates."""
    prompt = torch.tensor([encode(theirs, "a b c")])
    drafter = retokenised(Told(ours, ["a b c aa bb ab ba abc"]), ours, theirs)
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 5, "rule": "coupled"}
    assert torch.equal(
        SpecDiff(model, drafter).generate(prompt, **options), SpecDiff(model, None).generate(prompt, **options)
    )


def test_block_lm_with_another_tokenizer(model, ours, theirs):
    """The standalone diffusion LM: refused by itself with the remedy in the message, served when translated."""
    torch.manual_seed(3)
    lm = DiffusionLM(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(ours) + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
            )
        ).eval(),
        DLMSpec(mask_id=len(ours), attention="causal_context", block_size=4, alignment="prompt", shift=1),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="retokenised"):
        BlockLMDrafter(lm, tokenizer=ours, target_tokenizer=theirs)
    drafter = retokenised(BlockLMDrafter(lm), ours, theirs)
    prompts = torch.tensor([encode(theirs, t)[:5] for t in TEXT])
    out = SpecDiff(model, drafter).generate(prompts, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(model, prompts, 16)) and out.stats.proposed > 0


def test_a_tokenizer_that_changes_text_is_refused(ours, theirs):
    lossy = byte_pairs(300, TEXT, normalizers.Lowercase())
    for pair in ((lossy, theirs), (ours, lossy)):
        with pytest.raises(UnsupportedError, match="does not give text back"):
            Retokenised(RandomDrafter(300), *pair)


def test_drafters_that_read_target_states_are_refused(ours, theirs):
    class Tapping:
        taps, block_size = (1,), 4

        def start(self, request):
            raise AssertionError

    with pytest.raises(UnsupportedError, match="Tapping reads the target's states"):
        retokenised(Tapping(), ours, theirs)
