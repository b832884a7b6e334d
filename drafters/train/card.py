"""The README of a trained drafter: data, recipe, tokens, measured acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from specdiff.drafters.dflash import DFlashDrafter
from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.evaluate import Acceptance
from specdiff.drafters.train.loop import TrainConfig, TrainState

DISTANCES = {"kl": "KL", "tv": "total variation"}


def sources(documents: Sequence[Document]) -> str:
    """ "name: documents" of the corpus, most frequent first."""
    counts = Counter(d.source or "unnamed" for d in documents)
    return ", ".join(f"{name}: {count}" for name, count in counts.most_common())


def card(
    name: str,
    target: str,
    drafter: DFlashDrafter,
    documents: Sequence[Document],
    config: TrainConfig,
    state: TrainState,
    held_out: Acceptance | None,
    served: dict[str, Any] | None = None,
    repeat: Sequence[str] = (),
    curve: Sequence[str] = (),
    licence: str = "apache-2.0",
) -> str:
    """Markdown with the metadata block of the hub.

    Args:
        name: of the drafter.
        target: name or path of the model it drafts for.
        drafter: the drafter.
        documents: what it was trained on.
        config: how.
        state: how far.
        held_out: acceptance on held-out documents.
        served: lines of the serving-path evaluation and others, name to value.
        repeat: table rows that let one repeat the run.
        curve: a table of tau against tokens and hours.
        licence: of the weights.
    """
    settings = drafter.config
    tokens = sum(len(d) for d in documents)
    vocabulary = len(drafter.draft_ids) if drafter.draft_ids is not None else settings.vocab_size
    parameters = sum(p.numel() for p in drafter.model.parameters())
    loss = config.loss
    decay = f"decay weights (gamma {loss.gamma:g})"
    weights = decay if loss.weighting == "decay" else f"D-PACE weights (floor {loss.dpace_floor:g})"
    kind = "plain DFlash (z-lab layout)" if settings.plain else "DFlash with direct path and sequential head"
    lines = [
        "---",
        f"license: {licence}",
        "library_name: specdiff",
        f"base_model: {target}",
        "tags: [speculative-decoding, block-diffusion, dflash]",
        "---",
        f"# {name}",
        "",
        f"A block-diffusion drafter for `{target}`. It holds no weight of the target: embedding and output head",
        "are read from the target when the drafter is loaded.",
        "",
        "| what | value |",
        "|---|---|",
        f"| kind | {kind} |",
        f"| drafted tokens per pass (K) | {settings.block_size} |",
        f"| layers, parameters | {settings.num_layers}, {parameters / 1e6:.1f} M |",
        f"| taps (state after target layer) | {', '.join(map(str, settings.target_layer_ids))} |",
        f"| draft vocabulary | {vocabulary} of {settings.vocab_size} ids |",
        f"| data | {len(documents)} chats, {tokens} tokens, the target's own responses ({sources(documents)}) |",
        f"| trained on | {state.anchors} anchors in {state.step} steps, {state.seconds / 3600:.2f} hours |",
        f"| recipe | {config.optimizer}, lr {config.lr:g}, {config.rows} documents x {config.anchors} anchors a step, "
        f"{weights}, {config.loss.hard:g} cross-entropy, rest {DISTANCES[config.loss.distance]} to the target's law |",
    ]
    if held_out is not None:
        shares = ", ".join(f"{share:.2f}" for share in held_out.by_position)
        lines.append(f"| held-out greedy tau | {held_out.tau:.2f} (accepted through slot 1, 2, ...: {shares}) |")
    lines += [f"| {key} | {value} |" for key, value in (served or {}).items()]
    lines += repeat
    if curve:
        lines += ["", "Held-out tau against tokens and hours of training:", "", *curve]
    lines += [
        "",
        "tau is new tokens per target pass in greedy decoding; held-out text is the target's own greedy text that",
        "training did not see.",
        "",
    ]
    return "\n".join(lines)
