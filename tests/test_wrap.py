"""``SpecDiff`` itself: construction, where it can be put, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import PROMPT, VOCAB, Recorder, build, characters, drafter, greedy_text, reference, run, target
from transformers import GenerationConfig, pipeline

from specdiff import SpecDiff
from specdiff.errors import InvalidInputError, SpecDiffError, UnsupportedError
from specdiff.stats import SpecDiffOutput
from specdiff.testing import RandomDrafter, ReplayDrafter
from specdiff.verify import Delta, Proposal


def test_the_target_is_not_altered():
    model = target()
    before = copy.deepcopy(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    config = model.config.to_dict(), model.generation_config.to_dict()
    run(SpecDiff(model, RandomDrafter(VOCAB)), max_new_tokens=12)
    assert [name for name, _ in model.named_modules()] == names
    assert (model.config.to_dict(), model.generation_config.to_dict()) == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("way", ["inside", "as the model"])
def test_in_a_text_generation_pipeline(way):
    model, tokenizer = target(), characters()
    text = tokenizer.decode(PROMPT[0])
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
    wanted = plain(text, max_new_tokens=16, do_sample=False)
    sd = SpecDiff(model, drafter("Dmix", greedy_text(), 4), tokenizer=tokenizer)
    if way == "inside":
        assert plain(text, max_new_tokens=16, do_sample=False, custom_generate=sd) == wanted
    else:
        assert (
            pipeline("text-generation", model=sd, tokenizer=tokenizer)(text, max_new_tokens=16, do_sample=False)
            == wanted
        )


def test_it_shows_what_a_model_shows():
    model = target()
    sd = SpecDiff(model)
    assert sd.config is model.config
    assert sd.generation_config is model.generation_config
    assert sd.device == model.device
    assert sd.dtype == model.dtype
    assert sd.can_generate()


def test_to_moves_and_still_decodes():
    sd = SpecDiff(build(3), RandomDrafter(VOCAB), block_size=3, rule="token")
    assert sd.to(torch.float64) is sd
    assert sd.dtype == torch.float64
    assert (sd.block_size, sd.rule) == (3, "token")
    assert torch.equal(
        sd.generate(PROMPT, max_new_tokens=8, do_sample=False)[:, PROMPT.shape[1] :],
        reference(sd.ar, PROMPT, max_new_tokens=8),
    )


def test_returns_are_those_of_generate():
    model = target()
    sd = SpecDiff(model, drafter("Dself", greedy_text(), 4))
    plain = sd.generate(PROMPT, max_new_tokens=9, do_sample=False)
    assert torch.is_tensor(plain)
    assert torch.equal(plain, model.generate(PROMPT, max_new_tokens=9, do_sample=False))
    full = run(sd, max_new_tokens=9)
    assert isinstance(full, SpecDiffOutput)
    assert torch.equal(full.sequences, plain)
    assert full.stats.new_tokens == [9]
    assert full.scores is None


def test_a_generation_config_object_is_left_alone():
    model = target()
    config = GenerationConfig(max_new_tokens=7, do_sample=False, stop_strings=["zz"])
    before = config.to_dict()
    out = SpecDiff(model, tokenizer=characters()).generate(PROMPT, generation_config=config)
    assert out.shape[1] == PROMPT.shape[1] + 7
    assert config.to_dict() == before


def test_bind_carries_streamer_tokenizer_and_stop_strings():
    model, tokenizer = target(), characters()
    text = greedy_text()[0]
    stop = tokenizer.decode(text[4:6])
    sd = SpecDiff(model, drafter("Dself", greedy_text(), 8))
    streamer = Recorder()
    bound = sd.bind(streamer=streamer, tokenizer=tokenizer, stop_strings=[stop])
    out = model.generate(PROMPT, max_new_tokens=30, do_sample=False, custom_generate=bound)
    wanted = model.generate(PROMPT, max_new_tokens=30, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(out, wanted)
    assert streamer.ended == 1
    assert streamer.tokens == out[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"rule": "best"}, InvalidInputError),
        ({"block_size": -1}, InvalidInputError),
        ({"block_size": 9}, InvalidInputError),
        ({"block_size": True}, InvalidInputError),
        ({"fast": "always"}, InvalidInputError),
        ({"drafter": object()}, InvalidInputError),
    ],
)
def test_bad_construction_is_refused_at_once(arguments, error):
    arguments = {"drafter": RandomDrafter(VOCAB, 8)} | arguments
    with pytest.raises(error):
        SpecDiff(target(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"rule": "greedy", "do_sample": True}, "greedy"),
        ({"seed": -1}, "seed"),
        ({"seed": [1, 2]}, "seeds"),
        ({"seed": 1, "generator": torch.Generator()}, "seed"),
        ({"block_size": 99}, "block_size"),
        ({"rule": "sideways"}, "rule"),
        ({"inputs_embeds": torch.zeros(1, 4, 64)}, "inputs_embeds"),
        ({"assistant_model": "x"}, "assistant_model"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"stop_strings": ["a"]}, "tokenizer"),
    ],
)
def test_bad_calls_are_refused_by_name_before_any_pass(arguments, words):
    model = target()
    sd = SpecDiff(model, RandomDrafter(VOCAB, 8))
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises((SpecDiffError, ValueError), match=words):
            sd.generate(PROMPT, max_new_tokens=4, **arguments)
    finally:
        handle.remove()
    assert not passes


def test_right_padding_and_holes_are_refused():
    sd = SpecDiff(target())
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    for mask in ([[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 1, 1], [1, 0, 1, 1]]):
        with pytest.raises(UnsupportedError, match="left"):
            sd.generate(ids, attention_mask=torch.tensor(mask), max_new_tokens=3, do_sample=False)


def test_another_model_is_refused():
    sd = SpecDiff(build(1))
    with pytest.raises(UnsupportedError, match="another model"):
        build(2).generate(PROMPT, max_new_tokens=3, custom_generate=sd)


def test_block_size_per_call_and_zero_block_is_plain_decoding():
    sd = SpecDiff(target(), drafter("Dself", greedy_text(), 8))
    outs = {block: run(sd, max_new_tokens=25, block_size=block) for block in (0, 1, 3, 8)}
    assert all(torch.equal(out.sequences, outs[0].sequences) for out in outs.values())
    assert outs[0].stats.proposed == 0
    assert outs[0].stats.tau == 1
    assert outs[3].stats.rounds == 6
    assert outs[8].stats.rounds == 3


def test_a_drafter_of_one_row_too_few_is_named():
    def first_row(whole):
        return Proposal(tokens=whole.tokens[:1], lengths=whole.lengths[:1], law=Delta())

    class Wrong(ReplayDrafter):
        def start(self, request):
            session = super().start(request)
            propose = session.propose
            session.propose = lambda *given: first_row(propose(*given))
            return session

    sd = SpecDiff(target(), Wrong(greedy_text().expand(2, -1), 4))
    with pytest.raises(InvalidInputError, match="rows"):
        sd.generate(PROMPT.expand(2, -1), max_new_tokens=6, do_sample=False)
