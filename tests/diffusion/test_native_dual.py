"""Dual-mode models: the base stays exact, the adapter acts on noisy rows alone, one file turns AR into diffusion."""

from __future__ import annotations

import pytest
import torch
from native_tiny import MASK, prompt, tiny_llama

from specdiff import DiffusionLM, SpecDiff
from specdiff.diffusion.dual import DualAdapter, dual_spec
from specdiff.errors import FormatError, InvalidInputError, UnsupportedError


def trained(base, seed=0):
    """An adapter with weights as if it had been trained."""
    torch.manual_seed(seed)
    adapter = DualAdapter(base, MASK, rank=4)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return adapter


def test_base_is_untouched_and_ar_mode_is_bit_exact():
    base = tiny_llama(0)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    modules = {n: id(m) for n, m in base.named_modules()}
    ids = prompt(9)
    plain = base(ids).logits
    adapter = trained(base)
    assert {n: id(m) for n, m in base.named_modules()} == modules
    assert all(torch.equal(v, before[k]) for k, v in base.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.modules())
    assert torch.equal(base(ids).logits, plain)
    assert torch.equal(adapter.model(ids).logits, plain)  # no rows are noisy
    noisy = torch.zeros(1, 9, dtype=torch.bool)
    noisy[0, 6:] = True
    with adapter.rows(noisy):
        mixed = adapter.model(ids).logits
    assert torch.equal(
        mixed[:, :6], plain[:, :6]
    )  # causal: clean rows before the noisy ones are the base's, to the bit
    assert not torch.allclose(mixed[:, 6:], plain[:, 6:])
    assert torch.equal(adapter.model(ids).logits, plain)
    base_ids = {id(p) for p in base.parameters()}
    assert not any(id(p) in base_ids for p in adapter.parameters())
    shared = [p for p in adapter.model.parameters() if id(p) in base_ids]
    assert shared and all(p.data_ptr() in {q.data_ptr() for q in base.parameters()} for p in shared)


def test_mask_row_is_the_adapters_own():
    base = tiny_llama(0)
    adapter = DualAdapter(base, MASK, rank=2)
    ids = torch.tensor([[1, MASK, 3]])
    with torch.no_grad():
        adapter.layers["model/embed_tokens"].row.add_(1.0)
    with adapter.rows(torch.tensor([[False, True, True]])):
        changed = adapter.model(ids).logits
    assert not torch.allclose(changed[:, 1], base(ids).logits[:, 1])
    with adapter.rows(torch.tensor([[False, False, True]])):
        assert torch.equal(adapter.model(ids).logits[:, :2], base(ids).logits[:, :2])


def test_save_load_generate_infill_draft(tmp_path):
    base = tiny_llama(0)
    trained(base).save(tmp_path, dual_spec(MASK, 4, pad_id=0), tokens=123)
    lm = DiffusionLM.from_adapter(tiny_llama(0), str(tmp_path))
    assert lm.spec.name == "dual" and lm.ar is lm.adapter.base
    ids = prompt(6)
    plain = base.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None, suppress_tokens=[MASK]
    )
    out = lm.generate(ids, max_new_tokens=12, threshold=0.5)
    assert torch.equal(out, lm.generate(ids, max_new_tokens=12, threshold=0.5, cache="none"))
    assert out[0, 6] == plain[0, 6]  # the first slot after the anchor equals AR
    one = lm.generate(ids, max_new_tokens=12, block_size=1)
    assert torch.equal(one, plain)  # one token a block is AR
    hole = torch.zeros_like(ids, dtype=torch.bool)
    hole[0, 3:5] = True
    filled = lm.infill(ids, hole)
    assert torch.equal(filled[~hole], ids[~hole])
    text = SpecDiff(lm.ar, lm.drafter(block_size=3)).generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(text, base.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None))


def test_only_the_adapter_gets_gradients():
    base = tiny_llama(0)
    base.requires_grad_(False)
    adapter = DualAdapter(base, MASK, rank=2)
    noisy = torch.tensor([[False] * 3 + [True] * 3])
    ids = torch.tensor([[1, 2, 3, MASK, MASK, 4]])
    with adapter.rows(noisy):
        loss = adapter.model(ids).logits[:, 3:].logsumexp(-1).sum()
    loss.backward()
    assert all(p.grad is None for p in base.parameters())
    assert adapter.layers["model/embed_tokens"].row.grad.abs().sum() > 0
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in adapter.named_parameters() if n.endswith("up"))


def test_refusals(tmp_path):
    base = tiny_llama(0)
    with pytest.raises(FormatError, match="no dual-mode adapter"):
        DualAdapter.load(base, tmp_path)
    trained(base).save(tmp_path, dual_spec(MASK, 4))
    with pytest.raises(UnsupportedError, match="from_adapter"):
        DiffusionLM.from_pretrained(str(tmp_path))
    with pytest.raises(FormatError, match="another base"):
        DualAdapter.load(tiny_llama(0, layers=3), tmp_path)
    with pytest.raises(InvalidInputError, match="called"):
        DualAdapter(base, MASK, targets=("zebra",))
    with pytest.raises(UnsupportedError, match="autoregressive"):
        _ = DiffusionLM(base, preset="llada", mask_id=MASK, eos_ids=(), pad_id=0).ar


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_in_dual_mode(model_pair):
    """A real model: one token a block is its own greedy text, and it drafts for itself losslessly."""
    model, tokenizer = model_pair
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    plain = model.generate(ids, max_new_tokens=10, do_sample=False)
    adapter = DualAdapter(model, 17, rank=16)
    assert sum(p.numel() for p in adapter.parameters()) * 2 < 12e6  # bytes in bfloat16
    lm = DiffusionLM(adapter.model, dual_spec(17, 4), tokenizer=tokenizer, adapter=adapter)
    assert torch.equal(lm.generate(ids, max_new_tokens=10, block_size=1), plain)
    out = SpecDiff(lm.ar, lm.drafter(block_size=2), fast="off").generate(
        ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain)
    assert out.stats.acceptance_by_position[0] > 0.99
