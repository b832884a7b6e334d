"""What must hold for any model, untrained: AR equality, caches, rows, fixed spans, the analytic law, progress."""

from __future__ import annotations

import itertools

import pytest
import torch
from native_tiny import EOS, MASK, PAD, VOCAB, left_padded, lm, prompt, spec, tiny_llama

from specdiff import DiffusionLM
from specdiff.diffusion.caches import Certainty, Delayed
from specdiff.diffusion.canvas import pack
from specdiff.diffusion.denoiser import Denoiser, logit_rows
from specdiff.errors import InvalidInputError, NumericalError, UnsupportedError

BLOCK = {"attention": "block_causal", "block_size": 4, "alignment": "absolute", "convention": "sdar"}
FAST_V2 = {
    "attention": "block_causal",
    "block_size": 8,
    "sub_block": 4,
    "alignment": "absolute",
    "shift": 1,
    "first_token": "ar",
    "convention": "sdar",
}
CONTEXT = {"attention": "causal_context", "block_size": 5, "alignment": "prompt", "shift": 1}

EVERY = [
    ("quota", {}, {"steps": 7}),
    ("threshold", {}, {"threshold": 0.5}),
    ("factor", {}, {"factor": 1.5}),
    ("sub_block", FAST_V2, {"threshold": 0.5}),
    ("dynamic", BLOCK, {"threshold": 0.5, "steps": 3}),
    ("static", BLOCK, {"steps": 2}),
    ("sequential", BLOCK, {"steps": 3}),
    ("entropy_budget", BLOCK, {"bound": 2.0}),
    ("dream", {"shift": 1, "convention": "dream"}, {"alg": "entropy", "alg_temp": 0.5, "steps": 6}),
    ("dream", {"shift": 1, "convention": "dream"}, {"alg": "origin", "steps": 6}),
    ("edit", BLOCK, {"threshold": 0.5, "edit_threshold": 0.1, "steps": 4}),
    ("stable_skip", {}, {"patience": 2}),
    ("mixed", CONTEXT, {"share": 0.5}),
    ("leading", CONTEXT, {"threshold": 0.3}),
    ("ancestral", {}, {"steps": 9}),
    ("first_hitting", BLOCK, {}),
    ("any_order", {}, {}),
    ("mask_predict", {}, {"steps": 4}),
    ("remdm", {}, {"kind": "cap", "cap": 0.2, "steps": 12}),
    ("remdm", BLOCK, {"kind": "conf", "steps": 24}),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(EVERY)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(0)


# -- AR equality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["causal", "causal_context", "block_causal"])
@pytest.mark.parametrize("cache", ["none", "block"])
def test_block_one_shift_one_is_ar_greedy(model, attention, cache):
    ids, mask = left_padded([prompt(3)[0], prompt(9, 2)[0]])
    plain = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=11,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=None,
        suppress_tokens=[MASK],
    )
    got = lm(model, attention=attention, block_size=1, shift=1, cache=cache).generate(ids, mask, max_new_tokens=11)
    assert torch.equal(got, plain)


def test_first_slot_after_the_anchor_is_ar_for_a_causal_context(model):
    ids = prompt(6)
    plain = model.generate(
        ids, max_new_tokens=1, do_sample=False, pad_token_id=PAD, eos_token_id=None, suppress_tokens=[MASK]
    )
    got = lm(model, **CONTEXT, cache="block").generate(ids, max_new_tokens=10, policy="any_order", order="left")
    assert got[0, 6] == plain[0, 6]


