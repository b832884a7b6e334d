"""Recorded passes: the same logits and texts as the general path, whatever lengths and rows, with a tape for a GPU."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fast_models import COMMON, MASK, NEW, PROMPTS, TAKEN, build
from tape import Tape
from torch import Tensor
from transformers import DeepseekV3Config, GPT2Config, MistralConfig, MixtralConfig, PreTrainedModel

from specdiff import SpecDiff
from specdiff.cache.ragged import RaggedLayer
from specdiff.errors import NumericalError, UnsupportedError
from specdiff.fast import recording
from specdiff.fast.choose import fast_path
from specdiff.fast.graphs import GraphTarget, StaticLayer
from specdiff.fast.recording import RecordedStep, bucket
from specdiff.fast.target import FastTarget
from specdiff.testing import RandomDrafter, ReplayDrafter

FAMILIES: dict[str, Any] = {
    "llama": TAKEN["llama"],
    "qwen3": TAKEN["qwen3"],
    "gpt2": lambda: GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=256, eos_token_id=None),
    "deepseek": lambda: DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4, "first_k_dense_replace": 3},
        q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=12,
    ),
}  # fmt: skip


@functools.cache
def model(family: str) -> PreTrainedModel:
    return build(FAMILIES[family]())


def recorded(family: str, drafter: Any = None, **options: Any) -> tuple[SpecDiff, Tape]:
    """A wrapped model that takes recorded passes."""
    tape = Tape()
    wrapped = SpecDiff(model(family), drafter, fast="off", **options)
    wrapped.fast_target = GraphTarget(model(family), tape)
    return wrapped, tape


def run(wrapped: SpecDiff, prompts: Tensor = PROMPTS, mask: Tensor = MASK, **options: Any) -> Any:
    defaults = {"max_new_tokens": NEW, "return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": None}
    return wrapped.generate(prompts, attention_mask=mask, **defaults | options)


@functools.cache
def greedy(family: str) -> Tensor:
    return run(SpecDiff(model(family), fast="off"), do_sample=False).sequences[:, PROMPTS.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_and_rounds_equal_the_general_path(family: str) -> None:
    drafter = ReplayDrafter(greedy(family), 6, wrong_at=(3,))
    general = run(SpecDiff(model(family), drafter, fast="off"), do_sample=False)
    wrapped, tape = recorded(family, drafter)
    seen = tape.replays
    out = run(wrapped, do_sample=False)
    assert out.stats.path == "graphs"
    assert torch.equal(out.sequences, general.sequences) and out.stats.emitted == general.stats.emitted
    assert tape.replays - seen == out.stats.rounds > 3


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_sampled_texts_equal_the_general_path(rule: str) -> None:
    outs = []
    for graphs in (False, True):
        drafter = RandomDrafter(101, 4)
        wrapped = recorded("llama", drafter)[0] if graphs else SpecDiff(model("llama"), drafter, fast="off")
        outs.append(run(wrapped, do_sample=True, seed=[5, 6], rule=rule, output_logits=True, temperature=0.8))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for a, b in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_rows_that_end_leave_and_the_rest_goes_on() -> None:
    eos = int(greedy("llama")[0, 5])
    plain = run(SpecDiff(model("llama"), fast="off"), do_sample=False, eos_token_id=eos).sequences
    wrapped, tape = recorded("llama", RandomDrafter(101, 3))
    out = run(wrapped, do_sample=False, eos_token_id=eos)
    assert torch.equal(out.sequences, plain) and min(out.stats.row_rounds) < max(out.stats.row_rounds)
    assert tape.replays


def test_texts_that_pass_a_bucket_take_another_graph() -> None:
    ids = torch.arange(240)[None] % 100 + 1
    plain = run(SpecDiff(model("llama"), fast="off"), ids, torch.ones_like(ids), do_sample=False, max_new_tokens=15)
    wrapped, tape = recorded("llama")
    for _ in range(2):
        before = len(tape.recordings)
        out = run(wrapped, ids, torch.ones_like(ids), do_sample=False, max_new_tokens=15)
        assert torch.equal(out.sequences, plain.sequences)
    assert len(tape.recordings) == before  # the second call found every graph of the first


def test_a_state_is_used_again_and_weights_written_since_are_seen() -> None:
    net = build(FAMILIES["llama"]())
    tape = Tape()
    wrapped = SpecDiff(net, fast="off")
    wrapped.fast_target = GraphTarget(net, tape)
    run(wrapped, do_sample=False)
    with torch.no_grad():
        net.lm_head.weight.copy_(net.lm_head.weight.flip(0))
    assert torch.equal(
        run(wrapped, do_sample=False).sequences, run(SpecDiff(net, fast="off"), do_sample=False).sequences
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_generate_is_the_same_before_during_and_after(family: str) -> None:
    """Recording and replaying leave the model as it was: its own text and logits, also from inside its ``generate``."""
    net = build(FAMILIES[family](), seed=9)
    drafter = RandomDrafter(101, 4)

    def plain(**options: Any) -> tuple[Tensor, Tensor]:
        out = net.generate(
            PROMPTS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
            return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
        return out.sequences, torch.stack(out.logits)

    before = plain()
    modules = [(name, type(module), vars(module).keys()) for name, module in net.named_modules()]
    forward, settings = net.forward, net.config.to_dict()
    tape = Tape()
    wrapped = SpecDiff(net, drafter, fast="off")
    wrapped.fast_target = GraphTarget(net, tape)
    built = plain()
    assert torch.equal(run(wrapped, do_sample=False).sequences, before[0]) and tape.replays
    inside = net.generate(
        PROMPTS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None,
        custom_generate=wrapped,
    )  # fmt: skip
    during = plain()
    again = tape.replays
    assert torch.equal(inside, before[0]) and torch.equal(run(wrapped, do_sample=False).sequences, before[0])
    assert tape.replays > again, "plain decoding in between does not disturb the recordings"
    del wrapped, tape
    for sequences, logits in (built, during, plain()):
        assert torch.equal(sequences, before[0]) and torch.equal(logits, before[1])
    assert modules == [(name, type(module), vars(module).keys()) for name, module in net.named_modules()]
    assert net.forward == forward and net.config.to_dict() == settings


def test_a_conversation_that_outgrows_its_first_request() -> None:
    wrapped, _ = recorded("llama")
    plain = SpecDiff(model("llama"), fast="off")
    ids, reference = PROMPTS[1:], PROMPTS[1:]
    session = wrapped.session()
    for _ in range(3):
        options = {"do_sample": False, "max_new_tokens": 80, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        ids = session.generate(ids, **options)
        reference = plain.generate(reference, **options)
        assert torch.equal(ids, reference)


def test_taps_come_out_of_the_recording() -> None:
    general = SpecDiff(model("llama"), fast="off").target
    graphs = GraphTarget(model("llama"), Tape())
    results = []
    for target in (general, graphs):
        state = target.open(2, 40, (0, 2))
        state.forward(PROMPTS, torch.tensor([6, 4]), head="last")
        state.advance([6, 4])
        for width, kept in ((3, [2, 1]), (3, [3, 2]), (1, [1, 1])):
            got = state.forward(PROMPTS[:, :width], torch.full((2,), width))
            results.append(got)
            state.advance(kept)
    for a, b in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a.taps, b.taps, atol=1e-4, rtol=1e-4)


def test_refused_by_name() -> None:
    sliding = build(MistralConfig(**COMMON, sliding_window=8))
    with pytest.raises(UnsupportedError, match="sliding"):
        GraphTarget(sliding, Tape())
    with pytest.raises(UnsupportedError, match="CUDA"):
        GraphTarget(model("llama"))


def test_cuda_models_are_recorded_when_asked_and_cpu_models_packed() -> None:
    cuda = torch.device("cuda")
    path, why = fast_path(model("llama"), "auto", cuda)
    assert path is None and "fast='on'" in str(why)
    with pytest.raises(UnsupportedError, match="weights are not on a CUDA device"):
        fast_path(model("llama"), "on", cuda)
    assert fast_path(model("llama"), "off", cuda) == (None, None)
    assert isinstance(fast_path(model("llama"), "on", torch.device("cpu"))[0], FastTarget)


def test_what_waits_for_the_device_is_refused() -> None:
    config = MixtralConfig(**COMMON, num_local_experts=2, num_experts_per_tok=1, sliding_window=None)
    config._experts_implementation = "eager"
    with pytest.raises(UnsupportedError, match="cannot be recorded"):
        GraphTarget(build(config), Tape())


def test_columns_frozen_into_a_recording_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the general path's layer slices its buffers at columns that the host knows."""
    monkeypatch.setattr(StaticLayer, "_write", RaggedLayer._write)
    with pytest.raises(UnsupportedError, match="off by"):
        GraphTarget(model("llama"), Tape())


