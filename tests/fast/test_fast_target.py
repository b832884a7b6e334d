"""The fast target against the stock model's uncached forward pass, which is always the reference."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from fast_models import COMMON, REFUSED, TAKEN, build
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

from specdiff import SpecDiff, call, session
from specdiff.errors import UnsupportedError
from specdiff.fast import target
from specdiff.fast.state import FastState
from specdiff.fast.target import FastTarget

FAMILIES = sorted(TAKEN)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@functools.cache
def pair(family: str) -> tuple[PreTrainedModel, FastTarget]:
    """Tests must alter neither."""
    model = build(TAKEN[family]())
    return model, FastTarget(model)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, COMMON["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stock(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits ``[T, V]`` and hidden states of one row, uncached."""
    out = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    return out.logits[0], tuple(state[0] for state in out.hidden_states)


def full(rows: int, width: int) -> Tensor:
    return torch.full((rows,), width)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_equal_the_stock_pass(family: str) -> None:
    model, fast = pair(family)
    tokens = ids(30)
    logits, states = stock(model, tokens)
    state = fast.open(1, 64, taps=(0, 2))
    done = 0
    for width in (11, 1, 9, 1, 8):  # a prompt, then rounds of one and of several inputs
        result = state.forward(tokens[None, done : done + width], full(1, width))
        assert result.logits is not None and result.taps is not None
        torch.testing.assert_close(result.logits[0], logits[done : done + width], **CLOSE)
        wanted = torch.cat([states[1], states[3]], -1)[done : done + width]
        torch.testing.assert_close(result.taps[0], wanted, **CLOSE)
        state.advance([width])
        done += width
    assert state.lengths == [30]


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_rollback_and_select(family: str) -> None:
    """Rows advance by different amounts, reject, shrink and leave; each stays equal to its own uncached pass."""
    model, fast = pair(family)
    texts = ids(3, 40, seed=1)
    references = [stock(model, text)[0] for text in texts]
    state = fast.open(3, 48)
    rows = [0, 1, 2]
    wrong = ids(1, 12, seed=2)[0]
    script = [([7, 4, 9], None), ([3, 6, 1], None), ([2, 5, 4], "rollback"), ([4, 1, 6], "select"), ([5, 3], None)]
    for counts, event in script:
        width = max(counts) + 2
        tokens = torch.stack(
            [
                torch.cat([texts[r, n : n + c], wrong])[:width]
                for r, n, c in zip(rows, state.lengths, counts, strict=True)
            ]
        )
        result = state.forward(tokens, torch.tensor(counts))
        assert result.logits is not None
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            begin = state.lengths[at]
            torch.testing.assert_close(result.logits[at, :count], references[row][begin : begin + count], **CLOSE)
        last = state.forward(tokens, torch.tensor(counts), head="last")  # a second pass overwrites the first
        assert last.logits is not None and last.logits.shape[1] == 1
        for at, count in enumerate(counts):
            torch.testing.assert_close(last.logits[at, 0], result.logits[at, count - 1], **CLOSE)
        state.advance(counts)
        if event == "rollback":
            state.rollback([n - d for n, d in zip(state.lengths, (0, 5, 3), strict=True)])
        if event == "select":
            state.select([2, 0])
            rows = [2, 0]
    state.close()


def test_a_row_of_a_batch_equals_the_row_alone() -> None:
    _, fast = pair("smollm")
    texts = ids(2, 12, seed=3)
    both, alone = fast.open(2, 16), fast.open(1, 16)
    together = both.forward(texts, full(2, 12)).logits
    single = alone.forward(texts[1:], full(1, 12)).logits
    assert together is not None and single is not None
    torch.testing.assert_close(together[1], single[0], atol=1e-5, rtol=1e-5)


