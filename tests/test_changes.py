"""What changes between calls (weights, adapters, embeddings, modes) and what depends on the length of a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import PROMPT, VOCAB, build, target
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    StoppingCriteriaList,
)

from specdiff import SpecDiff
from specdiff.cache.rope import turning_point, why_not
from specdiff.drafters.base import DraftRequest, as_limits
from specdiff.errors import InvalidInputError, UnsupportedError
from specdiff.fast.target import FastTarget
from specdiff.fingerprint import fingerprint
from specdiff.testing import ReplayDrafter
from specdiff.verify import Delta, Proposal

PATHS = pytest.mark.parametrize("fast", ["off", "auto"])
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **kwargs)


# frequencies that depend on the length ------------------------------------------------------------------------------


def longrope(kind: str) -> Any:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0 + 3 * i for i in range(8)],
        "original_max_position_embeddings": 24,
    }
    if kind == "llama":
        return build(rope_parameters=rope | {"factor": 10.0})
    torch.manual_seed(0)
    config = Phi3Config(**SMALL, original_max_position_embeddings=24, rope_parameters=rope)
    model = Phi3ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_longrope_is_served_on_either_side_and_refused_across(kind):
    model = longrope(kind)
    for length, new in ((10, 15), (40, 20)):
        ids = prompt(length)
        text = greedy(model, ids, max_new_tokens=new)
        for chunk in (None, 16):
            sd = SpecDiff(model, ReplayDrafter(text[:, length:], 4, (2,)))
            extra = {} if chunk is None else {"prefill_chunk_size": chunk}
            assert torch.equal(greedy(sd, ids, max_new_tokens=new, **extra), text)
    sd = SpecDiff(model, ReplayDrafter(text[:, 40:], 4, (2,)))
    with pytest.raises(UnsupportedError, match=r"longrope.* change at 24 tokens and this call may reach 26"):
        greedy(sd, prompt(10), max_new_tokens=16)
    both = torch.cat([torch.cat([torch.zeros(1, 30, dtype=torch.long), prompt(10)], 1), prompt(40)])
    with pytest.raises(UnsupportedError, match="all longer than 24"):
        sd.generate(both, attention_mask=(both > 0).long(), max_new_tokens=4, do_sample=False)


def test_a_session_that_passes_the_turning_point_begins_again():
    model = longrope("llama")
    sd = SpecDiff(model, "lookup")
    session = sd.session()
    first = greedy(session, prompt(10), max_new_tokens=12)
    longer = torch.cat([first, prompt(20, seed=1)], 1)
    assert torch.equal(greedy(session, longer, max_new_tokens=16), greedy(model, longer, max_new_tokens=16))
    back = torch.cat([first[:, :12], prompt(3, seed=2)], 1)
    assert torch.equal(greedy(session, back, max_new_tokens=9), greedy(model, back, max_new_tokens=9))


def test_dynamic_frequencies_are_served_up_to_their_length_only():
    model = build(
        max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    assert turning_point(model.config) == ("dynamic", 32)
    text = greedy(model, prompt(10), max_new_tokens=23)
    sd = SpecDiff(model, ReplayDrafter(text[:, 10:], 4, (2,)))
    assert torch.equal(greedy(sd, prompt(10), max_new_tokens=23), text)
    with pytest.raises(UnsupportedError, match="dynamic"):
        greedy(sd, prompt(40), max_new_tokens=2)


def test_other_models_have_no_turning_point():
    assert turning_point(target().config) is None and why_not(target().config, [10**6], 10**6) is None


def test_queries_scaled_by_position_take_the_general_path():
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Ministral3ForCausalLM(Ministral3Config(**SMALL, head_dim=16, rope_parameters=rope)).eval()
    assert "scaled by their position" in (FastTarget.supports(model) or "")
    text = greedy(model, prompt(6), max_new_tokens=60)
    assert torch.equal(greedy(SpecDiff(model, ReplayDrafter(text[:, 6:], 4, (2,))), prompt(6), max_new_tokens=60), text)


# budgets ------------------------------------------------------------------------------------------------------------


@PATHS
def test_a_length_criterion_of_the_users_own_is_the_budget(fast):
    """transformers lets it replace the default length; windows, room and drafting go by it."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=32)).eval()
    ids = prompt(6)
    text = greedy(model, ids, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(80)]))
    assert text.shape[1] == 80
    sd = SpecDiff(model, ReplayDrafter(text[:, 6:], 4, (3,)), fast=fast)
    out = greedy(sd, ids, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(80)]), return_dict_in_generate=True)
    assert torch.equal(out.sequences, text) and out.stats.path == "general"
    assert len(out.stats.emitted[0]) < 30  # drafted to the end


