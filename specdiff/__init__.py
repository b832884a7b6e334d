"""Lossless speculative decoding of Hugging Face causal LMs with block-diffusion drafters.

Importing this package is cheap: names are loaded on first use (PEP 562), so that ``specdiff.verify`` needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "SpecDiff": "specdiff.wrap",
    "load_target": "specdiff.hub",
    "load_drafter": "specdiff.hub",
    "DiffusionLM": "specdiff.diffusion.lm",
    "DLMSpec": "specdiff.diffusion.spec",
    "Proposal": "specdiff.verify",
    "Verdict": "specdiff.verify",
    "Sampled": "specdiff.verify",
    "Delta": "specdiff.verify",
    "Coupled": "specdiff.verify",
    "RULES": "specdiff.verify",
    "verify": None,
    "drafters": None,
    "testing": None,
    "SpecDiffError": "specdiff.errors",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'specdiff' has no attribute {name!r}")
    source = _EXPORTS[name]
    if source is None:
        return importlib.import_module(f"specdiff.{name}")
    return getattr(importlib.import_module(source), name)


def __dir__() -> list[str]:
    return sorted(__all__)
