"""DFlash drafters on disk: the z-lab layout, with specdiff's options beside it.

``config.json`` says what the z-lab layout can say (``block_size`` counts the anchor there); options that it cannot hold
sit under ``specdiff``, so a plain drafter written here is a plain z-lab checkpoint. Weights are safetensors, sharded on
request; parameters of options are named ``options.*``, a pruned vocabulary is the integer tensor ``draft_ids``. Nothing
that belongs to the target (embedding, head) is ever written.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdiff.drafters.config import DFlashConfig
from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.errors import FormatError

ARCHITECTURE = "DFlashDraftModel"
_OPTIONS = (
    "normalize_taps",
    "direct",
    "input_scale",
    "late_mlp",
    "correction",
    "correction_window",
    "markov_rank",
    "qk_norm",
)
INDEX = "model.safetensors.index.json"


def to_zlab(config: DFlashConfig) -> dict[str, Any]:
    """``config.json`` of the z-lab layout; options off their defaults go under ``specdiff``."""
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size + 1,
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": False,
        "dflash_config": {"target_layer_ids": list(config.target_layer_ids)},
    }
    if config.mask_token_id is not None:
        out["dflash_config"]["mask_token_id"] = config.mask_token_id
    if config.causal:
        out["is_causal"] = True
    if config.input_embedding_scale != 1.0:
        out["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        out["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping:
        out["final_logit_softcapping"] = config.final_logit_softcapping
    default = {f.name: f.default for f in fields(DFlashConfig)}
    options = {name: getattr(config, name) for name in _OPTIONS if getattr(config, name) != default[name]}
    if options:
        out["specdiff"] = options
    return out


def from_zlab(values: dict[str, Any]) -> DFlashConfig:
    """Settings from a z-lab ``config.json``, old revisions or new: nested values first, then the top level.

    Raises:
        FormatError: another architecture, a missing value, or a layout that this drafter does not implement.
    """
    names = values.get("architectures") or []
    if ARCHITECTURE not in names:
        raise FormatError(f"config.json describes {names or 'no architecture'}, not {ARCHITECTURE}")
    nested = values.get("dflash_config") or {}
    rope = values.get("rope_parameters") or {}

    def get(name: str, *fallback: Any) -> Any:
        for place in (nested, rope, values):
            if place.get(name) is not None:
                return place[name]
        if fallback:
            return fallback[0]
        raise FormatError(f"config.json has no {name}, neither nested nor at the top")

    if values.get("attention_bias"):
        raise FormatError("attention_bias is not part of the DFlash layout that specdiff reads")
    if rope.get("rope_type", "default") != "default":
        raise FormatError(f"rope_type {rope['rope_type']!r} is not supported for drafters")
    if "sliding_attention" in (values.get("layer_types") or []):
        raise FormatError("draft layers with sliding attention are not supported yet")
    if get("hidden_act", "silu") != "silu":
        raise FormatError(f"hidden_act {get('hidden_act')!r}: only silu is supported")
    layers = get("num_target_layers")
    count = len(nested.get("target_layer_ids") or []) or int(get("num_taps", values["num_hidden_layers"]))
    heads = get("num_attention_heads")
    return DFlashConfig(
        hidden_size=get("hidden_size"),
        intermediate_size=get("intermediate_size"),
        num_layers=get("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", heads),
        head_dim=get("head_dim", get("hidden_size") // heads),
        vocab_size=get("vocab_size"),
        num_target_layers=layers,
        target_layer_ids=tuple(get("target_layer_ids", zlab_taps(layers, count))),
        block_size=get("block_size") - 1,
        mask_token_id=get("mask_token_id", None),
        rms_norm_eps=get("rms_norm_eps", 1e-6),
        rope_theta=get("rope_theta", 10000.0),
        causal=bool(get("causal", get("is_causal", False))),
        input_embedding_scale=get("input_embedding_scale", 1.0),
        output_multiplier=get("output_multiplier", 1.0),
        final_logit_softcapping=get("final_logit_softcapping", None),
        **(values.get("specdiff") or {}),
    )


def zlab_taps(layers: int, count: int) -> tuple[int, ...]:
    """Default taps of the z-lab layout: ``round(1 + i (L - 4) / (n - 1))``, and L // 2 for a single one."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def save(
    drafter: DFlashDrafter,
    folder: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2**40,
    push_to_hub: bool = False,
    repo_id: str | None = None,
    **hub: Any,
) -> None:
    """Write a drafter.

    Args:
        drafter: bound or not.
        folder: created if needed; an older drafter in it is replaced.
        dtype: of the weights on disk (default: as they are).
        max_shard_bytes: largest file; more than one file gets the usual index.
        push_to_hub: upload afterwards, to ``repo_id`` (default: the folder's name), with the ``hub`` options of
            :func:`push`.
        repo_id: see ``push_to_hub``.
        hub: see ``push_to_hub``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.safetensors"), *folder.glob(INDEX)]:
        old.unlink()
    tensors: dict[str, Tensor] = {}
    for name, value in drafter.model.state_dict().items():
        tensors[name] = value.detach().cpu().to(dtype or value.dtype).contiguous()
    if drafter.draft_ids is not None:
        tensors["draft_ids"] = drafter.draft_ids.cpu().int()
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        where = {}
        for i, shard in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            where.update(dict.fromkeys(shard, file))
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(to_zlab(drafter.config), indent=2) + "\n")
    if push_to_hub:
        push_folder(folder, repo_id or folder.name, **hub)


def _split(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Greedy split into dictionaries of at most ``limit`` bytes (a single larger tensor stands alone)."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        weight = tensor.numel() * tensor.element_size()
        if shards[-1] and size + weight > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += weight
    return shards


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder with ``model.safetensors`` or an index.

    Raises:
        FormatError: there is neither, or a shard is missing.
    """
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).exists():
            raise FormatError(f"{folder}: {file} is missing")
        with safe_open(folder / file, framework="pt") as handle:
            tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    return tensors


