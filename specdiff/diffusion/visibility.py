"""Who sees whom: one rule for every attention kind.

Every position has a block index, and a query sees the keys whose index is not above its own. Full attention gives
all the
same index, causal attention the position, block-causal attention the block; with a causal context the positions of
the open
block share an index while clean ones keep their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdiff.diffusion.spec import DLMSpec


def block_floor(position: Tensor, origin: Tensor, size: int) -> Tensor:
    """First position of the block that holds ``position``; block edges lie at ``origin + k * size``."""
    return torch.div(position - origin, size, rounding_mode="floor") * size + origin


def block_index(spec: DLMSpec, width: int, start: Tensor, end: Tensor, origin: Tensor) -> Tensor:
    """``Long[B, width]`` index of every position.

    Args:
        spec: the model.
        width: number of positions.
        start: ``Long[B]`` first position of the open block.
        end: ``Long[B]`` one past the open block.
        origin: ``Long[B]`` where block edges are counted from.
    """
    position = torch.arange(width, device=start.device).expand(start.shape[0], width)
    if spec.attention == "full":
        return torch.zeros_like(position)
    if spec.attention == "causal":
        return position
    inside = (position >= start[:, None]) & (position < end[:, None])
    if spec.attention == "causal_context":
        return torch.where(inside, start[:, None], position)
    size = spec.block_size or 1
    index = torch.div(position - origin[:, None], size, rounding_mode="floor")
    own = torch.div(start - origin, size, rounding_mode="floor")
    # a canvas stretched over several blocks is one block
    return torch.where(inside, own[:, None], index)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, 1, T, S]`` float mask from ``Bool[B, T, S]``: 0 where seen, the most negative finite number elsewhere.

    Boolean 4-D masks are silently wrong under eager attention; an additive one serves eager and sdpa alike.
    """
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
