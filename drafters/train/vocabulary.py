"""Choice of the pruned draft vocabulary from the corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdiff.drafters.train.corpus import Document


def choose_vocabulary(documents: Sequence[Document], vocab_size: int, size: int, prior: float = 0.5) -> Tensor:
    """The ``size`` ids most worth proposing, ascending: counts in responses (prompts at a tenth) plus a rank prior.

    Byte-pair vocabularies list their merges by frequency, so an id never seen is the likelier the smaller it is; the
    prior ``prior * size / (size + id)`` lets that decide among ids that the corpus does not show.

    Args:
        documents: the training corpus.
        vocab_size: of the target.
        size: how many ids to keep.
        prior: weight of the rank prior, in counts.
    """
    counts = np.zeros(vocab_size)
    for document in documents:
        cut = document.prompt_length
        counts += np.bincount(document.ids[cut:], minlength=vocab_size)[:vocab_size]
        counts += 0.1 * np.bincount(document.ids[:cut], minlength=vocab_size)[:vocab_size]
    counts += prior * size / (size + np.arange(vocab_size))
    keep = np.argsort(-counts, kind="stable")[: min(size, vocab_size)]
    return torch.from_numpy(np.sort(keep))
