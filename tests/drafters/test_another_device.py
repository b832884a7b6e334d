"""A round on a device that is not the host: ``meta`` has no values to read, and does not mix with tensors elsewhere."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tiny import DIRECT, drafter, target
from torch import Tensor

from specdiff import SpecDiff
from specdiff.cache.kinds import layer_plans
from specdiff.cache.passes import ModelCall
from specdiff.cache.states import RaggedState, Serving
from specdiff.drafters.base import DraftRequest
from specdiff.drafters.combined import CombinedDrafter
from specdiff.fast.graphs import GraphState
from specdiff.fast.recording import Outputs
from specdiff.verify import Noise, verify
from specdiff.verify.noise import CounterNoise

META = torch.device("meta")


class Repeating:
    """Records nothing: every replay is a run."""

    lock = threading.RLock()

    def __call__(self, step: Any) -> Any:
        return type("Recording", (), {"replay": staticmethod(step)})()


@torch.no_grad()
def round_on_meta(rule: str, recorded: bool, **options: Any) -> Outputs:
    """Prefill and a round of target and drafter; returns what a round would read back."""
    net = target()
    drafts = drafter(net, **options)
    net.to(META)
    drafts.bind(net)
    repeating = Repeating()
    serving = Serving("ragged", plans=tuple(layer_plans(net.config) or ()))
    call = ModelCall(net)
    state: RaggedState = (
        GraphState(repeating, lambda state: None, call, serving, 2, 256, drafts.taps, 256)
        if recorded
        else RaggedState(call, serving, 2, 64, drafts.taps, 256)
    )
    session = drafts.start(
        DraftRequest(
            2, META, torch.float32, 50, rule, capacity=64, target_cache=state,
            recorder=repeating if recorded else None,
        )
    )  # fmt: skip
    noise = Noise(torch.zeros(2, dtype=torch.long, device=META))
    ids, counts = torch.zeros(2, 6, dtype=torch.long, device=META), torch.zeros(2, dtype=torch.long, device=META)
    session.commit(ids, counts, state.forward(ids, counts, head=None).taps)
    state.advance([6, 4])
    for _ in range(2):
        round_noise = noise.round(counts)
        proposal = session.propose(ids[:, 0], counts, round_noise)
        result = state.forward(torch.cat([ids[:, :1], proposal.tokens], 1), proposal.lengths + 1)
        assert result.logits is not None
        verdict = verify(rule, result.logits, proposal, round_noise)
        state.advance([2, 1])
        session.commit(proposal.tokens, verdict.accepted, None if result.taps is None else result.taps[:, 1:])
    return verdict.accepted, verdict.next_token, verdict.bad, proposal.tokens


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("rule", ["greedy", "token", "block", "coupled"])
@pytest.mark.parametrize("options", [{}, DIRECT | {"correction_window": 3}, {"markov_rank": 4}], ids=str)
def test_a_round_neither_reads_nor_mixes_devices(rule: str, recorded: bool, options: dict[str, Any]) -> None:
    for tensor in round_on_meta(rule, recorded, **options):
        assert isinstance(tensor, Tensor) and tensor.device == META


def test_a_tensor_left_on_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    on_host = torch.zeros(2, dtype=torch.long)
    monkeypatch.setattr(Noise, "round", lambda self, lengths: CounterNoise(on_host, lengths))
    with pytest.raises(RuntimeError):
        round_on_meta("block", False)


@pytest.mark.parametrize("combined", [False, True])
def test_to_moves_what_a_drafter_reads_of_the_target(combined: bool) -> None:
    model = target()
    inner = drafter(model)
    sd = SpecDiff(model, CombinedDrafter(inner) if combined else inner)
    sd.to("meta")
    assert inner.head.device.type == inner.embed(torch.zeros(1, dtype=torch.long, device="meta")).device.type == "meta"