# -- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [BLOCK, FAST_V2, CONTEXT, {**CONTEXT, "attention": "causal"}], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_exact_block_cache_gives_the_logits_of_no_cache(changes, attention):
    model = tiny_llama(0, attention=attention)
    ids, mask = left_padded([prompt(7)[0], prompt(12, 2)[0]])
    logs: dict[str, list] = {}
    for cache in ("none", "block"):
        logs[cache] = []

        def keep(i, ids, logits, positions, log=logs[cache]):
            log.append(logits.clone())
            return logits

        lm(model, **changes).generate(
            ids, mask, max_new_tokens=14, policy="threshold", threshold=0.5, cache=cache, logits_hook=keep
        )
    assert len(logs["none"]) == len(logs["block"]) > 3
    for a, b in zip(logs["none"], logs["block"], strict=True):
        assert torch.allclose(a, b, atol=2e-4)


def test_scatter_cache_with_everything_refreshed_is_no_cache(model):
    """The approximate caches become exact where they refresh everything."""
    ids, mask = left_padded([prompt(7)[0], prompt(12, 2)[0]])
    for changes in ({}, {"shift": 1}):
        dlm = lm(model, **changes)
        plain = dlm.generate(ids, mask, max_new_tokens=12, policy="quota", steps=6, cache="none")
        for cache in (Delayed(interval=1), Certainty(k=10_000)):
            assert torch.equal(dlm.generate(ids, mask, max_new_tokens=12, policy="quota", steps=6, cache=cache), plain)
        # one step a block: prefix and dual refresh all at every pass
        whole = dlm.generate(
            ids, mask, max_new_tokens=12, policy="threshold", threshold=0.0, block_size=4, cache="none"
        )
        for name in ("prefix", "dual"):
            got = dlm.generate(
                ids, mask, max_new_tokens=12, policy="threshold", threshold=0.0, block_size=4, cache=name
            )
            assert torch.equal(got, whole)


class Spy(Denoiser):
    """Records what is computed and what exists."""

    def logits(self, batch, cache=None):
        if not hasattr(self, "log"):
            self.log = []
        computed = batch.plan | logit_rows(batch.want, self.spec.shift)
        self.log.append((computed[0].clone(), batch.want[0].clone(), batch.ids[0].clone()))
        return super().logits(batch, cache)


def spied(model, cache, policy="quota", steps=8, new=8, **changes):
    dlm = lm(model, **changes)
    dlm.denoiser = Spy(model, dlm.spec)
    dlm.generate(prompt(5), max_new_tokens=new, policy=policy, steps=steps, cache=cache)
    return dlm.denoiser.log


def test_prefix_and_dual_plans(model):
    n = torch.arange(13)
    for name in ("prefix", "dual"):
        log = spied(model, name, block_size=4)
        for i, (computed, _, _) in enumerate(log):
            start = 5 if i < 4 else 9
            rest = (n >= start) & ((n < start + 4) if name == "dual" else (n >= 0))
            assert torch.equal(computed, torch.ones(13, dtype=torch.bool) if i % 4 == 0 else rest)


@pytest.mark.parametrize("shift", [0, 1])
def test_delayed_plan_leaves_out_what_was_decoded_by_two_passes_ago(model, shift):
    log = spied(model, Delayed(interval=6), shift=shift)
    masked = [ids == MASK for _, _, ids in log]
    for i, (computed, want, _) in enumerate(log):
        if i <= 1 or i % 6 == 0:
            assert computed.all()
            continue
        # decoded by pass i-2 = already clean when pass i-1 began
        frozen = ~masked[i - 1]
        expected = ~frozen
        if shift:
            expected = expected | logit_rows(want[None], 1)[0]
        assert torch.equal(computed, expected)


def test_certainty_plan_takes_k_masks_and_what_was_just_decoded(model):
    for shift in (0, 1):
        log = spied(model, Certainty(k=3), shift=shift)
        for i, (computed, want, ids) in enumerate(log):
            if i == 0:
                assert computed.all()
                continue
            masks = ids == MASK
            just = (log[i - 1][2] == MASK) & ~masks
            assert want.sum() == min(3, int(masks.sum()))
            expected = want | just | logit_rows(want[None], shift)[0]
            assert torch.equal(computed, expected)