def load(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> DFlashDrafter:
    """Load an unbound drafter from a folder or a hub repository.

    Args:
        name_or_path: a folder, else a repository id.
        dtype: to compute in; None keeps what is on disk.
        revision: of the repository.
        token: for private repositories.
        cache_dir: of the hub's files.
        local_files_only: never go to the network (``HF_HUB_OFFLINE`` does the same).

    Raises:
        FormatError: not a DFlash checkpoint, or tensors are missing, left over, or of the wrong shape.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                str(name_or_path), revision=revision, token=token, cache_dir=cache_dir,
                local_files_only=local_files_only, allow_patterns=["*.json", "*.safetensors"],
            )
        )  # fmt: skip
    if not (folder / "config.json").exists():
        raise FormatError(f"{folder}: no config.json, so no drafter")
    model = DFlashModel(from_zlab(json.loads((folder / "config.json").read_text())))
    tensors = read_tensors(folder)
    draft_ids = tensors.pop("draft_ids", None)
    own = model.state_dict()
    missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    if missing or extra:
        raise FormatError(f"{folder}: weights do not fit config.json; missing {missing[:4]}, left over {extra[:4]}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise FormatError(f"{folder}: {name} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}")
    stored = next(iter(tensors.values())).dtype
    model.load_state_dict(tensors)
    model.to(dtype or stored)
    return DFlashDrafter(model, draft_ids).eval()


def push(drafter: DFlashDrafter, repo_id: str, **options: Any) -> str:
    """Save to a temporary folder and upload it; returns the address of the commit."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        save(drafter, Path(scratch))
        return push_folder(Path(scratch), repo_id, **options)


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload drafter",
) -> str:
    """Upload a drafter folder to the hub, creating the repository if needed."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    done = api.upload_folder(folder_path=folder, repo_id=repo, revision=revision, commit_message=commit_message)
    return str(done.commit_url)
