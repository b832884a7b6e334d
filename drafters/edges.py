"""Heads that rescore a slot's logits by the *id* of the token before it; the first slot follows the anchor.

Each token is drawn from the rescored law of its slot, left to right, and that law is what is reported: the ``q`` is
exact. Parameter names are those of the layouts that these heads come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CandidateSelector(nn.Module):
    """DFlash 2: among the k likeliest candidates c of a slot, ``logit(c) + sum(pred[x_prev] * (W h) * succ[c])``.

    Args:
        hidden: width H of the states.
        vocab: rows of the codebooks.
        rank: their width.
        top_k: candidates k; every other id is out of the running.
    """

    def __init__(self, hidden: int, vocab: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, logits: Tensor, normed: Tensor, previous: Tensor, ids: Tensor) -> Tensor:
        """Rescored logits ``[B, Vd]``, -inf for all but the candidates.

        Args:
            logits: ``[B, Vd]`` of the slot.
            normed: ``[B, H]`` its state after the final norm.
            previous: ``Long[B]`` target id of the token before.
            ids: ``Long[Vd]`` target id of each column.
        """
        best, columns = logits.topk(min(self.top_k, logits.shape[-1]), -1)
        query = self.predecessor_codebook[previous] * self.hidden_projection(normed)
        score = torch.einsum("br,bkr->bk", query, self.successor_codebook[ids[columns]]).to(logits.dtype)
        return torch.full_like(logits, float("-inf")).scatter(-1, columns, best + score)


class TransitionHead(nn.Module):
    """DSpark's vanilla Markov head: ``logits + W2 W1[x_prev]``, both tables its own.

    Args:
        vocab: rows of ``W1``, target ids.
        columns: rows of ``W2``, columns of the draft vocabulary.
        rank: width between them.
    """

    def __init__(self, vocab: int, columns: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, logits: Tensor, previous: Tensor) -> Tensor:
        """``[B, Vd]`` of ``[B, Vd]`` and the target ids before: ``Long[B]``."""
        return logits + self.markov_w2(self.markov_w1(previous)).to(logits.dtype)


class ConfidenceHead(nn.Module):
    """DSpark: the estimated probability that a slot's token is accepted, given that those before it were.

    It reads the slot's state and the token before it, never the token it speaks of: cutting a draft where it is low
    leaves the law of the tokens that are drafted unchanged.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """``[B]`` probabilities of ``[B, width]``."""
        return torch.sigmoid(self.proj(features).squeeze(-1).float())
