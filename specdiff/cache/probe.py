"""Find out, on a dozen tokens, how a model can be served right; refuse it by name when it cannot.

No table of architectures: every candidate way of serving runs a ragged prefill, a block of which only a part is
accepted, and the block after it, and must give the logits of the stock model's uncached pass over the same tokens. The
first candidate that does is taken. The cost is one uncached pass over 8 tokens for two rows, and five passes over 1 to
4 tokens for each candidate tried (the first one in nearly all models); it is paid once per model object.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from specdiff.cache.kinds import LayerPlan, hides_a_window, kinds_in_words, layer_plans
from specdiff.cache.passes import ModelCall
from specdiff.cache.states import GroupedState, RaggedState, Serving
from specdiff.errors import UnsupportedError

logger = logging.getLogger(__name__)

LENGTH = 8
"""Tokens per row of the probe."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest allowed difference, as a share of the spread of the logits."""


class _State(Protocol):
    def forward(self, tokens: Tensor, counts: Tensor, *, head: str | None = "all") -> object: ...


def find_serving(call: ModelCall, open_state: Callable[[Serving, int, int], RaggedState | GroupedState]) -> Serving:
    """The first way of serving that reproduces the uncached pass.

    Args:
        call: the model.
        open_state: ``(serving, batch, capacity)`` to a fresh state.

    Raises:
        UnsupportedError: none does, or the uncached pass itself is not causal; says what was found.
    """
    plans = layer_plans(call.model.config)
    if call.device.type == "meta":
        return next(_candidates(call, plans))
    name = type(call.model).__name__
    if (lacks := cache_fault(call)) is not None:
        raise UnsupportedError(
            f"{name} cannot be a target: transformers cannot make a cache for its configuration ({lacks}), "
            "so its own generate fails as well"
        )
    with _quiet():
        tokens = probe_tokens(call)
        reference = _reference(call, name, tokens)
        found: list[str] = []
        for serving in _candidates(call, plans):
            try:
                gap = _gap(open_state(serving, 2, 2 * LENGTH), tokens, reference)
                allowed = TOLERANCE.get(call.model.dtype, 1e-1)
                if allowed > 1e-3 and not serving.stepwise and any(plan.states for plan in serving.plans):
                    # In half precision a dropped state can hide in the rounding: single steps show how large that is.
                    single = _gap(open_state(replace(serving, stepwise=True), 2, 2 * LENGTH), tokens, reference)
                    allowed = min(allowed, max(3 * single, 1e-3))
            except Exception as error:
                found.append(f"{serving.words}: {type(error).__name__}: {_short(error)}")
                continue
            if gap <= allowed:
                if found:
                    logger.info("%s is served %s; %s", name, serving.words, "; ".join(found))
                return serving
            found.append(f"{serving.words}: off by {gap:.2g} of the logits' spread")
    hint = "; it is in training mode, call model.eval() first" if call.model.training else ""
    raise UnsupportedError(
        f"{name} cannot be a target: no way of running it with a cache ({kinds_in_words(plans)}) gives the logits of "
        f"its own uncached pass{hint} ({'; '.join(found)}); use plain generate for it"
    )


def check_state(call: ModelCall, state: RaggedState) -> None:
    """Try a fresh state of two rows, ``2 * LENGTH`` columns each, in the same way.

    Raises:
        UnsupportedError: its passes differ from the uncached one; says by how much.
    """
    with _quiet():
        tokens = probe_tokens(call)
        gap = _gap(state, tokens, _reference(call, type(call.model).__name__, tokens))
    if not gap <= TOLERANCE.get(call.model.dtype, 1e-1):
        raise UnsupportedError(f"its recorded passes are off by {gap:.2g} of the logits' spread")


def cache_fault(call: ModelCall) -> str | None:
    """What a configuration lacks that transformers' default cache asks it for, which ``generate`` then fails on."""
    if call.cache_name not in ("cache", "past_key_values"):
        return None
    try:
        DynamicCache(config=call.model.config)
    except AttributeError as error:
        return _short(error)
    except (KeyError, TypeError, ValueError):  # models with a cache of their own make it themselves
        return None
    return None


def probe_tokens(call: ModelCall) -> Tensor:
    """``Long[2, LENGTH]`` ids that mean nothing special to the model."""
    config = call.model.config
    text = config.get_text_config()
    special: set[int] = set()
    for part in (config, text, call.model.generation_config):
        for key, value in (part.to_dict() if part is not None else {}).items():
            if key.endswith(("_token_id", "_token_index", "_token")):
                special.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    usable = [token for token in range(min(text.vocab_size, 4096)) if token not in special] or list(
        range(text.vocab_size)
    )
    picks = [usable[(7 + 37 * at + 11 * at * at) % len(usable)] for at in range(2 * LENGTH)]
    return torch.tensor(picks, device=call.device).view(2, LENGTH)


