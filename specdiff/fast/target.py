"""``FastTarget``: the target on packed CPU kernels, for models of the common decoder pattern."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.errors import UnsupportedError
from specdiff.fast.packed import PackedModel, pack_model
from specdiff.fast.recognise import NotRecognisedError, recognise
from specdiff.fast.state import FastState
from specdiff.fingerprint import Fingerprint, fingerprint
from specdiff.target import Target

log = logging.getLogger(__name__)

PROBE = 13
"""Tokens of the forward pass that is compared with the stock model's."""
TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit (at least 1), that kernels may cause."""

_LOCK = threading.Lock()
_PACKED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Fingerprint, PackedModel]]
_PACKED = weakref.WeakKeyDictionary()


class FastTarget(Target):
    """A target whose passes run on packed copies of the weights. Same interface as :class:`specdiff.target.Target`.

    The model is only read. Its parts are recognised from its modules, and the result is compared with the stock
    forward pass before it is used, so a model that is not what it looks like is refused, never computed wrongly.
    Packed copies cost half of the model's float32 memory where float16 holds the weights exactly, and all of it
    elsewhere. Weights that change afterwards are noticed at the next request and packed again.

    Args:
        model: the target.

    Raises:
        UnsupportedError: the model is not of the pattern; the message says why. :meth:`supports` asks without packing.
    """

    name = "fast"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.packed()

    @staticmethod
    def supports(model: PreTrainedModel) -> str | None:
        """None when the fast path can serve ``model`` as far as its modules tell, otherwise the reason why not."""
        try:
            recognise(model)
        except NotRecognisedError as error:
            return str(error)
        return None

    def refuses(self, capacity: int, seen: Fingerprint | None = None) -> str | None:
        """Why a request of ``capacity`` columns per row cannot take the fast path, or None; ``seen`` as in
        :meth:`open`."""
        try:
            return _too_long(self.packed(seen), capacity)
        except UnsupportedError as error:
            return str(error)

    def packed(self, seen: Fingerprint | None = None) -> PackedModel:
        """The packed model, packed again when the model's weights have changed. All targets of one model share it."""
        with _LOCK:
            seen = fingerprint(self.model) if seen is None else seen
            held = _PACKED.get(self.model)
            if held is None or held[0] != seen:
                _PACKED.pop(self.model, None)  # release the old copies before new ones are made
                held = (seen, _checked(self.model))
                _PACKED[self.model] = held
            return held[1]

    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self.packed().weight_bytes

    def open(self, batch: int, capacity: int, taps: Sequence[int] = (), seen: Fingerprint | None = None) -> FastState:
        """Start a request of ``batch`` rows that needs at most ``capacity`` columns.

        Args:
            batch: rows.
            capacity: columns.
            taps: layers.
            seen: the model's fingerprint as it is now, which takes a millisecond or more; None takes it.

        Raises:
            UnsupportedError: the request does not fit; :meth:`refuses` asks beforehand.
        """
        packed = self.packed(seen)
        why = _too_long(packed, capacity)
        if why is not None:
            raise UnsupportedError(f"the fast path cannot serve this: {why}; use fast='auto' or fast='off'")
        self._check_taps(taps)
        return FastState(packed, batch, capacity, tuple(taps))


def _too_long(packed: PackedModel, capacity: int) -> str | None:
    window = packed.parts.window
    if window is not None and capacity > window:
        return f"the request may reach {capacity} tokens, past the attention window of {window}"
    return None


def _checked(model: PreTrainedModel) -> PackedModel:
    """Recognise, pack and compare.

    Raises:
        UnsupportedError: with the reason.
    """
    try:
        parts = recognise(model)
        _check_memory(model)
        packed = pack_model(parts)
        difference, size = compare(model, packed)
    except NotRecognisedError as error:
        raise UnsupportedError(f"no fast path for {type(model).__name__}: {error}") from None
    if not difference <= TOLERANCE * max(1.0, size):
        raise UnsupportedError(
            f"no fast path for {type(model).__name__}: it looks familiar, but its own forward pass differs "
            f"by {difference:.2g} in logits up to {size:.3g}"
        )
    log.info("fast path for %s: kernels %s, logits within %.2g", type(model).__name__, packed.kernels, difference)
    return packed


def _check_memory(model: PreTrainedModel) -> None:
    """Leave the fast path alone when packed copies would take most of what is free (known on Linux only)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if needed > free // 2:
        raise NotRecognisedError(
            f"its packed weights may take {needed / 1e9:.1f} GB and only {free / 1e9:.1f} GB of memory are free"
        )


def compare(model: PreTrainedModel, packed: PackedModel) -> tuple[float, float]:
    """Largest difference of a logit between the stock pass and the packed one, and the largest logit.

    The packed pass runs in two steps over its cache, two rows, the first one advanced further than the second.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, packed.parts.head.out_features, (2, PROBE), generator=generator)
    with torch.no_grad():
        stock = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits.float()
    state = FastState(packed, 2, PROBE, ())
    cut = (8, 5)
    head = state.forward(tokens[:, : cut[0]], torch.tensor(cut)).logits
    state.advance(cut)
    rest = torch.stack([tokens[0, cut[0] :], tokens[1, cut[1] : cut[1] + PROBE - cut[0]]])
    tail = state.forward(rest, torch.full((2,), rest.shape[1])).logits
    assert head is not None and tail is not None
    pairs: list[tuple[Tensor, Tensor]] = []
    for row, at in enumerate(cut):
        pairs += [(stock[row, :at], head[row, :at]), (stock[row, at : at + rest.shape[1]], tail[row])]
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    return difference, float(stock.abs().max())
