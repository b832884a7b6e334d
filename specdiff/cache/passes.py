"""One call of the stock model: arguments by signature, only the head rows that are needed, only the tapped states."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdiff.errors import UnsupportedError

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""What the cache is called in a model's forward, newest first (``past_key_values`` is a deprecated alias in 5.24)."""

Keep = int | Tensor
"""Which inputs the head is computed for: the last n, or the given indices."""


def inner_model(model: Any) -> Any:
    """The model inside an adapter's wrapper (PEFT), which hands calls and keyword arguments on; else the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class ModelCall:
    """How to call one model.

    Args:
        model: a causal LM.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.parameters = set(inspect.signature(inner_model(model).forward).parameters)
        self.cache_name = next((name for name in CACHE_NAMES if name in self.parameters), None)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        embedding = self.model.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        device = weight.device if weight is not None else self.model.device
        hook = getattr(embedding, "_hf_hook", None)
        runs_on = getattr(hook, "execution_device", None)
        if device.type == "meta" and runs_on is not None:  # weights that accelerate keeps elsewhere between calls
            return torch.device(runs_on)
        return device

    def uncached(
        self, ids: Tensor, *, keep: Keep | None = None, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """The stock model's plain pass over ``Long[g, T]``, with the mask and positions that ``generate`` gives it."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        logits, tapped, _ = self(
            ids, positions=positions, mask=torch.ones_like(ids), use_cache=False, keep=keep, taps=taps
        )
        return logits, tapped

    def __call__(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Any = None,
        cache: Any = None,
        use_cache: bool = True,
        keep: Keep | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Run ``ids``: ``Long[g, T]``.

        Args:
            ids: inputs.
            positions: ``Long[g, T]``; left out when the model takes none.
            mask: additive 4-D mask or masks by layer type, a 2-D padding mask, or None.
            cache: what the model calls its cache, or None.
            use_cache: as in transformers.
            keep: inputs that the head is computed for (all when None).
            taps: layers whose output states are wanted.

        Returns:
            Logits ``[g, kept, V]`` in the model's dtype, states ``[g, T, n*H]`` or None, and the cache as the model
            returned it (None where it returns none).
        """
        wanted = {
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": use_cache,
            "return_dict": True,
            "logits_to_keep": keep,
            self.cache_name or "": cache,
        }
        arguments = {
            name: value
            for name, value in wanted.items()
            if value is not None and (name in self.parameters or name == "return_dict")
        }
        slicing = keep is not None and "logits_to_keep" not in self.parameters
        with torch.no_grad(), captured(self.model, taps) as states, sliced_head(self.model, keep if slicing else None):
            out = self.model(input_ids=ids.to(self.device), **arguments)
        tapped = torch.cat([states[tap].to(self.device) for tap in taps], dim=-1) if taps else None
        logits = out.logits
        if (
            slicing
            and keep is not None
            and logits.shape[1] == ids.shape[1] != (keep if isinstance(keep, int) else len(keep))
        ):
            logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[0] != ids.shape[0]:
            raise UnsupportedError("its logits are not one row of scores per token")
        return logits, tapped, out.get(self.cache_name) if use_cache and self.cache_name else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of layers: the only ModuleList of the text model as long as its ``num_hidden_layers``."""
    wanted = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UnsupportedError(f"{type(model).__name__}: no list of {wanted} decoder layers found to read states from")


@contextmanager
def captured(model: PreTrainedModel, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record the states after the given layers during the passes made inside, by this thread alone.

    As in ``output_hidden_states``, the state of the last layer is the one after the final norm. Only tapped states are
    kept, so the cost does not grow with depth.
    """
    states: dict[int, Tensor] = {}
    if not taps:
        yield states
        return
    me = threading.get_ident()
    layers = decoder_layers(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model

    def record(tap: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() == me:
                states[tap] = (
                    output[0] if isinstance(output, (tuple, list)) else getattr(output, "last_hidden_state", output)
                )

        return hook

    handles = []
    try:
        for tap in taps:
            module = decoder if tap == len(layers) - 1 else layers[tap]
            handles.append(module.register_forward_hook(record(tap)))
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def sliced_head(model: PreTrainedModel, keep: Keep | None) -> Iterator[None]:
    """Let the output head see only the inputs in ``keep``, for models whose forward has no ``logits_to_keep``."""
    head = model.get_output_embeddings() if keep is not None else None
    if head is None or keep is None:
        yield
        return
    me = threading.get_ident()

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        states = inputs[0]
        if threading.get_ident() != me or states.dim() != 3:
            return None
        index = slice(-keep, None) if isinstance(keep, int) else keep.to(states.device)
        return (states[:, index], *inputs[1:])

    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
