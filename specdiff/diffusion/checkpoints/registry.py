"""Which class and which spec a checkpoint folder wants. No remote code runs: weights go into native classes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdiff.diffusion.checkpoints.build import CONTINUOUS, masked_lm_ids
from specdiff.diffusion.presets import preset as named
from specdiff.diffusion.spec import DLMSpec
from specdiff.errors import FormatError, UnsupportedError

log = logging.getLogger(__name__)

_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_META = ("auto_map", "architectures", "model_type", "transformers_version", "torch_dtype", "_name_or_path")


@dataclass(frozen=True)
class Family:
    """How to load one layout.

    Attributes:
        preset: name of its spec.
        model: returns the class.
        config: returns the config from the values of ``config.json``; None uses the class's own.
        keys: renames of weights (regular expressions), or None.
        masked: the shape of masks that the class takes is a model's own.
    """

    preset: str
    model: Callable[[], type[Any]]
    config: Callable[[dict[str, Any]], Any] | None = None
    keys: dict[str, str] | None = None
    optional: tuple[str, ...] = field(default=())


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k not in _META}


def _qwen2(values: dict[str, Any]) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_plain(values))


def _qwen3(values: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_plain(values))


def _qwen3_moe(values: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_plain(values))


def _llama(values: dict[str, Any]) -> Any:
    """LLaDA's own names in Llama's."""
    from transformers import LlamaConfig

    heads = values["n_heads"]
    for name, want in (("block_type", "llama"), ("activation_type", "silu"), ("include_bias", False), ("alibi", False)):
        if values.get(name, want) != want:
            raise FormatError(f"LLaDA config: {name} = {values[name]!r}, but the Llama layout needs {want!r}")
    return LlamaConfig(
        vocab_size=values.get("embedding_size") or values["vocab_size"],
        hidden_size=values["d_model"],
        intermediate_size=values.get("mlp_hidden_size") or values["d_model"] * values.get("mlp_ratio", 4),
        num_hidden_layers=values["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=values.get("n_kv_heads") or heads,
        rms_norm_eps=values.get("rms_norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": float(values.get("rope_theta", 10000.0))},
        max_position_embeddings=values.get("max_sequence_length", 4096),
        attention_bias=bool(values.get("include_qkv_bias", False)),
        tie_word_embeddings=bool(values.get("weight_tying", False)),
        bos_token_id=None,
        eos_token_id=values.get("eos_token_id"),
        pad_token_id=values.get("pad_token_id"),
    )


_LLADA_KEYS = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.transformer\.blocks\.(\d+)\.q_proj\.": r"model.layers.\1.self_attn.q_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.k_proj\.": r"model.layers.\1.self_attn.k_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.v_proj\.": r"model.layers.\1.self_attn.v_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.attn_norm\.": r"model.layers.\1.input_layernorm.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.up_proj\.": r"model.layers.\1.mlp.up_proj.",
    r"^model\.transformer\.blocks\.(\d+)\.ff_out\.": r"model.layers.\1.mlp.down_proj.",
}


def _class(name: str) -> Callable[[], type[Any]]:
    def get() -> type[Any]:
        import transformers

        return getattr(transformers, name)

    return get


def _llada2() -> type[Any]:
    from specdiff.diffusion.checkpoints.llada2 import LLaDA2MoeForCausalLM

    return LLaDA2MoeForCausalLM


def _llada2_config(values: dict[str, Any]) -> Any:
    from specdiff.diffusion.checkpoints.llada2 import LLaDA2MoeConfig

    return LLaDA2MoeConfig(**_plain(values))


def _bd3lm() -> type[Any]:
    from specdiff.diffusion.checkpoints.bd3lm import BD3LM

    return BD3LM


def _bd3lm_config(values: dict[str, Any]) -> Any:
    from specdiff.diffusion.checkpoints.bd3lm import BD3LMConfig

    return BD3LMConfig(**_plain(values))


FAMILIES: dict[str, Family] = {
    "LLaDAModelLM": Family("llada", _class("LlamaForCausalLM"), _llama, _LLADA_KEYS),
    "DreamModel": Family("dream", _class("Qwen2ForCausalLM"), _qwen2),
    "Fast_dLLM_QwenForCausalLM": Family("fast-dllm-v2", _class("Qwen2ForCausalLM"), _qwen2),
    "SDARForCausalLM": Family("sdar", _class("Qwen3ForCausalLM"), _qwen3),
    "SDARMoeForCausalLM": Family("sdar", _class("Qwen3MoeForCausalLM"), _qwen3_moe),
    "LLaDA2MoeModelLM": Family("llada2.0", _llada2, _llada2_config),
    "LLaDA2MoeForCausalLM": Family("llada2.0", _llada2, _llada2_config),
    "DiffusionGemmaForBlockDiffusion": Family("diffusion-gemma", _class("DiffusionGemmaForBlockDiffusion")),
    "BD3LM": Family("bd3lm", _bd3lm, _bd3lm_config),
    "MDLM": Family("mdlm", _bd3lm, _bd3lm_config),
}
"""By the first name under ``architectures`` in config.json."""


def load(
    name_or_path: str,
    preset: str | DLMSpec | None,
    kwargs: dict[str, Any],
    tokenizer: Any = None,
    mask_known: bool = False,
) -> tuple[Any, Any, DLMSpec]:
    """Model, tokenizer (or None) and spec of a checkpoint.

    Args:
        name_or_path: folder or hub id.
        preset: overrides the family's spec.
        kwargs: hub options and ``from_pretrained`` options.
        tokenizer: used in place of the one in the folder.
        mask_known: the caller gives the mask id.
    """
    hub = {k: kwargs.pop(k) for k in _HUB if k in kwargs}
    folder = _folder(name_or_path, hub)
    config_file = folder / "config.json"
    if (folder / "dual_config.json").is_file():
        raise UnsupportedError(
            f"{name_or_path} is a dual-mode adapter: DiffusionLM.from_adapter(base, folder) loads it"
        )
    if not config_file.is_file():
        raise FormatError(f"{name_or_path} has no config.json")
    values = json.loads(config_file.read_text())
    family = _family(values, name_or_path, preset)
    model = _model(folder, family, values, kwargs)
    tokenizer = tokenizer or _tokenizer(folder)
    spec = preset if isinstance(preset, DLMSpec) else named(preset or family.preset)
    if not isinstance(preset, DLMSpec):
        if spec.name == "bert":
            spec = spec.replace(**masked_lm_ids(model.config, tokenizer, mask_known))
        else:
            spec = _with_config(spec, folder, values, tokenizer)
    return model, tokenizer, spec


def _folder(name_or_path: str, hub: dict[str, Any]) -> Path:
    path = Path(name_or_path)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name_or_path, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx"], **hub))


def _family(values: dict[str, Any], name: str, preset: str | DLMSpec | None) -> Family:
    kind = (values.get("architectures") or [""])[0]
    model_type = str(values.get("model_type", ""))
    if kind in FAMILIES:
        return FAMILIES[kind]
    for word in CONTINUOUS:
        if word in (model_type.lower().replace("_", "-"), kind.lower().replace("_", "-")):
            raise UnsupportedError(
                f"{name} is {kind or model_type}: continuous embedding diffusion (Diffusion-LM, AR-Diffusion, DiT, "
                "flow matching) has no token canvas and is not supported"
            )
    if kind.endswith("MaskedLM"):
        return Family("bert", _class("AutoModelForMaskedLM"))
    if kind == "E2D2" or model_type == "e2d2":
        raise UnsupportedError(
            f"{name} is E2D2: only its contract is supported; wrap the model in an object with encode and decode "
            "(specdiff.diffusion.encdec.EncoderDecoder) and give it to DiffusionLM"
        )
    if preset is not None and kind.endswith("ForCausalLM"):
        spec = preset if isinstance(preset, DLMSpec) else named(preset)
        return Family(spec.name, _class("AutoModelForCausalLM"))
    raise UnsupportedError(
        f"{name}: architecture {kind or model_type!r} is not a known diffusion language model (known: "
        f"{', '.join(sorted(FAMILIES))}, and masked LMs); for a native causal class give preset= or a DLMSpec"
    )


def _model(folder: Path, family: Family, values: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    options = dict(kwargs)
    if family.config is not None:
        try:
            options["config"] = family.config(values)
        except KeyError as error:
            raise FormatError(f"{folder}: config.json lacks {error.args[0]!r}") from None
    if family.keys is not None:
        options["key_mapping"] = family.keys
    model, info = family.model().from_pretrained(folder, output_loading_info=True, use_safetensors=True, **options)
    missing = sorted(info["missing_keys"])
    wrong = sorted(str(k) for k in info.get("mismatched_keys", ()))
    if missing or wrong:
        raise FormatError(f"{folder}: weights missing: {missing[:5]}, of another shape: {wrong[:5]}")
    if info["unexpected_keys"]:
        log.warning("%s: weights without a place: %s", folder, sorted(info["unexpected_keys"])[:5])
    return model


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, KeyError, OSError, ImportError):
        # the class is remote code; the fast tokenizer's file says all that is needed
        if (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder)
        log.warning("%s: its tokenizer needs remote code; pass tokenizer=", folder)
        return None


def _with_config(spec: DLMSpec, folder: Path, values: dict[str, Any], tokenizer: Any) -> DLMSpec:
    """What the files say takes precedence over the preset's public ids."""
    found: dict[str, Any] = {}
    generation_file = folder / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    mask = values.get("mask_token_id", generation.get("mask_token_id", getattr(tokenizer, "mask_token_id", None)))
    if mask is not None and spec.corruption == "mask":
        found["mask_id"] = int(mask)
    if spec.corruption == "mask":
        eos = generation.get("eos_token_id", values.get("eos_token_id"))
        if eos is None and tokenizer is not None:
            eos = (
                tokenizer.eos_token_id
                if tokenizer.eos_token_id is not None
                else getattr(tokenizer, "sep_token_id", None)
            )
        if eos is not None:
            ids = (eos,) if isinstance(eos, int) else tuple(eos)
            found["eos_ids"] = ids + tuple(i for i in spec.eos_ids if i not in ids and i < values.get("vocab_size", 0))
        pad = generation.get("pad_token_id", values.get("pad_token_id"))
        found["pad_id"] = pad if pad is not None else found.get("eos_ids", spec.eos_ids or (0,))[0]
    if spec.attention == "block_causal":
        size = values.get("block_size", values.get("bd_size"))
        if size is not None:
            found["block_size"] = int(size)
        if spec.sub_block is not None and "small_block_size" in values:
            found["sub_block"] = int(values["small_block_size"])
        if spec.name == "bd3lm":
            found["mask_id"] = int(values.get("mask_token_id", values["vocab_size"] - 1))
            found["eos_ids"] = tuple(i for i in spec.eos_ids if i < found["mask_id"])
            found["pad_id"] = spec.pad_id if spec.pad_id is not None and spec.pad_id < found["mask_id"] else None
    if spec.name == "mdlm":
        found["mask_id"] = int(values.get("mask_token_id", values["vocab_size"] - 1))
        found["eos_ids"] = tuple(i for i in spec.eos_ids if i < found["mask_id"])
        found["pad_id"] = spec.pad_id if spec.pad_id is not None and spec.pad_id < found["mask_id"] else None
    return spec.replace(**found)
