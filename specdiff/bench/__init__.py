"""Measuring: speed, acceptance, cost curves, and the checks behind ``specdiff audit``."""
