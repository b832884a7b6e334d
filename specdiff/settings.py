"""Which arguments of Hugging Face's ``generate`` are honoured, which have no effect, and which are refused.

Every field of transformers' ``GenerationConfig`` is in exactly one of three tables. Refused fields, and fields that no
table knows, raise when they hold anything but their neutral value. A field that only tunes a mode which is off (beam
search, assisted decoding) has no effect in plain decoding either; it is reported as a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdiff.errors import UnsupportedError

_PROCESSOR = "a logits processor built by transformers"
_STOP = "a stopping criterion built by transformers"

HONOURED: dict[str, str] = {
    "max_length": _STOP,
    "max_new_tokens": _STOP,
    "max_time": _STOP,
    "stop_strings": _STOP,
    "eos_token_id": _STOP,
    "min_length": _PROCESSOR,
    "min_new_tokens": _PROCESSOR,
    "do_sample": "chooses greedy or sampling",
    "temperature": _PROCESSOR,
    "top_k": _PROCESSOR,
    "top_p": _PROCESSOR,
    "min_p": _PROCESSOR,
    "top_h": _PROCESSOR,
    "typical_p": _PROCESSOR,
    "epsilon_cutoff": _PROCESSOR,
    "eta_cutoff": _PROCESSOR,
    "repetition_penalty": _PROCESSOR,
    "encoder_repetition_penalty": _PROCESSOR,
    "no_repeat_ngram_size": _PROCESSOR,
    "encoder_no_repeat_ngram_size": _PROCESSOR,
    "bad_words_ids": _PROCESSOR,
    "renormalize_logits": _PROCESSOR,
    "forced_bos_token_id": _PROCESSOR,
    "forced_eos_token_id": _PROCESSOR,
    "remove_invalid_values": _PROCESSOR,
    "exponential_decay_length_penalty": _PROCESSOR,
    "suppress_tokens": _PROCESSOR,
    "begin_suppress_tokens": _PROCESSOR,
    "sequence_bias": _PROCESSOR,
    "guidance_scale": "a stateful logits processor built by transformers",
    "watermarking_config": _PROCESSOR,
    "num_return_sequences": "transformers repeats the prompts before the loop starts",
    "output_scores": "processed scores of every new token",
    "output_logits": "raw logits of every new token",
    "return_dict_in_generate": "GenerateDecoderOnlyOutput with stats",
    "pad_token_id": "fills rows that ended early",
    "bos_token_id": "the prompt when none is given",
    "prefill_chunk_size": "prompt tokens per pass (1024 without it)",
}
"""Field -> how it is honoured."""

_BEAMS = "it belongs to beam search"
_ASSIST = "it tunes transformers' own assisted decoding; use block_size= and the drafter's settings"
_CACHE = "it sizes transformers' own caches; specdiff sizes its own"
_COMPILE = "it concerns transformers' compiled static-cache decoding; use SpecDiff(fast=)"
_INTERNAL = "a mark that transformers keeps for itself"

WITHOUT_EFFECT: dict[str, str] = {
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "num_assistant_tokens": _ASSIST,
    "num_assistant_tokens_schedule": _ASSIST,
    "assistant_confidence_threshold": _ASSIST,
    "assistant_lookbehind": _ASSIST,
    "target_lookbehind": _ASSIST,
    "max_matching_ngram_size": _ASSIST,
    "use_cache": "specdiff always keeps its cache; the text is the same",
    "cache_config": _CACHE,
    "max_cache_len": _CACHE,
    "compile_config": _COMPILE,
    "disable_compile": _COMPILE,
    "low_memory": "it belongs to contrastive search",
    "continuous_batching_config": "it belongs to generate_batch",
    "decoder_start_token_id": "it belongs to encoder-decoder models",
    "_from_model_config": _INTERNAL,
    "transformers_version": _INTERNAL,
}
"""Field -> why it changes nothing."""

_NO_BEAMS = (
    "specdiff samples or takes the argmax, without beams; set num_beams=1 and leave the other beam options unset"
)
_OWN_DRAFTER = "specdiff drafts with its own drafter; leave it unset and choose the drafter in SpecDiff(ar, drafter)"
_NOT_KEPT = "the states of a drafted block are not kept; call the model on the finished sequences instead"
_OTHER_SEARCH = "that is another decoding method; leave it unset, or call the model's own generate"

REFUSED: dict[str, str] = {
    "num_beams": _NO_BEAMS,
    "num_beam_groups": _NO_BEAMS,
    "diversity_penalty": _NO_BEAMS,
    "constraints": _NO_BEAMS,
    "force_words_ids": _NO_BEAMS,
    "penalty_alpha": _OTHER_SEARCH,
    "dola_layers": _OTHER_SEARCH,
    "use_mtp": _OWN_DRAFTER,
    "prompt_lookup_num_tokens": 'specdiff has its own prompt lookup; leave it unset and use SpecDiff(ar, "lookup")',
    "assistant_early_exit": _OWN_DRAFTER,
    "assistant_ensemble_weight": "it gives up the target's distribution, which specdiff keeps; leave it unset",
    "speculation_type": _OWN_DRAFTER,
    "is_assistant": "a SpecDiff is the target, not an assistant; leave it unset",
    "output_attentions": _NOT_KEPT,
    "output_hidden_states": _NOT_KEPT,
    "cache_implementation": "specdiff brings its own cache; leave it unset",
    "token_healing": "heal the prompt first with model.heal_tokens(input_ids, tokenizer), then leave it unset",
}
"""Field -> why it is refused and what to do."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "cache_implementation": ("dynamic", "dynamic_full"),
    "constraints": ([],),
    "force_words_ids": ([],),
}
"""Values besides None that ask for nothing. Booleans: False does, but for use_cache, where True does."""


