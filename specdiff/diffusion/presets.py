"""The published diffusion language models as :class:`DLMSpec` values.

Ids and conventions are those of the public checkpoints; a model with another vocabulary overrides them by keyword.
"""

from __future__ import annotations

from specdiff.diffusion.spec import DLMSpec
from specdiff.errors import InvalidInputError

_LLADA = DLMSpec(
    name="llada",
    mask_id=126336,
    eos_ids=(126081, 126348),
    pad_id=126081,
    convention="llada",
    policy="quota",
    options={"steps": 128},
    max_length=4096,
)
_DREAM = DLMSpec(
    name="dream",
    mask_id=151666,
    shift=1,
    eos_ids=(151643, 151645),
    pad_id=151643,
    convention="dream",
    policy="dream",
    options={"steps": 512, "alg": "entropy"},
    max_length=2048,
)
_FAST_V2 = DLMSpec(
    name="fast-dllm-v2",
    mask_id=151665,
    shift=1,
    attention="block_causal",
    block_size=32,
    alignment="absolute",
    sub_block=8,
    first_token="ar",
    eos_ids=(151645,),
    pad_id=151643,
    convention="sdar",
    policy="sub_block",
    options={"threshold": 0.9},
    cache="block",
)
_LLADA2 = DLMSpec(
    name="llada2.0",
    mask_id=156895,
    attention="block_causal",
    block_size=32,
    alignment="absolute",
    eos_ids=(156892,),
    pad_id=156892,
    convention="sdar",
    policy="dynamic",
    options={"threshold": 0.95, "steps": 32},
    cache="block",
)
_SDAR = DLMSpec(
    name="sdar",
    mask_id=151669,
    attention="block_causal",
    block_size=4,
    alignment="absolute",
    eos_ids=(151645, 151643),
    pad_id=151643,
    convention="sdar",
    policy="dynamic",
    options={"threshold": 0.9, "steps": 4},
    cache="block",
)
_BD3LM = DLMSpec(
    name="bd3lm",
    mask_id=50257,
    attention="block_causal",
    block_size=16,
    alignment="absolute",
    eos_ids=(50256,),
    pad_id=50256,
    convention="sdar",
    policy="first_hitting",
    cache="block",
    max_length=1024,
)

PRESETS: dict[str, DLMSpec] = {
    "llada": _LLADA,
    "dream": _DREAM,
    "fast-dllm-v1": _LLADA.replace(
        name="fast-dllm-v1", policy="threshold", options={"threshold": 0.9}, block_size=32, cache="dual"
    ),
    "fast-dllm-v2": _FAST_V2,
    "llada2.0": _LLADA2,
    "llada2.1": _LLADA2.replace(
        name="llada2.1", policy="edit", options={"threshold": 0.7, "edit_threshold": 0.5, "steps": 32}
    ),
    "sdar": _SDAR,
    "diffusion-gemma": DLMSpec(
        name="diffusion-gemma",
        corruption="uniform",
        attention="causal_context",
        block_size=256,
        alignment="prompt",
        commit="encoder",
        self_conditioning=True,
        eos_ids=(1, 106),
        pad_id=0,
        convention="sdar",
        policy="entropy_bound",
        cache="block",
    ),
    "bd3lm": _BD3LM,
    "mdlm": _BD3LM.replace(
        name="mdlm", attention="full", block_size=None, alignment="prompt", policy="ancestral", cache="none", options={}
    ),
    "bert": DLMSpec(
        name="bert",
        mask_id=103,
        pad_id=0,
        eos_ids=(102,),
        forbidden_ids=(0, 100, 101),
        convention="llada",
        policy="quota",
        options={"steps": 128},
        max_length=512,
    ),
}


def preset(name: str) -> DLMSpec:
    """The preset called ``name``; unknown names are refused with the list of known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise InvalidInputError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}") from None
