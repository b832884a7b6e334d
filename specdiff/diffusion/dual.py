"""Dual-mode models: a frozen autoregressive model plus low-rank weights that act on noisy rows alone.

Clean rows go through the base weights only: autoregressive mode is bit-exact, both share weights and keys and values.
Nothing of the base is altered: the adapted model is a tree of new modules that share the base's parameters, no hooks.

Training fills :class:`DualAdapter` (``parameters()`` are the low-rank factors and the mask's embedding row);
decoding needs
``adapter.rows(noisy)`` around each forward, which :class:`~specdiff.diffusion.denoiser.Denoiser` does.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdiff.diffusion.spec import DLMSpec
from specdiff.errors import FormatError, InvalidInputError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that get low-rank weights by default."""
CONFIG = "dual_config.json"
WEIGHTS = "dual_adapter.safetensors"


class _Switch(threading.local):
    """Which inputs of the running forward are noisy; one value per thread."""

    noisy: Tensor | None = None
    everywhere: bool = False


class LowRankLinear(nn.Module):
    """``base(x)`` plus ``scale * B A x`` where the row is noisy."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, switch: _Switch) -> None:
        super().__init__()
        # the base is no submodule: its parameters stay the base model's
        self._base = [base]
        self._switch = switch
        self.scale = scale
        self.down = nn.Parameter(
            torch.empty(rank, base.in_features, dtype=base.weight.dtype, device=base.weight.device)
        )
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self._base[0](x)
        noisy = self._switch.noisy
        if noisy is None:
            return y
        extra = (x @ self.down.T) @ self.up.T
        if self._switch.everywhere:
            return y + self.scale * extra
        return torch.where(noisy[..., None], y + self.scale * extra, y)


class MaskEmbedding(nn.Module):
    """The base's embedding, with a row of its own for the mask on noisy rows.

    The row starts as half the mean of all embeddings, "some token": what the base makes of it is far closer to the
    model's own predictions than what it makes of a reserved token that it never saw.
    """

    def __init__(self, base: nn.Embedding, mask_id: int, switch: _Switch) -> None:
        super().__init__()
        self._base = [base]
        self._switch = switch
        self.mask_id = mask_id
        self.row = nn.Parameter((base.weight.detach().float().mean(0) / 2).to(base.weight.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        y = self._base[0](ids)
        noisy = self._switch.noisy
        if noisy is None:
            return y
        return torch.where((noisy & (ids == self.mask_id))[..., None], self.row.to(y.dtype), y)


class DualAdapter(nn.Module):
    """The trainable part of a dual-mode model.

    Args:
        base: a causal LM; its parameters are shared, never changed.
        mask_id: a reserved token that serves as mask.
        rank: of the low-rank weights.
        alpha: their scale is ``alpha / rank``.
        targets: names of the linear layers that get them.

    Attributes:
        base: the model as it was.
        model: the adapted model (new modules over the same parameters).
    """

    def __init__(
        self, base: nn.Module, mask_id: int, rank: int = 16, alpha: float = 32.0, targets: Sequence[str] = TARGETS
    ) -> None:
        super().__init__()
        if rank < 1:
            raise InvalidInputError(f"rank must be at least 1, not {rank}")
        self.rank, self.alpha, self.targets, self.mask_id = rank, alpha, tuple(targets), mask_id
        self._switch = _Switch()
        self._models: list[nn.Module] = [base]
        self.layers = nn.ModuleDict()
        model = _shadow(base)
        table = base.get_input_embeddings()  # type: ignore[operator]
        embedding = next(name for name, module in base.named_modules() if module is table)
        for name, module in list(model.named_modules()):
            leaf = name.rsplit(".", 1)[-1]
            if leaf in self.targets and isinstance(module, nn.Linear):
                layer: nn.Module = LowRankLinear(module, rank, alpha / rank, self._switch)
            elif name == embedding:
                layer = MaskEmbedding(module, mask_id, self._switch)
            else:
                continue
            self.layers[name.replace(".", "/")] = layer
            _place(model, name, layer)
        if len(self.layers) < 2:
            raise InvalidInputError(f"no linear layer of {type(base).__name__} is called {', '.join(self.targets)}")
        self._models.append(model)

    @property
    def base(self) -> Any:
        """The autoregressive model, as it was."""
        return self._models[0]

    @property
    def model(self) -> Any:
        """The adapted model."""
        return self._models[1]

    @contextlib.contextmanager
    def rows(self, noisy: Tensor) -> Iterator[None]:
        """Within the context the adapter acts where ``noisy``: ``Bool[A, T]``; elsewhere the base is exact."""
        before = self._switch.noisy, self._switch.everywhere
        self._switch.noisy = noisy if bool(noisy.any()) else None
        self._switch.everywhere = bool(noisy.all())
        try:
            yield
        finally:
            self._switch.noisy, self._switch.everywhere = before

    def save(self, folder: str | Path, spec: DLMSpec, *, dtype: torch.dtype | None = None, **notes: Any) -> None:
        """Write the adapter's weights and its description; the base is not in it.

        Args:
            folder: made if it is not there.
            spec: how the dual-mode model is to be decoded.
            dtype: of the file; default: the adapter's own.
            **notes: further entries of the description.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file(
            {k: v.detach().to(dtype or v.dtype).contiguous() for k, v in self.state_dict().items()}, path / WEIGHTS
        )
        values = {
            "kind": "dual",
            "rank": self.rank,
            "alpha": self.alpha,
            "targets": list(self.targets),
            "mask_id": self.mask_id,
            "spec": spec.to_dict(),
            **notes,
        }
        (path / CONFIG).write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, base: nn.Module, folder: str | Path) -> tuple[DualAdapter, DLMSpec]:
        """Read an adapter for ``base``.

        Raises:
            FormatError: files missing, or made for another base.
        """
        path = Path(folder)
        if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
            raise FormatError(f"{folder} is no dual-mode adapter: {CONFIG} and {WEIGHTS} are needed")
        values = json.loads((path / CONFIG).read_text())
        adapter = cls(base, values["mask_id"], values["rank"], values["alpha"], values["targets"])
        weights = load_file(path / WEIGHTS)
        own = adapter.state_dict()
        wrong = sorted(
            k
            for k in own.keys() | weights.keys()
            if k not in own or k not in weights or own[k].shape != weights[k].shape
        )
        if wrong:
            raise FormatError(f"{folder} was made for another base model; first differences: {', '.join(wrong[:3])}")
        adapter.load_state_dict(weights)
        return adapter, DLMSpec.from_dict(values["spec"])


def dual_spec(mask_id: int, block_size: int, **changes: Any) -> DLMSpec:
    """The spec of a dual-mode model: causal clean tokens, shift 1, blocks at any offset."""
    values: dict[str, Any] = {
        "name": "dual",
        "mask_id": mask_id,
        "shift": 1,
        "attention": "causal_context",
        "block_size": block_size,
        "alignment": "prompt",
        "convention": "sdar",
        "policy": "leading",
        "cache": "block",
    }
    return DLMSpec(**{**values, **changes})


def _shadow(module: nn.Module) -> nn.Module:
    """A tree of new module objects over the same parameters and buffers."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._modules = {name: None if child is None else _shadow(child) for name, child in module._modules.items()}
    return twin


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    root.get_submodule(parent)._modules[leaf] = module
