"""A drafter's layers with their matrices packed for the CPU kernels that few rows need (``specdiff.fast.linear``).

Decoding runs the code of training and evaluation; only the linear layers are exchanged, in a copy of the module tree
that shares every other parameter. ``specdiff.fast.linear`` and ``.norm`` import torch only, so no floor is crossed.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdiff.drafters.layers import GatedMLP, RMSNorm
from specdiff.fast.linear import PackedLinear, pack
from specdiff.fast.norm import RmsNorm

if TYPE_CHECKING:
    from specdiff.drafters.context_cache import ContextCache
    from specdiff.drafters.dflash import DFlashModel
    from specdiff.fast.recording import Recordings


SHORTLIST = 256
"""Candidates per slot. A draft vocabulary below eight times that is read whole."""


class PackedModule(nn.Module):
    """Stands in for an ``nn.Linear`` and computes the same. Holds no parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed: PackedLinear = pack(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return self.packed(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class PackedMLP(nn.Module):
    """Stands in for a :class:`~specdiff.drafters.layers.GatedMLP`: gate and up are one matrix product."""

    def __init__(self, mlp: GatedMLP) -> None:
        super().__init__()
        self.gate_up: PackedLinear = pack(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.down: PackedLinear = pack(mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` to the same shape."""
        gate, up = self.gate_up(x.reshape(-1, x.shape[-1])).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up)).view(x.shape)


class PackedNorm(nn.Module):
    """Stands in for an :class:`~specdiff.drafters.layers.RMSNorm`, in fewer operators."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.run = RmsNorm(norm.weight.detach(), norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same shape."""
        return self.run(x)


class DraftRuntime:
    """What decoding runs: the drafter's layers and its head, packed where that helps.

    Attributes:
        model: the draft layers; ``model`` itself when it is not float32 on the CPU.
        stamp: identifies the weights that were packed.
        shortlist: how many candidates a slot of a sequential head keeps from the block's shared head read; 0 for all.
        idle: buffers and recordings of the last greedy request that ended, for the next one of its shape.

    Args:
        model: the trainable part; only read.
        head: ``[Vd, H]`` rows of the draft vocabulary.
    """

    def __init__(self, model: DFlashModel, head: Tensor) -> None:
        self.stamp = stamp(model, head)
        self.dtype = head.dtype
        self.model = model
        if all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()):
            self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
            _exchange(self.model)
        self.idle: dict[Hashable, tuple[ContextCache, Recordings]] = {}
        self.head: PackedLinear = pack(head)
        self._rows = head
        packed = self.model is not model
        self.shortlist = SHORTLIST if packed and head.shape[0] >= 8 * SHORTLIST else 0

    def __deepcopy__(self, memo: object) -> None:
        """None: a drafter's copy has weights of its own, and packs them when it first drafts."""

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits ``[..., Vd]`` (float32) of normed states ``[..., H]``."""
        flat = self.head(normed.to(self.dtype).reshape(-1, normed.shape[-1])).float()
        return self.model.shape_logits(flat.view(*normed.shape[:-1], -1))

    def logits_of(self, normed: Tensor, columns: Tensor) -> Tensor:
        """Draft logits ``[B, M]`` (float32) of ``normed``: ``[B, H]`` at ``columns``: ``Long[B, M]`` alone."""
        rows = self._rows.index_select(0, columns.reshape(-1)).view(*columns.shape, -1)
        return self.model.shape_logits((rows @ normed.to(self.dtype)[..., None])[..., 0].float())


def _exchange(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedModule(child))
        elif type(child) is GatedMLP:
            setattr(module, name, PackedMLP(child))
        elif type(child) is RMSNorm:
            setattr(module, name, PackedNorm(child))
        else:
            _exchange(child)


def stamp(model: DFlashModel, head: Tensor) -> tuple[tuple[int, int], ...]:
    """Changes whenever a weight is written, replaced or moved."""

    def tensors() -> Iterator[Tensor]:
        yield from model.parameters()
        yield head

    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors())
