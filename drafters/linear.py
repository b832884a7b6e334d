"""Linear layers that pack themselves for decoding on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Apply = Callable[[Tensor], Tensor]


def packed(weight: Tensor) -> Apply:
    """``x W^T`` for ``x``: ``[..., in]`` by the fastest kernel for few rows.

    The weight may be rounded to float16; a drafter may do that, its law is whatever it computes.
    """
    from specdiff.fast.linear import pack  # imports torch only

    layer = pack(weight, exact=False)

    def apply(x: Tensor) -> Tensor:
        return layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return apply


def packable(weight: Tensor) -> bool:
    """Only float32 on the CPU gains from packing."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32


class DraftLinear(nn.Linear):
    """``nn.Linear`` without bias. In eval mode and without gradients, on the CPU in float32, it runs packed.

    The packed copy is made at first use and again after the weight has changed.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self._packed: Apply | None = None
        self._packed_of: tuple[int, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if self.training or torch.is_grad_enabled() or not packable(self.weight):
            return F.linear(x, self.weight)
        state = (self.weight.data_ptr(), self.weight._version)
        if self._packed is None or self._packed_of != state:
            self._packed, self._packed_of = packed(self.weight), state
        return self._packed(x.float())

    def __deepcopy__(self, memo: dict[int, object]) -> DraftLinear:
        copy = DraftLinear(self.in_features, self.out_features).to(self.weight)
        copy.weight.data.copy_(self.weight.data)
        copy.train(self.training)
        memo[id(self)] = copy
        return copy

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_packed": None, "_packed_of": None}
