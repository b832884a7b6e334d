"""The quality table of dual-mode models."""

from __future__ import annotations

import pytest
import torch
from bench_tiny import tiny_llama

from specdiff import DiffusionLM
from specdiff.bench.native import common_prefix, judge, markdown, native_quality
from specdiff.diffusion.dual import DualAdapter, dual_spec
from specdiff.errors import UnsupportedError

MASK = 11


def dual(seed: int = 0) -> DiffusionLM:
    torch.manual_seed(seed)
    adapter = DualAdapter(tiny_llama(), MASK, rank=2)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return DiffusionLM(adapter.model, dual_spec(MASK, 4), adapter=adapter)


def test_judge_reads_the_law_one_token_before():
    model = tiny_llama().requires_grad_(False)
    ids = torch.tensor([[1, 5, 3, 7, 2]])
    law, top = judge(model, ids, 2)
    logits = model(ids).logits[0]
    for i, place in enumerate((2, 3, 4)):
        row = torch.log_softmax(logits[place - 1], -1)
        assert float(law[i]) == pytest.approx(float(row[ids[0, place]]), abs=1e-5)
        assert bool(top[i]) == (int(row.argmax()) == int(ids[0, place]))
    best = int(logits[1].argmax())
    second = int(logits[1].index_fill(0, torch.tensor(best), -torch.inf).argmax())
    refused = torch.cat([ids[:, :2], torch.tensor([[second]])], 1)
    assert not judge(model, refused, 2)[1][0] and judge(model, refused, 2, [best])[1][0]


def test_common_prefix():
    assert common_prefix(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4, 5])) == 2
    assert common_prefix(torch.tensor([1]), torch.tensor([2])) == 0


def test_the_table_agrees_with_what_must_hold():
    """Blocks of one token are greedy AR; drafting for itself is greedy AR in fewer verifications; one token per pass at
    threshold 1."""
    lm = dual()
    prompts = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7]])]
    rows = native_quality(lm, prompts, [1, 4], [0.0, 1.0], 12)
    by = {(r.name, r.block, r.threshold): r for r in rows}
    ar = by["greedy AR", None, None]
    assert ar.top_share == 1.0 and ar.prefix_share == 1.0 and ar.tokens_per_pass == 1.0
    one = by["leading", 1, 1.0]
    assert one.log_likelihood == pytest.approx(ar.log_likelihood, abs=1e-5)
    assert one.prefix_share == 1.0 and one.top_share == 1.0
    for policy in ("leading", "threshold"):
        assert by[policy, 4, 1.0].tokens_per_pass == pytest.approx(1.0, abs=0.1)
        assert by[policy, 4, 0.0].tokens_per_pass > 2.5
        assert by[policy, 4, 0.0].log_likelihood < ar.log_likelihood
    own = by["drafts for itself", 4, None]
    assert own.prefix_share == 1.0 and own.log_likelihood == pytest.approx(ar.log_likelihood, abs=1e-5)
    text = markdown(rows)
    assert text.count("\n") == len(rows) + 1 and "greedy AR" in text


def test_only_dual_mode_models_have_an_ar_half():
    plain = DiffusionLM(tiny_llama(), dual_spec(MASK, 4))
    with pytest.raises(UnsupportedError, match="dual-mode"):
        native_quality(plain, [], [1], [1.0], 4)