def test_buffers_grow_and_keep_what_is_committed() -> None:
    model, fast = pair("qwen3")
    tokens = ids(60, seed=4)
    reference = stock(model, tokens)[0]
    state = fast.open(1, 8)
    assert state.columns == 8
    for begin in range(0, 60, 12):
        result = state.forward(tokens[None, begin : begin + 12], full(1, 12))
        assert result.logits is not None
        torch.testing.assert_close(result.logits[0], reference[begin : begin + 12], **CLOSE)
        state.advance([12])
    assert state.columns >= 60


def test_rejected_tokens_move_a_length_and_copy_nothing() -> None:
    _, fast = pair("llama")
    state = fast.open(1, 32)
    state.forward(ids(1, 10), full(1, 10))
    state.advance([3])
    where = [cache.data_ptr() for cache in state.caches]
    state.rollback([2])
    state.forward(ids(1, 4), full(1, 4))
    assert state.lengths == [2] and where == [cache.data_ptr() for cache in state.caches]


def test_head_none_gives_no_logits_and_results_are_ordinary_tensors() -> None:
    _, fast = pair("llama")
    state = fast.open(1, 32, taps=(1,))
    result = state.forward(ids(1, 5), full(1, 5), head=None)
    assert result.logits is None and result.taps is not None
    logits = state.forward(ids(1, 5), full(1, 5)).logits
    assert logits is not None and not logits.is_inference() and not result.taps.is_inference()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_the_model_is_not_altered(family: str) -> None:
    model = build(TAKEN[family](), seed=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [(name, id(module), type(module)) for name, module in model.named_modules()]
    prompt = ids(1, 6)
    text = model.generate(prompt, max_new_tokens=8, do_sample=False)
    fast = FastTarget(model)
    state = fast.open(1, 32, taps=(0,))
    during_pass = state.forward(ids(1, 9), full(1, 9))
    assert during_pass.logits is not None
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), text)
    state.close()
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), text)
    assert modules == [(name, id(module), type(module)) for name, module in model.named_modules()]
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p._version == 0 or torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_changed_weights_are_noticed_at_the_next_request() -> None:
    model = build(TAKEN["llama"](), seed=6)
    fast = FastTarget(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.5)
    result = fast.open(1, 16).forward(ids(1, 7), full(1, 7))
    assert result.logits is not None
    torch.testing.assert_close(result.logits[0], stock(model, ids(1, 7)[0])[0], **CLOSE)
    model.model.layers[0].self_attn.q_proj = nn.Linear(48, 48, bias=False)
    result = fast.open(1, 16).forward(ids(1, 7), full(1, 7))
    assert result.logits is not None
    torch.testing.assert_close(result.logits[0], stock(model, ids(1, 7)[0])[0], **CLOSE)


def test_targets_of_one_model_share_the_copies_and_let_them_go_with_it() -> None:
    model = build(TAKEN["llama"](), seed=7)
    first = FastTarget(model).packed()
    assert FastTarget(model).packed() is first
    gone = weakref.ref(first.layers[0].qkv)
    del first, model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_models_are_refused_by_reason(name: str) -> None:
    config, word = REFUSED[name]
    model = build(config())
    with pytest.raises(UnsupportedError, match="no fast path") as caught:
        FastTarget(model)
    assert word in str(caught.value)


def test_a_hook_or_another_linear_class_is_refused() -> None:
    model = build(TAKEN["llama"]())
    assert FastTarget.supports(model) is None
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "hooks" in str(FastTarget.supports(model))
    handle.remove()
    assert FastTarget.supports(model) is None

    class Adapted(nn.Linear):
        pass

    changed = copy.deepcopy(model)
    changed.model.layers[0].mlp.up_proj.__class__ = Adapted
    assert "Adapted" in str(FastTarget.supports(changed))
    patched = copy.deepcopy(model)
    patched.model.layers[0].mlp.forward = lambda x: x
    assert "replaced forward" in str(FastTarget.supports(patched))


def test_a_hook_added_later_sends_requests_to_the_general_path() -> None:
    model = build(TAKEN["llama"]())
    fast = FastTarget(model)
    assert fast.refuses(32) is None
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert "hooks" in str(fast.refuses(32))
    handle.remove()
    assert fast.refuses(32) is None