def test_a_recorded_step_follows_its_inputs() -> None:
    held = torch.zeros(4)

    def step(x: Tensor, at: Tensor) -> tuple[Tensor | None, ...]:
        held.index_copy_(0, at, x)
        return held.cumsum(0), None

    tape = Tape()
    replayed = RecordedStep(tape, step, (torch.ones(1), torch.tensor([0])))
    held.zero_()
    first = replayed(torch.tensor([2.0]), torch.tensor([1]))
    second = replayed(torch.tensor([5.0]), torch.tensor([3]))
    assert first[0].tolist() == [0, 2, 2, 2] and second[0].tolist() == [0, 2, 2, 7] and first[1] is None
    with pytest.raises(RuntimeError, match="not permitted"):
        RecordedStep(tape, lambda x: (x * x.sum().item(),), (torch.ones(2),))


def test_buckets_hold_and_waste_at_most_half() -> None:
    for length in range(1, 5000, 7):
        size = bucket(length)
        assert length <= size and (size == 256 or size < 1.5 * length + 1)
    assert [bucket(n) for n in (1, 257, 385, 513, 769, 1024)] == [256, 384, 512, 768, 1024, 1024]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_themselves(dtype: torch.dtype) -> None:
    net = build(FAMILIES["llama"]()).to("cuda", dtype)
    prompts, mask = PROMPTS.cuda(), MASK.cuda()
    plain = run(SpecDiff(net, fast="off"), prompts, mask, do_sample=False)
    drafter = ReplayDrafter(plain.sequences[:, PROMPTS.shape[1] :].cpu(), 6, wrong_at=(3,))
    wrapped = SpecDiff(net, drafter, fast="on")
    out = run(wrapped, prompts, mask, do_sample=False)
    assert out.stats.path == "graphs"
    if dtype is torch.float32:
        assert torch.equal(out.sequences, plain.sequences) and torch.equal(
            run(wrapped, prompts, mask, do_sample=False).sequences, plain.sequences
        )


