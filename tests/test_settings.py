"""Every argument of generate is honoured, has no effect, or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

from specdiff.errors import UnsupportedError
from specdiff.settings import (
    HONOURED,
    REFUSED,
    WITHOUT_EFFECT,
    check_call,
    check_generation_config,
    check_model_kwargs,
    is_neutral,
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


class Captured(Exception):
    """Carries what reaches a decoding loop."""

    def __init__(self, config: GenerationConfig, kwargs: dict) -> None:
        self.config, self.kwargs = config, kwargs


def prepared(model: LlamaForCausalLM, ids: torch.Tensor | None = None, **kwargs) -> Captured:
    """The configuration and model arguments that transformers hands to a loop."""

    def callee(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        raise Captured(generation_config, model_kwargs)

    with pytest.raises(Captured) as caught:
        model.generate(
            torch.tensor([[1, 5, 6]]) if ids is None else ids, custom_generate=callee, **{"max_new_tokens": 4} | kwargs
        )
    return caught.value


def test_every_field_is_in_exactly_one_table():
    for name in vars(GenerationConfig()):
        if name.startswith("_") and name != "_from_model_config":
            continue
        places = [name in HONOURED, name in WITHOUT_EFFECT, name in REFUSED]
        assert sum(places) == 1, f"GenerationConfig.{name} is in {sum(places)} tables"
    names = [*HONOURED, *WITHOUT_EFFECT, *REFUSED]
    assert len(names) == len(set(names))


def test_transformers_defaults_ask_for_nothing(model):
    assert check_generation_config(GenerationConfig(), model=model) == []
    assert check_generation_config(prepared(model).config, model=model) == []
    for name, value in GenerationConfig._get_default_generation_params().items():
        assert name in HONOURED or is_neutral(name, value), name


VALUES = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["a"],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "is_assistant": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "cache_implementation": "static",
    "token_healing": True,
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_named_with_their_value_and_a_remedy(name, model):
    config = prepared(model).config
    setattr(config, name, VALUES[name])
    with pytest.raises(UnsupportedError) as caught:
        check_generation_config(config, model=model)
    text = str(caught.value)
    assert text.startswith(f"{name}={VALUES[name]!r}") and REFUSED[name] in text
    with pytest.raises(UnsupportedError, match=name):
        check_call({name: VALUES[name]})
    check_call({name: None})


NO_EFFECT = {
    "early_stopping": True,
    "length_penalty": 0.5,
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "max_matching_ngram_size": 4,
    "use_cache": False,
    "cache_config": {"a": 1},
    "max_cache_len": 64,
    "compile_config": object(),
    "disable_compile": True,
    "low_memory": True,
    "continuous_batching_config": object(),
    "decoder_start_token_id": 1,
}


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_fields_without_effect_become_a_note(name, model):
    config = prepared(model).config
    setattr(config, name, NO_EFFECT[name])
    notes = check_generation_config(config, model=model)
    assert len(notes) == 1 and notes[0].startswith(f"{name}=") and "no effect" in notes[0]
    assert set(NO_EFFECT) | {"_from_model_config", "transformers_version"} == set(WITHOUT_EFFECT)


def test_unlisted_values_are_refused_unless_the_model_file_brought_them(model):
    config = prepared(model).config
    config.brand_new_field = 3
    with pytest.raises(UnsupportedError, match="brand_new_field=3"):
        check_generation_config(config, model=model)
    with pytest.raises(UnsupportedError, match="brand_new_field=3"):
        check_generation_config(config)
    config.brand_new_field = None
    assert check_generation_config(config, model=model) == []
    other = copy.deepcopy(model)
    other.generation_config.chat_format = "chatml"
    config = prepared(other).config
    assert config.chat_format == "chatml"
    (note,) = check_generation_config(config, model=other)
    assert "chat_format" in note
    config.chat_format = "raw"
    with pytest.raises(UnsupportedError, match="chat_format='raw'"):
        check_generation_config(config, model=other)


def test_a_field_of_a_later_transformers_is_refused_even_from_the_model_file(model, monkeypatch):
    monkeypatch.delitem(HONOURED, "top_h")
    other = copy.deepcopy(model)
    other.generation_config.top_h = 0.4
    with pytest.raises(UnsupportedError, match=r"top_h=0\.4"):
        check_generation_config(prepared(other).config, model=other)


@pytest.mark.parametrize("name", ["assistant_model", "assistant_tokenizer", "synced_gpus", "custom_generate"])
def test_arguments_of_generate_itself(name):
    with pytest.raises(UnsupportedError, match=name):
        check_call({name: object()})
    check_call({name: None, "max_new_tokens": 3})


def test_what_transformers_prepares_is_taken(model):
    padded = torch.tensor([[0, 0, 5], [1, 5, 6]])
    for kwargs in (
        {},
        {"ids": padded},
        {"ids": padded, "attention_mask": padded.ne(0).long()},
        {"ids": padded, "attention_mask": padded.ne(0), "do_sample": True, "num_return_sequences": 2},
        {"use_cache": False},
        {"ids": padded, "attention_mask": padded.ne(0).long(), "position_ids": torch.tensor([[7, 7, 0], [0, 1, 2]])},
    ):
        assert check_model_kwargs(prepared(model, **kwargs).kwargs) == []


def test_the_callers_empty_cache_is_taken_with_a_note_and_a_filled_one_refused(model):
    cache = DynamicCache(config=model.config)
    (note,) = check_model_kwargs(prepared(model, cache=cache).kwargs)
    assert "stays empty" in note
    with torch.no_grad():
        model(torch.tensor([[1, 5]]), cache=cache)
    with pytest.raises(UnsupportedError, match=r"session\(\)"):
        check_model_kwargs(prepared(model, cache=cache).kwargs)


def test_other_masks_and_positions_are_refused():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    with pytest.raises(UnsupportedError, match="padding_side"):
        check_model_kwargs({"attention_mask": mask})
    with pytest.raises(UnsupportedError, match="2-D"):
        check_model_kwargs({"attention_mask": torch.ones(2, 1, 3, 3)})
    for positions in ([[1, 2, 3]], [[0, 1, 1]]):
        with pytest.raises(UnsupportedError, match="position_ids"):
            check_model_kwargs({"position_ids": torch.tensor(positions), "attention_mask": None})
    left = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(UnsupportedError, match="position_ids"):
        check_model_kwargs({"attention_mask": left, "position_ids": torch.arange(3).expand(2, 3)})
    with pytest.raises(UnsupportedError, match="position_ids"):
        check_model_kwargs({"attention_mask": left, "position_ids": torch.arange(3)[None]})


@pytest.mark.parametrize(
    "name",
    [
        "inputs_embeds",
        "encoder_outputs",
        "pixel_values",
        "token_type_ids",
        "output_attentions",
        "synced_gpus",
        "labels",
    ],
)
def test_model_arguments_that_the_loop_would_drop_are_refused(name):
    with pytest.raises(UnsupportedError, match=name):
        check_model_kwargs({name: True})
    assert check_model_kwargs({name: None}) == []
