"""Every decoder against an independent short oracle, written here with torch alone."""

from __future__ import annotations

import pytest
import torch
from native_tiny import EOS, MASK, VOCAB, block_net, full_net, lm, prompt, tiny_llama

from specdiff.diffusion.sampling import Sampling, draw

NEW = 12


@pytest.fixture(scope="module")
def model():
    return tiny_llama(0)


def forbid(logits):
    logits = logits.clone()
    logits[..., MASK] = -torch.inf
    return logits


def shifted(logits):
    return torch.cat([logits[:1], logits[:-1]])


def quotas(n, steps):
    return [n // steps + (i < n % steps) for i in range(steps)]


def test_quotas_sum_to_the_block():
    for n in range(1, 40):
        for steps in range(1, n + 1):
            assert sum(quotas(n, steps)) == n


# -- LLaDA ------------------------------------------------------------------------------------------------------------


def llada(net, ids, new, block, steps, cfg=0.0):
    x = torch.cat([ids, torch.full((new,), MASK)])
    p, blocks = len(ids), new // block
    passes = 0
    for b in range(blocks):
        end = p + (b + 1) * block
        for k in quotas(block, steps // blocks):
            logits = net(x)
            if cfg:
                blind = x.clone()
                blind[:p] = MASK
                u = net(blind)
                logits = u + (cfg + 1) * (logits - u)
            logits = forbid(logits)
            passes += 1
            best = logits.argmax(-1)
            sure = torch.softmax(logits.double(), -1).gather(-1, best[:, None])[:, 0]
            sure[x != MASK] = -1
            sure[end:] = -1
            pick = sure.topk(k).indices
            x[pick] = best[pick]
    return x, passes


@pytest.mark.parametrize("block,steps,cfg", [(12, 12, 0.0), (12, 5, 0.0), (4, 6, 0.0), (6, 4, 0.0), (12, 6, 0.7)])
def test_llada(model, block, steps, cfg):
    ids = prompt(5)
    want, passes = llada(full_net(model), ids[0], NEW, block, steps, cfg)
    out = lm(model, policy="quota").generate(
        ids, max_new_tokens=NEW, steps=steps, block_size=block, cfg_scale=cfg, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == want.tolist()
    assert out.stats.nfe == [passes]


def test_llada_sampling_convention():
    """x = argmax exp(l) / (-log u)^T, confidence from the untempered softmax."""
    logits = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    race = torch.rand(1, 3, 7, generator=torch.Generator().manual_seed(1)).log().neg()

    class Fixed:
        def race(self, positions, vocab):
            return race

    tokens, law = draw(logits, Sampling(temperature=0.6), Fixed(), torch.zeros(1, 3, dtype=torch.long))
    want = (logits.double().exp() / race.double() ** 0.6).argmax(-1)
    assert tokens.tolist() == want.tolist()
    assert torch.equal(law, logits)


# -- Dream ------------------------------------------------------------------------------------------------------------


def dream(net, ids, new, steps, alg, eps=1e-3):
    x = torch.cat([ids, torch.full((new,), MASK)])
    grid = torch.linspace(1, eps, steps + 1, dtype=torch.float64)
    for i in range(steps):
        masked = x == MASK
        if not masked.any():
            break
        logits = forbid(shifted(net(x)))
        p = torch.softmax(logits, -1)
        best = logits.argmax(-1)
        top = p.sort(-1, descending=True).values
        sure = {
            "maskgit_plus": top[:, 0],
            "topk_margin": top[:, 0] - top[:, 1],
            "entropy": (p * torch.log(p + 1e-10)).sum(-1),
        }[alg]
        n = int(masked.sum())
        k = n if i == steps - 1 else max(1, int(n * (1 - grid[i + 1] / grid[i])))
        pick = torch.where(masked, sure, -torch.inf).topk(k).indices
        x[pick] = best[pick]
    return x


@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize("steps", [12, 5])
def test_dream(model, alg, steps):
    ids = prompt(5)
    want = dream(full_net(model), ids[0], NEW, steps, alg)
    dlm = lm(model, shift=1, policy="dream", convention="dream")
    got = dlm.generate(ids, max_new_tokens=NEW, alg=alg, steps=steps)
    assert got[0].tolist() == want.tolist()


def test_dream_origin_law(model):
    """Masks are decided with chance 1 - s/t: the count of the first step that decides any is binomial, cut at 0."""
    ids, steps, rows = prompt(4), 4, 400
    dlm = lm(model, shift=1, policy="dream", convention="dream")
    out = dlm.generate(
        ids.repeat(rows, 1),
        max_new_tokens=6,
        alg="origin",
        steps=steps,
        seed=3,
        return_dict_in_generate=True,
        output_trajectory=True,
    )
    first = out.trajectory[0][1].logical_not().sum(-1)
    # law of the first non-empty step
    grid = torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64)
    law, alive = torch.zeros(7, dtype=torch.float64), 1.0
    for i in range(steps):
        c = 1.0 if i == steps - 1 else float(1 - grid[i + 1] / grid[i])
        for k in range(1, 7):
            law[k] += (
                alive
                * torch.exp(
                    torch.special.gammaln(torch.tensor(7.0))
                    - torch.special.gammaln(torch.tensor(k + 1.0))
                    - torch.special.gammaln(torch.tensor(7.0 - k))
                ).double()
                * c**k
                * (1 - c) ** (6 - k)
            )
        alive *= (1 - c) ** 6
    seen = torch.bincount(first, minlength=7).double()
    chi = ((seen[1:] - rows * law[1:]) ** 2 / (rows * law[1:]).clamp(min=1e-9))[rows * law[1:] > 4].sum()
    assert law.sum() == pytest.approx(1.0)
    assert float(chi) < 22  # 5 degrees of freedom, p > 0.0005
    assert max(out.stats.nfe) <= steps


def test_dream_filters_in_order():
    """top-p before top-k for Dream, top-k before top-p for SDAR: the kept sets differ."""
    logits = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]).log()
    kept = {
        c: torch.isfinite(draw(logits, Sampling(0.0, 2, 0.55, c), None, None)[1]).sum().item()
        for c in ("dream", "sdar")
    }
    assert kept == {"dream": 2, "sdar": 1}


