"""Dual-mode training: noise, who sees whom, weights and schedules; training computes what decoding computes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny
import torch

from specdiff import DiffusionLM
from specdiff.diffusion.canvas import pack
from specdiff.diffusion.denoiser import PassInput
from specdiff.diffusion.dual import DualAdapter, dual_spec
from specdiff.diffusion.visibility import additive_mask
from specdiff.drafters.train.corpus import Document
from specdiff.drafters.train.dual.config import DualConfig, largest_block, openness
from specdiff.drafters.train.dual.noise import block_starts, make_batch, mask_pair, pack_rows
from specdiff.drafters.train.dual.objective import (
    DualObjective,
    clean_visibility,
    confident_entropy,
    noisy_visibility,
    trained,
    weights,
)
from specdiff.errors import InvalidInputError

MASK = 3


def documents(*lengths: int, prompt: int = 3, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(4, tiny.VOCAB, n), prompt) for n in lengths]


def batch_of(*lengths: int, count: int = 8, size: int = 4, opened: float = 1.0, seed: int = 0, **options):
    config = DualConfig(block_sizes=(size,), length=64, **options)
    return make_batch([documents(*lengths)], count, size, opened, config, np.random.default_rng(seed))


def adapter_of(model, seed: int = 0) -> DualAdapter:
    """An adapter that is far from zero."""
    torch.manual_seed(seed)
    adapter = DualAdapter(model, MASK, rank=4)
    with torch.no_grad():
        for p in adapter.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return adapter


def test_the_two_copies_cover_every_position_that_may_be_masked_and_never_both():
    rng = np.random.default_rng(0)
    for _ in range(200):
        present = np.repeat(rng.random((1, 6)) < 0.8, 2, 0)
        masked, rate = mask_pair(present, rng.uniform(0.3, 1, 2), True, rng)
        assert (masked[0] | masked[1]).tolist() == present[0].tolist()
        assert not (masked[0] & masked[1]).any()
        assert rate[1] == 1 - rate[0]
    batch = batch_of(40, drafting=0.0)
    a, b = batch.masked[:, 0::2], batch.masked[:, 1::2]
    assert torch.equal(a ^ b, batch.present[:, 0::2]) and not (a & b).any()
    assert torch.equal(batch.anchors[:, 0::2], batch.anchors[:, 1::2])


def test_drafting_blocks_are_masked_as_a_whole_and_come_at_two_places():
    batch = batch_of(60, drafting=0.5, count=8)
    assert int(batch.drafting.sum()) == 4
    assert torch.equal(batch.masked[batch.drafting], batch.present[batch.drafting])
    pairs = batch.drafting[0].view(-1, 2)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    starts = batch.anchors[0].view(-1, 2)
    assert bool((starts[pairs[:, 0], 0] != starts[pairs[:, 0], 1]).all())


def test_mask_ratios_stay_in_their_band():
    config = {"drafting": 0.0, "complement": False, "band": (0.4, 0.6), "count": 200}
    batch = batch_of(64, seed=1, **config)
    share = float(batch.masked[batch.present].float().mean())
    assert abs(share - 0.5) < 0.06
    assert float(batch.rate.min()) >= 0.4 and float(batch.rate.max()) <= 0.6
    assert len(batch.rate.unique()) > 100
    assert len(batch_of(64, level="sequence", **config).rate.unique()) == 1


def test_blocks_tile_the_responses_from_a_random_offset():
    seen = set()
    for seed in range(20):
        starts = block_starts([(0, 3, 30), (30, 5, 20)], 4, 9, np.random.default_rng(seed))
        assert len(set(starts.tolist())) == 9  # every offset has as many tiles
        assert all(3 <= s < 29 or 35 <= s < 49 for s in starts)
        seen |= {s % 4 for s in starts if s < 30}
    assert seen == {0, 1, 2, 3}
    assert len(block_starts([(0, 3, 6)], 4, 9, np.random.default_rng(0))) == 9  # few tiles: they come again


def test_documents_are_cut_packed_or_left_out():
    rows = pack_rows(documents(20, 90, 30, 10, 4), 64, True)
    assert [[len(d) for d in row] for row in rows] == [[20, 30, 10], [90]]  # 4 tokens have one response token
    assert [len(row) for row in pack_rows(documents(20, 30), 64, False)] == [1, 1]


def test_no_gradient_and_no_influence_across_documents_blocks_or_from_the_answer():
    """One forward over [clean | noisy] with the training masks: a block depends on the clean tokens in front of it in
    its own document and on itself, on nothing else; and the two passes of training are that one forward."""
    model = tiny.target()
    adapter = adapter_of(model)
    batch = batch_of(20, 24, count=6, size=4, drafting=0.4)
    rows, blocks, size = batch.masked.shape
    width = batch.ids.shape[1]
    clean = torch.nn.functional.pad(clean_visibility(batch), (0, blocks * size))
    seen = torch.cat([clean, noisy_visibility(batch)], 1)
    noisy_ids = torch.where(batch.masked | ~batch.present, MASK, batch.tokens).flatten(1)
    ids = torch.cat([batch.ids, noisy_ids], 1)
    places = batch.place.gather(1, batch.anchors)[..., None] + 1 + torch.arange(size)
    noisy = torch.arange(ids.shape[1])[None] >= width
    with adapter.rows(noisy):
        embedded = adapter.model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = adapter.model(
            inputs_embeds=embedded,
            attention_mask=additive_mask(seen, torch.float32),
            position_ids=torch.cat([batch.place, places.flatten(1)], 1),
        ).logits[:, width:]
    objective = DualObjective(adapter, DualConfig(block_sizes=(size,), length=64))
    _, cache = objective.clean(batch)
    torch.testing.assert_close(
        objective.noisy(batch, cache), logits.view(rows, blocks, size, -1)[:, :, :-1][trained(batch)]
    )
    reached = set()
    for block in range(blocks):
        (grad,) = torch.autograd.grad(logits[0, block * size : (block + 1) * size].sum(), embedded, retain_graph=True)
        found = grad[0].abs().sum(-1) > 0
        anchor = int(batch.anchors[0, block])
        own = batch.document[0] == batch.document[0, anchor]
        wanted = own & (torch.arange(width) <= anchor)
        assert torch.equal(found[:width], wanted)
        inside = torch.zeros(blocks * size, dtype=torch.bool)
        inside[block * size : (block + 1) * size] = True
        assert torch.equal(found[width:], inside)
        reached.add(int(batch.document[0, anchor]))
    assert reached == {0, 1}


def test_training_computes_what_decoding_computes():
    """A half-written block: the objective's logits are the denoiser's, with its cache of clean tokens and without."""
    model = tiny.target()
    adapter = adapter_of(model)
    lm = DiffusionLM(adapter.model, dual_spec(MASK, 4), adapter=adapter)
    batch = batch_of(30, count=2, size=4, drafting=0.0, seed=5)
    target, cache = DualObjective(adapter, DualConfig(block_sizes=(4,), length=64)).clean(batch)
    got = DualObjective(adapter, DualConfig(block_sizes=(4,), length=64)).noisy(batch, cache)
    wanted, own = [], []
    for block in range(2):
        start = int(batch.anchors[0, block]) + 1
        ids = torch.cat([batch.ids[:, :start], torch.where(batch.masked, MASK, batch.tokens)[:, block]], 1)
        everything = torch.ones_like(ids, dtype=torch.bool)
        position = torch.arange(ids.shape[1])[None]
        want = torch.zeros_like(everything)
        want[0, start + 1 :] = batch.masked[0, block, 1:]
        logits = lm.denoiser.logits(
            PassInput(
                ids=ids, plan=everything, want=want, index=position.clamp(max=start), visible=everything,
                open=position >= start,
            )
        )  # fmt: skip
        places, valid = pack(want)
        wanted.append(logits[valid])
        own.append(model(batch.ids).logits[0, places[valid] - 1])
    torch.testing.assert_close(got, torch.cat(wanted))
    torch.testing.assert_close(target, torch.cat(own))  # the law to learn is the causal model's at the same place


def test_annealing_goes_from_causal_to_full():
    config = DualConfig(annealing=0.5)
    assert openness(config, 0.0) == 0.0 and openness(config, 0.25) == 0.5 and openness(config, 0.7) == 1.0
    assert openness(DualConfig(), 0.0) == 1.0
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    assert bool((batch_of(40, opened=0.0).open == causal).all())
    assert bool(batch_of(40, opened=1.0).open.all())
    half = batch_of(40, opened=0.5, count=200).open
    assert bool((half | ~causal).all()), "the causal part is never taken away"
    assert abs(float(half[..., ~causal].float().mean()) - 0.5) < 0.06


def test_block_sizes_grow_stay_and_fall_back():
    config = DualConfig(block_sizes=(4, 32), wsd=(0.2, 0.2))
    sizes = [largest_block(config, p / 100) for p in range(100)]
    assert sizes[0] == 2 and max(sizes) == 32 and sizes[-1] == 4
    assert all(s == 32 for s in sizes[20:80])
    assert sizes[:20] == sorted(sizes[:20]) and sizes[80:] == sorted(sizes[80:], reverse=True)
    assert {largest_block(DualConfig(), p / 10) for p in range(11)} == {8}


def test_inverse_rates_weigh_every_position_equally_on_average():
    """The bound of MDLM: over the draws of the noise each position that may be masked weighs 1."""
    config = DualConfig(block_sizes=(4,), length=64, drafting=0.0, complement=False, inverse_rate=True)
    total, possible = 0.0, 0
    for seed in range(60):
        batch = make_batch([documents(60)], 40, 4, 1.0, config, np.random.default_rng(seed))
        total += float(weights(batch, config).sum())
        possible += int(batch.present[..., 1:].sum())
    assert abs(total / possible - 1) < 0.03
    plain = weights(batch, DualConfig(block_sizes=(4,), length=64))
    assert set(plain[trained(batch)].tolist()) == {1.0}


def test_drafting_weights_decay_from_the_first_trained_slot():
    config = DualConfig(block_sizes=(4,), length=64, drafting=1.0, gamma=4.0)
    value = weights(batch_of(40, drafting=1.0), config)[0, 0].tolist()
    assert value == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_confidence_term_is_the_entropy_where_the_top_token_is_right():
    law = torch.log_softmax(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.1]]), -1)
    right = torch.tensor([True, False])
    assert float(confident_entropy(law, right)) == pytest.approx(float(-(law[0].exp() * law[0]).sum()))
    assert float(confident_entropy(law, ~right & False)) == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_sizes": (1,)}, "at least 2"),
        ({"band": (0.0, 1.0)}, "band"),
        ({"level": "word"}, "level"),
        ({"length": 8}, "length"),
        ({"wsd": (0.8, 0.4)}, "wsd"),
        ({"gamma": 0.0}, "gamma"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(InvalidInputError, match=words):
        DualConfig(**options)