def _reference(call: ModelCall, name: str, tokens: Tensor) -> Tensor:
    """Uncached logits ``[2, LENGTH, V]``; refuses models whose pass fails or looks ahead."""
    try:
        logits = torch.cat([call.uncached(row)[0] for row in tokens.split(1)])
        short = call.uncached(tokens[:1, : LENGTH // 2])[0]
    except Exception as error:
        raise UnsupportedError(
            f"{name} cannot be a target: its plain pass over text alone fails ({type(error).__name__}: {_short(error)})"
        ) from error
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise UnsupportedError(
            f"{name} cannot be a target: its logits have shape {tuple(logits.shape)}, not one row per token"
        )
    logits = logits.float()
    gap = _difference(short[0].float(), logits[0, : LENGTH // 2], logits)
    if gap > 10 * TOLERANCE.get(call.model.dtype, 1e-1):
        why = (
            "it is in training mode: call model.eval()"
            if call.model.training
            else "load it as a decoder (is_decoder=True)"
        )
        raise UnsupportedError(
            f"{name} cannot be a target: its logits at a position change with the tokens after it (by {gap:.2g} of "
            f"their spread), so it is not causal here; {why}"
        )
    return logits


def _candidates(call: ModelCall, plans: list[LayerPlan] | None) -> Iterator[Serving]:
    """Ways of serving, fastest first."""
    own = tuple(plans or ())
    recurrent = any(plan.states for plan in own)
    attention = {(plan.attention, plan.window) for plan in own if plan.attention}
    ragged = []
    apart = not hides_a_window(call.model.config, plans)
    if own and apart and ({"attention_mask", "position_ids"} <= call.parameters or not attention):
        if len(attention) < 2:
            ragged.append(Serving("ragged", plans=own))
        if attention:
            ragged.append(Serving("ragged", by_type=True, plans=own))
    rows = [Serving("rows", plans=own, padding_mask=padding) for padding in (True, False)] if own else []
    foreign = []
    if call.cache_name is not None:
        makers = (False, True) if plans is not None else (True, False)
        foreign = [Serving("foreign", padding_mask=pad, own_cache=own) for own in makers for pad in (True, False)]
    yield from [*ragged, *rows]
    if recurrent:
        yield from (replace(serving, stepwise=True) for serving in [*ragged, *rows])
    yield from foreign
    yield from (replace(serving, stepwise=True) for serving in foreign)
    yield Serving("uncached")


def _gap(state: RaggedState | GroupedState, tokens: Tensor, reference: Tensor) -> float:
    """Largest difference to the reference over a ragged prefill, a partly rejected block and what follows."""
    device = tokens.device
    junk = tokens.flip(0).roll(1, dims=1)
    gaps = []

    def run(parts: list[tuple[int, int, int]]) -> None:
        """One pass; each row gives (start, tokens that are true, tokens that are not)."""
        width = max(true + false for _, true, false in parts)
        ids = torch.zeros(2, width, dtype=torch.long, device=device)
        for row, (start, true, false) in enumerate(parts):
            ids[row, :true] = tokens[row, start : start + true]
            ids[row, true : true + false] = junk[row, :false]
        counts = torch.tensor([true + false for _, true, false in parts], device=device)
        result = state.forward(ids, counts)
        assert result.logits is not None
        for row, (start, true, _) in enumerate(parts):
            gaps.append(_difference(result.logits[row, :true], reference[row, start : start + true], reference))
        state.advance([true for _, true, _ in parts])

    try:
        run([(0, 3, 0), (0, 2, 0)])
        run([(3, 1, 2), (2, 3, 0)])
        run([(4, 2, 0), (5, 1, 1)])
        run([(6, 1, 0), (6, 1, 0)])
        run([(7, 1, 0), (7, 1, 0)])
    finally:
        state.close()
    return max(gaps)


def _difference(got: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """Largest difference as a share of the spread of all logits; infinite where one of the two is NaN."""
    spread = float(scale[torch.isfinite(scale)].std()) if torch.isfinite(scale).any() else 1.0
    same = got == wanted
    gap = torch.where(same, torch.zeros_like(got), (got - wanted.to(got.device)).abs()).max()
    value = float(gap) / max(spread, 1e-12)
    return value if value == value else float("inf")


@contextmanager
def _quiet() -> Iterator[None]:
    """Stock code warns about odd inputs during the trials; none of that concerns the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:157] + "..."
