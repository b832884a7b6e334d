"""The README of a trained dual-mode adapter: data, recipe, measured on held-out text."""

from __future__ import annotations

from collections.abc import Sequence

from specdiff.diffusion.dual import DualAdapter
from specdiff.drafters.train.card import sources
from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.dual.config import DualConfig
from specdiff.drafters.train.dual.trainer import Denoising
from specdiff.drafters.train.loop import TrainConfig, TrainState


def dual_card(
    name: str,
    target: str,
    adapter: DualAdapter,
    documents: Sequence[Document],
    config: TrainConfig,
    dual: DualConfig,
    state: TrainState,
    curve: Sequence[Denoising],
    licence: str = "apache-2.0",
) -> str:
    """Markdown with the metadata block of the hub.

    Args:
        name: of the adapter.
        target: name or path of its base model.
        adapter: the adapter.
        documents: what it was trained on.
        config: the loop.
        dual: noise and loss.
        state: how far.
        curve: held-out measurements, before any training first, best last; empty without held-out documents.
        licence: of the weights.
    """
    parameters = sum(p.numel() for p in adapter.parameters())
    tokens = sum(len(d) for d in documents)
    copies = "a second copy with the complement masked" if dual.complement else "no complementary copy"
    lines = [
        "---",
        f"license: {licence}",
        "library_name: specdiff",
        f"base_model: {target}",
        "tags: [block-diffusion, speculative-decoding, lora]",
        "---",
        f"# {name}",
        "",
        f"A dual-mode adapter: `{target}` stays the autoregressive model it is, to the bit, and writes blocks by",
        "diffusion as well. Low-rank weights act on noisy rows alone; keys and values of clean text are shared.",
        "",
        "| what | value |",
        "|---|---|",
        f"| low-rank weights | rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.targets)}; "
        f"{parameters / 1e6:.1f} M parameters, bfloat16 |",
        f"| mask | token {adapter.mask_id}, with an embedding row of its own |",
        f"| blocks | {', '.join(map(str, dual.block_sizes))} tokens; {dual.drafting:.0%} masked as a whole, the others "
        f"with ratios in {list(dual.band)} per {dual.level} and {copies} |",
        f"| loss | KL to the causal model's own law + {dual.hard:g} cross-entropy; drafting weights "
        f"exp(-(k-1)/{dual.gamma:g}){'; 1/t' if dual.inverse_rate else ''}"
        f"{f'; {dual.confidence:g} confidence term' if dual.confidence else ''} |",
        f"| data | {len(documents)} chats, {tokens} tokens, the model's own responses ({sources(documents)}), cut at "
        f"{dual.length} tokens |",
        f"| recipe | {config.optimizer}, lr {config.lr:g}, {config.rows} x {config.anchors} blocks a step, weight "
        f"average {config.average:g} |",
        f"| trained on | {state.anchors} blocks in {state.step} steps, {state.seconds / 3600:.2f} hours |",
    ]
    if curve:
        first, last = curve[0], curve[-1]
        shares = ", ".join(f"{share:.2f}" for share in last.by_position)
        lines += [
            f"| held-out loss | {first.loss:.2f} before, {last.loss:.2f} after |",
            f"| held-out KL to the causal law | fully masked blocks and partly masked ones together: {first.kl:.2f} "
            f"before, {last.kl:.2f} after |",
            f"| held-out tau, drafting for itself | {last.tau:.2f} (accepted through slot 1, 2, ...: {shares}) |",
        ]
    lines += [
        "",
        "tau is new tokens per verification in greedy decoding: slot 1 is the causal model's own token. A draft",
        "costs about as much as one step of the model, so drafting for itself gains nothing until tau is well above 2.",
        "",
    ]
    return "\n".join(lines)
