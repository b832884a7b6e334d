"""Invariant 1: after every commit the cache equals a fresh uncached pass, for each kind of cache."""

from __future__ import annotations

import functools

import pytest
from audit import Audit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdiff.compat.family import default_model
from specdiff.compat.tiny import WINDOW

KINDS = {
    "full": "llama",
    "learned positions": "gpt2",
    "alibi": "bloom",
    "all sliding": "mistral",
    "sliding and full": "gemma3_text",
    "sinks": "gpt_oss",
    "chunked": "llama4_text",
    "latent": "deepseek_v3",
    "indexed": "deepseek_v32",
    "shared by layers": "gemma3n_text",
    "recurrent": "mamba2",
    "gated delta and full": "qwen3_next",
    "recurrent and full in one layer": "falcon_h1",
    "short convolution": "lfm2",
    "recurrent, token by token": "jamba",
    "own cache": "deepseek_v4",
    "own state": "rwkv",
}
"""Kind of cache: the architecture that stands for it."""
IN_DEFAULT = ("full", "sliding and full", "chunked", "latent", "gated delta and full", "recurrent", "alibi")
"""The others are slow tests: same code, more of it."""

model_of = functools.cache(default_model)

rounds = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, WINDOW + 3)), min_size=3, max_size=3), max_size=5
)


def marked() -> list:
    return [pytest.param(kind, marks=() if kind in IN_DEFAULT else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", marked())
def test_cache_equals_an_uncached_pass_after_every_commit(kind):
    @settings(max_examples=2, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(rounds, st.integers(0, 1 << 16), st.sampled_from([(7, 3, 12), (1, 1, 1), (9, 9, 9)]))
    def drive(plan, seed, prompts):
        audit = Audit(model_of(KINDS[kind]), 3, seed)
        for at in range(0, max(prompts), 5):  # chunked prefill, in which shorter rows have nothing left
            audit.step([max(0, min(5, prompt - at)) for prompt in prompts], [0, 0, 0])
        for turn, parts in enumerate(plan):
            batch = len(audit.texts)
            audit.step([true for true, _ in parts[:batch]], [junk for _, junk in parts[:batch]])
            if turn == 2:
                audit.select([2, 0])
            if turn == 3:
                audit.rollback([max(0, length - 2 * at) for at, length in enumerate(audit.state.lengths)])
                if 0 in audit.state.lengths:  # what could not go back begins again
                    missing = [0 if length else 4 for length in audit.state.lengths]
                    audit.step(missing, [0] * batch)

    drive()


@pytest.mark.parametrize("kind", IN_DEFAULT[:5])
def test_a_fixed_run_with_select_rollback_and_a_window_inside_the_block(kind):
    audit = Audit(model_of(KINDS[kind]), 3, 2)
    audit.step([5, 3, 5], [0, 0, 0])
    audit.step([4, 0, 5], [0, 0, 0])
    audit.step([1, 3, 2], [WINDOW + 4, 0, 2])
    audit.step([2, 1, 1], [1, WINDOW + 4, 0])
    audit.select([2, 0])
    audit.step([9, 1], [0, 3])
    audit.rollback([audit.state.lengths[0] - 2, audit.state.lengths[1]])
    audit.step([3 if length else 4 for length in audit.state.lengths], [2, 0])


@pytest.mark.parametrize("kind", ["full", "sliding and full", "gated delta and full"])
def test_audit_compares_something(kind):
    audit = Audit(model_of(KINDS[kind]), 2, 0)
    audit.step([5, 3], [0, 2])
    assert audit.checked > 4


def test_audit_notices_a_wrong_key():
    audit = Audit(model_of("llama"), 2, 0)
    audit.step([5, 3], [0, 0])
    audit.state.cache.layers[1].keys[1, 0, 2, 0] += 0.01
    with pytest.raises(AssertionError):
        audit.check_contents()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cache_equals_an_uncached_pass_for_long(kind):
    """Many rounds, past windows, compactions and chunk borders."""
    audit = Audit(model_of(KINDS[kind]), 3, 5, capacity=128)
    audit.step([7, 1, 12], [0, 0, 0])
    for turn in range(24):
        audit.step([1 + turn % 3, 1 + turn % 4, 1], [turn % 9, 0, 12])