def test_sub_block_cache_is_the_block_cache_at_sub_block_entry(model):
    """Fast-dLLM v2: with one token per sub-block every pass is an entry, so both caches agree."""
    changes = {**FAST_V2, "sub_block": 1}
    ids = prompt(9)
    dlm = lm(model, **changes, policy="sub_block")
    assert torch.equal(
        dlm.generate(ids, max_new_tokens=14, cache="sub_block"), dlm.generate(ids, max_new_tokens=14, cache="block")
    )
    log = spied(model, "sub_block", policy="sub_block", steps=None, new=11, **FAST_V2)
    widths = {int(c.sum()) for c, w, _ in log if w.any()}
    assert min(widths) <= 5  # inside a sub-block only its rows (and a predecessor) are computed
    assert any(int(c[8:].sum()) >= 8 for c, _, _ in log)  # at an entry the whole block is


def test_caches_say_what_they_are(model):
    out = lm(model).generate(prompt(4), max_new_tokens=4, cache="dual", return_dict_in_generate=True)
    assert out.stats.notes == ["cache 'dual' is approximate"]
    with pytest.raises(UnsupportedError, match="full attention"):
        lm(model).generate(prompt(4), max_new_tokens=4, cache="block")
    with pytest.raises(InvalidInputError, match="unknown cache"):
        lm(model).generate(prompt(4), max_new_tokens=4, cache="paged")


def test_context_window_budget_is_respected(model):
    seen = []

    class Watch(Denoiser):
        def logits(self, batch, cache=None):
            seen.append(batch.visible[0] & ~batch.open[0])
            return super().logits(batch, cache)

    dlm = lm(model, **BLOCK, cache="block")
    dlm.denoiser = Watch(model, dlm.spec)
    out = dlm.generate(prompt(20), max_new_tokens=8, context_window=6, return_dict_in_generate=True)
    assert max(int(s.sum()) for s in seen) == 6
    assert "window" in out.stats.notes[0]


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,changes,options", EVERY, ids=IDS)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_b55_a_row_of_a_batch_equals_its_solo_run(model, name, changes, options, temperature):
    rows = [prompt(3)[0], prompt(9, 2)[0], prompt(6, 3)[0]]
    ids, mask = left_padded(rows)
    dlm = lm(model, **changes, cache="block" if changes.get("block_size") else "none")
    args = {"max_new_tokens": 9, "policy": name, "temperature": temperature, "return_dict_in_generate": True, **options}
    seeds = [11, 12, 13]
    batch = dlm.generate(ids, mask, seed=seeds, **args)
    again = dlm.generate(ids, mask, seed=seeds, **args)
    assert torch.equal(batch.sequences, again.sequences)
    for i, row in enumerate(rows):
        solo = dlm.generate(row[None], seed=[seeds[i]], **args)
        assert solo.sequences[0, -9:].tolist() == batch.sequences[i, -9:].tolist()
        assert solo.stats.nfe[0] == batch.stats.nfe[i]
    other, right = left_padded(rows, pad=0)
    assert torch.equal(dlm.generate(other, right, seed=seeds, **args).sequences[:, -9:], batch.sequences[:, -9:])


def test_b55_padding_on_the_right_gives_the_same_rows(model):
    rows = [prompt(3)[0], prompt(9, 2)[0]]
    left, left_mask = left_padded(rows)
    right, right_mask = left.clone(), left_mask.clone()
    right[0], right_mask[0] = left[0].roll(-6), left_mask[0].roll(-6)
    dlm = lm(model, policy="quota")
    a, b = dlm.generate(left, left_mask, max_new_tokens=8), dlm.generate(right, right_mask, max_new_tokens=8)
    assert torch.equal(a[:, -8:], b[:, -8:])


