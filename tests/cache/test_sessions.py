"""Conversations over every kind of cache: what is kept, what is computed again, and that the text never changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from specdiff import SpecDiff
from specdiff.compat.family import default_model
from specdiff.compat.tiny import FIRST_ORDINARY_ID, VOCABULARY
from specdiff.drafters.base import DraftRequest, as_limits
from specdiff.testing import ReplayDrafter
from specdiff.verify import Delta, Proposal

model_of = functools.cache(default_model)
NEW = 8


def ids(count: int, seed: int) -> torch.Tensor:
    """A random prompt ``Long[1, count]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY_ID, VOCABULARY, (1, count), generator=generator)


def greedy(model: Any, prompt: torch.Tensor, new: int = NEW) -> torch.Tensor:
    """``transformers``' own text."""
    return model.generate(prompt, max_new_tokens=new, do_sample=False)[:, prompt.shape[1] :]


class Oracle:
    """Drafts the text that it is given, by what its session was told is committed; one guess in a block is wrong."""

    block_size = 4
    taps = ()
    text: torch.Tensor

    def start(self, request: DraftRequest) -> OracleSession:
        return OracleSession(self)


class OracleSession:
    """Holds a count of committed tokens, which rollback must keep right between calls."""

    def __init__(self, owner: Oracle) -> None:
        self.owner, self.committed = owner, 0

    def propose(self, anchor: torch.Tensor, limits: torch.Tensor, noise: Any) -> Proposal:
        at = self.committed + 1
        tokens = torch.nn.functional.pad(
            self.owner.text[:, at : at + 4], (0, max(0, at + 4 - self.owner.text.shape[1]))
        )
        tokens[:, 2] = FIRST_ORDINARY_ID - 1
        return Proposal(tokens=tokens, lengths=as_limits(limits, 4), law=Delta())

    def commit(self, tokens: torch.Tensor, counts: torch.Tensor, taps: Any) -> None:
        self.committed += int(counts[0])

    def select(self, rows: torch.Tensor) -> None: ...

    def rollback(self, lengths: torch.Tensor) -> None:
        self.committed = min(self.committed, int(lengths[0]))

    def close(self) -> None: ...


class Talk:
    """Turns of one session, each compared with a fresh call: same text, same rounds."""

    def __init__(self, name: str) -> None:
        self.model = model_of(name)
        self.drafter = Oracle()
        self.sd = SpecDiff(self.model, self.drafter, fast="off")
        self.session = self.sd.session()

    def turn(self, prompt: torch.Tensor) -> int:
        """Returns the prompt tokens that were computed."""
        text = greedy(self.model, prompt)
        self.drafter.text = torch.cat([prompt, text], dim=1)
        fresh = self.sd.generate(prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        kept = self.session.generate(prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(kept.sequences[:, prompt.shape[1] :], text)
        assert torch.equal(kept.sequences, fresh.sequences)
        assert kept.stats.emitted == fresh.stats.emitted
        assert max(kept.stats.emitted[0]) == 3  # drafts were accepted
        return kept.stats.prompt_tokens_computed


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_next", "mamba2", "bloom"])
def test_b30_a_second_turn_computes_only_what_is_new(name):
    talk = Talk(name)
    first = ids(11, 1)
    assert talk.turn(first) == 11
    second = torch.cat([first, greedy(talk.model, first), ids(5, 2)], dim=1)
    assert talk.turn(second) == 6  # the last answer's final token, and the new ones


@pytest.mark.parametrize(("name", "computed"), [("llama", 8), ("mistral", 8), ("mamba2", 12), ("bloom", 8)])
def test_an_edited_history_is_rolled_back_or_computed_again(name, computed):
    talk = Talk(name)
    first = ids(12, 1)
    talk.turn(first)
    edited = first.clone()
    edited[0, 4] += 1 if int(edited[0, 4]) < VOCABULARY - 1 else -1
    assert talk.turn(edited) == computed


def test_the_same_prompt_again_computes_its_last_token_only():
    talk = Talk("llama")
    talk.turn(ids(9, 4))
    assert talk.turn(ids(9, 4)) == 1


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_b28_calls_of_one_object_leave_nothing_for_the_next(name):
    model = model_of(name)
    long, short = ids(30, 5), ids(5, 6)
    texts = {prompt.shape[1]: greedy(model, prompt) for prompt in (long, short)}
    sd = SpecDiff(model, ReplayDrafter([[FIRST_ORDINARY_ID]], block_size=4, wrong_at=(1,)), fast="off")

    def call(prompt: torch.Tensor) -> tuple[list[int], dict[str, Any]]:
        sd.drafter.continuation = texts[prompt.shape[1]]
        out = sd.generate(prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        return out.sequences[0].tolist(), {"emitted": out.stats.emitted, "rounds": out.stats.rounds}

    alone = call(short)
    call(long)
    assert call(short) == alone == call(short)
    assert alone[0][5:] == texts[5][0].tolist()
    batch = torch.cat([short, short, short])
    assert torch.equal(sd.generate(batch, max_new_tokens=NEW, do_sample=False)[:, 5:], texts[5].expand(3, -1))
    assert call(short) == alone
