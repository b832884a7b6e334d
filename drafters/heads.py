"""Light sequential heads: what a slot may learn from the drafted tokens before it.

Both keep an exact left-to-right law: the logits of slot k are a function of the block's parallel states and of the
tokens before slot k only, so a left-to-right walk draws from exactly the ``q`` that it reports.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdiff.drafters.layers import RMSNorm, rms_norm


class CorrectionHead(nn.Module):
    """``x + W_o (silu(g) * u)`` with ``g, u = W_c norm(x) + sum_j W_e[j] norm(embedding[x_{k-1-j}])``.

    A gated variant of the zero-initialised autoregressive correction of DFly: at initialisation ``W_o`` is zero and the
    head is the identity.

    Args:
        hidden: width H.
        width: inner width.
        window: number of previous tokens seen.
        eps: of the norms.
    """

    def __init__(self, hidden: int, width: int, window: int, eps: float) -> None:
        super().__init__()
        self.window, self.eps = window, eps
        self.norm = RMSNorm(hidden, eps)
        self.state_proj = nn.Linear(hidden, 2 * width, bias=False)
        self.token_proj = nn.Linear(window * hidden, 2 * width, bias=False)
        self.out_proj = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.out_proj.weight)

    def prepare(self, x: Tensor) -> Tensor:
        """The part that needs no tokens: ``[..., 2 * width]`` of ``x``: ``[..., H]``."""
        return self.state_proj(self.norm(x))

    def correct(self, x: Tensor, prepared: Tensor, previous: Tensor | None) -> Tensor:
        """Corrected states.

        Args:
            x: ``[..., H]`` states.
            prepared: of :meth:`prepare`.
            previous: ``[..., window, H]`` embeddings of the tokens before, nearest first; zeros where there is none.
                None is all zeros.
        """
        if previous is not None:
            prepared = prepared + self.token_proj(rms_norm(previous, self.eps).flatten(-2))
        gate, up = prepared.chunk(2, -1)
        return x + self.out_proj(F.silu(gate) * up)


class TokenInjection(nn.Module):
    """``x + scale * sum_j W[j] norm(embedding[x_{k-1-j}])``: tells a slot the drafted tokens before it; zero at first.

    Args:
        hidden: width H.
        window: number of previous tokens seen.
        eps: of the norm.
        scale: size of the residual stream that ``x`` lives on.
    """

    def __init__(self, hidden: int, window: int, eps: float, scale: float) -> None:
        super().__init__()
        self.eps, self.scale = eps, scale
        self.token_proj = nn.Linear(window * hidden, hidden, bias=False)
        nn.init.zeros_(self.token_proj.weight)

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        """``[..., H]`` states and ``[..., window, H]`` embeddings, nearest first, zeros where there is none."""
        return x + self.scale * self.token_proj(rms_norm(previous, self.eps).flatten(-2))


class MarkovHead(nn.Module):
    """A low-rank bias on the logits from the token before: ``W1[x_{k-1}] W2`` (DSpark).

    ``W1`` is applied to the token's frozen embedding, so that the head stays small for any vocabulary:
    ``bias = (norm(e_prev) A) B^T E_draft`` with A, B ``[H, rank]``, and ``E_draft`` the (pruned) output embedding.
    """

    def __init__(self, hidden: int, rank: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, hidden, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, previous: Tensor) -> Tensor:
        """What to add to the normed state before the output embedding: ``[..., H]`` of ``[..., H]``."""
        return self.up(self.down(rms_norm(previous, self.eps)))


def tokens_before_slots(tokens: Tensor, window: int) -> Tensor:
    """Ids of the ``window`` drafted tokens before each slot, nearest first; -1 where the block has not begun.

    Args:
        tokens: ``Long[..., S]`` the block's tokens; slot k sees those before k.
        window: how many.

    Returns:
        ``Long[..., S, window]``.
    """
    nothing = tokens.new_full((*tokens.shape[:-1], window), -1)
    line = torch.cat([nothing, tokens], -1)  # slot k's predecessor is at window - 1 + k
    slots = torch.arange(tokens.shape[-1], device=tokens.device)
    return line[..., slots[:, None] + (window - 1 - torch.arange(window, device=tokens.device))]
