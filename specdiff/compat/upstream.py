"""Faults of transformers that decide how an architecture is served, each named after reading its code."""

from __future__ import annotations

_SCAN = "its scan takes no initial state, so a multi-token step drops the filled one"
_ASSISTANT = "a drafter of another model, whose keys and values it needs; generate fails on it alone"
_CODES = "it decodes audio codebooks, not text; generate on token ids alone fails as well"

UPSTREAM: dict[str, str] = {
    "blt": "its configuration has no num_hidden_layers, so no cache can be made for it and generate fails",
    "doge": "a pass over several tokens picks other keys for its dynamic mask than passes over one token do",
    "falcon_mamba": _SCAN,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "jamba": _SCAN,
    "moshi": "its cache forgets what lies behind the window while its uncached pass attends to it",
    "musicgen": _CODES,
    "musicgen_melody": _CODES,
    "reformer": "its pass fails on position_ids as soon as it pads the text to whole chunks",
    "recurrent_gemma": "its recurrent state lives in the module, so it cannot be taken back: decoded without a cache",
    "zamba2": "its single-token step is off by 5% of the logits' spread from its own uncached pass",
    "mamba": _SCAN,
    "zamba": _SCAN,
}
"""Model type to what is wrong, or cannot be run, in the installed transformers."""