@pytest.mark.parametrize("value", [-1, 0, 2.5, True])
def test_a_chunk_is_a_number_of_tokens(value):
    with pytest.raises((InvalidInputError, ValueError), match="prefill_chunk_size"):
        greedy(SpecDiff(target()), PROMPT, max_new_tokens=4, prefill_chunk_size=value)


# between calls ------------------------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("how", ["in place", "data"])
def test_changed_weights_are_noticed_by_objects_and_sessions(fast, how):
    model = build(seed=3)
    ids = prompt(12)
    sd = SpecDiff(model, fast=fast)
    session = sd.session()
    first = greedy(session, ids, max_new_tokens=10)
    weight = model.model.layers[0].mlp.down_proj.weight
    if how == "data":
        weight.data.mul_(-1)
    else:
        with torch.no_grad():
            weight.mul_(-1)
    longer = torch.cat([first, prompt(3, seed=5)], 1)
    wanted = greedy(model, longer, max_new_tokens=30)
    assert torch.equal(greedy(session, longer, max_new_tokens=30), wanted)
    assert torch.equal(greedy(sd, longer, max_new_tokens=30), wanted)


class Adapted(nn.Linear):
    """As PEFT's layers: which adapter is active is no parameter."""

    active = "one"

    @property
    def active_adapters(self) -> list[str]:
        return [self.active]

    @property
    def disable_adapters(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.active == "one" else -1)


def test_a_switched_adapter_is_noticed_by_a_session():
    model = build(seed=4)
    old = model.model.layers[0].mlp.down_proj
    new = Adapted(old.in_features, old.out_features, bias=False)
    new.load_state_dict(old.state_dict())
    model.model.layers[0].mlp.down_proj = new
    before = fingerprint(model)
    assert before == fingerprint(model)
    session = SpecDiff(model).session()
    first = greedy(session, prompt(12), max_new_tokens=10)
    new.active = "two"
    assert before != fingerprint(model)
    longer = torch.cat([first, prompt(3, seed=5)], 1)
    assert torch.equal(greedy(session, longer, max_new_tokens=30), greedy(model, longer, max_new_tokens=30))


class Reader:
    """Proposes a text by heart, ids unseen."""

    block_size, taps = 4, ()
    text: Tensor

    def start(self, request: DraftRequest) -> Reader:
        self.request, self.at = request, 0
        return self

    def propose(self, anchor: Tensor, limits: Tensor, noise: Any) -> Proposal:
        limits = as_limits(limits, self.block_size)
        rest = self.text[:, self.at + 1 : self.at + 1 + int(limits.max())]
        return Proposal(rest, limits.clamp(max=rest.shape[1]), Delta())

    def commit(self, tokens: Tensor, counts: Tensor, taps: Tensor | None) -> None:
        self.at += int(counts[0])

    def select(self, rows: Tensor) -> None: ...

    def rollback(self, lengths: Tensor) -> None:
        self.at = int(lengths[0])

    def close(self) -> None: ...


