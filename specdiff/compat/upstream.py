"""Faults of transformers that decide how an architecture is served, each named after reading its code."""

from __future__ import annotations

UPSTREAM: dict[str, str] = {}
"""Model type to what is wrong in the installed transformers."""
