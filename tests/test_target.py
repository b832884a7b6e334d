"""The target adapter: which rows the head computes, which states are kept, where it ends, what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdiff import SpecDiff
from specdiff.cache.ragged import RaggedLayer
from specdiff.compat.family import default_model
from specdiff.compat.tiny import FIRST_ORDINARY_ID, VOCABULARY
from specdiff.errors import UnsupportedError
from specdiff.target import Target
from specdiff.testing import ReplayDrafter

model_of = functools.cache(default_model)


def prompt(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded random prompts and their mask."""
    generator = torch.Generator().manual_seed(3)
    width = max(sizes)
    ids = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (len(sizes), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(sizes)[:, None]
    return ids.masked_fill(~mask, 0), mask.long()


def greedy_texts(model: Any, ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """``transformers``' own greedy text of each row alone: ``Long[B, new]``."""
    rows = [row[real.bool()][None] for row, real in zip(ids, mask, strict=True)]
    return torch.cat([model.generate(row, max_new_tokens=new, do_sample=False)[:, -new:] for row in rows])


def head_rows(model: Any, run: Any) -> list[int]:
    """Rows per prompt that the output head computed in each of its calls."""
    rows: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, out: rows.append(out.shape[1]))
    try:
        run()
    finally:
        handle.remove()
    return rows


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "bloom", "trocr"])
def test_b50_head_computes_one_row_in_prefill_and_block_plus_one_in_verify(name):
    model = model_of(name)
    ids, mask = prompt(23)
    text = greedy_texts(model, ids, mask, 12)
    sd = SpecDiff(model, ReplayDrafter(text, block_size=3), fast="off")

    def run() -> None:
        out = sd.generate(ids, max_new_tokens=12, do_sample=False, prefill_chunk_size=8)
        assert torch.equal(out[:, 23:], text)

    rows = head_rows(model, run)
    assert rows[:3] == [1, 1, 1]  # three chunks of prefill
    assert rows[3:5] == [4, 4]
    assert max(rows) == 4


def test_b50_ragged_prefill_computes_at_most_one_row_per_prompt_length():
    model = model_of("llama")
    state = Target(model).open(3, 32)
    tokens = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (3, 9))
    rows = head_rows(model, lambda: state.forward(tokens, torch.tensor([9, 4, 9]), head="last"))
    assert rows == [2]


def test_only_tapped_states_are_kept_and_no_hook_stays():
    model = default_model("llama")
    state = Target(model).open(2, 32, taps=(0, 1))
    tokens = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (2, 5))
    result = state.forward(tokens, torch.tensor([5, 3]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():  # leaves hooks of its own
        states = model(tokens[:1], output_hidden_states=True).hidden_states
    assert result.taps.shape == (2, 5, 2 * 32)
    torch.testing.assert_close(result.taps[0], torch.cat([states[1][0], states[2][0]], dim=-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mamba2", "bloom"])
def test_taps_of_rows_that_run_in_groups_are_left_aligned(name):
    model = model_of(name)
    target = Target(model)
    state = target.open(2, 32, taps=(0,))
    tokens = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (2, 6))
    state.forward(tokens[:, :3], torch.tensor([3, 2]))
    state.advance([2, 2])  # the first row's third input did not stand
    result = state.forward(tokens[:, 2:], torch.tensor([4, 2]))
    for row, count in ((0, 4), (1, 2)):
        wanted = target.call.uncached(tokens[row : row + 1, : 2 + count], taps=(0,))[1]
        torch.testing.assert_close(result.taps[row, :count], wanted[0, 2:], atol=1e-4, rtol=1e-4)


def test_unknown_tap_is_refused():
    with pytest.raises(UnsupportedError, match="tap 7 does not exist"):
        Target(model_of("llama")).open(1, 8, taps=(7,))


def test_buffers_grow_and_keep_what_they_hold():
    model = model_of("llama")
    target = Target(model)
    state = target.open(1, 96)
    state.cache.span.capacity = 8
    text = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (1, 40))
    for at in range(0, 40, 5):
        result = state.forward(text[:, at : at + 5], torch.tensor([5]))
        state.advance([5])
        torch.testing.assert_close(
            result.logits[0, -1], target.call.uncached(text[:, : at + 5])[0][0, -1], atol=1e-4, rtol=0
        )
    layer = state.cache.layers[0]
    assert isinstance(layer, RaggedLayer) and layer.keys.shape[2] == 64  # doubled three times, not once per pass


def test_windows_need_no_more_than_window_and_pass():
    model = model_of("mistral")
    state = Target(model).open(2, 4096)
    text = torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (2, 120))
    for at in range(0, 120, 6):
        state.forward(text[:, at : at + 6], torch.tensor([6, 6]))
        state.advance([6, 6])
    assert state.cache.layers[0].keys.shape[2] <= 8 + 6 + 64


def test_rollback_copies_nothing():
    state = Target(model_of("llama")).open(1, 32)
    state.forward(torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (1, 9)), torch.tensor([9]))
    state.advance([9])
    before = state.cache.layers[0].keys
    state.rollback([4])
    assert state.lengths == [4] and state.cache.layers[0].keys is before


