"""How often a round reads values back from the device, counted in torch's own calls (a CPU stands for the device)."""

from __future__ import annotations

import pytest
import torch
from tiny import DIRECT, drafter, target
from torch.overrides import TorchFunctionMode

from specdiff import SpecDiff
from specdiff.loop import Decoding

READS = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.nonzero,
    torch.nonzero,
    torch.unique,
    torch.Tensor.unique,
    torch.masked_select,
    torch.equal,
    torch.Tensor.equal,
}
"""What waits for an accelerator: values or shapes that the host has to know. Tensors made of host values on a device
wait as well (``specdiff.fast.uploads`` does not)."""


def tiny_pair():
    model = target()
    return model, drafter(model, **DIRECT, correction_window=3)


class Reads(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS or (function is torch.tensor and (kwargs or {}).get("device") is not None):
            self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


def reads_by_round(monkeypatch, wrapped, ids, **options):
    """The read-backs of each round of a request."""
    rounds = []
    step = Decoding._round

    def counted(self):
        with Reads() as reads:
            step(self)
        rounds.append(reads.seen)

    monkeypatch.setattr(Decoding, "_round", counted)
    for module in ("drafters.dflash_session", "drafters.context_cache"):
        monkeypatch.setattr(f"specdiff.{module}.on_host", lambda tensor: False)
    out = wrapped.generate(ids, max_new_tokens=20, return_dict_in_generate=True, eos_token_id=None, **options)
    assert len(rounds) == out.stats.rounds
    return rounds, out


SAMPLING = {"do_sample": True, "seed": 1}
REQUESTS = {"greedy": {"do_sample": False}, "block": SAMPLING, "coupled": SAMPLING | {"rule": "coupled"}}


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_reads_back_once(monkeypatch, request_name, rows):
    model, drafts = tiny_pair()
    ids = torch.arange(3, 3 + 5 * rows).view(rows, 5)
    wrapped = SpecDiff(model, drafts, fast="off")
    rounds, out = reads_by_round(monkeypatch, wrapped, ids, pad_token_id=0, **REQUESTS[request_name])
    assert out.stats.proposed > 0
    assert [reads for reads in rounds if reads != ["tolist"]] == []


def test_a_tensor_made_on_the_device_is_seen(monkeypatch):
    """A control: values of the host that are copied in a way that waits."""
    model, drafts = tiny_pair()
    monkeypatch.setattr("specdiff.loop.upload", lambda values, device: torch.tensor(values, device=device))
    rounds, _ = reads_by_round(
        monkeypatch, SpecDiff(model, drafts, fast="off"), torch.tensor([[3, 4, 5]]), do_sample=False, pad_token_id=0
    )
    assert all(reads.count("tensor") > 1 for reads in rounds)


def test_a_drafter_that_looks_at_its_limits_is_seen(monkeypatch):
    """The control: one more read is counted."""
    model, drafts = tiny_pair()
    start = drafts.start

    def watched(request):
        session = start(request)
        propose = session.propose
        session.propose = lambda anchor, limits, noise: int(limits.max()) and propose(anchor, limits, noise)
        return session

    drafts.start = watched
    rounds, _ = reads_by_round(
        monkeypatch, SpecDiff(model, drafts, fast="off"), torch.tensor([[3, 4, 5]]), do_sample=False, pad_token_id=0
    )
    assert all(len(reads) > 1 for reads in rounds[:-1])