def test_a_request_that_failed_leaves_nothing_behind() -> None:
    net = build(FAMILIES["llama"]())
    wrapped = SpecDiff(net, fast="off")
    wrapped.fast_target = GraphTarget(net, Tape())
    good = run(wrapped, do_sample=False).sequences
    embedding = net.get_input_embeddings().weight
    with torch.no_grad():
        row = embedding[42].clone()
        embedding[42] = float("nan")
        with pytest.raises(NumericalError):
            run(wrapped, do_sample=False)
        embedding[42] = row
    assert torch.equal(run(wrapped, do_sample=False).sequences, good)


@pytest.mark.parametrize("first", [True, False])
def test_inside_and_outside_inference_mode(first: bool) -> None:
    wrapped, _ = recorded("llama", RandomDrafter(101, 3))
    for mode in (first, not first):
        with torch.inference_mode(mode):
            out = run(wrapped, do_sample=False).sequences
        assert torch.equal(out[:, PROMPTS.shape[1] :].clone(), greedy("llama"))


def test_hooks_are_not_recorded() -> None:
    net = build(FAMILIES["llama"]())
    wrapped = SpecDiff(net, fast="off")
    wrapped.fast_target = GraphTarget(net, Tape())
    scale = [1.0]
    handle = net.model.layers[0].register_forward_hook(lambda module, args, out: out * scale[0])
    out = run(wrapped, do_sample=False)
    assert out.stats.path == "general" and any("hooks" in note for note in out.stats.notes)
    with pytest.raises(UnsupportedError, match="hooks"):
        GraphTarget(net, Tape())
    handle.remove()
    assert run(wrapped, do_sample=False).stats.path == "graphs"


def test_four_threads_on_one_object() -> None:
    wrapped, _ = recorded("llama", ReplayDrafter(greedy("llama"), 4, wrong_at=(2,)))
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: run(wrapped, do_sample=False).sequences, range(8)))
    assert all(torch.equal(out[:, PROMPTS.shape[1] :], greedy("llama")) for out in outs)


def test_results_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KEPT", 2)
    tape = Tape()
    steps = recording.Recordings(tape)
    for key in (1, 2, 1, 3, 1):
        assert steps(key, lambda x: (x + 1,), (torch.ones(key),))[0].shape == (key,)
    assert len(tape.recordings) == 3  # 2 went when 3 came: 1 had been used since
    monkeypatch.setattr(recording, "KEPT_BYTES", 1)
    steps(4, lambda x: (x + 1,), (torch.ones(4),))
    steps(1, lambda x: (x + 1,), (torch.ones(1),))
    assert len(tape.recordings) == 5