def test_a_recurrent_state_that_cannot_go_back_begins_again():
    state = Target(model_of("mamba2")).open(2, 32)
    state.forward(torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (2, 9)), torch.tensor([9, 9]))
    state.advance([9, 5])  # the second row's state is still before its nine inputs
    state.rollback([4, 4])
    assert state.lengths == [0, 4]


def test_near_the_position_limit_the_last_block_shortens():
    model = model_of("gpt2")
    limit = model.config.max_position_embeddings
    ids, mask = prompt(limit - 9, limit - 14)
    text = greedy_texts(model, ids, mask, 9)
    sd = SpecDiff(model, ReplayDrafter(text, block_size=8), fast="off")
    out = sd.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(out[:, -9:], text)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_b24_windows_smaller_and_larger_than_the_block(name, attention):
    model = model_of(name)
    before = model.config._attn_implementation
    if attention == "sdpa" and not model._supports_sdpa:
        attention = "eager"
    model.set_attn_implementation(attention)
    try:
        for size in (5, 8, 30):
            ids, mask = prompt(size)
            text = greedy_texts(model, ids, mask, 24)
            for block, wrong_at in ((4, (2,)), (16, (7,))):
                sd = SpecDiff(model, ReplayDrafter(text, block_size=block, wrong_at=wrong_at), fast="off")
                assert torch.equal(sd.generate(ids, max_new_tokens=24, do_sample=False)[:, size:], text)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "rwkv"])
def test_b25_rejected_drafts_leave_no_trace_in_recurrent_state(name):
    model = model_of(name)
    ids, mask = prompt(7, 4)
    text = greedy_texts(model, ids, mask, 14)
    for block, wrong_at in ((4, (0,)), (4, (1, 3))):
        sd = SpecDiff(model, ReplayDrafter(text, block_size=block, wrong_at=wrong_at), fast="off")
        out = sd.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
        assert torch.equal(out[:, -14:], text)
    if sd.target.serving.stepwise:
        assert "token by token" in sd.notes[0]


def test_encoder_decoder_is_refused_by_name():
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(
        UnsupportedError, match="T5ForConditionalGeneration cannot be a target: it is an encoder-decoder"
    ):
        SpecDiff(T5ForConditionalGeneration(config).eval())


def test_flash_attention_is_refused_naming_sdpa():
    model = default_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="attn_implementation='sdpa'"):
        SpecDiff(model)


def test_a_model_that_looks_ahead_is_refused():
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=1.0,
    )
    with pytest.raises(UnsupportedError, match="not causal"):
        SpecDiff(BertLMHeadModel(config).eval())


def test_dropout_in_training_mode_is_refused_with_the_remedy():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.5,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    with pytest.raises(UnsupportedError, match=r"model\.eval\(\)"):
        SpecDiff(model.train())


def test_probe_runs_once_per_model_object():
    model = default_model("llama")
    calls: list[int] = []
    model.register_forward_hook(lambda module, inputs, out: calls.append(1))
    SpecDiff(model, fast="off")
    first = len(calls)
    SpecDiff(model, fast="off")
    assert 0 < first <= 8 and len(calls) == first


def test_bfloat16_targets_are_served_and_a_dropped_state_is_still_noticed():
    assert Target(default_model("llama").bfloat16()).serving.mode == "ragged"
    assert Target(default_model("mamba").bfloat16()).serving.stepwise


def test_compiled_targets_are_refused_with_the_remedy():
    model = default_model("llama")
    with pytest.raises(UnsupportedError, match="wrap the model before compiling"):
        SpecDiff(torch.compile(model))
    model.compile()
    with pytest.raises(UnsupportedError, match="wrap the model before compiling"):
        SpecDiff(model)


def test_weights_that_accelerate_keeps_elsewhere():
    from accelerate import cpu_offload

    model = default_model("llama")
    ids, mask = prompt(6, 4)
    text = greedy_texts(model, ids, mask, 8)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.device.type == "meta"
    sd = SpecDiff(model, ReplayDrafter(text, block_size=3, wrong_at=(1,)), fast="off")
    assert torch.equal(sd.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, 6:], text)


class Wrapper(torch.nn.Module):
    """What PEFT's wrapper is to callers: forwards everything to the model inside, whose weights may be switched."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def get_base_model(self) -> Any:
        return self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.generate(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)


def test_adapter_wrappers_are_served_and_switched_weights_count_at_once():
    model = Wrapper(default_model("llama")).eval()
    ids, _ = prompt(7)
    mask = torch.ones_like(ids)
    text = greedy_texts(model, ids, mask, 10)
    sd = SpecDiff(model, ReplayDrafter(text, block_size=3, wrong_at=(1,)), fast="off")
    assert torch.equal(sd.generate(ids, max_new_tokens=10, do_sample=False)[:, 7:], text)
    with torch.no_grad():
        model.base.lm_head.weight.mul_(-1)
    other = greedy_texts(model, ids, mask, 10)
    assert not torch.equal(other, text)
    assert torch.equal(sd.generate(ids, max_new_tokens=10, do_sample=False)[:, 7:], other)