# -- Fast-dLLM v1 -----------------------------------------------------------------------------------------------------


def fast_v1(net, ids, new, block, rule, value):
    x = torch.cat([ids, torch.full((new,), MASK)])
    p, passes = len(ids), 0
    for b in range(new // block):
        begin, end = p + b * block, p + (b + 1) * block
        while (x[begin:end] == MASK).any():
            logits = forbid(net(x))
            passes += 1
            sure, best = torch.softmax(logits, -1).max(-1)
            here = [i for i in range(begin, end) if x[i] == MASK]
            here.sort(key=lambda i: -float(sure[i]))
            if rule == "threshold":
                pick = [i for i in here if sure[i] >= value] or here[:1]
            else:
                pick = here[:1]
                for place, i in enumerate(here[1:], start=2):
                    if sure[i] < 1 - value / (place + 1):
                        break
                    pick.append(i)
            for i in pick:
                x[i] = best[i]
    return x, passes


@pytest.mark.parametrize("rule,value", [("threshold", 0.3), ("threshold", 0.9), ("factor", 1.0), ("factor", 2.2)])
@pytest.mark.parametrize("block", [12, 4])
def test_fast_dllm_v1(model, rule, value, block):
    ids = prompt(5)
    want, passes = fast_v1(full_net(model), ids[0], NEW, block, rule, value)
    out = lm(model).generate(
        ids, max_new_tokens=NEW, policy=rule, block_size=block, return_dict_in_generate=True, **{rule: value}
    )
    assert out.sequences[0].tolist() == want.tolist()
    assert out.stats.nfe == [passes]


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.6, 1.0])
def test_leading_grows_from_left_to_right(model, threshold):
    ids, net = prompt(5), full_net(model)
    x, passes = torch.cat([ids[0], torch.full((NEW,), MASK)]), 0
    while (x[5:] == MASK).any():
        sure, best = torch.softmax(forbid(net(x)), -1).max(-1)
        place = int((x == MASK).nonzero()[0])
        x[place] = best[place]
        while place + 1 < len(x) and sure[place] >= threshold and sure[place + 1] >= threshold:
            place += 1
            x[place] = best[place]
        passes += 1
    out = lm(model).generate(
        ids, max_new_tokens=NEW, policy="leading", threshold=threshold, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == x.tolist()
    assert out.stats.nfe == [passes]


# -- block-causal models ----------------------------------------------------------------------------------------------


def blocks_of(ids, new, size):
    """Canvas and the [begin, end) of its blocks, absolute alignment."""
    total = -(-(len(ids) + new) // size) * size
    x = torch.cat([ids, torch.full((total - len(ids),), MASK)])
    begin = len(ids) // size * size
    return x, [(b, b + size) for b in range(begin, total, size)]


def sdar(net, ids, new, size, steps, mode, value=0.0):
    x, blocks = blocks_of(ids, new, size)
    for begin, end in blocks:
        n = int((x[begin:end] == MASK).sum())
        for k in quotas(n, min(steps, n)) + [0] * 99:
            here = [i for i in range(begin, end) if x[i] == MASK]
            if not here:
                break
            logits = forbid(net(x[:end]))
            p = torch.softmax(logits, -1)
            sure, best = p.max(-1)
            spread = torch.special.entr(p).sum(-1)
            k = max(k, 1)
            if mode == "sequential":
                pick = here[:k]
            elif mode == "static":
                pick = sorted(here, key=lambda i: -float(sure[i]))[:k]
            elif mode == "dynamic":
                pick = [i for i in here if sure[i] > value]
                if len(pick) < k:
                    pick = sorted(here, key=lambda i: -float(sure[i]))[:k]
            else:
                here.sort(key=lambda i: float(spread[i]))
                pick, total = here[:1], float(spread[here[0]])
                for i in here[1:]:
                    total += float(spread[i])
                    if total > value:
                        break
                    pick.append(i)
            for i in pick:
                x[i] = best[i]
    return x[: len(ids) + new]


@pytest.mark.parametrize(
    "mode,name,options,value",
    [
        ("sequential", "sequential", {}, 0),
        ("static", "static", {}, 0),
        ("dynamic", "dynamic", {"threshold": 0.2}, 0.2),
        ("dynamic", "dynamic", {"threshold": 0.9}, 0.9),
        ("entropy", "entropy_budget", {"bound": 3.0}, 3.0),
    ],
)
@pytest.mark.parametrize("length", [4, 6])
def test_sdar(model, mode, name, options, value, length):
    ids = prompt(length)
    if name != "entropy_budget":
        options = {**options, "steps": 3}
    want = sdar(block_net(model, 4), ids[0], 10, 4, 3 if "steps" in options else 99, mode, value)
    for cache in ("block", "none"):
        dlm = lm(model, attention="block_causal", block_size=4, alignment="absolute", convention="sdar", cache=cache)
        got = dlm.generate(ids, max_new_tokens=10, policy=name, **options)
        assert got[0].tolist() == want.tolist(), cache


def llada21(net, ids, new, size, steps, tau, tau_edit, extra=16):
    x, blocks = blocks_of(ids, new, size)
    prompt_end, edited, longest = len(ids), 0, 0
    for begin, end in blocks:
        n = int((x[begin:end] == MASK).sum())
        ks, over, i = quotas(n, min(steps, n)), 0, 0
        while True:
            masks = [j for j in range(begin, end) if x[j] == MASK]
            logits = forbid(net(x[:end]))
            sure, best = torch.softmax(logits, -1).max(-1)
            changes = [
                j for j in range(max(begin, prompt_end), end) if x[j] != MASK and sure[j] > tau_edit and best[j] != x[j]
            ]
            k = max(ks[i] if i < len(ks) else 0, 1)
            pick = [j for j in masks if sure[j] > tau]
            if len(pick) < k:
                pick = sorted(masks, key=lambda j: -float(sure[j]))[:k]
            for j in pick + changes:
                x[j] = best[j]
            edited += len(changes)
            i += 1
            over += not masks
            if (x[begin:end] == MASK).any():
                continue
            if over >= extra or (not masks and not changes):
                break
        longest = max(longest, i)
    return x[: len(ids) + new], edited, longest


@pytest.mark.parametrize("tau,tau_edit", [(0.5, 0.0), (0.3, 0.25), (0.95, 0.9)])
def test_llada21_editing(model, tau, tau_edit):
    ids, size = prompt(6), 8
    want, edited, longest = llada21(block_net(model, size), ids[0], 14, size, 8, tau, tau_edit)
    dlm = lm(model, attention="block_causal", block_size=size, alignment="absolute", convention="sdar", cache="block")
    out = dlm.generate(
        ids,
        max_new_tokens=14,
        policy="edit",
        steps=8,
        threshold=tau,
        edit_threshold=tau_edit,
        return_dict_in_generate=True,
    )
    assert out.sequences[0].tolist() == want.tolist()
    assert out.sequences[0, :6].tolist() == ids[0].tolist()
    assert longest <= size + 17
    if tau_edit < 0.3:
        assert edited > 0  # otherwise the test shows nothing


def test_llada20_passes_fall_with_the_threshold(model):
    dlm = lm(model, attention="block_causal", block_size=8, alignment="absolute", convention="sdar", cache="block")
    nfe = [
        dlm.generate(
            prompt(8), max_new_tokens=16, policy="dynamic", threshold=t, steps=8, return_dict_in_generate=True
        ).stats.nfe[0]
        for t in (0.99, 0.25, 0.05)
    ]
    assert nfe[0] > nfe[1] > nfe[2] >= 2


def fast_v2(net, ids, new, size, sub, tau):
    x, blocks = blocks_of(ids, new, size)
    for begin, end in blocks:
        if x[begin] == MASK:
            x[begin] = forbid(net(x[:begin])[-1]).argmax()
        for low in range(begin, end, sub):
            while (x[low : low + sub] == MASK).any():
                p = torch.softmax(forbid(shifted(net(x[:end]))), -1)
                sure, best = p.max(-1)
                here = [i for i in range(low, low + sub) if x[i] == MASK]
                top = max(here, key=lambda i: float(sure[i]))
                for i in here:
                    if sure[i] > tau or i == top:
                        x[i] = best[i]
    return x[: len(ids) + new]


@pytest.mark.parametrize("length", [8, 11])
@pytest.mark.parametrize("tau", [0.2, 0.9])
def test_fast_dllm_v2(model, length, tau):
    ids = prompt(length)
    want = fast_v2(block_net(model, 8), ids[0], 17, 8, 4, tau)
    for cache in ("none", "block"):
        dlm = lm(
            model,
            attention="block_causal",
            block_size=8,
            sub_block=4,
            alignment="absolute",
            shift=1,
            first_token="ar",
            convention="sdar",
            cache=cache,
            policy="sub_block",
        )
        got = dlm.generate(ids, max_new_tokens=17, threshold=tau)
        assert got[0].tolist() == want.tolist(), cache


def test_bd3lm_first_hitting_decides_one_at_a_time_in_uniform_order(model):
    rows, size = 600, 3
    dlm = lm(model, attention="block_causal", block_size=size, alignment="absolute", cache="block")
    out = dlm.generate(
        prompt(3).repeat(rows, 1),
        max_new_tokens=size,
        policy="first_hitting",
        seed=5,
        return_dict_in_generate=True,
        output_trajectory=True,
    )
    assert out.stats.nfe == [size] * rows
    left = torch.stack([noisy for _, noisy in out.trajectory])
    assert left.sum(-1).tolist() == [[2] * rows, [1] * rows, [0] * rows]
    order = [tuple(left[:, r].long().sum(0).tolist()) for r in range(rows)]
    counts = [order.count(o) for o in sorted(set(order))]
    assert len(counts) == 6
    assert sum((c - rows / 6) ** 2 / (rows / 6) for c in counts) < 22  # chi-square, 5 degrees, p > 0.0005


# -- remasking --------------------------------------------------------------------------------------------------------


def mask_predict(net, ids, new, steps):
    x = torch.cat([ids, torch.full((new,), MASK)])
    p = len(ids)
    sure = torch.zeros(new)
    for t in range(1, steps + 1):
        q, best = torch.softmax(forbid(net(x)), -1).max(-1)
        masked = (x[p:] == MASK).clone()
        x[p:][masked], sure[masked] = best[p:][masked], q[p:][masked]
        n = new * (steps - t) // steps
        if n:
            x[p:][sure.topk(n, largest=False).indices] = MASK
    return x


@pytest.mark.parametrize("steps", [1, 3, 6, 12])
def test_mask_predict(model, steps):
    ids = prompt(5)
    out = lm(model).generate(ids, max_new_tokens=NEW, policy="mask_predict", steps=steps, return_dict_in_generate=True)
    assert out.sequences[0].tolist() == mask_predict(full_net(model), ids[0], NEW, steps).tolist()
    assert out.stats.nfe == [steps]


# -- others -----------------------------------------------------------------------------------------------------------


def test_stable_skip(model):
    def oracle(net, ids, new, tau, patience):
        x = torch.cat([ids, torch.full((new,), MASK)])
        guess, run, passes = {}, {}, 0
        while (x == MASK).any():
            sure, best = torch.softmax(forbid(net(x)), -1).max(-1)
            passes += 1
            here = [i for i in range(len(x)) if x[i] == MASK]
            for i in here:
                run[i] = run.get(i, 0) + 1 if guess.get(i) == int(best[i]) else 0
                guess[i] = int(best[i])
            top = max(here, key=lambda i: float(sure[i]))
            for i in here:
                if sure[i] >= tau or i == top or run[i] >= patience:
                    x[i] = best[i]
        return x, passes

    ids = prompt(5)
    base = lm(model).generate(ids, max_new_tokens=NEW, policy="threshold", threshold=0.95, return_dict_in_generate=True)
    for patience in (1, 2, float("inf")):
        want, passes = oracle(full_net(model), ids[0], NEW, 0.95, patience)
        out = lm(model).generate(
            ids,
            max_new_tokens=NEW,
            policy="stable_skip",
            threshold=0.95,
            patience=patience,
            return_dict_in_generate=True,
        )
        assert out.sequences[0].tolist() == want.tolist()
        assert out.stats.nfe == [passes]
        if patience == float("inf"):
            assert torch.equal(out.sequences, base.sequences)
        else:
            assert out.stats.nfe < base.stats.nfe


def test_apd_lossy(model):
    """R = 1 accepts all at once; R = 0 greedy writes what AR writes; between, the oracle's leading matches."""
    ar = tiny_llama(7)
    ids = prompt(5)
    dlm = lm(model)

    def run(mix):
        return dlm.generate(ids, max_new_tokens=NEW, policy="apd_lossy", mix=mix, ar=ar, return_dict_in_generate=True)

    assert run(1.0).stats.nfe == [1]
    plain = ar.generate(
        ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, suppress_tokens=[MASK]
    )
    assert torch.equal(run(0.0).sequences, plain)

    x, net = torch.cat([ids[0], torch.full((NEW,), MASK)]), full_net(model)
    while (x == MASK).any():
        d = forbid(net(x))
        draft = torch.where(x == MASK, d.argmax(-1), x)
        a = forbid(shifted(ar(draft[None]).logits[0]))
        mix = 0.5 * torch.log_softmax(d, -1) + 0.5 * torch.log_softmax(a, -1)
        target = mix.nan_to_num(nan=-1e9, neginf=-1e9).argmax(-1)
        for place, i in enumerate([i for i in range(len(x)) if x[i] == MASK]):
            if place and target[i] != draft[i]:
                break
            x[i] = target[i]
            if target[i] != draft[i]:
                break
    out = run(0.5)
    assert out.sequences[0].tolist() == x.tolist()
    assert "neither" in out.stats.notes[0]


@pytest.mark.parametrize("draws", ["counter", "torch"])
def test_apd_lossy_races_draft_and_target_with_one_noise(model, draws):
    """R = 1: both laws are the same, so with one noise all is accepted at once, whatever the noise is."""
    torch.manual_seed(0)
    out = lm(model).generate(
        prompt(5),
        max_new_tokens=NEW,
        policy="apd_lossy",
        mix=1.0,
        ar=tiny_llama(7),
        temperature=1.0,
        draws=draws,
        return_dict_in_generate=True,
    )
    assert out.stats.nfe == [1]


@pytest.mark.parametrize("order", ["left", "right", "random"])
def test_any_order(model, order):
    out = lm(model).generate(
        prompt(5),
        max_new_tokens=6,
        policy="any_order",
        order=order,
        seed=2,
        return_dict_in_generate=True,
        output_trajectory=True,
    )
    left = torch.stack([noisy[0] for _, noisy in out.trajectory])
    assert left.sum(-1).tolist() == [5, 4, 3, 2, 1, 0]
    if order != "random":
        want = [i if order == "left" else 5 - i for i in range(6)]
        gone = [int((left[i - 1] if i else torch.ones(6, dtype=torch.bool)).ne(left[i]).nonzero()) for i in range(6)]
        assert gone == want
    assert EOS < VOCAB


def test_ar_mixing_share_one_is_ar(model):
    ids = prompt(5)
    plain = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, suppress_tokens=[MASK]
    )
    dlm = lm(model, shift=1, attention="causal", block_size=6, cache="block")
    for threshold in (0.0, 0.9):
        got = dlm.generate(ids, max_new_tokens=NEW, policy="mixed", share=1.0, threshold=threshold)
        assert torch.equal(got, plain)
    parallel = dlm.generate(ids, max_new_tokens=NEW, policy="mixed", share=0.0, threshold=0.9)
    base = dlm.generate(ids, max_new_tokens=NEW, policy="threshold", threshold=0.9)
    assert torch.equal(parallel, base)
