"""Absorbing and uniform corruption: posteriors by enumeration, and the uniform ancestral sampler."""

from __future__ import annotations

import pytest
import torch
from native_tiny import tiny_llama

from specdiff import DiffusionLM, DLMSpec
from specdiff.diffusion.canvas import pack
from specdiff.diffusion.policies.ancestral import Ancestral
from specdiff.diffusion.policies.d3pm import posterior
from specdiff.errors import UnsupportedError


def chain(kind, vocab, keep):
    """One-step transition matrix ``[x_s, x_t]``."""
    if kind == "uniform":
        return keep * torch.eye(vocab) + (1 - keep) / vocab
    q = keep * torch.eye(vocab)
    q[:, -1] += 1 - keep
    return q


@pytest.mark.parametrize("kind", ["uniform", "mask"])
def test_posterior_is_bayes_on_a_toy(kind):
    vocab, a_s, a_t = 4, 0.7, 0.4
    clean = torch.tensor([0.5, 0.3, 0.2, 0.0]) if kind == "mask" else torch.tensor([0.4, 0.3, 0.2, 0.1])
    to_s, s_to_t = chain(kind, vocab, a_s), chain(kind, vocab, a_t / a_s)
    assert torch.allclose(to_s @ s_to_t, chain(kind, vocab, a_t), atol=1e-6)
    for x_t in range(vocab):
        joint = (clean @ to_s) * s_to_t[:, x_t]
        if not joint.sum():
            continue
        got = posterior(
            clean[None], torch.tensor([x_t]), torch.tensor([a_t]), torch.tensor([a_s]), 3 if kind == "mask" else None
        )[0]
        assert torch.allclose(got.float(), joint / joint.sum(), atol=1e-6)
    if kind == "mask":  # the ancestral policy's chance is the posterior's mass outside the mask
        stay = posterior(clean[None], torch.tensor([3]), torch.tensor([a_t]), torch.tensor([a_s]), 3)[0, 3]
        assert float(1 - stay) == pytest.approx((a_s - a_t) / (1 - a_t), abs=1e-6)
        assert Ancestral.corruption == "mask"


class Bayes:
    """The exact denoiser of independent tokens: p(x_0 | x_t) for each position, whatever the time.

    A denoiser without time input that knows the answer's law alone: with it the sampler must end in that law.
    """

    def __init__(self, law):
        self.law = law
        self.vocab_size, self.supports_cache, self.device, self.spec = len(law), False, torch.device("cpu"), None

    def new_cache(self, rows, capacity):
        raise AssertionError

    def select(self, cache, rows):
        raise AssertionError

    def logits(self, batch, cache=None):
        positions, _ = pack(batch.want)
        return self.law.log().expand(*positions.shape, -1)


def test_uniform_ancestral_ends_in_the_law_of_the_denoiser():
    """One step to time 0 from uniform noise draws from the law itself; fixed and prompt positions stay."""
    law = torch.tensor([0.5, 0.3, 0.15, 0.05])
    spec = DLMSpec(corruption="uniform", policy="uniform_ancestral", convention="sdar")
    lm = DiffusionLM(Bayes(law), spec)
    rows = 2000
    out = lm.generate(
        torch.zeros(rows, 1, dtype=torch.long), max_new_tokens=2, steps=1, temperature=1.0, seed=4, fixed={1: [2]},
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.stats.nfe == [1] * rows
    assert (out.sequences[:, 0] == 0).all() and (out.sequences[:, 2] == 2).all()
    counts = torch.bincount(out.sequences[:, 1], minlength=4)
    assert float(((counts - rows * law) ** 2 / (rows * law)).sum()) < 18  # 3 degrees, p > 0.0005


def test_uniform_models_run_in_batches_and_refuse_mask_policies():
    model = tiny_llama(0)
    lm = DiffusionLM(model, DLMSpec(corruption="uniform", policy="uniform_ancestral", convention="sdar"))
    ids = torch.tensor([[1, 2, 3]])
    two = lm.generate(ids.repeat(2, 1), max_new_tokens=6, steps=5, temperature=0.7, seed=[8, 9])
    assert torch.equal(two[:1], lm.generate(ids, max_new_tokens=6, steps=5, temperature=0.7, seed=8))
    assert not torch.equal(two[0], two[1])
    with pytest.raises(UnsupportedError, match="mask noise"):
        lm.generate(ids, policy="quota")
    with pytest.raises(UnsupportedError, match="ELBO"):
        lm.score(ids, 1)
