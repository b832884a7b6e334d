"""Checks of losslessness on the user's own pair of models, for ``specdiff audit`` and for tests."""

from specdiff.bench.chi2 import FitTest
from specdiff.bench.greedy import GreedyReport, GreedyRun, Mismatch, greedy_check, reference_texts
from specdiff.bench.law import LawReport, chi_square_check, exact_law

__all__ = [
    "FitTest",
    "GreedyReport",
    "GreedyRun",
    "LawReport",
    "Mismatch",
    "chi_square_check",
    "exact_law",
    "greedy_check",
    "reference_texts",
]