def is_neutral(name: str, value: Any) -> bool:
    """True if ``value`` of the field ``name`` asks for nothing."""
    if value is None:
        return True
    if isinstance(value, bool):
        return value is (name == "use_cache")
    return value in _NEUTRAL.get(name, ())


def check_generation_config(generation_config: GenerationConfig, *, model: Any = None) -> list[str]:
    """Refuse what cannot be served right, before anything is computed.

    Args:
        generation_config: the merged configuration of this call.
        model: the target. Entries that are no fields of ``GenerationConfig`` at all pass if they come unchanged from
            ``model.generation_config`` (a file with extra keys); transformers ignores those, too.

    Returns:
        Notes, one for each field that is set but has no effect.

    Raises:
        UnsupportedError: names the field, its value and what to do instead.
    """
    notes: list[str] = []
    for name, value in sorted(vars(generation_config).items()):
        if name in HONOURED or is_neutral(name, value):
            continue
        if name in REFUSED:
            raise UnsupportedError(f"{name}={_show(value)} is not supported: {REFUSED[name]}")
        if name in WITHOUT_EFFECT:
            if WITHOUT_EFFECT[name] != _INTERNAL:
                notes.append(f"{name}={_show(value)} has no effect: {WITHOUT_EFFECT[name]}")
            continue
        if name.startswith("_"):  # tensors and marks that transformers prepares for the loop
            continue
        if _inherited(name, value, model):
            notes.append(f"{name}={_show(value)} from the model's generation config is ignored, as transformers does")
            continue
        raise UnsupportedError(
            f"{name}={_show(value)} is not known to specdiff, so it cannot be honoured; remove it from the call or "
            f"from the generation config"
        )
    return notes


_CALL_REFUSED: dict[str, str] = {
    "assistant_model": _OWN_DRAFTER,
    "assistant_tokenizer": _OWN_DRAFTER,
    "synced_gpus": "ranks would have to run the same number of rounds; use one process per replica",
    "custom_generate": "SpecDiff is the decoding loop; call the model's own generate for another one",
}


