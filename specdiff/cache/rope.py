"""Rotary embeddings whose frequencies depend on how long the text is, and the calls that they rule out.

transformers chooses the frequencies of ``longrope`` and ``dynamic`` by the largest position of each *pass*. A drafted
block, a prompt chunk or a longer neighbour in the batch would therefore turn positions differently than plain decoding
does, where they differ. ``longrope`` has two sets, one up to a length and one beyond it: texts that stay on one side
are served. ``dynamic`` changes with every token beyond its length: only texts up to it are served.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig


def turning_point(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Kind (``longrope`` or ``dynamic``) and the number of tokens at which the frequencies change, or None."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    found: list[tuple[str, int]] = []
    for entry in (rope, *rope.values()):
        kind = entry.get("rope_type") if isinstance(entry, dict) else None
        if kind == "longrope":
            found.append(("longrope", entry.get("original_max_position_embeddings") or text.max_position_embeddings))
        elif kind is not None and "dynamic" in kind:
            found.append(("dynamic", text.max_position_embeddings))
    return min(found, key=lambda pair: pair[1], default=None)


def why_not(config: PreTrainedConfig, prompts: Sequence[int], max_new: int) -> str | None:
    """Why prompts of these lengths cannot be continued by ``max_new`` tokens, with the remedy; None when they can."""
    turn = turning_point(config)
    if turn is None or max(prompts) + max_new - 1 <= turn[1]:
        return None
    kind, length = turn
    if kind == "longrope" and min(prompts) > length:
        return None
    remedy = f"keep prompt and max_new_tokens within {length} tokens"
    if kind == "longrope":
        remedy += f", give prompts that are all longer than {length},"
    return (
        f"its rotary frequencies ({kind}) change at {length} tokens and this call may reach {max(prompts) + max_new}, "
        f"so passes over several tokens would not give generate's text; {remedy} or use plain generate"
    )