def test_a_call_looks_at_the_weights_once(monkeypatch) -> None:
    """Path, packed copies and session share one fingerprint; the next call takes its own, and so sees a change."""
    model = build(TAKEN["llama"]())
    seen: list[int] = []
    for module in (call, session, target):
        real = module.fingerprint
        monkeypatch.setattr(module, "fingerprint", lambda m, real=real: seen.append(1) or real(m))
    wrapped = SpecDiff(model, fast="on")
    keeping = wrapped.session()
    text = ids(1, 6)
    for generate in (wrapped.generate, keeping.generate):
        seen.clear()
        before = generate(text, max_new_tokens=8, do_sample=False)
        assert len(seen) == 1
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        after = generate(text, max_new_tokens=8, do_sample=False)
        assert len(seen) == 2 and not torch.equal(before, after)


def test_bfloat16_and_dropout_in_training_are_refused() -> None:
    model = build(LlamaConfig(**COMMON, attention_dropout=0.1))
    assert FastTarget.supports(model) is None
    assert "eval" in str(FastTarget.supports(model.train()))
    assert "float32" in str(FastTarget.supports(model.eval().to(torch.bfloat16)))


def test_sliding_windows_bound_the_request() -> None:
    model = build(MistralConfig(**COMMON, sliding_window=24))
    fast = FastTarget(model)
    assert fast.refuses(24) is None
    assert "window of 24" in str(fast.refuses(25))
    with pytest.raises(UnsupportedError, match="window of 24"):
        fast.open(1, 40)
    tokens = ids(24)
    result = fast.open(1, 24).forward(tokens[None], full(1, 24))
    assert result.logits is not None
    torch.testing.assert_close(result.logits[0], stock(model, tokens)[0], **CLOSE)


def test_a_wrong_recognition_cannot_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the comparison at construction sees a single wrong scale."""
    import specdiff.fast.packed as packed

    attend = packed.attend
    monkeypatch.setattr(packed, "attend", lambda *a: attend(*a[:-1], a[-1] * 1.05))
    with pytest.raises(UnsupportedError, match="differs"):
        FastTarget(build(TAKEN["llama"]()))


def test_unknown_taps_are_refused() -> None:
    _, fast = pair("llama")
    with pytest.raises(UnsupportedError, match="tap 3"):
        fast.open(1, 16, taps=(3,))


@pytest.mark.model
def test_default_model_greedy_tokens_equal(model_pair) -> None:
    """Greedy text through the fast state, a token at a time and in wide passes, equals plain generate (near-ties
    apart)."""
    model, tokenizer = model_pair
    fast = FastTarget(model)
    for prompt in ("The capital of France is", "def fibonacci(n):\n"):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        count = 20
        text = model.generate(tokens, max_new_tokens=count, do_sample=False, eos_token_id=None)[0]
        logits = stock(model, text)[0]
        top = logits.topk(2, -1).values
        clear = (top[:, 0] - top[:, 1]) > 1e-3
        start = tokens.shape[1]
        narrow, wide = _greedy(fast.open(1, 256), text, start, 1), _greedy(fast.open(1, 256), text, start, 9)
        for got in (narrow, wide):
            assert torch.equal(got[clear[start - 1 : -1]], text[start:][clear[start - 1 : -1]])


def _greedy(state: FastState, text: Tensor, start: int, width: int) -> Tensor:
    """Argmax after each position of ``text`` from ``start - 1`` on, in passes of ``width`` inputs."""
    first = state.forward(text[None, :start], full(1, start), head="last").logits
    assert first is not None
    state.advance([start])
    found = [first[0].argmax(-1)]
    for at in range(start, len(text) - 1, width):
        piece = text[None, at : min(at + width, len(text) - 1)]
        logits = state.forward(piece, full(1, piece.shape[1])).logits
        assert logits is not None
        found.append(logits[0].argmax(-1))
        state.advance([piece.shape[1]])
    return torch.cat(found)