def check_call(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of ``generate`` itself, which the loop that transformers calls would never see.

    Args:
        kwargs: keyword arguments of ``SpecDiff.generate`` as the user gave them.

    Raises:
        UnsupportedError: names the argument and what to do instead.
    """
    for name, reason in _CALL_REFUSED.items():
        if kwargs.get(name):
            raise UnsupportedError(f"{name} is not supported: {reason}")
    for name in REFUSED:
        if name in kwargs and not is_neutral(name, kwargs[name]):
            raise UnsupportedError(f"{name}={_show(kwargs[name])} is not supported: {REFUSED[name]}")


_CACHES = ("cache", "past_key_values", "cache_params")
_INERT = frozenset(
    {"use_cache", "logits_to_keep", "cache_position", "return_dict", "output_attentions", "output_hidden_states"}
)


def check_model_kwargs(model_kwargs: Mapping[str, Any]) -> list[str]:
    """Check what ``generate`` would pass on to the model's forward.

    Taken: a 2-D ``attention_mask`` whose last column is unmasked, the default ``position_ids``, an empty cache. Inert:
    ``use_cache``, ``logits_to_keep``, ``cache_position``, ``return_dict``. Anything else that is not None is refused.

    Args:
        model_kwargs: the keyword arguments that reach the decoding loop besides those it names.

    Returns:
        Notes.

    Raises:
        UnsupportedError: names the argument and what to do instead.
    """
    notes: list[str] = []
    mask = model_kwargs.get("attention_mask")
    for name, value in model_kwargs.items():
        if value is None or value is False:
            continue
        if name == "mm_encoder_outputs" and not value:  # generate adds an empty one to text-only calls
            continue
        if name == "attention_mask":
            _check_mask(value)
        elif name == "position_ids":
            _check_positions(value, mask)
        elif name in _CACHES:
            notes += _check_cache(name, value)
        elif name in ("output_attentions", "output_hidden_states"):
            raise UnsupportedError(f"{name}=True is not supported: {_NOT_KEPT}")
        elif name in _CALL_REFUSED:
            raise UnsupportedError(f"{name} is not supported: {_CALL_REFUSED[name]}")
        elif name not in _INERT:
            raise UnsupportedError(
                f"{name} is not supported: specdiff decodes from input_ids alone; pass token ids only"
            )
    return notes


def _check_mask(mask: Tensor) -> None:
    if mask.dim() != 2:
        raise UnsupportedError(f"attention_mask must be 2-D [batch, length], got shape {tuple(mask.shape)}")
    if not bool((mask[:, -1] != 0).all()):
        raise UnsupportedError(
            "attention_mask masks the last token of a row: the prompt is padded on the right (or ends with the padding "
            "token); use padding_side='left' and pass the tokenizer's attention_mask"
        )


def _check_positions(positions: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        default = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    else:
        default = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0).to(positions.device)
        if positions.shape != default.shape:
            default = default.new_full(positions.shape, -1)
    used = torch.ones_like(default, dtype=torch.bool) if mask is None else (mask != 0).to(positions.device)
    if positions.shape != used.shape or not torch.equal(positions[used], default[used]):
        raise UnsupportedError("position_ids other than the default ones are not supported; leave them out")


def _check_cache(name: str, cache: Any) -> list[str]:
    try:
        filled = int(cache.get_seq_length()) > 0
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        previous = getattr(cache, "has_previous_state", False)  # caches of recurrent layers alone have no length
        filled = bool(previous() if callable(previous) else previous)
    if filled:
        raise UnsupportedError(
            f"{name} already holds tokens, and specdiff cannot continue from a foreign cache; use SpecDiff.session() "
            f"to keep the cache between calls"
        )
    if getattr(cache, "_is_user_defined", False):
        return [f"the empty {name} that was passed in stays empty: specdiff keeps its own cache"]
    return []


def _inherited(name: str, value: Any, model: Any) -> bool:
    own = getattr(model, "generation_config", None)
    if own is None or name in vars(GenerationConfig()):
        return False
    return hasattr(own, name) and getattr(own, name) == value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
