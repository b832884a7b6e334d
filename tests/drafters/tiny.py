"""Tiny targets, random drafters and hand-made corpora for the drafter tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdiff.drafters.base import DraftRequest
from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.train.corpus import Document, write_shard

VOCAB = 50
HIDDEN = 32
LAYERS = 4


def target(seed: int = 0, tied: bool = True, spread: float = 0.5, vocab: int = VOCAB) -> LlamaForCausalLM:
    """A random Llama whose greedy text varies."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=spread,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def settings(**options: Any) -> DFlashConfig:
    """Settings that fit :func:`target`; plain z-lab unless told otherwise."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "num_target_layers": LAYERS,
        "target_layer_ids": (0, 2),
        "block_size": 4,
        "mask_token_id": 3,
    }
    return DFlashConfig(**(values | options))


DIRECT = {"direct": True, "normalize_taps": True, "qk_norm": False, "late_mlp": True, "input_scale": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0},
    "direct": DIRECT | {"late_mlp": False},
    "late": DIRECT | {"correction_window": 3},
    "correction": DIRECT | {"late_mlp": False, "correction": 16, "correction_window": 2},
    "markov": {"markov_rank": 4},
    "everything": DIRECT | {"correction": 16, "correction_window": 2, "markov_rank": 4},
}
EDGES: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_kernel": 2, "conv_group": 8, "selector_rank": 6, "selector_top_k": 5},
    "convolution": {"conv_kernel": 3, "conv_group": 16},
    "selector": {"selector_rank": 6, "selector_top_k": 5},
    "dspark": {
        "anchor_predicts": True, "transition_rank": 6, "confidence": True, "confidence_sees_token": True,
    },
    "sliding": {"windows": (5, 0), "sliding_causal": True},
    "all sliding": {"windows": (5, 3)},
}  # fmt: skip
"""Drafters of other layouts: served, some of them not trained."""


def drafter(model: LlamaForCausalLM, seed: int = 0, draft_ids: Tensor | None = None, **options: Any) -> DFlashDrafter:
    """A drafter with random weights everywhere (also where training starts from zeros), bound to ``model``."""
    torch.manual_seed(seed)
    made = DFlashModel(settings(**options))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return DFlashDrafter(made.eval(), draft_ids).bind(model)


def request(model: LlamaForCausalLM, batch: int = 1, rule: str = "greedy", **options: Any) -> DraftRequest:
    """A request for ``model``."""
    values: dict[str, Any] = {
        "batch_size": batch,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "vocab_size": model.config.vocab_size,
        "rule": rule,
        "capacity": 64,
    }
    return DraftRequest(**(values | options))


@torch.no_grad()
def taps_of(model: LlamaForCausalLM, ids: Tensor, taps: tuple[int, ...]) -> Tensor:
    """``[B, T, n * H]`` by the stock model's uncached pass."""
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i + 1] for i in taps], -1)


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: Tensor, new: int) -> Tensor:
    """``Long[B, P + new]`` plain greedy text."""
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, eos_token_id=None
    )


def write_greedy_corpus(
    folder: Path, model: LlamaForCausalLM, count: int, prompt: int = 4, new: int = 40
) -> list[Document]:
    """Greedy texts after random prompts, as one shard ``greedy.npz``."""
    ids = torch.randint(4, model.config.vocab_size, (count, prompt), generator=torch.Generator().manual_seed(1))
    texts = greedy(model, ids, new).numpy().astype(np.int64)
    documents = [Document(text, prompt, "greedy") for text in texts]
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "greedy.npz", documents)
    return documents
