"""From a GGUF file to a folder that ``from_pretrained`` reads: bfloat16 safetensors, tokenizer, model card."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdiff.hub.progress import spinner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def convert_gguf(gguf: Path, result: Path, *, name: str, card: str) -> None:
    """Dequantise ``gguf``, round to bfloat16 and save it with its tokenizer and card in ``result``.

    What transformers takes over from GGUF metadata as it stands is put right: the weights are plain after dequantising
    (no quantisation is left in the config), float32 noise of the normalisation's epsilon goes, special tokens get into
    the generation config, and the ``smollm`` pre-tokenizer splits digits as the original one does.

    Args:
        gguf: the file.
        result: an empty folder.
        name: the model's name, for its config.
        card: text of its ``README.md``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with spinner(f"converting {name} to safetensors (once; about half a minute)"), _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        plain: Any = model
        plain.is_quantized, plain.hf_quantizer = False, None
        model.config._name_or_path = name
        model.config.__dict__.pop("_model_name_or_path", None)  # the GGUF's internal name
        if hasattr(model.config, "rms_norm_eps"):
            model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
        special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**special)
        plain.to(torch.bfloat16).save_pretrained(result)
        _split_digits(tokenizer, gguf)
        tokenizer.padding_side = "left"
        if model.config.max_position_embeddings:
            tokenizer.model_max_length = model.config.max_position_embeddings
        for key in ("local_files_only", "is_local"):
            tokenizer.init_kwargs.pop(key, None)
        tokenizer.save_pretrained(result)
    (result / "README.md").write_text(card, encoding="utf-8")


def _split_digits(tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    """GGUF names the pre-tokenizer and transformers ignores the name: ``smollm`` takes each digit by itself first."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars of transformers' own inside ours; the user's setting comes back afterwards."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar over GGUF tensors knows no setting
            yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