def test_seed_int_gives_row_zero_the_seed_itself(model):
    dlm = lm(model)
    ids = prompt(5).repeat(3, 1)
    batch = dlm.generate(ids, max_new_tokens=8, temperature=1.0, seed=5)
    solo = dlm.generate(ids[:1], max_new_tokens=8, temperature=1.0, seed=5)
    assert torch.equal(batch[:1], solo)
    assert not torch.equal(batch[0], batch[1])
    torch.manual_seed(9)
    a = dlm.generate(ids, max_new_tokens=8, temperature=1.0)
    torch.manual_seed(9)
    assert torch.equal(a, dlm.generate(ids, max_new_tokens=8, temperature=1.0))


def test_a_fast_row_does_not_wait_for_a_slow_one(model):
    """Its NFE is its own; rows of one batch are in different phases of one pass."""
    rows = [prompt(3)[0], prompt(9, 2)[0], prompt(5, 4)[0]]
    ids, mask = left_padded(rows)
    dlm = lm(model, **BLOCK, cache="block", eos_ids=(EOS,))
    args = {"policy": "dynamic", "threshold": 0.25, "steps": 4, "max_new_tokens": 16, "return_dict_in_generate": True}
    out = dlm.generate(ids, mask, **args)
    solo = [dlm.generate(r[None], **args).stats.nfe[0] for r in rows]
    assert out.stats.nfe == solo
    assert len(set(solo)) > 1
    assert out.stats.passes == max(solo)


# -- spans, progress, law ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,changes,options", EVERY, ids=IDS)
def test_fixed_spans_and_prompts_never_change_and_every_step_commits(model, name, changes, options):
    """Also B58: mask ids inside the prompt are text, not places to fill."""
    ids = prompt(6)
    ids[0, 2] = ids[0, 5] = MASK
    span = {3: [7, 8], -1: [9]}
    out = lm(model, **changes).generate(
        ids,
        max_new_tokens=11,
        policy=name,
        temperature=0.7,
        seed=1,
        fixed=span,
        return_dict_in_generate=True,
        output_trajectory=True,
        **options,
    )
    text = out.sequences[0]
    assert text[:6].tolist() == ids[0].tolist()
    assert text[9:11].tolist() == [7, 8] and int(text[-1]) == 9
    assert not (text[6:] == MASK).any()
    for canvas, noisy in out.trajectory:
        assert canvas[0, 3:5].tolist() == [7, 8] and int(canvas[0, 10]) == 9
        assert not noisy[0, 3:5].any()
    if name not in ("remdm", "edit", "mask_predict"):
        left = [int(noisy.sum()) for _, noisy in out.trajectory]
        assert out.stats.nfe[0] <= 16
        if name not in ("sub_block", "dynamic", "static", "sequential", "entropy_budget", "first_hitting", "mixed"):
            assert all(a > b for a, b in itertools.pairwise([8, *left]))  # block models also fill up their last block


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [None, 1, 5, 50])
@pytest.mark.parametrize("policy", ["threshold", "dynamic", "quota"])
def test_b56_a_loop_without_progress_cannot_be(model, threshold, steps, policy):
    """Uniform logits: no position ever reaches the threshold."""
    options = {} if policy == "quota" else {"threshold": threshold}
    out = lm(model, convention="sdar").generate(
        prompt(4),
        max_new_tokens=9,
        policy=policy,
        steps=steps,
        return_dict_in_generate=True,
        logits_hook=lambda i, ids, logits, positions: torch.zeros_like(logits),
        **options,
    )
    assert out.stats.nfe[0] <= 9
    assert out.sequences.shape == (1, 13)
    assert not (out.sequences[0, 4:] == MASK).any()


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_b56_bad_thresholds_are_refused(model, threshold):
    for policy in ("threshold", "dynamic", "edit"):
        with pytest.raises(InvalidInputError, match="threshold"):
            lm(model).generate(prompt(4), max_new_tokens=4, policy=policy, threshold=threshold)


