"""Optimisers, schedule and averaging for drafter training."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def build_optimizers(
    module: nn.Module, kind: str, lr: float, weight_decay: float, muon_lr: float
) -> list[torch.optim.Optimizer]:
    """Optimisers over the parameters of ``module``.

    Args:
        module: what is trained.
        kind: "adamw", or "muon" (Muon for matrices, AdamW for embeddings, norms and slots).
        lr: of AdamW.
        weight_decay: on matrices.
        muon_lr: of Muon, scaled so that its updates have the root mean square of AdamW's.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() == 2 and "slot" not in name.split(".")
            (matrices if is_matrix else rest).append(parameter)
    if kind == "muon":
        muon = torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.95))]
    if kind != "adamw":
        raise ValueError(f"optimizer must be adamw or muon, not {kind!r}")
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))]


def schedule(progress: float, warmup: float, floor: float = 0.02) -> float:
    """Learning-rate factor at ``progress`` in [0, 1]: linear warm-up over ``warmup``, then cosine down to ``floor``."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    along = (progress - warmup) / max(1 - warmup, 1e-9)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * along))


class Average:
    """Exponential moving average of parameters, in float32, with a decay that grows with the number of updates."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.values = {name: p.detach().float().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move towards the current parameters."""
        self.updates += 1
        rate = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, parameter in module.named_parameters():
            self.values[name].lerp_(parameter.detach().float(), rate)

    @torch.no_grad()
    def swap(self, module: nn.Module) -> None:
        """Exchange the module's parameters and the average; call twice to undo."""
        for name, parameter in module.named_parameters():
            held = parameter.detach().float().clone()
            parameter.copy_(self.values[name].to(parameter.dtype))
            self.values[name] = held


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Optimiser state as named tensors and numbers, for safetensors."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for which, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                key = f"{which}.{index}.{name}"
                if isinstance(value, Tensor):
                    tensors[key] = value.detach().contiguous().clone()
                elif isinstance(value, (int, float)):
                    numbers[key] = value
    return tensors, numbers


def load_optimizer_tensors(
    optimizers: Iterable[torch.optim.Optimizer], tensors: dict[str, Tensor], numbers: dict[str, float]
) -> None:
    """The inverse of :func:`optimizer_tensors`."""
    for which, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        state: dict[int, dict[str, Tensor | float]] = {}
        entries: list[tuple[str, Tensor | float]] = [*tensors.items(), *numbers.items()]
        for key, value in entries:
            owner, index, name = key.split(".", 2)
            if int(owner) == which:
                state.setdefault(int(index), {})[name] = value
        whole["state"] = state
        optimizer.load_state_dict(whole)