@PATHS
def test_resized_embeddings(fast):
    """Ids that were none when the object was made are tokens now."""
    model, drafter = build(layers=2), Reader()
    sd = SpecDiff(model, drafter, fast=fast)
    torch.manual_seed(3)
    model.resize_token_embeddings(140, mean_resizing=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.4)
        model.lm_head.weight.normal_(0, 0.4)
    ids = prompt(8)
    drafter.text = greedy(model, ids, max_new_tokens=30)
    assert int(drafter.text.max()) >= VOCAB
    out = greedy(sd, ids, max_new_tokens=30, return_dict_in_generate=True)
    assert torch.equal(out.sequences, drafter.text)
    assert len(out.stats.emitted[0]) < 10


@PATHS
def test_another_default_dtype(fast, monkeypatch):
    model = build(seed=6)
    text = greedy(model, prompt(9), max_new_tokens=20)
    sd = SpecDiff(model, ReplayDrafter(text[:, 9:], 4, (2,)), fast=fast)
    torch.set_default_dtype(torch.bfloat16)
    try:
        both = torch.cat([prompt(9), prompt(9)])
        assert torch.equal(greedy(sd, both[:1], max_new_tokens=20), text)
        assert torch.equal(greedy(SpecDiff(model, fast=fast), both, max_new_tokens=20), torch.cat([text, text]))
    finally:
        torch.set_default_dtype(torch.float32)


@PATHS
def test_a_session_begun_in_inference_mode_goes_on_without(fast):
    from specdiff.drafters.dflash import DFlashDrafter, DFlashModel
    from specdiff.drafters.train.initialise import config_for

    model = build(seed=7)
    config = config_for(model, num_layers=1, target_layer_ids=(0, 1), block_size=3, direct=True)
    torch.manual_seed(0)
    drafter = DFlashDrafter(DFlashModel(config)).eval().bind(model)
    session = SpecDiff(model, drafter, fast=fast).session()
    with torch.inference_mode():
        first = greedy(session, prompt(12), max_new_tokens=10).clone()
    longer = torch.cat([first, prompt(3, seed=5)], 1).clone()
    assert torch.equal(greedy(session, longer, max_new_tokens=12), greedy(model, longer, max_new_tokens=12))


# arguments ----------------------------------------------------------------------------------------------------------


def test_a_generation_config_by_position():
    config = GenerationConfig(max_new_tokens=7, do_sample=False)
    wanted = target().generate(PROMPT, config)
    assert torch.equal(SpecDiff(target()).generate(PROMPT, config), wanted)
    assert torch.equal(SpecDiff(target()).session().generate(PROMPT, config), wanted)


def test_stop_strings_by_keyword_win_over_those_of_a_config():
    from cases import characters

    tokenizer = characters()
    whole = tokenizer.decode(greedy(target(), PROMPT, max_new_tokens=20)[0, PROMPT.shape[1] :])
    early, late = whole[3], whole[9]
    config = GenerationConfig(stop_strings=[late], max_new_tokens=20, do_sample=False)
    sd = SpecDiff(target(), tokenizer=tokenizer)
    new = sd.generate(PROMPT, config, stop_strings=[early])[0, PROMPT.shape[1] :]
    assert len(new) == whole.index(early) + 1
    assert config.stop_strings == [late]


@dataclass
class Unhashable:
    """A drafter as a user may write it: a dataclass, which cannot be a key."""

    inner: Any
    block_size: int = 4
    taps: tuple[int, ...] = field(default=())

    def start(self, request: DraftRequest) -> Any:
        return self.inner.start(request)


def test_a_drafter_that_cannot_be_a_key_may_have_adaptive_lengths():
    text = greedy(target(), PROMPT, max_new_tokens=24)
    drafter = Unhashable(ReplayDrafter(text[:, PROMPT.shape[1] :], 4))
    with pytest.raises(TypeError):
        hash(drafter)
    assert torch.equal(greedy(SpecDiff(target(), drafter, block_size="auto"), PROMPT, max_new_tokens=24), text)
