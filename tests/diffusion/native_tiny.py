"""Tiny random models for the tests of native mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdiff import DiffusionLM, DLMSpec

VOCAB, MASK, EOS, PAD = 41, 40, 39, 38


def tiny_llama(seed: int = 0, vocab: int = VOCAB, layers: int = 2, attention: str = "sdpa") -> LlamaForCausalLM:
    """Llama with logits well apart."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


def spec(**changes: object) -> DLMSpec:
    """A mask-diffusion spec over the tiny vocabulary; no end ids unless asked for."""
    values: dict[str, object] = {"mask_id": MASK, "pad_id": PAD, "options": {}}
    values.update(changes)
    return DLMSpec(**values)  # type: ignore[arg-type]


def lm(model: LlamaForCausalLM, **changes: object) -> DiffusionLM:
    """A DiffusionLM over the tiny model."""
    return DiffusionLM(model, spec(**changes))


def full_net(model: LlamaForCausalLM) -> Callable[[Tensor], Tensor]:
    """``ids [N] -> logits [N, V]`` with full attention."""

    @torch.no_grad()
    def net(ids: Tensor) -> Tensor:
        n = len(ids)
        return model(input_ids=ids[None], attention_mask=torch.zeros(1, 1, n, n)).logits[0].float()

    return net


def block_net(model: LlamaForCausalLM, size: int) -> Callable[[Tensor], Tensor]:
    """``ids [N] -> logits [N, V]`` with blocks of ``size`` tokens seeing themselves and what is before."""

    @torch.no_grad()
    def net(ids: Tensor) -> Tensor:
        block = torch.arange(len(ids)) // size
        seen = block[None, :] <= block[:, None]
        mask = torch.zeros(len(ids), len(ids)).masked_fill(~seen, -1e30)
        return model(input_ids=ids[None], attention_mask=mask[None, None]).logits[0].float()

    return net


def prompt(length: int, seed: int = 1, rows: int = 1) -> Tensor:
    """``Long[rows, length]`` random ids without special ones."""
    return torch.randint(0, PAD, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor], pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Rows ``Long[n]`` as one left-padded batch and its attention mask."""
    width = max(len(r) for r in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return ids, mask
