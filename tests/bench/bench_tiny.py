"""Tiny models and drafters whose laws are far from each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdiff.drafters.base import DraftRequest, as_limits
from specdiff.verify import Purpose, Sampled
from specdiff.verify.laws import Proposal
from specdiff.verify.noise import RoundNoise


def tiny_llama(vocab: int = 12, *, eos: int | None = None, seed: int = 0, scale: float = 0.6) -> LlamaForCausalLM:
    """A Llama of two layers with random weights; ``scale`` sets how peaked its law is."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


class SlantedDrafter:
    """Draws from a law of its own that depends on the token before and on the slot. Law: ``Sampled``.

    Args:
        vocab: vocabulary size.
        block_size: K.
        sharp: how peaked its law is.
        lie: states a uniform law instead of the one it draws from, which biases the ratio rules.
    """

    taps: Sequence[int] = ()

    def __init__(self, vocab: int, block_size: int = 2, *, sharp: float = 2.0, lie: bool = False) -> None:
        self.block_size, self.lie = block_size, lie
        generator = torch.Generator().manual_seed(17)
        self.table = sharp * torch.randn(block_size, vocab, vocab, generator=generator)

    def start(self, request: DraftRequest) -> SlantedSession:
        return SlantedSession(self, request)


class SlantedSession:
    def __init__(self, drafter: SlantedDrafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request

    def propose(self, anchor: Tensor, limits: Tensor, noise: RoundNoise) -> Proposal:
        drafter = self.drafter
        vocab = drafter.table.shape[-1]
        race = noise.exponential(Purpose.DRAFT, drafter.block_size, torch.arange(vocab))
        tokens, laws, before = [], [], anchor
        for slot in range(drafter.block_size):
            logits = self.request.warp(drafter.table[slot, before])
            before = (logits.softmax(-1) / race[:, slot]).argmax(-1)
            tokens.append(before)
            laws.append(torch.zeros_like(logits) if drafter.lie else logits)
        return Proposal(
            tokens=torch.stack(tokens, 1),
            lengths=as_limits(limits, drafter.block_size),
            law=Sampled(),
            logits=torch.stack(laws, 1),
        )

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None: ...

    def select(self, rows: Tensor) -> None: ...

    def rollback(self, lengths: Tensor) -> None: ...

    def close(self) -> None: ...


class StubTokenizer:
    """One id per character; enough of a tokenizer for the benchmark."""

    chat_template = None

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % (self.vocab - 1) for letter in text]}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(map(str, ids))