def test_b58_a_prompt_of_masks_alone(model):
    ids = torch.full((1, 5), MASK)
    out = lm(model, policy="quota").generate(ids, max_new_tokens=4)
    assert out[0, :5].tolist() == [MASK] * 5 and not (out[0, 5:] == MASK).any()


class Table:
    """A denoiser that knows the exact joint of three tokens and answers with its conditionals."""

    def __init__(self, joint):
        self.joint = joint  # [V, V, V]
        self.vocab_size = joint.shape[0] + 1
        self.supports_cache = False
        self.device = torch.device("cpu")
        self.spec = None

    def new_cache(self, rows, capacity):
        raise AssertionError

    def select(self, cache, rows):
        pass

    def logits(self, batch, cache=None):
        mask = self.vocab_size - 1
        out = []
        for row in batch.ids[:, -3:]:
            law = self.joint.clone()
            for place, token in enumerate(row.tolist()):
                if token != mask:
                    keep = torch.zeros(self.joint.shape[0])
                    keep[token] = 1
                    law = law * keep.view([-1 if d == place else 1 for d in range(3)])
            law = law / law.sum()
            out.append(torch.stack([law.sum([d for d in range(3) if d != place]) for place in range(3)]))
        p = torch.cat([torch.stack(out), torch.zeros(len(out), 3, 1)], -1)
        positions, _ = pack(batch.want[:, -3:])
        return p.log().gather(1, positions[..., None].expand(-1, -1, self.vocab_size))


@pytest.mark.parametrize(
    "name,options",
    [("any_order", {}), ("first_hitting", {}), ("ancestral", {"steps": 1500}), ("sequential", {"steps": 3})],
)
def test_tabular_denoiser_gives_the_analytic_law(name, options):
    """One token at a time from exact conditionals is the joint itself, in any order."""
    g = torch.Generator().manual_seed(3)
    joint = torch.rand(3, 3, 3, generator=g) ** 2
    joint = joint / joint.sum()
    rows = 1000
    dlm = DiffusionLM(Table(joint), spec(mask_id=3, pad_id=0, convention="sdar"))
    out = dlm.generate(
        torch.zeros(rows, 1, dtype=torch.long), max_new_tokens=3, policy=name, temperature=1.0, seed=1, **options
    )[:, 1:]
    code = out[:, 0] * 9 + out[:, 1] * 3 + out[:, 2]
    want = joint.reshape(-1) * rows
    chi = ((torch.bincount(code, minlength=27) - want) ** 2 / want)[want > 4].sum()
    assert float(chi) < 56  # 26 degrees, p > 0.0005


def test_parallel_steps_give_the_product_of_marginals():
    """All three tokens in one step: the law of a tabular denoiser's first pass, not the joint."""
    joint = torch.zeros(2, 2, 2)
    joint[0, 0, 0] = joint[1, 1, 1] = 0.5
    rows = 800
    dlm = DiffusionLM(Table(joint), spec(mask_id=2, pad_id=0, convention="sdar"))
    out = dlm.generate(
        torch.zeros(rows, 1, dtype=torch.long), max_new_tokens=3, policy="quota", steps=1, temperature=1.0, seed=1
    )[:, 1:]
    counts = torch.bincount(out[:, 0] * 4 + out[:, 1] * 2 + out[:, 2], minlength=8)
    assert float(((counts - rows / 8) ** 2 / (rows / 8)).sum()) < 26


def test_nan_logits_are_an_error_at_once_and_the_object_stays_usable(model):
    def broken(i, ids, logits, positions):
        if i == 1:
            logits[0, 0] = torch.nan
        return logits

    dlm = lm(model)
    with pytest.raises(NumericalError, match="pass 1"):
        dlm.generate(prompt(4), max_new_tokens=6, logits_hook=broken)
    assert dlm.generate(prompt(4), max_new_tokens=6).shape == (1, 10)
    assert VOCAB == 41
