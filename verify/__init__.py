"""Acceptance rules of speculative decoding: pure tensor functions over scores, proposals and noise. Needs torch only.

``verify(rule, scores, proposal, noise)`` is the whole of it; ``decide`` gives the same decision before its draws.
"""

from specdiff.verify.draw import race
from specdiff.verify.laws import Coupled, Delta, Law, Proposal, Sampled, Verdict
from specdiff.verify.noise import CounterNoise, Noise, Purpose, RoundNoise, mix_seed, row_seeds
from specdiff.verify.rules import RULES, Decision, decide, verify

__all__ = [
    "RULES",
    "CounterNoise",
    "Coupled",
    "Decision",
    "Delta",
    "Law",
    "Noise",
    "Proposal",
    "Purpose",
    "RoundNoise",
    "Sampled",
    "Verdict",
    "decide",
    "mix_seed",
    "race",
    "row_seeds",
    "verify",
]
