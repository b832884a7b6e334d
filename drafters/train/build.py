"""From options to a drafter ready to train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.data import Corpus
from specdiff.drafters.train.initialise import config_for, copy_layers, default_taps, fit_direct_path, typical_rms
from specdiff.drafters.train.vocabulary import choose_vocabulary
from specdiff.errors import InvalidInputError

FIT_DOCUMENTS = 200
"""Documents that the least squares of the direct path look at."""
BY_SLOT = ("options.slot.weight", "options.gain.weight")
"""Weights of a direct drafter with a row for each slot."""


@dataclass(frozen=True)
class Shape:
    """What kind of drafter to build.

    Attributes:
        block_size: K.
        layers: draft layers.
        taps: target layers to read; () for ``tap_count`` spread ones.
        tap_count: see ``taps``.
        vocabulary: size of the pruned draft vocabulary, 0 for all ids.
        plain: the plain z-lab DFlash layout instead of the direct path with a late MLP.
        init: "target" (copied layers; least squares for the direct path) or "random".
        window: drafted tokens that the sequential head sees.
        correction: width of an additional gated correction head, 0 for none.
        markov_rank: rank of a Markov head, 0 for none.
        mask_token_id: of a plain drafter; None takes an id that the corpus never uses.
    """

    block_size: int = 4
    layers: int = 1
    taps: tuple[int, ...] = ()
    tap_count: int = 5
    vocabulary: int = 10240
    plain: bool = False
    init: str = "target"
    window: int = 3
    correction: int = 0
    markov_rank: int = 0
    mask_token_id: int | None = None

    def tap_ids(self, target: Any) -> tuple[int, ...]:
        """The tapped layers. A direct drafter also reads the state that enters the target's last layers."""
        depth = target.config.get_text_config().num_hidden_layers
        entering = depth - self.layers - 1
        if entering < 0 and not self.plain:
            raise InvalidInputError(f"a drafter of {self.layers} layers needs a target of more, this one has {depth}")
        if self.taps and self.init == "target" and not self.plain and entering not in self.taps:
            raise InvalidInputError(
                f"a drafter that starts as the target's last layers reads what enters them: put {entering} among the "
                f"taps ({', '.join(map(str, self.taps))}), or begin with random weights (--init random)"
            )
        if self.taps:
            return self.taps
        if self.plain:
            return default_taps(depth, self.tap_count)
        rest = default_taps(depth, max(self.tap_count - 1, 1))
        return tuple(sorted({*(t for t in rest if t < entering), entering}))


def build(target: Any, corpus: Corpus, shape: Shape, seed: int = 0) -> DFlashDrafter:
    """A drafter bound to ``target``, with starting weights.

    Args:
        target: a Hugging Face causal LM.
        corpus: with at least one shard.
        shape: what to build.
        seed: of random weights.
    """
    if shape.init not in ("target", "random"):
        raise InvalidInputError(f"init must be 'target' or 'random', not {shape.init!r}")
    torch.manual_seed(seed)
    taps = shape.tap_ids(target)
    text = target.config.get_text_config()
    first = text.num_hidden_layers - shape.layers
    documents = [s.documents[i] for s, i in corpus.train]
    items = [s[i] for s, i in corpus.train[:FIT_DOCUMENTS]]
    copied = shape.init == "target"
    fitted = copied and not shape.plain and (first - 1) in taps
    scale = typical_rms(items[:16], taps.index(first - 1)) if fitted else 1.0
    config = config_for(
        target,
        num_layers=shape.layers,
        target_layer_ids=taps,
        block_size=shape.block_size,
        mask_token_id=mask_id(shape, documents, text.vocab_size) if shape.plain else None,
        qk_norm=shape.plain or has_qk_norm(target),
        normalize_taps=not shape.plain,
        direct=not shape.plain,
        input_scale=scale,
        late_mlp=not shape.plain,
        correction=0 if shape.plain else shape.correction,
        markov_rank=0 if shape.plain else shape.markov_rank,
        correction_window=shape.window,
    )
    model = DFlashModel(config)
    if copied:
        copy_layers(model, target, first)
    else:
        random_weights(model)
    if fitted:
        fit_direct_path(model, target.get_input_embeddings().weight.detach().cpu(), items, first - 1)
    draft_ids = None
    if shape.vocabulary and shape.vocabulary < text.vocab_size:
        draft_ids = choose_vocabulary(documents, text.vocab_size, shape.vocabulary)
    return DFlashDrafter(model, draft_ids).bind(target)


def continued(name: str, target: Any, block_size: int | None = None) -> DFlashDrafter:
    """A finished drafter to train further, in float32 and bound to ``target``.

    Args:
        name: of the zoo, or a folder, or a hub repository.
        target: what it drafts for.
        block_size: K from now on, None for its own. Only a direct drafter has weights by slot: fewer slots drop the
            last ones, new slots start as the last one.

    Raises:
        InvalidInputError: ``name`` is no block-diffusion drafter.
    """
    from specdiff.drafters.loading import load

    drafter = load(name, target)
    if not isinstance(drafter, DFlashDrafter):
        raise InvalidInputError(f"{name!r} is no block-diffusion drafter that could be trained further")
    if block_size is None or block_size == drafter.block_size:
        return drafter
    model = DFlashModel(replace(drafter.config, block_size=block_size))
    weights = drafter.model.state_dict()
    if drafter.config.direct:
        slots = torch.arange(block_size).clamp(max=drafter.block_size - 1)
        for key in BY_SLOT:
            weights[key] = weights[key][slots]
    model.load_state_dict(weights)
    return DFlashDrafter(model, drafter.draft_ids).bind(target)


def random_weights(model: DFlashModel) -> None:
    """Normal weights of standard deviation 0.02 for every matrix that is not zero by design."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "gain" not in name and bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)


def has_qk_norm(target: Any) -> bool:
    """Whether the target's own attention normalises queries and keys (so that copied layers should)."""
    return any(name.endswith("self_attn.q_norm.weight") for name, _ in target.named_parameters())


def mask_id(shape: Shape, documents: Iterable[Document], vocab_size: int) -> int:
    """The mask token of a plain drafter: as given, else the largest id that no training document uses.

    Raises:
        InvalidInputError: there is none.
    """
    if shape.mask_token_id is not None:
        return shape.mask_token_id
    used: set[int] = set()
    for document in documents:
        used.update(document.ids.tolist())
    free = next((i for i in range(vocab_size - 1, -1, -1) if i not in used), None)
    if free is None:
        raise InvalidInputError(
            "the training text uses every id of the vocabulary, so none is left for the mask of --plain drafters: name "
            "one that the target hardly ever writes with --mask-token-id"
        )
    return free


def describe(drafter: DFlashDrafter, taps: Sequence[int]) -> str:
    """One line for logs."""
    size = sum(p.numel() for p in drafter.model.parameters()) / 1e6
    vocabulary = len(drafter.draft_ids) if drafter.draft_ids is not None else drafter.config.vocab_size
    kind = "plain" if drafter.config.plain else "direct"
    return f"{kind}, K {drafter.block_size}, {size:.1f}M parameters, taps {tuple(taps)}, {vocabulary} draft ids"
